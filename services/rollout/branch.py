"""One branch of an interaction: its tokens, and the state of its environment and its tools.

agent_loop.py begins one per attempt, and turns.py takes it from turn to turn. decoding/search.py
has several, which share what their parent has done and go on from there, each on its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from agent_r1.rollout.envs import ToolEnv
from agent_r1.rollout.tool_calls.client import ToolOutageError
from agent_r1.rollout.tool_calls.runner import CallRunner
from agent_r1.text.reading import TurnText
from agent_r1.text.trajectory_builder import TrajectoryBuilder
from agent_r1_proto.tasks import RolloutTask
from agent_r1_proto.trajectory import Status, Turn

logger = logging.getLogger(__name__)


class AttemptFailedError(Exception):
    """This attempt ends as FAILED; the message is the trajectory's reason."""


@dataclass(eq=False)
class BranchState:
    """What a branch holds outside of its tokens."""

    env: ToolEnv
    calls: CallRunner

    async def fork(self, path: str, turns: Sequence[Turn]) -> BranchState:
        """Return a state like this one that changes on its own.

        Args:
            path: names the branch that gets it.
            turns: that led to this state.

        Raises:
            AttemptFailedError: the environment cannot be copied, or a tool forked no session.
        """
        try:
            calls = await self.calls.fork(path, turns)
        except ToolOutageError as exc:
            raise AttemptFailedError(exc.reason) from exc
        try:
            return BranchState(self.env.fork(), calls)
        except Exception as exc:
            await calls.close()
            kind = type(self.env).__name__
            logger.exception("environment not forked env=%s", kind)
            raise AttemptFailedError(
                f"env_error: {kind}.fork raised {type(exc).__name__}: {exc}; write {kind}.fork so "
                "that it returns a copy"
            ) from exc

    async def close(self, step_timeout_s: float) -> None:
        """Close the sessions and the environment; what fails is logged."""
        await self.calls.close()
        try:
            async with asyncio.timeout(step_timeout_s):
                await self.env.close()
        except Exception:
            logger.exception("environment not closed rollout_id=%s", self.calls.rollout_id)


@dataclass(eq=False)
class Branch:
    """An interaction as far as it has come."""

    rollout: RolloutTask
    state: BranchState
    record: TrajectoryBuilder = field(default_factory=TrajectoryBuilder)
    path: str = ""
    """Names it among the branches of an attempt; "" where there is only one."""
    ended: tuple[Status, str] | None = None
    """How it ended and why; None while it goes on."""

    @property
    def last(self) -> TurnText:
        """What its last turn says; the turn has been sampled."""
        assert self.record.read is not None
        return self.record.read

    @property
    def num_calls(self) -> int:
        """Calls of the last turn that would reach a tool."""
        return self.state.calls.num_runnable(self.last)

    def sprout(self, path: str) -> Branch:
        """Return a branch with the same tokens. It shares the state until it gets its own."""
        return Branch(self.rollout, self.state, self.record.copy(), path, self.ended)
