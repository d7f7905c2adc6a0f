"""The trajectories of a run in the browser: lists, groups, one of them token by token."""
