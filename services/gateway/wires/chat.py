"""OpenAI's Chat Completions: how agents that speak it ask a session for the next turn.

An agent --POST /sessions/ID/v1/chat/completions--> `Asked`; what the session says --> JSON, or
server-sent events. The session's key is the API key. Answers are made with the types of the
`openai` package; requests are read strictly: a field that is not known here is refused by its name.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field, JsonValue

from agent_r1.gateway.speech import Speaker, Speech
from agent_r1.gateway.wire import Asked, Begun, Ended, ErrorKind, Said, Session, Sessions, WireError
from agent_r1.gateway.wires.history import check_calls, read_arguments, read_tool
from agent_r1.gateway.wires.http import (
    Answer,
    AnswerResponse,
    Body,
    ErrorForm,
    WireRequest,
    event,
    find_session,
    note_overruled,
    problem_of,
    read_request,
    refuse,
    retries_of,
)
from agent_r1.runtime.imports import quick_imports
from agent_r1_proto.tasks import ChatMessage
from agent_r1_proto.tools import ToolSpec

with quick_imports():
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

MAX_CHOICES = 16
"""Most answers to one request."""
MAX_STOPS = 16
"""Most texts at which a turn ends."""
_SAMPLING = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "seed"}
    | {"frequency_penalty", "presence_penalty", "repetition_penalty"}
    | {"chat_template_kwargs", "enable_thinking", "reasoning", "thinking"}
)
"""Parameters that are the task's."""
_CHANGES_NOTHING = frozenset(
    {"metadata", "moderation", "safety_identifier", "store", "user"}
    | {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "prediction"}
    | {"reasoning_effort", "verbosity", "service_tier", "parallel_tool_calls"}
)
_REASONING = ("reasoning_content", "reasoning", "reasoning_details")
_ERRORS: dict[ErrorKind, tuple[str, str | None]] = {
    "invalid_request": ("invalid_request_error", None),
    "context_full": ("invalid_request_error", "context_length_exceeded"),
    "no_session": ("invalid_request_error", "invalid_api_key"),
    "ended": ("invalid_request_error", "session_ended"),
    "busy": ("rate_limit_error", "rate_limit_exceeded"),
    "too_large": ("invalid_request_error", "request_too_large"),
    "unavailable": ("server_error", "unavailable"),
}
"""`type` and `code` of each kind of error."""


