"""Run folders as people and tools read them: stored trajectories, their index, exports."""
