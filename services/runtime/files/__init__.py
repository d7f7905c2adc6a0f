"""Files: atomic writes, private and shared ones, data of users, what a run folder holds."""
