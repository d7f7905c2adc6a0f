"""Tool calls: what rollout asks of a tool service and what comes back.

rollout --POST /call--> tool service --> rollout. `GET /spec` answers `ToolSpec`, `GET /healthz`
answers `ToolHealth`; `POST /open` and `POST /close` bracket a session, `POST /fork` copies one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from agent_r1_proto.messages import Message, StrictMessage
from agent_r1_proto.parts import ResultPart, TextPart

ToolStatus = Literal["ok", "error"]
TESTS_TOOL = "code_tests"
"""Name of the tool that tests programs; its results have `TestedCode`."""


class ToolSpec(StrictMessage):
    """Specification of a tool, answered by `GET /spec` and shown to the model by its template."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,127}$")]
    version: str
    """The tool's own version; recorded with every call."""
    description: str
    parameters: dict[str, Any]
    """JSON Schema of the arguments (an object)."""
    sessions: bool = False
    """The tool keeps state per rollout between `POST /open` and `POST /close`."""
    max_batch: Annotated[int, Field(ge=1)] = 64
    """Most calls one `POST /call` may carry."""
    idempotent: bool = True
    """A call may be sent again when it is not known whether the first one ran."""
    forks: bool = False
    """`POST /fork` copies a session; otherwise a copy is a fresh session with the calls repeated.
    """
    outside_effects: bool = False
    """A call changes more than its session, so a branch that calls it cannot be discarded."""

    def as_function(self) -> dict[str, Any]:
        """Return the tool as chat templates take it."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": self.parameters,
            },
        }


class ToolCall(StrictMessage):
    """One call, as it travels to a tool service."""

    name: str
    arguments: dict[str, JsonValue]
    rollout_id: str
    turn: Annotated[int, Field(ge=0)]
    tool_context: JsonValue = None
    timeout_s: Annotated[float, Field(gt=0)]
    """Time left for this call, in seconds; the service must answer within it."""


class ToolResult(StrictMessage):
    """Result of a call. `error` is the tool's own answer ("no such page") and the model reads it.

    A failure of the service (timeout, 5xx, lost connection) has no ToolResult: it fails the
    attempt.
    """

    status: ToolStatus = "ok"
    """`ok`, or `error` where the text says what was wrong with the call."""
    parts: list[ResultPart] = []
    """Parts that the model sees, in order."""
    data: JsonValue = None
    """Anything for ToolEnv and logs; never shown to the model."""

    def text(self) -> str:
        """Return the text parts, joined by newlines."""
        return "\n".join(part.text for part in self.parts if isinstance(part, TextPart))


class TestedCode(StrictMessage):
    """`ToolResult.data` of the tool `code_tests`: how the model's program did."""

    passed: Annotated[int, Field(ge=0)]
    """Tests that passed."""
    failed: Annotated[int, Field(ge=0)]
    """Tests that did not."""
    total: Annotated[int, Field(ge=1)]
    """Sum of both."""

    @model_validator(mode="after")
    def _check_sum(self) -> Self:
        if self.passed + self.failed != self.total:
            raise ValueError(
                f"passed ({self.passed}) and failed ({self.failed}) must add up to total "
                f"({self.total})"
            )
        return self

    @property
    def share(self) -> float:
        """Tests that passed over all."""
        return self.passed / self.total


class CallRequest(StrictMessage):
    """Body of `POST /call`: one or many calls."""

    # A list of a million wrong items would make a million errors, of some gigabytes.
    calls: Annotated[list[ToolCall], Field(min_length=1, fail_fast=True)]


class CallReply(StrictMessage):
    """Answer of `POST /call`: one result per call, in the order of the calls."""

    version: str
    """Version of the tool that answered."""
    instance: str
    """Name of the process that answered."""
    results: list[ToolResult]


class SessionRequest(StrictMessage):
    """Body of `POST /open` and `POST /close`."""

    rollout_id: str
    tool_context: JsonValue = None


class ForkRequest(StrictMessage):
    """Body of `POST /fork`: begins the session `fork_id` in the state that `rollout_id` has."""

    rollout_id: str
    fork_id: str


class ToolHealth(Message):
    """Answer of `GET /healthz`."""

    status: Literal["ok", "draining"]
    name: str
    version: str
    instance: str
    sessions: int = 0
