"""The rollout service: samples in from a stream, trajectories out, tools over HTTP between."""
