"""An interaction as tokens: the model samples turns, and what it reads between them is appended.

rollout/turns.py --replies--> `TokenLoop` --prompt--> a `Sampler` --`Generation`--> the
`Interaction`, which becomes a `Trajectory`

Nothing here runs a tool: whoever has the replies appends them. Every sampled token is kept as it
was sampled, with mask 1 and its log-probability; everything else (prompt, glue, tool text) has mask
0. When the chat template changes earlier turns, the dialogue is rendered again and a new segment
starts.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, Self

import numpy as np
from pydantic import JsonValue

from agent_r1.runtime.unicode import repair_json, repair_text
from agent_r1.text.chat_format import ChatFormat, OutsideMessage, PromptMessage, Rendered
from agent_r1.text.reading import TurnText, fields_of
from agent_r1_proto.parts import StoredImage, shown_text
from agent_r1_proto.tasks import RolloutTask
from agent_r1_proto.tools import ToolSpec
from agent_r1_proto.trajectory import Reply, Status, ToolCallRecord, Trajectory, Turn, VersionSpan

MAX_DATA_CHARS = 16 * 1024
"""Longest `ToolResult.data` or `EnvStep.data` that is recorded, in characters of its JSON."""
MAX_DATA_DEPTH = 100
"""Most lists and dicts within one another: readers of messages take 200 of all that they hold."""


# --- What samples --------------------------------------------------------------------------------


class PolicyError(Exception):
    """A sampler could not do what was asked; the message says value, limit and remedy."""


class PromptError(PolicyError, ValueError):
    """The prompt cannot be sampled from: it is empty or holds an id outside the vocabulary."""


class PromptTooLongError(PromptError):
    """The prompt leaves no room for a single sampled token within the context."""


class EngineDeadError(PolicyError):
    """The engine stopped; nothing can be sampled until the service is started again."""


@dataclass(frozen=True)
class Generation:
    """One turn as the policy sampled it.

    N = sampled tokens, the end-of-turn token included when it was sampled.
    """

    token_ids: list[int]
    """[N] sampled tokens."""
    logprobs: list[float]
    """[N] natural-log probability of each, at the sampling temperature."""
    version_spans: list[VersionSpan]
    """Versions of the weights that sampled tokens [start, end) of this generation; in order,
    covering [0, N)."""
    finish_reason: Literal["stop", "length"]
    """"stop": ended by the model's own end-of-turn token; "length": by `max_tokens` or context."""


class Sampler(Protocol):
    """The writer of turns; the engine of rollout is one (rollout/policy.py).

    `generate` may be called concurrently without bound; the caller limits what is in flight.
    """

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and generation together."""
        ...

    async def generate(
        self,
        token_ids: list[int],
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        request_id: str,
    ) -> Generation:
        """Sample after a prompt until an end-of-turn token, `max_tokens` or the context's end.

        Cancelling the call aborts the request in the engine.

        Args:
            token_ids: [T] the prompt; never re-tokenized.
            max_tokens: most tokens to sample; cut to what the context leaves.
            temperature: 0 is greedy.
            seed: of this request alone.
            request_id: unique among requests in flight; appears in the engine's log.

        Raises:
            PromptError: the prompt is empty, holds an unknown id or fills the context.
            EngineDeadError: the engine failed.
        """
        ...


def turn_seed(run_seed: int, rollout: RolloutTask, turn: int, path: str = "") -> int:
    """Return the sampler's seed of one turn, below 2**63.

    The task's own seed serves the first turn. Others derive from it or, where it has none, from the
    key: the same for every incarnation, so that a resumed run samples what it would have sampled. A
    branch with a `path` has seeds of its own, which derive from these.
    """
    key, seed = rollout.key, rollout.sampling.seed
    if path:
        text = f"{turn_seed(run_seed, rollout, turn)}/{path}"
    elif seed is None:
        text = f"{run_seed}/{key.group_id}/{key.sample_index}/{key.attempt}/{turn}"
    elif turn == 0:
        return seed
    else:
        text = f"{seed}/{turn}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


# --- What is recorded ----------------------------------------------------------------------------


class Interaction:
    """An interaction as far as it has come. T = tokens so far."""

    def __init__(self, rollout: RolloutTask) -> None:
        self.rollout = rollout
        self.ended: tuple[Status, str] | None = None
        """Status and reason of its end; None while it goes on."""
        self.token_ids: list[int] = []
        self.prompt_length = 0
        self.segment_starts: list[int] = []
        self.messages: list[PromptMessage] = []
        """The dialogue so far, without the last turn while its calls run."""
        self.tools: list[ToolSpec] = []
        """Tools that are offered."""
        self.turns: list[Turn] = []
        self.logprobs: list[list[float]] = []
        """Log-probabilities of each turn's tokens."""
        self.version_spans: list[VersionSpan] = []
        self.read: TurnText | None = None
        """Reading of the last turn; None before the first one."""
        self.opening = ""
        """The thought that the template began before the last turn, or before the next one where
        that is not sampled yet; "" where it began none."""
        self._state_key = ""

    def copy(self) -> Self:
        """Return an interaction with the same beginning, which grows on its own."""
        twin = copy.copy(self)
        grown = {name: [*value] for name, value in vars(self).items() if isinstance(value, list)}
        vars(twin).update(grown)
        return twin

    def add_prompt(self, prompt: Rendered) -> None:
        """Begin with the prompt."""
        self.token_ids += prompt.token_ids
        self.opening = prompt.opening
        self.prompt_length = len(self.token_ids)

    def cut_prompt(self, max_tokens: int) -> None:
        """Keep only the first tokens of a prompt that is too long to sample from."""
        del self.token_ids[max_tokens:]
        self.prompt_length = len(self.token_ids)

    @property
    def context(self) -> list[int]:
        """The tokens of the segment that grows: what the next turn is sampled after."""
        return self.token_ids[self.segment_starts[-1] :] if self.segment_starts else self.token_ids

    @property
    def last(self) -> TurnText:
        """The last turn, read; it has been sampled."""
        assert self.read is not None
        return self.read

    @property
    def turn_logprob(self) -> float:
        """Natural-log probability of the last turn, at the temperature that it was sampled at."""
        return math.fsum(self.logprobs[-1])

    def add_sampled(self, generation: Generation, read: TurnText) -> None:
        """Append one turn of the model."""
        self.read = read
        start = len(self.token_ids)
        self.token_ids += generation.token_ids
        self.logprobs.append(generation.logprobs)
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

    def finish(self, **facts: Any) -> Trajectory:
        """Build the message; the interaction has ended.

        Args:
            facts: fields of the message that its tokens do not give.
        """
        assert self.ended is not None
        num_tokens = len(self.token_ids)
        action_mask = np.zeros(num_tokens, dtype=np.bool_)
        logprobs = np.zeros(num_tokens, dtype=np.float32)
        for turn, values in zip(self.turns, self.logprobs, strict=True):
            action_mask[turn.start : turn.end] = True
            logprobs[turn.start : turn.end] = values
        return Trajectory(
            rollout=self.rollout,
            token_ids=np.array(self.token_ids, dtype=np.int32),
            action_mask=action_mask,
            rollout_logprobs=logprobs,
            prompt_length=self.prompt_length,
            segment_starts=self.segment_starts,
            version_spans=self.version_spans,
            turns=self.turns,
            status=self.ended[0],
            reason=repair_text(self.ended[1]),
            temperature=self.rollout.sampling.temperature,
            **facts,
        )


