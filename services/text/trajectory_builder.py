"""A trajectory while it grows, and the seeds of its turns.

tokens.py appends sampled turns and replies, rollout the prompt, calls and what an environment gave;
`finish` makes the `Trajectory` message.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import JsonValue

from agent_r1.runtime.unicode import repair_json, repair_text
from agent_r1.text.chat_format import PromptMessage, Rendered
from agent_r1.text.reading import TurnText, fields_of
from agent_r1.text.sampler import Generation
from agent_r1_proto.parts import StoredImage, shown_text
from agent_r1_proto.tasks import RolloutKey, RolloutTask
from agent_r1_proto.tools import ToolSpec
from agent_r1_proto.trajectory import Reply, Status, ToolCallRecord, Trajectory, Turn, VersionSpan

MAX_DATA_CHARS = 16 * 1024
"""Longest `ToolResult.data` or `EnvStep.data` that is recorded, in characters of its JSON."""
MAX_DATA_DEPTH = 100
"""Most lists and dicts within one another: readers of messages take 200 of all that they hold."""


def derive_seed(run_seed: int, key: RolloutKey, turn: int) -> int:
    """Return the sampler's seed of one turn, below 2**63.

    The same for every incarnation, so that a resumed run samples what it would have sampled.
    """
    text = f"{run_seed}/{key.group_id}/{key.sample_index}/{key.attempt}/{turn}"
    return _hash_to_seed(text)


def _hash_to_seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def turn_seed(run_seed: int, rollout: RolloutTask, turn: int, path: str = "") -> int:
    """Return the seed of a turn: the task's own for the first turn, or derived from the key.

    A branch with a `path` has seeds of its own, which derive from these.
    """
    if path:
        return _hash_to_seed(f"{turn_seed(run_seed, rollout, turn)}/{path}")
    if rollout.sampling.seed is None:
        return derive_seed(run_seed, rollout.key, turn)
    if turn == 0:
        return rollout.sampling.seed
    return _hash_to_seed(f"{rollout.sampling.seed}/{turn}")


class TrajectoryBuilder:
    """A trajectory while it grows. T = tokens so far."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.prompt_length = 0
        self.segment_starts: list[int] = []
        self.messages: list[PromptMessage] = []
        """The dialogue so far, without the last turn while its calls run."""
        self.tools: list[ToolSpec] = []
        """Those that are offered."""
        self.turns: list[Turn] = []
        self.version_spans: list[VersionSpan] = []
        self.read: TurnText | None = None
        """What the last turn says; None before the first one."""
        self.opening = ""
        """The thought that the template began before the last turn, or before the next one where
        that is not sampled yet; "" where it began none."""
        self._logprobs: list[tuple[int, list[float]]] = []
        self._state_key = ""

    def copy(self) -> TrajectoryBuilder:
        """Return a trajectory with the same beginning, which grows on its own."""
        twin = copy.copy(self)
        vars(twin).update({name: copy.copy(value) for name, value in vars(self).items()})
        return twin

    def add_prompt(self, prompt: Rendered) -> None:
        """Begin with the prompt."""
        self.token_ids += prompt.token_ids
        self.opening = prompt.opening
        self.prompt_length = len(self.token_ids)

    @property
    def context(self) -> list[int]:
        """The tokens of the segment that grows: what the next turn is sampled after."""
        return self.token_ids[self.segment_starts[-1] :] if self.segment_starts else self.token_ids

    def begin_segment(self, token_ids: list[int]) -> None:
        """Go on in a segment of its own, which begins with a rewritten history."""
        self.segment_starts.append(len(self.token_ids))
        self.token_ids += token_ids

    def cut_prompt(self, max_tokens: int) -> None:
        """Keep only the first tokens of a prompt that is too long to sample from."""
        del self.token_ids[max_tokens:]
        self.prompt_length = len(self.token_ids)

    @property
    def turn_logprob(self) -> float:
        """Natural-log probability of the last turn, at the temperature that it was sampled at."""
        return math.fsum(self._logprobs[-1][1])

    def add_sampled(self, generation: Generation, read: TurnText) -> None:
        """Append one turn of the model."""
        self.read = read
        start = len(self.token_ids)
        self.token_ids += generation.token_ids
        self._logprobs.append((start, generation.logprobs))
        for span in generation.version_spans:
            self.version_spans.append(
                VersionSpan(
                    policy_version=span.policy_version,
                    start=start + span.start,
                    end=start + span.end,
                )
            )
        self.turns.append(
            Turn(
                start=start,
                end=len(self.token_ids),
                text=read.text,
                finish_reason=generation.finish_reason,
                state_key=self._state_key,
                **fields_of(read),
            )
        )

    def set_calls(self, calls: list[ToolCallRecord]) -> None:
        """Attach the calls of the last turn."""
        self.turns[-1] = self.turns[-1].model_copy(update={"calls": calls})

    def add_step(
        self,
        *,
        turn_reward: float | None,
        process_rewards: Sequence[float | None],
        data: JsonValue,
        state_key: str,
    ) -> None:
        """Keep what an environment gave the last turn and its calls, and where they led."""
        turn = self.turns[-1]
        changes: dict[str, object] = {
            "process_reward": _float(turn_reward),
            "data": repair_json(recorded_data(data)),
        }
        if process_rewards:
            changes["calls"] = [
                call.model_copy(update={"process_reward": _float(reward)})
                for call, reward in zip(turn.calls, process_rewards, strict=True)
            ]
        self.turns[-1] = turn.model_copy(update=changes)
        self._state_key = repair_text(state_key)

    def add_replies(self, replies: list[Reply]) -> None:
        """Keep what the model reads after the last turn, unless that is what its calls say."""
        turn = self.turns[-1]
        images = any(isinstance(part, StoredImage) for one in replies for part in one.parts)
        if images or list(map(_reading, replies)) != list(map(_reading, turn.shown())):
            self.turns[-1] = turn.model_copy(update={"replies": replies})

    def finish(self, rollout: RolloutTask, status: Status, reason: str, **facts: Any) -> Trajectory:
        """Build the message."""
        num_tokens = len(self.token_ids)
        action_mask = np.zeros(num_tokens, dtype=np.bool_)
        logprobs = np.zeros(num_tokens, dtype=np.float32)
        for start, values in self._logprobs:
            action_mask[start : start + len(values)] = True
            logprobs[start : start + len(values)] = values
        return Trajectory(
            rollout=rollout,
            token_ids=np.array(self.token_ids, dtype=np.int32),
            action_mask=action_mask,
            rollout_logprobs=logprobs,
            prompt_length=self.prompt_length,
            segment_starts=self.segment_starts,
            version_spans=self.version_spans,
            turns=self.turns,
            status=status,
            reason=reason,
            temperature=rollout.sampling.temperature,
            **facts,
        )


def _reading(reply: Reply) -> tuple[object, ...]:
    """Return what a model reads of a reply: the same where text is in one part or in several."""
    return reply.role, reply.call, shown_text(reply.parts)


def recorded_data(data: JsonValue) -> JsonValue:
    """Return data of a tool or an environment, or None where it is too much for a trajectory."""
    fits = nesting(data) <= MAX_DATA_DEPTH and len(json.dumps(data)) <= MAX_DATA_CHARS
    return data if fits else None


def nesting(data: JsonValue) -> int:
    """Return how many lists and dicts stand within one another."""
    if not isinstance(data, list | dict):
        return 0
    return 1 + max(map(nesting, data.values() if isinstance(data, dict) else data), default=0)


def _float(reward: float | None) -> float | None:
    """Return a reward as the message holds it; an environment may give any kind of number."""
    return None if reward is None else float(reward)


def failed_trajectory(rollout: RolloutTask, reason: str) -> Trajectory:
    """Return the FAILED trajectory of a sample of which nothing can be kept."""
    return TrajectoryBuilder().finish(rollout, "FAILED", reason, seed=0)
