"""`TextEnv`: tool results as a message of the user, for calls that are written as plain text.

For a ToolFormat that the chat template does not know (`in_template = False`).
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_r1.rollout.envs.base import CallResult, EnvStep, ModelTurn, ToolEnv


class TextEnv(ToolEnv):
    """Shows each result as `Observation: ...`; a turn without a call is the answer."""

    sends_messages = True

    async def step(self, turn: ModelTurn, results: Sequence[CallResult]) -> EnvStep:
        """Show what the tools said, or end."""
        if not results:
            return EnvStep(done=True, reason="answer")
        return EnvStep(message="\n\n".join(f"Observation: {result.text}" for result in results))