def failed_trajectory(rollout: RolloutTask, reason: str) -> Trajectory:
    """Return the FAILED trajectory of a sample of which nothing can be kept."""
    interaction = Interaction(rollout)
    interaction.ended = ("FAILED", reason)
    return interaction.finish(seed=0)


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


# --- Turn by turn --------------------------------------------------------------------------------


class UnreadableTurnError(Exception):
    """A tool format failed over a turn; its cause says how."""


@dataclass(frozen=True)
class TokenLoop:
    """Samples turns, and appends what the model reads between them."""

    policy: Sampler
    chat: ChatFormat
    max_context: int
    """Most tokens of one segment, prompt included."""
    max_tokens_per_turn: int
    answer_pattern: str | None = None
    """Pattern of an answer, as `env.answer_pattern`."""

    async def sample(
        self, interaction: Interaction, *, temperature: float, seed: int, request_id: str
    ) -> None:
        """Let the model write the next turn; a limit that cuts it ends the interaction.

        Args:
            interaction: gets the turn.
            temperature: 0 is greedy.
            seed: of this turn.
            request_id: unique among requests in flight.

        Raises:
            PolicyError: nothing was sampled.
            UnreadableTurnError: the turn cannot be read.
        """
        room = self.max_context - len(interaction.context)
        generation = await self.policy.generate(
            interaction.context,
            max_tokens=min(self.max_tokens_per_turn, room),
            temperature=temperature,
            seed=seed,
            request_id=request_id,
        )
        if not generation.token_ids or len(generation.logprobs) != len(generation.token_ids):
            raise PolicyError(
                f"the policy returned {len(generation.token_ids)} tokens with "
                f"{len(generation.logprobs)} log-probabilities; expected one each, at least one"
            )
        reader = replace(
            self.chat.reader,
            answer_pattern=self.answer_pattern,
            opens_in_thought=bool(interaction.opening),
        )
        try:
            read = reader.read(self.chat.decode_turn(generation.token_ids))
        except Exception as exc:  # a user's tool format may raise anything
            raise UnreadableTurnError from exc
        interaction.add_sampled(generation, read)
        if generation.finish_reason == "length":
            full = len(interaction.context) >= self.max_context
            limit = "max_trajectory_tokens" if full else "max_tokens_per_turn"
            interaction.ended = ("TRUNCATED", limit)

    def append(self, interaction: Interaction, reply: Sequence[OutsideMessage]) -> None:
        """Add what follows the last turn up to the next one; no room for that is the end.

        Raises:
            ChatTemplateError: the template cannot render it.
        """
        said = self.chat.said(interaction.turns[-1].text, interaction.opening)
        interaction.messages += [said, *reply]
        is_rewritten = self.chat.rewrites(reply)
        if is_rewritten:
            rendered = self.chat.render_prompt(interaction.messages, interaction.tools)
            token_ids, opening = rendered.token_ids, rendered.opening
        else:
            token_ids, opening = self.chat.encode_reply(reply), self.chat.opening_after(reply)
        length = len(token_ids) + (0 if is_rewritten else len(interaction.context))
        if length >= self.max_context:
            interaction.ended = ("TRUNCATED", "max_trajectory_tokens")
            return
        if is_rewritten:
            interaction.segment_starts.append(len(interaction.token_ids))
        interaction.token_ids += token_ids
        interaction.opening = opening
