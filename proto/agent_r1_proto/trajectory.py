"""The trajectory: the one message every service reads or writes.

rollout --XADD--> stream `trajectories` --> reward --XADD--> `scored_trajectories` --> learner

Dimension key: T = tokens in one trajectory.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, JsonValue, model_validator

from agent_r1_proto.arrays import BoolArray, Float32Array, Int32Array, SentOnce, SentWhere
from agent_r1_proto.messages import Message, StreamMessage
from agent_r1_proto.parts import Part, StoredImage, shown_text
from agent_r1_proto.policies import DEFAULT_POLICY, PolicyName
from agent_r1_proto.prefixes import find_repeats
from agent_r1_proto.tasks import RolloutTask

Status = Literal["COMPLETED", "TRUNCATED", "FAILED"]
ANSWERED = ("ok", "error")
"""Statuses of calls that a tool answered."""


def _is_none(value: object) -> bool:
    return value is None


class VersionSpan(Message):
    """Tokens [start, end) of the trajectory were sampled under `policy_version`."""

    policy_version: Annotated[int, Field(ge=0)]
    start: Annotated[int, Field(ge=0)]
    end: Annotated[int, Field(ge=0)]


class ToolCallRecord(Message):
    """One tool call of a trajectory: what was asked, who answered, how it ended."""

    end_token_index: Annotated[int, Field(ge=0)]
    """Index into `token_ids` of the sampled token that closes the call."""
    tool: str
    """Name the model wrote; "" when the call could not be parsed."""
    arguments: dict[str, JsonValue] = {}
    status: Literal["ok", "error", "malformed", "unknown_tool", "over_limit", "failed"]
    """ok and error come from the tool; failed is an outage, which fails the attempt."""
    version: str = ""
    instance: str = ""
    attempt: Annotated[int, Field(ge=0)] = 0
    """Retries of this call at the transport level."""
    latency_ms: Annotated[float, Field(ge=0)] = 0.0
    parts: list[Part] = []
    data: JsonValue = None
    """`ToolResult.data`, for reward components and logs; None where it is over 16 KiB as JSON."""
    process_reward: float | None = None
    """Reward of ToolEnv for the call; None when it gives none."""
    error: str = ""
    """Error in one line."""

    def text(self) -> str:
        """Return what the tool answered; a part that is no text is named in brackets."""
        return shown_text(self.parts)


class Reply(Message):
    """One message that followed a turn, as the model read it."""

    role: Literal["tool", "user"]
    """`tool`: the result of a call; `user`: what the environment, or a person, said."""
    parts: list[Part]
    """Text and images, cut to the limits of `[env]`, control tokens spelled out."""
    call: int | None = None
    """Number of the call of the turn that it answers; None where it answers none."""


class Turn(Message):
    """One turn of the model: what it says, the tool calls it made, and what followed."""

    start: Annotated[int, Field(ge=0)]
    """Index of the turn's first sampled token."""
    end: Annotated[int, Field(ge=0)]
    """One past its last sampled token; tool text and glue follow up to the next turn's start."""
    text: str
    """The sampled tokens, decoded, for reading and parsing only."""
    finish_reason: str
    """vLLM's finish reason: "stop" or "length"."""
    calls: list[ToolCallRecord] = []
    process_reward: float | None = None
    """Reward of ToolEnv for the turn, beside those of its calls; None when it gave none."""
    state_key: str = ""
    """ToolEnv's name for the state in which the turn was taken; "" for the first turn, and where it
    gave none."""
    well_formed: Annotated[bool | None, Field(exclude_if=_is_none)] = None
    """Whether the turn is one closed thought, then calls or one answer, and nothing else. None:
    nobody has read the turn, as before 2.2, and the next three fields say nothing."""
    thought: Annotated[str | None, Field(exclude_if=_is_none)] = None
    """Text of the closed thought that the turn begins with; None without one."""
    said: Annotated[str | None, Field(exclude_if=_is_none)] = None
    """The text without its thoughts; None where that is all of it."""
    answer: Annotated[str | None, Field(exclude_if=_is_none)] = None
    """The answer that it gives; None without one."""
    replies: Annotated[list[Reply] | None, Field(exclude_if=_is_none)] = None
    """Messages that the model read after it; of the last turn, those it would have read had it gone
    on. None: the result of each call, as the call has it."""
    data: Annotated[JsonValue, Field(exclude_if=_is_none)] = None
    """`EnvStep.data`, for reward components; never shown to the model."""

    def shown(self) -> list[Reply]:
        """Return what the model read after the turn."""
        if self.replies is not None:
            return self.replies
        return [
            Reply(role="tool", parts=call.parts, call=i)
            for i, call in enumerate(self.calls)
            if call.status != "failed"
        ]

    @property
    def says_more(self) -> bool:
        """Return whether it has what versions before 2.2 lack."""
        return any(value is not None for value in (self.well_formed, self.replies, self.data))

    @property
    def has_images(self) -> bool:
        """Return whether it holds an image, which versions before 4.0 kept in another way."""
        holders = (*self.calls, *(self.replies or ()))
        return any(isinstance(part, StoredImage) for one in holders for part in one.parts)


