"""Tasks: what the agent is asked to do.

A user's data file holds one `Task` a line. learner --XADD--> stream `tasks` (one `RolloutTask`
per sample) --> rollout.
"""

from __future__ import annotations

import json
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, JsonValue, model_validator

from agent_r1_proto.foreign_messages import own_fields
from agent_r1_proto.messages import Message, StreamMessage, StrictMessage
from agent_r1_proto.parts import Content, shown_text, text_of
from agent_r1_proto.policies import DEFAULT_POLICY, PolicyName

Purpose = Literal["train", "eval", "value"]
"""`value`: shows what turns are worth. Like `eval`, it never trains and no credit counts it."""
Role = Literal["system", "user", "assistant", "tool"]
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 2.0
"""Limits of vLLM, which refuses more and samples at 0.01 where less is asked for."""
DecodingMethod = Literal["best_of_n", "majority", "value_guided", "beam"]
TURN_BY_TURN: tuple[DecodingMethod, ...] = ("value_guided", "beam")
"""Methods that choose after every turn; the others choose among whole interactions."""


def _is_none(value: object) -> bool:
    return value is None


def _check_temperature(temperature: float) -> float:
    if 0 < temperature < LEAST_TEMPERATURE:
        raise ValueError(
            f"the temperature ({temperature}) must be 0, which is greedy, or at least "
            f"{LEAST_TEMPERATURE}; set one of them"
        )
    return temperature


Temperature = Annotated[
    float, Field(ge=0.0, le=MOST_TEMPERATURE), AfterValidator(_check_temperature)
]
"""0.0 is greedy."""
PositiveTemperature = Annotated[float, Field(ge=LEAST_TEMPERATURE, le=MOST_TEMPERATURE)]
"""Temperature at which tokens are drawn and log-probabilities computed: never 0."""


def _is_empty(value: object) -> bool:
    return not value


class MessageCall(StrictMessage):
    """One tool call of an assistant's message."""

    name: Annotated[str, Field(min_length=1)]
    """Name of the tool."""
    arguments: dict[str, JsonValue] = {}
    id: str = ""
    """Id under which a message of role "tool" answers it; "" where nobody says."""


