"""Scores: what the reward service adds to a trajectory.

reward --XADD--> stream `scored_trajectories` (or the task's `reply_stream`) --> learner, clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from agent_r1_proto.messages import Message, StreamMessage, StrictMessage
from agent_r1_proto.parts import Content, TextPart
from agent_r1_proto.tasks import ChatMessage
from agent_r1_proto.trajectory import Reply, Status, Trajectory, Turn

PAPER_MEASURES = ("exact_match", "format")
"""Components that `reward.rule = "paper"` is made of, and measures always."""


def measured_components(rule: str, components: Mapping[str, float]) -> dict[str, float]:
    """Return the weights of all components that are measured; the paper's rule has none."""
    if rule == "paper":
        return dict.fromkeys((*PAPER_MEASURES, *components), 0.0)
    return dict(components)


def _is_empty(values: Sequence[object] | Mapping[str, object]) -> bool:
    return not values


def _is_none(value: object) -> bool:
    return value is None


class Reward(Message):
    """Outcome reward of one trajectory; each component is kept by name."""

    total: float
    """Weighted sum of the components (or the selected rule's value), without process rewards."""
    components: dict[str, float] = {}
    """Components by name, unweighted: `exact_match`, `f1`, `format`, …"""
    prediction: str | None = None
    """The answer that was extracted; None when there is none."""
    tokens: Annotated[dict[str, int], Field(exclude_if=_is_empty)] = {}
    """Tokens that language models read and wrote for components, by the component; those that asked
    none are left out."""
    versions: Annotated[dict[str, str], Field(exclude_if=_is_empty)] = {}
    """Version of the language model that each component asked; those that ask none are left out."""
    reasons: Annotated[dict[str, str], Field(exclude_if=_is_empty)] = {}
    """Why, in words of the components, by the component; those that say nothing are left out."""


class ScoredTrajectory(StreamMessage):
    """A trajectory and its reward: what the learner trains on."""

    SCHEMA_NAME: ClassVar[str] = "scored_trajectory"
    SCHEMA_VERSION: ClassVar[str] = "5.1"
    WITH_TOKENS: ClassVar[dict[str, str]] = {"2.1": "2.2", "3.0": "3.1"}
    """Versions of a reward that counts tokens, by the trajectory's; without, both count alike."""
    WITH_VERSIONS: ClassVar[dict[str, str]] = {"2.1": "2.3", "3.0": "3.2"}
    """Versions of a reward that names the models asked."""
    WITH_READING: ClassVar[dict[str, str]] = {
        **{"2.2": "2.4", "3.1": "3.3", "4.0": "4.0"},
        **{"4.1": "4.1", "5.0": "5.0"},
    }
    """Versions that say all of that, by the trajectory's, whose turns say what they are."""
    WITH_REASONS: ClassVar[dict[str, str]] = {"2": "2.5", "3": "3.4", "4": "4.2", "5": "5.1"}
    """Versions of a reward with reasons, by the major of the trajectory's."""

    trajectory: Trajectory
    reward: Reward | None
    """Reward; None for a FAILED trajectory: an outage is not the model's failure."""
    scored_at: float = 0.0
    """Time of scoring, as Unix time in seconds by the clock of the rollout server, as
    `Trajectory.started_at`."""

    def stream_key(self) -> str:
        """Return the rollout id."""
        return self.trajectory.rollout_id

    def written_version(self) -> str:
        """Return the oldest version that says all of it."""
        version = self.trajectory.written_version()
        if self.reward is not None and self.reward.reasons:
            return self.WITH_REASONS[version.partition(".")[0]]
        if version in self.WITH_READING:
            return self.WITH_READING[version]
        if self.reward is not None and self.reward.versions:
            return self.WITH_VERSIONS[version]
        if self.reward is not None and self.reward.tokens:
            return self.WITH_TOKENS[version]
        return version


class ScoreCall(StrictMessage):
    """One tool call of a turn to score."""

    tool: str
    """Name the model wrote; "" when the call could not be read."""
    arguments: dict[str, JsonValue] = {}
    status: str = "ok"
    """Status, as in `ToolCallRecord`."""
    text: str = ""
    """Text that the tool answered."""
    data: JsonValue = None
    """Data that the tool sent beside its text: `ToolResult.data`."""


class ScoreReply(StrictMessage):
    """One message that followed a turn, as the model read it."""

    role: Literal["tool", "user"]
    content: Content
    call: int | None = None
    """Number of the call of the turn that it answers; None where it answers none."""


