"""Messages with valid defaults, so that a test shows only what it is about."""

from __future__ import annotations

from typing import Any

import numpy as np

from agent_r1.runs.record import readable
from agent_r1.runs.store import StoredTrajectory, Tokens
from agent_r1.text.reading import TurnReader
from agent_r1_proto.rewards import Reward, ScoredTrajectory, ScoreReply, ScoreTurn
from agent_r1_proto.tasks import RolloutKey, RolloutTask, Task
from agent_r1_proto.trajectory import (
    Lineage,
    Status,
    ToolCallRecord,
    Trajectory,
    Turn,
    VersionSpan,
)


def read_turn(text: str, *results: str) -> ScoreTurn:
    """Return a turn that says what it is, and what tools answered."""
    replies = [ScoreReply(role="tool", content=result) for result in results]
    return TurnReader().read_turn(ScoreTurn(text=text, replies=replies or None))


def rollout_task(
    run_id: str = "run",
    *,
    incarnation: int = 1,
    group_id: int = 0,
    sample_index: int = 0,
    attempt: int = 0,
    group_size: int = 2,
    **changes: Any,
) -> RolloutTask:
    """Return the sample `run/incarnation/group/sample/attempt` of a one-line task."""
    key = RolloutKey(
        run_id=run_id,
        incarnation=incarnation,
        group_id=group_id,
        sample_index=sample_index,
        attempt=attempt,
    )
    fields: dict[str, Any] = {
        "task": Task(id=f"q{group_id}", prompt="who?", payload={"answers": ["Ada"]})
    }
    return RolloutTask(key=key, group_size=group_size, **(fields | changes))


def trajectory(
    rollout: RolloutTask | None = None,
    *,
    prompt_length: int = 2,
    num_sampled: int = 3,
    policy_version: int = 0,
    status: Status = "COMPLETED",
    answer: str = "Ada",
    calls: list[ToolCallRecord] | None = None,
    **changes: Any,
) -> Trajectory:
    """Return a trajectory of one turn: `prompt_length` prompt tokens, then `num_sampled`."""
    total = prompt_length + num_sampled
    mask = np.arange(total) >= prompt_length
    fields: dict[str, Any] = {
        "rollout": rollout or rollout_task(),
        "token_ids": np.arange(total, dtype=np.int32),
        "action_mask": mask,
        "rollout_logprobs": np.where(mask, -0.5, 0.0).astype(np.float32),
        "prompt_length": prompt_length,
        "version_spans": [
            VersionSpan(policy_version=policy_version, start=prompt_length, end=total)
        ],
        "turns": [
            Turn(
                start=prompt_length,
                end=total,
                text=f"<think>I know.</think><answer>{answer}</answer>",
                finish_reason="stop",
                calls=calls or [],
            )
        ],
        "status": status,
        "reason": "answer",
        "seed": 1,
        "temperature": 1.0,
    }
    return Trajectory(**(fields | changes))


def two_segments() -> dict[str, Any]:
    """Return fields of a trajectory of two segments.

    Its prompt has 2 tokens and its first turn 3; then follow a rewritten history of 3 tokens and a
    turn of 2.
    """
    mask = np.array([0, 0, 1, 1, 1, 0, 0, 0, 1, 1], bool)
    return {
        "num_sampled": 8,
        "token_ids": np.array([7, 300, 9, 8, 1, 7, 300, 8, 5, 1], np.int32),
        "action_mask": mask,
        "rollout_logprobs": np.array([0, 0, -0.5, -0.25, -1, 0, 0, 0, -2, -0.125], np.float32),
        "segment_starts": [5],
        "version_spans": [
            VersionSpan(policy_version=4, start=2, end=5),
            VersionSpan(policy_version=5, start=8, end=10),
        ],
        "turns": [
            Turn(start=2, end=5, text="<think>hm</think>look", finish_reason="stop"),
            Turn(start=8, end=10, text="Ada", finish_reason="stop", process_reward=0.5),
        ],
    }


def repeated_segments() -> dict[str, Any]:
    """Return fields of a trajectory of three segments that begin alike.

    Its prompt has 100 tokens and its first turn 3. The second segment repeats 100 tokens of the
    first, and the third 120 of the second; each goes on with 20 others and a turn of one.
    """
    first = [*range(100), 900, 901, 902]
    second = [*range(100), *range(200, 220), 903]
    third = [*second[:120], *range(300, 320), 904]
    token_ids = np.array(first + second + third, np.int32)
    mask = token_ids >= 900
    sampled = [(100, 103), (223, 224), (364, 365)]
    return {
        "token_ids": token_ids,
        "action_mask": mask,
        "rollout_logprobs": np.where(mask, -0.5, 0.0).astype(np.float32),
        "prompt_length": 100,
        "segment_starts": [103, 224],
        "version_spans": [VersionSpan(policy_version=4, start=a, end=b) for a, b in sampled],
        "turns": [Turn(start=a, end=b, text="x", finish_reason="stop") for a, b in sampled],
    }


SEPARATORS = ["\u2028", "\u2029", "\x85"]
"""Characters that JSON need not escape, at which `str.splitlines` breaks a text."""


def three_lineages() -> dict[str, Any]:
    """Return fields of a trajectory of a main agent, one that it began, and one that is excluded.

    The main one has a prompt of 2 tokens and samples 2; the second has 2 and samples 3, the last
    two turns of it with a process reward in the first; the third has 1 and samples 1.
    """
    mask = np.array([0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1], bool)
    return {
        "num_sampled": 9,
        "token_ids": np.arange(11, dtype=np.int32),
        "action_mask": mask,
        "rollout_logprobs": np.where(mask, -1.0, 0.0).astype(np.float32),
        "segment_starts": [4, 9],
        "lineages": [
            Lineage(name="main", first_segment=0),
            Lineage(name="search", first_segment=1, parent=0),
            Lineage(name="judge", first_segment=2, parent=0, excluded="another model"),
        ],
        "version_spans": [
            VersionSpan(policy_version=4, start=2, end=4),
            VersionSpan(policy_version=5, start=6, end=9),
            VersionSpan(policy_version=1, start=10, end=11),
        ],
        "turns": [
            Turn(start=2, end=4, text="ask", finish_reason="stop"),
            Turn(start=6, end=7, text="look", finish_reason="stop", process_reward=0.5),
            Turn(start=7, end=9, text="found", finish_reason="stop"),
            Turn(start=10, end=11, text="good", finish_reason="stop"),
        ],
    }


def scored(
    rollout: RolloutTask | None = None,
    *,
    total: float = 1.0,
    tokens: dict[str, int] | None = None,
    versions: dict[str, str] | None = None,
    reasons: dict[str, str] | None = None,
    **changes: Any,
) -> ScoredTrajectory:
    """Return a scored trajectory; a FAILED one has no reward."""
    record = trajectory(rollout, **changes)
    reward = Reward(
        total=total,
        components={"em": total},
        tokens=tokens or {},
        versions=versions or {},
        reasons=reasons or {},
    )
    return ScoredTrajectory(trajectory=record, reward=None if record.status == "FAILED" else reward)


def stored(one: ScoredTrajectory | None = None, **facts: Any) -> StoredTrajectory:
    """Return a trajectory as a run folder has it, trained in step 1 with the advantage 0.5."""
    one = one or scored()
    advantages = np.where(one.trajectory.action_mask, 0.5, 0.0).astype(np.float32)
    record = readable(one, **({"step": 1, "advantage": 0.5, "trained": True} | facts))
    return StoredTrajectory(record, Tokens.of(one.trajectory, advantages=advantages))
