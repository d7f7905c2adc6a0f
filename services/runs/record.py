"""Records: a trajectory as people read it. ScoredTrajectory --> a JSON object --> store.py, `show`.

Sampled text and tool text stay apart: a turn's `text` is what the policy sampled, a call's `text`
what the tool answered; `replies`, where it is not null, is what the model read of that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from agent_r1_proto.messages import Message
from agent_r1_proto.parts import shown_text
from agent_r1_proto.rewards import ScoreCall, ScoredTrajectory, ScoreTurn
from agent_r1_proto.tasks import ChatMessage, added_system_prompt
from agent_r1_proto.trajectory import Reply, ToolCallRecord, Turn


def mask_spans(mask: npt.NDArray[np.bool_]) -> list[list[int]]:
    """Return the half-open ranges [start, end) where a [T] mask is True."""
    padded = np.concatenate(([False], mask, [False])).astype(np.int8)
    edges = np.diff(padded)
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    return [[int(start), int(end)] for start, end in zip(starts, ends, strict=True)]


def _call(call: ToolCallRecord) -> dict[str, Any]:
    fields = {name: value for name, value in call if name != "parts"}
    return fields | {"text": call.text(), "latency_ms": round(call.latency_ms, 3)}


def _turn(turn: Turn, lineage: int) -> dict[str, Any]:
    calls = [_call(call) for call in turn.calls]
    replies = None if turn.replies is None else list(map(_reply, turn.replies))
    return {**dict(turn), "lineage": lineage, "calls": calls, "replies": replies}


def _reply(reply: Reply) -> dict[str, Any]:
    return {"role": reply.role, "content": shown_text(reply.parts), "call": reply.call}


def score_turn(stored: Mapping[str, Any]) -> ScoreTurn:
    """Return a stored turn as reward components see it; old ones do not say what they are."""
    calls = [_of(ScoreCall, call) for call in stored["calls"]]
    return ScoreTurn.model_validate(
        _of(ScoreTurn, stored) | {"calls": calls, "num_calls": len(calls)}
    )


def main_turns(stored: Sequence[Mapping[str, Any]]) -> list[ScoreTurn]:
    """Return the stored turns that rewards are about: those of the main agent, as in `request_of`.

    Older files have only those, and no turn of them says so.
    """
    return [score_turn(turn) for turn in stored if turn.get("lineage", 0) == 0]


def prompt_messages(record: Mapping[str, Any]) -> list[ChatMessage]:
    """Return the dialogue before the first turn of a stored trajectory, of any version."""
    told = record.get("system_prompt")
    own = [] if told is None else [ChatMessage(role="system", content=told)]
    return [*own, *map(ChatMessage.model_validate, record["prompt"])]


def _of(message: type[Message], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is stored of a message's fields."""
    return {name: stored[name] for name in message.model_fields if name in stored}


def readable(
    scored: ScoredTrajectory,
    *,
    step: int,
    advantage: float | None,
    trained: bool,
    staleness: int | None = None,
    system_prompt: str | None = None,
) -> dict[str, Any]:
    """Render one trajectory for people.

    Args:
        scored: the trajectory and its reward.
        step: learner step it belongs to.
        advantage: what it was trained with; None when it was not.
        trained: False for failed and evaluation trajectories.
        staleness: age of what was trained, in learner steps.
        system_prompt: that of the run (`env.system_prompt`).
    """
    trajectory, reward = scored.trajectory, scored.reward
    rollout = trajectory.rollout
    bounds = trajectory.lineage_bounds()
    return {
        "step": step,
        "rollout_id": trajectory.rollout_id,
        "purpose": rollout.purpose,
        "group_id": rollout.key.group_id,
        "sample_index": rollout.key.sample_index,
        "attempt": rollout.key.attempt,
        "task_id": rollout.task.id,
        "metadata": rollout.task.metadata,
        "payload": rollout.task.payload,
        "system_prompt": added_system_prompt(rollout.task, system_prompt),
        "prompt": [message.model_dump() for message in rollout.task.messages()],
        "status": trajectory.status,
        "reason": trajectory.reason,
        "trained": trained,
        "turns": [
            _turn(turn, sum(start <= turn.start for start, _ in bounds) - 1)
            for turn in trajectory.turns
        ],
        "reward": None if reward is None else reward.model_dump(mode="json"),
        "process_reward": trajectory.process_reward(),
        "advantage": advantage,
        "staleness": staleness,
        "policy_versions": trajectory.policy_versions(),
        "version_spans": [
            [span.policy_version, span.start, span.end] for span in trajectory.version_spans
        ],
        "num_tokens": len(trajectory.token_ids),
        "token_digest": hashlib.blake2b(trajectory.token_ids.tobytes(), digest_size=8).hexdigest(),
        "prompt_length": trajectory.prompt_length,
        "segment_starts": trajectory.segment_starts,
        "lineages": [lineage.model_dump() for lineage in trajectory.lineages],
        "mask_spans": mask_spans(trajectory.action_mask),
        "temperature": trajectory.temperature,
        "seed": trajectory.seed,
        "server_id": trajectory.server_id,
        "started_at": trajectory.started_at,
        "latency_ms": round(trajectory.latency_ms, 3),
    }