class OpenAIErrors(ErrorForm):
    """Errors as OpenAI's clients read them."""

    def body(self, error: WireError) -> dict[str, Any]:
        """Return what a refusal says."""
        kind, code = _ERRORS[error.kind]
        param = error.param or None
        return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}

    def body_of_status(self, status: int, message: str) -> dict[str, Any]:
        """Return what a refusal says that comes before any wire."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"error": {"message": message, "type": kind, "param": None, "code": None}}


OPENAI_ERRORS = OpenAIErrors()


class _Function(Body):
    name: str
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class _OfferedTool(Body):
    type: Literal["function"]
    function: _Function
    cache_control: JsonValue = None


class _Named(Body):
    name: str


class _ToolName(Body):
    type: Literal["function"]
    function: _Named


class _AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: list[_ToolName]


class _ToolChoice(Body):
    type: Literal["function", "custom", "allowed_tools"]
    function: _Named | None = None
    custom: _Named | None = None
    allowed_tools: _AllowedTools | None = None


class _ResponseFormat(Body):
    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"] = "text"


class _StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChatRequest(WireRequest):
    """Body of a request."""

    sampling: ClassVar[frozenset[str]] = _SAMPLING
    changes_nothing: ClassVar[frozenset[str]] = _CHANGES_NOTHING

    messages: Annotated[list[dict[str, JsonValue]], Field(min_length=1, fail_fast=True)]
    model: str
    tools: Annotated[list[_OfferedTool] | None, Field(max_length=1024, fail_fast=True)] = None
    tool_choice: Literal["auto", "none", "required"] | _ToolChoice | None = None
    response_format: _ResponseFormat | None = None
    logit_bias: dict[str, JsonValue] | None = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    stop: str | list[str] | None = None
    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0)] = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    modalities: list[Literal["text"]] | None = None

    def asked(self, retries: int) -> Asked:
        """Return what is asked of the session.

        Raises:
            WireError: it cannot be asked.
        """
        if self.top_logprobs:
            refuse(
                "top_logprobs",
                f"top_logprobs ({self.top_logprobs}) must be 0: sessions record the log-probability"
                " of sampled tokens alone; leave it out",
            )
        messages = tuple(_read_message(i, message) for i, message in enumerate(self.messages))
        if messages[-1].role == "assistant":
            refuse(
                "messages",
                "the last message is the assistant's; it must be one that the policy answers",
            )
        tools = [_read_tool(i, tool.function) for i, tool in enumerate(self.tools or ())]
        return Asked(
            messages=messages,
            tools=tuple(tool for tool in tools if self._allows(tool.name)),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stop=self._stops(),
            n=self.n or 1,
            retries=retries,
            is_streamed=bool(self.stream),
            constrained=self._constraint(),
        )

    def _stops(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MAX_STOPS:
            refuse("stop", f"stop has {len(stops)} texts; the limit is {MAX_STOPS}: leave some out")
        return tuple(stop for stop in stops if stop)

    @property
    def _allowed(self) -> _AllowedTools | None:
        return self.tool_choice.allowed_tools if isinstance(self.tool_choice, _ToolChoice) else None

    def _allows(self, tool: str) -> bool:
        allowed = self._allowed
        return self.tool_choice != "none" and (
            allowed is None or any(one.function.name == tool for one in allowed.tools)
        )

    def _constraint(self) -> str:
        """Return the field that forces the answer, and how; "" where none does."""
        choice, allowed, form = self.tool_choice, self._allowed, self.response_format
        if choice not in (None, "auto", "none") and (allowed is None or allowed.mode != "auto"):
            return f"tool_choice {choice if isinstance(choice, str) else choice.type}"
        if form is not None and form.type != "text":
            return f"response_format {form.type}"
        return "logit_bias" if self.logit_bias else ""


def add_chat(app: FastAPI, sessions: Sessions) -> None:
    """Add the routes of Chat Completions."""
    noted: set[str] = set()

    @app.post("/sessions/{session_id}/v1/chat/completions")
    async def complete(session_id: str, request: Request) -> Response:
        session = await find_session(sessions, request, session_id)
        body = await read_request(ChatRequest, request)
        asked = body.asked(retries_of(request))
        note_overruled(body, noted)
        return AnswerResponse(_ChatAnswer(session, body, asked))


def _read_message(index: int, given: dict[str, JsonValue]) -> ChatMessage:
    """Return a message without its reasoning: what the policy thought is known to the session."""
    fields = {k: v for k, v in given.items() if k not in (*_REASONING, "cache_control")}
    if not any(fields.get(k) for k in ("content", "tool_calls", "function_call")):
        fields["content"] = fields.get("refusal") or ""  # it thought, or answered nothing
    try:
        if "role" not in fields:
            raise ValueError("role is missing; name who says it")
        if isinstance(calls := fields.get("tool_calls"), list):
            fields["tool_calls"] = [_read_call(call) for call in calls]
        message = ChatMessage.model_validate(fields)
        message.text()  # refuses images
        if message.tool_calls:
            check_calls(message)
    except (ValueError, RecursionError) as exc:
        refuse(where := f"messages.{index}", f"{where}: {problem_of(exc)}", exc)
    return message


def _read_call(given: JsonValue) -> JsonValue:
    """Return a call whose arguments are an object: what is none is an argument of that name."""
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(function, dict):
        return given
    arguments = function.get("arguments")
    whole = read_arguments(arguments) if isinstance(arguments, str) else arguments or {}
    return {**given, "function": {**function, "arguments": whole}}


def _read_tool(index: int, tool: _Function) -> ToolSpec:
    where = f"tools.{index}.function"
    return read_tool(where, tool.name, tool.description, tool.parameters)


@dataclass
class _Choice:
    """One answer as it grows."""

    session: Session
    index: int
    begun: Begun = field(default_factory=lambda: Begun(0, -1, ""))
    speaker: Speaker | None = None
    thought: str = ""
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    tokens: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    ended: Ended | None = None

    def take(self, event: Begun | Said | Ended) -> dict[str, Any]:
        """Take what happened, and return the delta that tells it; empty where it tells nothing."""
        if isinstance(event, Begun):
            self.begun = event
            self.speaker = Speaker(event.opening, self.session.turn_reader)
            return {"role": "assistant", "content": ""}
        assert self.speaker is not None
        if isinstance(event, Ended):
            self.ended = event
            return self._tell(self.speaker.finish())
        return self._tell(self.speaker.feed(event.text))

    def _tell(self, speech: Speech) -> dict[str, Any]:
        self.thought += speech.thought
        self.content += speech.content
        first = len(self.calls)
        for call in speech.calls:
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            self.calls.append(
                {
                    "id": self.session.call_id(self.begun.turn, len(self.calls)),
                    "type": "function",
                    "function": {"name": call.name, "arguments": arguments},
                }
            )
        calls = [{"index": first + i, **call} for i, call in enumerate(self.calls[first:])]
        told = {
            "reasoning_content": speech.thought,
            "content": speech.content,
            "tool_calls": calls,
        }
        return {name: value for name, value in told.items() if value}

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, as the API says it; None while it has not."""
        if self.ended is None:
            return None
        return "tool_calls" if self.calls and self.ended.reason == "stop" else self.ended.reason

    def message(self) -> dict[str, Any]:
        """Return the whole message."""
        told: dict[str, Any] = {"role": "assistant", "refusal": None}
        told["content"] = None if self.calls and not self.content else self.content
        if self.thought:
            told["reasoning_content"] = self.thought
        if self.calls:
            told["tool_calls"] = self.calls
        return told


