"""The gateway: agents that keep their own history speak to the policy, token for token."""
