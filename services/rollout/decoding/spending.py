"""What a search may spend, and what it has spent."""

from __future__ import annotations

from dataclasses import dataclass, field

from agent_r1.rollout.branch import AttemptFailedError, BranchState
from agent_r1_proto.tasks import Task
from agent_r1_proto.trajectory import DecodingCost, Probe


@dataclass
class CallBudget:
    """Tool calls that all branches of a search share."""

    left: int | None
    """None: no limit."""

    @classmethod
    def of(cls, max_calls: int | str | None, task: Task) -> CallBudget:
        """Return the budget of a task: `Decoding.max_calls`, or what that names in the payload.

        Raises:
            AttemptFailedError: the payload has no such number.
        """
        if not isinstance(max_calls, str):
            return cls(max_calls)
        found = task.payload.get(max_calls)
        if not isinstance(found, int) or isinstance(found, bool) or found < 0:
            raise AttemptFailedError(
                f"decoding_refused: decoding.max_calls names {max_calls!r}, which is {found!r} in "
                f"the payload of task {task.id!r}; give every task a whole number there"
            )
        return cls(found)

    def has(self, num_calls: int) -> bool:
        """Say whether so many calls are left."""
        return self.left is None or num_calls <= self.left

    def take(self, num_calls: int) -> bool:
        """Take some calls, if so many are left."""
        if not self.has(num_calls):
            return False
        if self.left is not None:
            self.left -= num_calls
        return True


@dataclass
class Spending:
    """What a search has spent so far."""

    sampled_tokens: int = 0
    calls: int = 0
    scores: int = 0
    scorer_tokens: int = 0
    states: list[BranchState] = field(default_factory=list)
    """Every state that there was."""

    def message(self, score: float | None, probe: Probe | None) -> DecodingCost:
        """Return it as a trajectory carries it, with what was chosen and what was found."""
        return DecodingCost(
            sampled_tokens=self.sampled_tokens,
            calls=self.calls,
            replayed_calls=sum(state.calls.replayed for state in self.states),
            scores=self.scores,
            scorer_tokens=self.scorer_tokens,
            score=score,
            probe=probe,
        )
