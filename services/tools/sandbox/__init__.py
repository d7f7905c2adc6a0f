"""Runs code that nobody trusts: bubblewrap, limits, and sandboxes started ahead of the calls."""
