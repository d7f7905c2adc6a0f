"""`env.type = "math"`: a problem with one answer, tools on the way to it.

The model may call tools (`python_exec`, say) in as many turns as the run allows; a turn without a
call is its answer. Whether that is right is the reward's business (`math_equal`): this environment
never sees more of the payload than any other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from agent_r1.rollout.envs.base import CallResult, EnvStep, ModelTurn
from agent_r1.rollout.envs.tool_env import ToolEnv
from agent_r1_proto.tasks import Task

REMINDER = "Your answer was not found. Give the final answer in \\boxed{}."
_ANSWER = re.compile(r"\\(?:boxed|fbox)\s*\{|####\s*\S")
_NUMBER = re.compile(r"\d")


class MathEnv(ToolEnv):
    r"""Ends at a turn without a call: reason "answer", or "no_answer" where it gives none.

    An answer is `\boxed{}`, an `<answer>` block, a line `#### 18`, and, where the payload says
    `"answer_type": "number"`, any number outside the thought.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._number_will_do = task.payload.get("answer_type") == "number"

    async def step(self, turn: ModelTurn, results: Sequence[CallResult]) -> EnvStep:
        """Show results, or end."""
        if results:
            return EnvStep(observations=[result.text for result in results])
        return EnvStep(done=True, reason="answer" if self._answers(turn) else "no_answer")

    def _answers(self, turn: ModelTurn) -> bool:
        if turn.answer is not None:
            return bool(turn.answer.strip())
        said = turn.text.rpartition("</think>")[2]
        if _ANSWER.search(said):
            return True
        return self._number_will_do and bool(_NUMBER.search(said))


class RemindingMathEnv(MathEnv):
    """`env.type = "math_reminding"`: asks once more for the answer of a turn that gives none.

    Args:
        task: what the agent was asked.
        reminders: how often it is asked, from `env.options`.
    """

    sends_messages: ClassVar[bool] = True

    def __init__(self, task: Task, reminders: int = 1) -> None:
        super().__init__(task)
        if reminders < 0:
            raise ValueError(f"env.options.reminders ({reminders}) must be >= 0")
        self._left = reminders

    async def step(self, turn: ModelTurn, results: Sequence[CallResult]) -> EnvStep:
        """Show results, remind, or end."""
        step = await super().step(turn, results)
        if step.reason == "no_answer" and self._left > 0:
            self._left -= 1
            return EnvStep(message=REMINDER)
        return step
