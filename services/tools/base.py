"""`Tool`, the base class of every tool: one action and its raw result.

A tool service (`app.py`) reads calls from rollout over HTTP, hands each to `Tool.call`, and writes
the result back. A tool says what happened; what that means for the dialogue and for the reward is
the business of `ToolEnv`. This module imports no web framework, so user code can import it cheaply.
"""

from __future__ import annotations

import asyncio
import difflib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, JsonValue, ValidationError

from agent_r1.runtime.argument_schema import find_problem
from agent_r1.runtime.user_code import check_methods
from agent_r1_proto.parts import TextPart
from agent_r1_proto.tools import ToolResult, ToolSpec

Arguments = dict[str, JsonValue]
S = TypeVar("S", bound=BaseModel)

_METHODS = {
    "call": ("arguments", "context"),
    "call_batch": ("calls",),
    "open": ("rollout_id", "tool_context"),
    "close": ("rollout_id",),
    "fork": ("rollout_id", "fork_id"),
    "start": (),
    "stop": (),
}
"""The methods of a tool that the service calls, with what it gives them."""


class ToolUnavailableError(Exception):
    """Raised in `Tool.call` when the thing behind the tool is down (a database, a remote API).

    Any other exception is the tool's own answer and the model reads its text. This one is an
    outage: the service answers 503, rollout retries or fails the attempt, and nothing is trained
    on it.
    """


class ToolBusyError(ToolUnavailableError):
    """Raised in `Tool.call` when the call has found no free place to run.

    The service answers 429, and rollout sends the call again: this waiting takes nothing of the
    call's time.
    """


@dataclass(frozen=True)
class CallContext:
    """Facts about a call besides its arguments."""

    rollout_id: str
    """The attempt that calls: `run/incarnation/group/sample/attempt`."""
    turn: int
    """Number of the model's turn, from 0."""
    tool_context: JsonValue
    """The task's `tool_context`; the model never sees it."""
    timeout_s: float
    """Time left for the call, in seconds; the service cancels it after that."""


