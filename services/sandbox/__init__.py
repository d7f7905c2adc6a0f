"""Runs untrusted code: bubblewrap, limits, and sandboxes started ahead of the calls."""
