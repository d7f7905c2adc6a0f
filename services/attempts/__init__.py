"""Attempts at samples: the worker takes them from the stream, the client calls tools for them."""
