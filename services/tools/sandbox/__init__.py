"""Tools that run untrusted code, each call in a sandbox."""