class Lineage(Message):
    """The part of a trajectory that one agent wrote: the main one, or one that it began.

    It is a run of whole segments, to the first one of the next lineage.
    """

    name: str
    """Name of the agent; "main" where there is only one."""
    first_segment: Annotated[int, Field(ge=0)]
    """Number of its first segment in the trajectory."""
    parent: Annotated[int, Field(ge=0)] | None = None
    """Number of the lineage that began it, which stands before it; None: no other one did."""
    excluded: str = ""
    """Reason why its tokens are not trained; "" where they are."""
    policy: PolicyName = DEFAULT_POLICY
    """The policy that sampled it."""


def _is_empty(values: list[object]) -> bool:
    return not values


class ProbedTurn(Message):
    """One candidate of a turn, and what came of it."""

    turn: Turn
    """Text of the turn; its calls are not run."""
    calls: bool
    """Whether it calls a tool."""
    sample: int | None
    """Number of the candidate that wrote it first; None where only the greedy turn is it."""
    greedy: bool
    """Whether it is the greedy turn."""
    logprob: float
    """Natural-log probability of all its tokens, at the sampling temperature."""
    value: float | None = None
    """Value that the scorer gives it; None where nothing is scored."""
    outcomes: list[float] = []
    """Reward of each continuation; one value where the turn calls nothing."""


class Probe(Message):
    """Candidates for one turn of a trajectory, each followed to the end several times."""

    after: Annotated[int, Field(ge=0)]
    """Turns of the trajectory before it."""
    greedy_logprob: Annotated[float | None, Field(exclude_if=_is_none)] = None
    """Natural-log probability of the greedy turn at temperature 1, to which `branch_below` is
    held."""
    candidates: list[ProbedTurn]
    """Candidates that differ."""


class DecodingCost(Message):
    """Cost of a search over the branches of an interaction, and what it chose."""

    sampled_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens that the policy sampled for all branches."""
    calls: Annotated[int, Field(ge=0)] = 0
    """Calls that tools answered to all branches."""
    replayed_calls: Annotated[int, Field(ge=0)] = 0
    """Calls made once more, to give a branch the state of a tool that its parent had."""
    scores: Annotated[int, Field(ge=0)] = 0
    """Branches that were scored, counted each time."""
    scorer_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens that the scorer's model read and wrote; 0 of a scorer without one."""
    score: float | None = None
    """Score of the branch that was chosen; None with `majority`."""
    places: Annotated[int | None, Field(ge=0, exclude_if=_is_none)] = None
    """States in which a search turn by turn had at least two different candidates; None with other
    methods."""
    probe: Annotated[Probe | None, Field(exclude_if=_is_none)] = None
    """Worth of the candidates of one turn, where that was asked for and a turn had several."""


