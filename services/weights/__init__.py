"""Weight versions on their way from the learner to the rollout servers, and their files."""
