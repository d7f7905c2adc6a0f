"""Programs that people use as agents: a file of keys of `[agent]` for each."""
