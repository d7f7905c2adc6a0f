"""The model's text: how a turn is read, and how tool calls are written, for every service."""