class ScoreTurn(StrictMessage):
    """One turn of text to score, and what followed it.

    A turn without `well_formed` is read by the service, as rollout would read it.
    """

    text: str
    well_formed: Annotated[bool | None, Field(exclude_if=_is_none)] = None
    """Whether the turn is one closed thought, then calls or one answer, and nothing else."""
    thought: Annotated[str | None, Field(exclude_if=_is_none)] = None
    """Text of the closed thought that the turn begins with; None without one."""
    said: Annotated[str | None, Field(exclude_if=_is_none)] = None
    """The text without its thoughts; None where that is all of it."""
    answer: Annotated[str | None, Field(exclude_if=_is_none)] = None
    """The answer that it gives; None without one."""
    num_calls: Annotated[int, Field(ge=0)] = 0
    """Calls of the turn, failed and malformed ones included."""
    calls: Annotated[list[ScoreCall], Field(fail_fast=True)] = []
    """The calls themselves, or none of them where only their number is known."""
    replies: Annotated[list[ScoreReply] | None, Field(exclude_if=_is_none, fail_fast=True)] = None
    """Messages that the model read after the turn. None: the result of each call, as the call has
    it."""
    data: Annotated[JsonValue, Field(exclude_if=_is_none)] = None
    """`EnvStep.data`: what the environment says of the turn to rewards alone."""
    token_ids: Annotated[list[int], Field(exclude_if=_is_empty, fail_fast=True)] = []
    """The tokens that the model sampled; only components that read tokens need them."""

    def shown(self) -> list[ScoreReply]:
        """Return what the model read after the turn."""
        if self.replies is not None:
            return self.replies
        return [
            ScoreReply(role="tool", content=call.text, call=i)
            for i, call in enumerate(self.calls)
            if call.status != "failed"
        ]

    @model_validator(mode="after")
    def _check_calls(self) -> Self:
        if self.calls and len(self.calls) != self.num_calls:
            raise ValueError(
                f"num_calls ({self.num_calls}) must be the number of calls ({len(self.calls)}); "
                "set it to that, or leave calls out"
            )
        return self


class ScoreRequest(StrictMessage):
    """Body of `POST /score`: a finished interaction as text."""

    payload: dict[str, JsonValue]
    """The task's payload: `answers` for the question-answering components."""
    prompt: Annotated[list[ChatMessage], Field(fail_fast=True)] = []
    """Messages that the model was asked with; only components that read them need them."""
    turns: Annotated[list[ScoreTurn], Field(min_length=1, fail_fast=True)]
    """The model's turns, in order; an interaction without one has a turn without text."""
    status: Status = "COMPLETED"
    token_ids: Annotated[list[int], Field(exclude_if=_is_empty, fail_fast=True)] = []
    """The tokens that lead to the state to be valued, as the model read and wrote them
    (`valued_tokens`); only the component critic needs them."""


class ValueRequest(StrictMessage):
    """Body of `POST /value`: an interaction as far as it has come, for one component."""

    component: str
    """Name in `reward.components`."""
    interaction: ScoreRequest
    """Interaction so far, with an empty payload where the component must not know the answer."""


class Value(Message):
    """Answer of `POST /value`."""

    value: float
    """Value that the component returned."""
    tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens that a language model read and wrote for it; 0 where none was asked."""
    version: str = ""
    """Version of the model that was asked, as its server names it; "" where none was."""


def score_turns(turns: Sequence[Turn]) -> list[ScoreTurn]:
    """Return turns as the components see them; an interaction without turns has one empty turn."""
    return [
        ScoreTurn(
            text=turn.text,
            num_calls=len(turn.calls),
            calls=[
                ScoreCall(
                    tool=c.tool,
                    arguments=c.arguments,
                    status=c.status,
                    text=c.text(),
                    data=c.data,
                )
                for c in turn.calls
            ],
            **{name: getattr(turn, name) for name in ("well_formed", "thought", "said", "answer")},
            replies=None if turn.replies is None else list(map(_score_reply, turn.replies)),
            data=turn.data,
        )
        for turn in turns
    ] or [ScoreTurn(text="")]


def _score_reply(reply: Reply) -> ScoreReply:
    """Return a reply as components see it: text where it is one part of text alone."""
    one = reply.parts[0] if len(reply.parts) == 1 else None
    content = one.text if isinstance(one, TextPart) else reply.parts
    return ScoreReply(role=reply.role, content=content, call=reply.call)


def valued_tokens(
    token_ids: Sequence[int], segment_starts: Sequence[int], turns: Sequence[Turn]
) -> list[int]:
    """Return the tokens that lead to the last state in which a token was chosen, or will be.

    Those are the states that a critic learns. An interaction that goes on has come to the beginning
    of its next turn. Where nothing follows the last turn, it is the state before its last token.

    Args:
        token_ids: of the whole interaction.
        segment_starts: as in `Trajectory`; the state is one of the last segment.
        turns: so far.
    """
    start = segment_starts[-1] if segment_starts else 0
    written = bool(turns) and turns[-1].end == len(token_ids)
    return list(token_ids[start : len(token_ids) - written])