class Trajectory(StreamMessage):
    """One finished rollout as a flat array of tokens.

    Prompt, sampled and tool tokens interleave; `action_mask` is the only record of which
    tokens the policy sampled. Tokens are never decoded and re-encoded after sampling.

    The array is one sequence of the model, or several segments end to end. A segment begins where
    the chat template rewrote the history: it holds that history anew, with action_mask False, and
    what the policy sampled after it. So every sampled token stands in the array once, behind the
    tokens that it was sampled after, and every index points into the whole array.

    Segments belong to one agent, or to several lineages end to end. Credit for what happened within
    a lineage stays there; the outcome belongs to the last trained token of each that is trained.
    """

    SCHEMA_NAME: ClassVar[str] = "trajectory"
    SCHEMA_VERSION: ClassVar[str] = "5.0"
    WITHOUT_REPEATS: ClassVar[str] = "4.1"
    """Version that is written where segments begin with few tokens alike."""
    WITHOUT_CALLS: ClassVar[str] = "4.0"
    """Version that is written where the prompt has no tool calls."""
    WITHOUT_LINEAGES: ClassVar[tuple[tuple[str, str], tuple[str, str]]] = (
        ("2.1", "2.2"),
        ("3.0", "3.1"),
    )
    """Versions that are written for older readers: with one segment, and with several; of each, the
    one before turns said what they are, and the one since."""

    rollout: RolloutTask
    """The sample this answers: its key, task, purpose and sampling parameters."""
    token_ids: Annotated[Int32Array, SentOnce("segment_starts")]
    """[T] prompt, sampled and tool tokens, in order."""
    action_mask: BoolArray
    """[T] True where the policy sampled the token; False for prompt and tool tokens."""
    rollout_logprobs: Annotated[Float32Array, SentWhere("action_mask")]
    """[T] natural-log probability under the sampling policy; 0.0 where action_mask is False."""
    prompt_length: Annotated[int, Field(ge=0)]
    """Tokens before the first turn."""
    segment_starts: Annotated[list[int], Field(exclude_if=_is_empty)] = []
    """Index of the first token of each segment after the first one; [] for a single segment."""
    version_spans: list[VersionSpan] = []
    """Versions of the sampled tokens: disjoint, in order, and covering all of them."""
    turns: list[Turn] = []
    status: Status
    reason: str = ""
    """Reason of its end: "answer", "max_turns", "max_trajectory_tokens", "tool_timeout: search",
    …"""
    seed: int
    """Seed of the sampler."""
    temperature: Annotated[float, Field(ge=0)]
    """Temperature of the sampler; the learner computes log-probabilities at it."""
    server_id: str = ""
    """The rollout server that made it."""
    started_at: float = 0.0
    """Start of the attempt, as Unix time in seconds."""
    latency_ms: Annotated[float, Field(ge=0)] = 0.0
    decoding: DecodingCost | None = None
    """Cost of the search, where the answer was chosen among several branches, of which this is
    one."""
    lineages: Annotated[list[Lineage], Field(exclude_if=_is_empty)] = []
    """The agents that wrote it, in order; [] where there is only one."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        num_tokens = len(self.token_ids)
        for name in ("action_mask", "rollout_logprobs"):
            length = len(getattr(self, name))
            if length != num_tokens:
                raise ValueError(f"{name} has {length} entries; token_ids has {num_tokens}")
        if self.prompt_length > num_tokens or self.action_mask[: self.prompt_length].any():
            raise ValueError(
                f"prompt_length ({self.prompt_length}) must not exceed {num_tokens} tokens nor "
                "reach a sampled token"
            )
        if np.any((self.rollout_logprobs != 0.0) & ~self.action_mask):
            raise ValueError("rollout_logprobs must be 0.0 where action_mask is False")
        if not np.all(np.isfinite(self.rollout_logprobs)):
            raise ValueError("rollout_logprobs holds a value that is not finite")
        covered = np.zeros(num_tokens, dtype=np.bool_)
        last = 0
        for span in self.version_spans:
            if not last <= span.start <= span.end <= num_tokens:
                raise ValueError(f"version span [{span.start}, {span.end}) is out of order")
            covered[span.start : span.end] = True
            last = span.end
        if np.any(self.action_mask & ~covered):
            raise ValueError("a sampled token lies outside every version span")
        self._check_segments()
        self._check_lineages()
        for turn in self.turns:
            if not turn.start <= turn.end <= num_tokens:
                raise ValueError(f"turn [{turn.start}, {turn.end}) exceeds {num_tokens} tokens")
            for call in turn.calls:
                inside = call.end_token_index < num_tokens
                if not inside or not self.action_mask[call.end_token_index]:
                    raise ValueError(
                        f"call end {call.end_token_index} is not a sampled token of the trajectory"
                    )
        return self

    def _check_segments(self) -> None:
        bounds = [0, *self.segment_starts, len(self.token_ids)]
        if self.segment_starts and any(a >= b for a, b in itertools.pairwise(bounds)):
            raise ValueError(
                f"segment_starts {self.segment_starts} must rise, above 0 and below the "
                f"{len(self.token_ids)} tokens"
            )
        for start in self.segment_starts:
            if start < self.prompt_length or self.action_mask[start]:
                raise ValueError(
                    f"the segment at {start} must begin after the prompt of {self.prompt_length} "
                    "tokens, and with a token that was not sampled"
                )
            for part in (*self.version_spans, *self.turns):
                if part.start < start < part.end:
                    raise ValueError(
                        f"the segment at {start} begins within [{part.start}, {part.end}), which "
                        "was sampled in one sequence"
                    )

    def _check_lineages(self) -> None:
        firsts = [lineage.first_segment for lineage in self.lineages]
        bounds = [*firsts, len(self.segment_starts) + 1]
        if firsts and (firsts[0] != 0 or any(a >= b for a, b in itertools.pairwise(bounds))):
            raise ValueError(
                f"the lineages begin with the segments {firsts}; they must rise from 0 and stay "
                f"below the {bounds[-1]} segments"
            )
        for number, lineage in enumerate(self.lineages):
            if lineage.parent is not None and lineage.parent >= number:
                raise ValueError(
                    f"lineage {number} ({lineage.name!r}) has the parent {lineage.parent}; it must "
                    "be one before it"
                )

    def stream_key(self) -> str:
        """Return the rollout id."""
        return str(self.rollout.key)

    def written_version(self) -> str:
        """Return the oldest version that says all of it."""
        images = any(turn.has_images for turn in self.turns)
        if any(shared for shared, _ in find_repeats(self.token_ids, self.segment_starts)):
            return self.SCHEMA_VERSION
        if self.rollout.has_calls:
            return self.WITHOUT_REPEATS
        if self.lineages or images or self.rollout.says_more:
            return self.WITHOUT_CALLS
        says_more = any(turn.says_more for turn in self.turns)
        return self.WITHOUT_LINEAGES[bool(self.segment_starts)][says_more]

    def segment_bounds(self) -> list[tuple[int, int]]:
        """Return the half-open range [start, end) of each segment, in order; at least one."""
        return list(itertools.pairwise([0, *self.segment_starts, len(self.token_ids)]))

    def lineage_bounds(self) -> list[tuple[int, int]]:
        """Return the half-open range [start, end) of each lineage, in order; at least one."""
        starts = [0, *self.segment_starts]
        firsts = [starts[lineage.first_segment] for lineage in self.lineages] or [0]
        return list(itertools.pairwise([*firsts, len(self.token_ids)]))

    def trained_turns(self) -> list[Turn]:
        """Return the turns of the lineages that are trained, in order."""
        excluded = [
            bounds
            for lineage, bounds in zip(self.lineages, self.lineage_bounds(), strict=False)
            if lineage.excluded
        ]
        return [t for t in self.turns if not any(a <= t.start < b for a, b in excluded)]

    def process_reward(self) -> float:
        """Return the sum of the process rewards that ToolEnv gave to trained turns and calls."""
        turns = self.trained_turns()
        rewarded = [*turns, *(call for turn in turns for call in turn.calls)]
        return sum(one.process_reward or 0.0 for one in rewarded)

    def trained_mask(self) -> npt.NDArray[np.bool_]:
        """Return [T] True where the policy sampled a token that may be trained."""
        mask = self.action_mask.copy()
        for lineage, (start, end) in zip(self.lineages, self.lineage_bounds(), strict=False):
            if lineage.excluded:
                mask[start:end] = False
        return mask

    @property
    def rollout_id(self) -> str:
        """Name of this attempt."""
        return str(self.rollout.key)

    @property
    def num_action_tokens(self) -> int:
        """Number of tokens the policy sampled."""
        return int(self.action_mask.sum())

    def calls(self) -> list[ToolCallRecord]:
        """Return every tool call, in order."""
        return [call for turn in self.turns for call in turn.calls]

    def answered_calls(self) -> dict[str, int]:
        """Count the calls that a tool answered, by the tool's name."""
        return dict(Counter(call.tool for call in self.calls() if call.status in ANSWERED))

    def policy_versions(self, mask: npt.NDArray[np.bool_] | None = None) -> list[int]:
        """Return the versions that sampled tokens, lowest first; [] when none did.

        Args:
            mask: [T] the tokens that are asked about; None: all that were sampled.
        """
        asked = self.action_mask if mask is None else mask
        return sorted(
            {
                span.policy_version
                for span in self.version_spans
                if asked[span.start : span.end].any()
            }
        )
