"""The ranks of the learner: how they meet, what they are told, and how they end together."""