class _ChatAnswer(Answer):
    """The answer to one request."""

    form = OPENAI_ERRORS

    def __init__(self, session: Session, body: ChatRequest, asked: Asked) -> None:
        super().__init__(session, asked)
        self._has_logprobs = bool(body.logprobs)
        self._has_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._choices = [_Choice(session, i) for i in range(asked.n)]
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": session.model,
        }

    def take(self, event: Begun | Said | Ended) -> bytes:
        """Return the chunks that tell what has happened."""
        choice = self._choices[event.choice]
        delta = choice.take(event)
        tokens = _logprobs(event) if self._has_logprobs and isinstance(event, Said) else []
        if not self.asked.is_streamed:
            choice.tokens += tokens
            return b""
        chunks = [self._chunk([_part(choice, tokens, delta=delta)])] if delta or tokens else []
        if choice.ended is not None:
            end = choice.finish_reason
            chunks.append(self._chunk([_part(choice, [], delta={}, finish_reason=end)]))
        return b"".join(chunks)

    def finish(self) -> bytes:
        """Return the end of a stream, or the whole completion."""
        if not self.asked.is_streamed:
            return self._completion()
        usage = self._chunk([], self._usage()) if self._has_usage else b""
        return usage + event("[DONE]")

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        fields = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        if self._has_usage:
            fields["usage"] = usage
        chunk = ChatCompletionChunk.model_validate(fields)
        return event(chunk.model_dump_json(exclude_unset=True))

    def _completion(self) -> bytes:
        choices = [
            _part(
                choice,
                choice.tokens,
                message=choice.message(),
                finish_reason=choice.finish_reason,
            )
            for choice in self._choices
        ]
        fields = {**self._head, "object": "chat.completion", "choices": choices}
        completion = ChatCompletion.model_validate({**fields, "usage": self._usage()})
        return completion.model_dump_json(exclude_unset=True).encode()

    def _usage(self) -> dict[str, Any]:
        """Return the tokens that were read, once for all answers, and those that were sampled."""
        begun = [choice.begun for choice in self._choices]
        read = max(one.prompt_tokens for one in begun)
        sampled = sum(choice.ended.sampled_tokens for choice in self._choices if choice.ended)
        return {
            "prompt_tokens": read,
            "completion_tokens": sampled,
            "total_tokens": read + sampled,
            "prompt_tokens_details": {"cached_tokens": max(one.cached_tokens for one in begun)},
        }


def _part(
    choice: _Choice, tokens: list[dict[str, Any]], finish_reason: str | None = None, **said: Any
) -> dict[str, Any]:
    """Return one of the `choices` of a chunk or of the whole answer."""
    logprobs = {"content": tokens, "refusal": None} if tokens else None
    return {
        "index": choice.index,
        **said,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }


def _logprobs(said: Said) -> list[dict[str, Any]]:
    """Return the tokens by their ids, as vLLM names them: one may be half a character."""
    pairs = zip(said.token_ids, said.logprobs, strict=True)
    return [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in pairs
    ]
