"""Choosing one answer among several branches of an interaction."""
