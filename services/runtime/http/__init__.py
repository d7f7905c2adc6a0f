"""The HTTP server of every service: its guard, its errors, the run token, serving."""

MAX_DETAIL_CHARS = 300
"""Most letters of another server's answer that a message about it quotes."""
