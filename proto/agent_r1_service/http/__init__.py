"""The HTTP server of every service: its guard, its errors, the run token, serving."""
