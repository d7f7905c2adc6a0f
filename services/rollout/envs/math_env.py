"""`env.type = "math"`: a problem with one answer, tools on the way to it.

The model may call tools (`python_exec`, say) in as many turns as the run allows; a turn without a
call is its answer. Whether that is right is the reward's business (`math_equal`): this environment
never sees more of the payload than any other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from agent_r1.rollout.envs.base import CallResult, EnvStep, ModelTurn, ToolEnv
from agent_r1_proto.tasks import Task

_ANSWER = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*\S|####\s*\S")
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
            return EnvStep(observations=[result.observation for result in results])
        return EnvStep(done=True, reason="answer" if self._answers(turn) else "no_answer")

    def _answers(self, turn: ModelTurn) -> bool:
        if turn.answer is not None:
            return bool(turn.answer.strip())
        said = turn.text if turn.said is None else turn.said
        if _ANSWER.search(said):
            return True
        return self._number_will_do and bool(_NUMBER.search(said))
