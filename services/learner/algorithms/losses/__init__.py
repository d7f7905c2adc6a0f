"""Losses of the policy, per token, and how they become one number."""