class Tool(ABC):
    """One action a model can take, served over HTTP by `agent-r1 serve tool`.

    A subclass sets `name`, `description` and `parameters` (JSON Schema of an object) and writes
    `call`. Arguments are checked against the schema before `call` sees them. One instance serves
    all calls of the process, concurrently; blocking work belongs in `asyncio.to_thread`.

    Example:
        class Add(Tool):
            name = "add"
            description = "Adds two numbers."
            parameters = {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
                "required": ["a", "b"],
                "additionalProperties": False,
            }

            async def call(self, arguments, context):
                return str(arguments["a"] + arguments["b"])
    """

    name: str
    """Name that the model writes to call it."""
    description: str
    """Description that the model reads."""
    parameters: dict[str, Any]
    """JSON Schema of the arguments: an object."""
    version: str = "1"
    """Recorded with every call; change it when the tool answers differently."""
    sessions: bool = False
    """True: `open` and `close` bracket every rollout, and calls need an open session."""
    max_batch: int = 1
    """Most calls one request may carry. They are answered together, when the slowest is done or the
    first deadline passes: raise it for a tool whose `call_batch` is cheaper than its calls."""
    idempotent: bool = True
    """False: a call that may have run is never sent again; its attempt fails instead."""
    outside_effects: bool = False
    """True: a call changes more than its session, such as sending a message. Decoding that discards
    branches is then refused: what a discarded branch has done could not be taken back."""

    @property
    def forks(self) -> bool:
        """Return whether `fork` is written; otherwise a branch of the interaction gets a fresh
        session, in which the calls so far are made once more."""
        return type(self).fork is not Tool.fork

    @abstractmethod
    async def call(self, arguments: Arguments, context: CallContext) -> ToolResult | str:
        """Answer one call.

        Args:
            arguments: the call's arguments, valid under `parameters`.
            context: who calls, and how long the answer may take.

        Returns:
            The result; a plain string is a result of one text part.

        Raises:
            ToolUnavailableError: an outage; the attempt fails and the model sees nothing.
            Exception: anything else is answered to the model as an error text.
        """

    async def call_batch(
        self, calls: Sequence[tuple[Arguments, CallContext]]
    ) -> list[ToolResult | str | BaseException]:
        """Answer the calls of one request, in order; override it where batching is cheaper.

        Returns:
            One result per call; an exception stands for a call that raised it.
        """
        return await asyncio.gather(
            *(self.call(arguments, context) for arguments, context in calls), return_exceptions=True
        )

    async def fork(self, rollout_id: str, fork_id: str) -> None:
        """Begin the session `fork_id` in the state that the session `rollout_id` has now.

        Decoding asks for it when an interaction branches. No call of `rollout_id` runs meanwhile;
        `close` is called for both. Write it where that is cheaper than making the calls again, or
        where a repeated call would be answered differently.
        """
        raise TypeError(f"{type(self).__name__} does not fork sessions")

    # The four hooks do nothing unless a subclass needs them (B027 wants them abstract).
    async def open(self, rollout_id: str, tool_context: JsonValue) -> None:  # noqa: B027
        """Begin the session of one rollout (tools with `sessions = True`)."""

    async def close(self, rollout_id: str) -> None:  # noqa: B027
        """End the session of one rollout; called once, however the rollout ended."""

    async def start(self) -> None:  # noqa: B027
        """Create clients and other resources; called once, before the first call."""

    async def stop(self) -> None:  # noqa: B027
        """Release what `start` created; called once, after the last call."""

    def counters(self) -> Mapping[str, int]:
        """Return counts of the tool's own for `GET /metrics`, by name; they only ever rise."""
        return {}

    def spec(self) -> ToolSpec:
        """Return what rollout and the model read about this tool.

        Raises:
            ValueError: an attribute is missing or wrong; the text says which and what to set.
        """
        kind = type(self).__name__
        for attribute in ("name", "description", "parameters"):
            if not hasattr(self, attribute):
                raise ValueError(f"tool class {kind} lacks {attribute!r}; set it on the class")
        check_methods(type(self), f"tool class {kind}", _METHODS)
        check_parameters(kind, self.parameters)
        try:
            return ToolSpec.model_validate({f: getattr(self, f) for f in ToolSpec.model_fields})
        except ValidationError as exc:
            problems = "; ".join(
                f"{error['loc'][0]} ({error['input']!r}): {error['msg']}" for error in exc.errors()
            )
            raise ValueError(f"tool class {kind} is not valid: {problems}") from exc


def check_parameters(owner: str, parameters: object) -> None:
    """Check that `parameters` is a JSON Schema of an object.

    Raises:
        ValueError: it is not; the text names `owner`.
    """
    if not isinstance(parameters, dict) or parameters.get("type") != "object":
        raise ValueError(
            f'{owner}.parameters must be a JSON Schema with "type": "object"; got {parameters!r}'
        )
    problem = find_problem(parameters)
    if problem is not None:
        raise ValueError(
            f"{owner}.parameters is not a valid JSON Schema: {problem}; correct that place, or "
            "leave it out"
        )


def parse_settings(model: type[S], settings: Mapping[str, object]) -> S:
    """Check the keyword arguments of a tool, which are the `settings` of its table.

    Raises:
        ValueError: a key is unknown or missing, or a value is wrong; the text names every one.
    """
    try:
        return model.model_validate(settings)
    except ValidationError as exc:
        # Not their values: there may be a key among them.
        problems = [
            _unknown_key(str(error["loc"][-1]), model)
            if error["type"] == "extra_forbidden"
            else f"{'.'.join(map(str, ('settings', *error['loc'])))}: "
            f"{error['msg'].removeprefix('Value error, ')}"
            for error in exc.errors(include_url=False)
        ]
        raise ValueError("; ".join(problems)) from exc


def _unknown_key(key: str, model: type[BaseModel]) -> str:
    near = difflib.get_close_matches(key, model.model_fields, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(model.model_fields)}"
    return f"settings.{key} is unknown; {hint}"


def text_result(text: str) -> ToolResult:
    """Return a result of one text part."""
    return ToolResult(parts=[TextPart(text=text)])


def error_result(text: str) -> ToolResult:
    """Return the tool's own error answer, which the model reads."""
    return ToolResult(status="error", parts=[TextPart(text=text)])
