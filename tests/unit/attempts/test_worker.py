"""The worker that makes attempts at samples: which failed ones count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agent_r1.attempts.worker import MAX_FREE_ATTEMPTS, SampleWorker
from agent_r1.text.tokens import failed_trajectory
from agent_r1_proto.tasks import RolloutTask
from agent_r1_proto.trajectory import Trajectory
from tests.support.builders import rollout_task, trajectory


class Consumer:
    """A consumer of one sample, which notes what is published."""

    def __init__(self) -> None:
        self.published: list[Trajectory] = []

    def note_components(self, entry: Any) -> None: ...

    async def finish(self, entry: Any, messages: Any = ()) -> None:
        self.published += [message for _, message in messages]


class Board:
    """A failure board that nobody reads."""

    async def note(self, *what: str) -> None: ...


async def attempts_at(reason: str, failures: int) -> tuple[int, str]:
    """Fail so many attempts at a sample that may have one; return how many were made, and what
    became of it."""
    made: list[RolloutTask] = []

    async def run_attempt(task: RolloutTask) -> Trajectory:
        made.append(task)
        return failed_trajectory(task, reason) if len(made) <= failures else trajectory()

    consumer, unused = Consumer(), SimpleNamespace()
    worker = SampleWorker(
        consumer=consumer,  # type: ignore[arg-type]
        registry=unused,  # type: ignore[arg-type]
        run_attempt=run_attempt,
        versions=unused,  # type: ignore[arg-type]
        trajectories="trajectories",
        max_concurrent=1,
        board=Board(),  # type: ignore[arg-type]
    )
    task = rollout_task().model_copy(update={"max_attempts": 1})
    await worker._work(SimpleNamespace(message=task))  # type: ignore[arg-type]
    return len(made), consumer.published[0].status


@pytest.mark.parametrize(
    "kind", ["agent_bad_reply", "agent_lost", "gateway_error", "policy_error", "agent_silent"]
)
async def test_faults_of_services_take_no_attempt(kind: str):
    assert await attempts_at(f"{kind}: why", failures=3) == (4, "COMPLETED")


async def test_other_failures_take_one_and_free_attempts_have_an_end():
    assert await attempts_at("decoding_refused: why", failures=3) == (1, "FAILED")
    made = MAX_FREE_ATTEMPTS + 1
    assert await attempts_at("gateway_error: why", failures=100) == (made, "FAILED")
