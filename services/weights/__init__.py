"""Weights as files: where a version is, and deltas between two versions."""
