"""`env.type = "code"`: write a program that passes hidden tests; failing ones are feedback.

The model calls `code_tests` with its program. That tool runs it in a sandbox against the tests of
the task's `tool_context`; neither program nor tests run here. Its counts (`CallResult.data`)
decide: all passed ends the trajectory, failures lead to the next turn. The outcome is the
reward's business (`tests_passed`, `all_tests_passed`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import ValidationError

from agent_r1.rollout.envs.base import CallResult, EnvStep, ModelTurn, ToolEnv
from agent_r1_proto.tasks import Task
from agent_r1_proto.tools import TESTS_TOOL, TestedCode


class CodeEnv(ToolEnv):
    """Ends when all tests pass (reason "tests_passed"), or at a turn without a call ("answer").

    Args:
        task: what the agent was asked.
        improvement_reward: process reward of a test call, times how much the best passed share so
            far rose by it; the rewards of a trajectory add up to at most this. 0.0 gives none.
    """

    def __init__(self, task: Task, improvement_reward: float = 0.0) -> None:
        super().__init__(task)
        if not math.isfinite(improvement_reward):
            raise ValueError(
                f"env.options.improvement_reward ({improvement_reward}) must be a finite number"
            )
        self._improvement_reward = improvement_reward
        self._best = 0.0

    async def step(self, turn: ModelTurn, results: Sequence[CallResult]) -> EnvStep:
        """Show what failed, or end."""
        if not results:
            return EnvStep(done=True, reason="answer")
        shares = [passed_share(result) for result in results]
        rewards = [self._reward(share) for share in shares] if self._improvement_reward else []
        tested = [share for share in shares if share is not None]
        if tested and tested[-1] == 1.0:  # the last one: it is what the reward counts
            return EnvStep(done=True, reason="tests_passed", process_rewards=rewards)
        return EnvStep(
            observations=[result.observation for result in results], process_rewards=rewards
        )

    def _reward(self, share: float | None) -> float | None:
        if share is None:
            return None
        gain = max(share - self._best, 0.0)
        self._best = max(self._best, share)
        return self._improvement_reward * gain


def passed_share(result: CallResult) -> float | None:
    """Return the share of tests a call passed; None for a call that ran no tests.

    Raises:
        ValueError: a tool of this name answered, but not with counts.
    """
    if result.name != TESTS_TOOL or result.status != "ok":
        return None
    try:
        return TestedCode.model_validate(result.data).share
    except ValidationError as exc:
        raise ValueError(
            f'the tool {TESTS_TOOL!r} answered data = {result.data!r:.200}; env.type = "code" '
            'needs the counts {"passed", "failed", "total"} of a tool of type = "code_tests"'
        ) from exc