class ChatMessage(StrictMessage):
    """One message of a dialogue, as chat templates take it.

    Messages of OpenAI's API and of ShareGPT's data sets (`from`, `value`) are read as well.
    """

    role: Role
    content: Content
    """Text, or a list of parts."""
    tool_calls: Annotated[list[MessageCall], Field(exclude_if=_is_empty)] = []
    """Calls of an assistant, which the chat template writes behind the text."""
    tool_call_id: Annotated[str, Field(exclude_if=_is_empty)] = ""
    """Id of the call that a tool's message answers, for templates that show it."""

    @model_validator(mode="before")
    @classmethod
    def _read_foreign(cls, value: object) -> object:
        return own_fields(value)

    @model_validator(mode="after")
    def _check_calls(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls belong to a message of an assistant, not of {self.role}")
        return self

    def shown(self) -> str:
        """Return what it says and calls, for people, judges and logs."""
        calls = [
            json.dumps({"name": c.name, "arguments": c.arguments}, ensure_ascii=False)
            for c in self.tool_calls
        ]
        return "\n".join([*([text] if (text := shown_text(self.content)) else []), *calls])

    def text(self) -> str:
        """Return what it says.

        Raises:
            ImageRefusedError: it holds an image.
        """
        return text_of(self.content)


class SamplingParameters(StrictMessage):
    """Parameters of sampling. top_p = 1 and no top-k: the learner scores the full distribution."""

    temperature: Temperature = 1.0
    """0.0 is greedy."""
    max_turns: Annotated[int, Field(ge=1)] | None = None
    """Overrides `env.max_turns` for this task."""
    seed: int | None = None
    """Seed of the first turn; None derives one from the sample's key."""


class Decoding(StrictMessage):
    """Method that chooses the answer among several branches of one interaction."""

    method: DecodingMethod
    """`best_of_n`: of whole interactions, the highest-scoring one. `majority`: the first
    of those whose answer is the most frequent. `value_guided`: after every turn, the candidate with
    the highest log-probability plus `beta` times its advantage. `beam`: several branches, drawn in
    proportion to that, which vote at the end."""
    candidates: Annotated[int, Field(ge=1)] = 4
    """Interactions (`best_of_n`, `majority`), or turns sampled after every branch. The greedy one
    is among the interactions, and beside the turns."""
    keep: Annotated[int, Field(ge=1)] = 1
    """`beam`: branches that are kept after every turn; 1 with every other method."""
    beta: Annotated[float | None, Field(ge=0, exclude_if=_is_none)] = None
    """`value_guided`, `beam`: weight of a value beside a log-probability; None is 1. With 0 nothing
    is scored."""
    branch_below: Annotated[float | None, Field(gt=0, le=1, exclude_if=_is_none)] = None
    """`value_guided`, `beam`: candidates are sampled where the greedy turn is less probable than
    this; None: everywhere."""
    answer_bias: Annotated[float | None, Field(ge=-100, le=100, exclude_if=_is_none)] = None
    """`value_guided`, `beam`: added to the log-probability of a candidate that calls nothing. Below
    0, only answers are taken that are likely; None is 0."""
    continuations: Annotated[int | None, Field(ge=0, exclude_if=_is_none)] = None
    """`value_guided` with the purpose `value`: how often the interaction is continued after each
    candidate of one turn, so that rewards say what the candidate is worth."""
    lookahead: Annotated[int, Field(ge=0)] | None = None
    """Turns whose calls are run before a candidate is scored, its own included; None is 1. With 0 a
    candidate is scored as it is written, and only the calls of those kept are run."""
    max_calls: Annotated[int, Field(ge=0)] | str | None = None
    """Most tool calls of all branches together: a number, or the name under which the task's
    payload has it. None: no limit."""
    scorer: str | None = None
    """Reward component that scores branches; it never sees the payload. `majority` has none, and
    neither has `beta` 0."""

    @property
    def by_turn(self) -> bool:
        """Return whether it chooses after every turn."""
        return self.method in TURN_BY_TURN

    @property
    def needs_scorer(self) -> bool:
        """Return whether branches are scored."""
        return self.beta != 0 if self.by_turn else self.method != "majority"

    @model_validator(mode="after")
    def _check_method(self) -> Self:
        if (self.keep > 1) != (self.method == "beam"):
            raise ValueError(
                f"decoding.keep ({self.keep}) must be 2 or more with the method beam and 1 with "
                f"every other; the method is {self.method}"
            )
        for key in ("lookahead", "beta", "branch_below", "answer_bias", "continuations"):
            if getattr(self, key) is not None and not self.by_turn:
                raise ValueError(
                    f"decoding.{key} ({getattr(self, key)}) belongs to {' and '.join(TURN_BY_TURN)}"
                    f"; {self.method} scores whole interactions: leave it out"
                )
        if self.continuations and self.method != "value_guided":
            raise ValueError(
                f"decoding.continuations ({self.continuations}) needs the method value_guided; the "
                f"method is {self.method}"
            )
        if self.candidates < 2 and not self.by_turn:
            raise ValueError(
                f"decoding.candidates ({self.candidates}) must be 2 or more with {self.method}"
            )
        if (self.scorer is not None) != self.needs_scorer:
            raise ValueError(
                f"decoding.scorer is {self.scorer!r} with the method {self.method}; majority and "
                "beta 0 have no scorer, and everything else needs one"
            )
        return self


class Task(StrictMessage):
    """One thing to do: a prompt the model sees and a payload it never sees."""

    id: Annotated[str, Field(min_length=1)]
    """Unique within its data file."""
    prompt: str | list[ChatMessage]
    """A user message, or a dialogue that ends with a user message, or with the tool messages that
    answer an assistant message. A system message at its beginning takes the place of
    `env.system_prompt`."""
    payload: dict[str, JsonValue] = {}
    """Any JSON for reward and ToolEnv (answers, tests); never shown to the model."""
    tools: list[str] | None = None
    """Names of the tools offered; None offers all configured tools, [] none."""
    tool_context: JsonValue = None
    """Any JSON sent with every tool call; never shown to the model."""
    metadata: dict[str, JsonValue] = {}
    """Any JSON for reports: `set` and `type` group evaluation results."""

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if not self.prompt:
            raise ValueError(f"task {self.id!r} has an empty prompt")
        if isinstance(self.prompt, str):
            return self
        last = self.prompt[-1].role
        asked = next((m.role for m in reversed(self.prompt) if m.role != "tool"), None)
        if asked != ("assistant" if last == "tool" else "user"):
            raise ValueError(
                f"task {self.id!r} ends with a message of role {last!r}; "
                "the last message must be the user's, or a tool's after an assistant's"
            )
        return self

    def messages(self) -> list[ChatMessage]:
        """Return the prompt as a dialogue."""
        if isinstance(self.prompt, str):
            return [ChatMessage(role="user", content=self.prompt)]
        return list(self.prompt)


def added_system_prompt(task: Task, of_run: str | None) -> str | None:
    """Return the system prompt that goes before a task's dialogue; None where it has its own.

    Args:
        task: has the dialogue.
        of_run: `env.system_prompt`.
    """
    return None if task.messages()[0].role == "system" else of_run


class RolloutKey(Message):
    """Names one attempt at one sample: run / incarnation / group / sample / attempt."""

    run_id: str
    incarnation: Annotated[int, Field(ge=0)]
    """Number of the learner's start; results of earlier ones are dropped."""
    group_id: Annotated[int, Field(ge=0)]
    """Position in the prompt order; every epoch is new."""
    sample_index: Annotated[int, Field(ge=0)]
    """Position within the group, 0 .. group_size - 1."""
    attempt: Annotated[int, Field(ge=0)] = 0

    @classmethod
    def parse(cls, text: str) -> RolloutKey:
        """Read what `str` renders.

        Raises:
            ValueError: the text is no key.
        """
        return cls.model_validate(dict(zip(cls.model_fields, text.split("/"), strict=True)))

    def __str__(self) -> str:
        """Render as `run/incarnation/group/sample/attempt`."""
        return (
            f"{self.run_id}/{self.incarnation}/{self.group_id}/{self.sample_index}/{self.attempt}"
        )


class RolloutTask(StreamMessage):
    """One sample to roll out: an entry of the stream `tasks`."""

    SCHEMA_NAME: ClassVar[str] = "rollout_task"
    SCHEMA_VERSION: ClassVar[str] = "2.1"
    WITHOUT_CALLS: ClassVar[str] = "2.0"
    """Version of a task without tool calls in its prompt, which older readers take."""
    WITHOUT_PARTS: ClassVar[str] = "1.2"
    """Version of a task of text alone for the default policy."""

    key: RolloutKey
    group_size: Annotated[int, Field(ge=1)]
    task: Task
    purpose: Purpose = "train"
    sampling: SamplingParameters = SamplingParameters()
    reply_stream: str | None = None
    """Stream that receives the scored trajectory; None is `scored_trajectories` (the learner's)."""
    max_attempts: Annotated[int, Field(ge=1)] = 3
    """A FAILED attempt below this number is retried by the rollout server at once."""
    traceparent: str | None = None
    """Trace that this sample belongs to, as W3C Trace Context writes it; None: not traced."""
    decoding: Decoding | None = None
    """Search for the answer among several branches; None: there is one, sampled as it comes."""
    policy: PolicyName = DEFAULT_POLICY
    """The policy that is asked."""

    @model_validator(mode="after")
    def _check_decoding(self) -> Self:
        if self.decoding is not None and self.purpose == "train":
            raise ValueError(
                f"decoding ({self.decoding.method}) must not be set with the purpose train: what a "
                "search chooses is no sample of the policy; leave it out or ask for eval"
            )
        if self.decoding is not None and self.sampling.temperature == 0.0:
            raise ValueError(
                f"decoding ({self.decoding.method}) chooses among samples, and at temperature 0 "
                "they are all the same; raise sampling.temperature"
            )
        continues = self.decoding is not None and bool(self.decoding.continuations)
        if continues != (self.purpose == "value"):
            raise ValueError(
                f"the purpose is {self.purpose}, and decoding.continuations is "
                f"{self.decoding and self.decoding.continuations}; the purpose value needs 1 or "
                "more, and no other has them"
            )
        return self

    def stream_key(self) -> str:
        """Return the rollout id."""
        return str(self.key)

    def written_version(self) -> str:
        """Return the oldest version that says all of it."""
        if self.has_calls:
            return self.SCHEMA_VERSION
        return self.WITHOUT_CALLS if self.says_more else self.WITHOUT_PARTS

    @property
    def has_calls(self) -> bool:
        """Return whether messages of its prompt call tools, or answer a call by its id."""
        return any(m.tool_calls or m.tool_call_id for m in self.task.messages())

    @property
    def says_more(self) -> bool:
        """Return whether readers of version 1 would misread it."""
        parts = any(not isinstance(message.content, str) for message in self.task.messages())
        return parts or self.purpose == "value" or self.policy != DEFAULT_POLICY
