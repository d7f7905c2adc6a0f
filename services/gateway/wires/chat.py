"""OpenAI's Chat Completions: how agents that speak it ask a session for the next turn.

An agent --POST /sessions/ID/v1/chat/completions--> `Asked`; what the session says --> JSON, or
server-sent events. The session's key is the API key. Answers are made with the types of the
`openai` package; requests are read strictly: a field that is not known here is refused by its name.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NoReturn, Self

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from agent_r1.gateway.speech import Speaker, Speech
from agent_r1.gateway.wire import (
    Asked,
    Begun,
    Ended,
    ErrorKind,
    Said,
    Session,
    Sessions,
    Waiting,
    WireError,
)
from agent_r1.runtime.http.api import parse_body
from agent_r1.runtime.imports import quick_imports
from agent_r1_proto.tasks import ChatMessage
from agent_r1_proto.tools import ToolSpec

with quick_imports():
    from openai.types import Model
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

logger = logging.getLogger(__name__)

WRITE_TIMEOUT_S = 60.0
"""How long a client may take to read what was written, before its connection is given up."""
STREAM_TYPE = "text/event-stream; charset=utf-8"
MAX_CHOICES = 16
"""Most answers to one request."""
MAX_STOPS = 16
"""Most texts at which a turn ends."""
_PENALTIES = {"frequency_penalty", "presence_penalty", "repetition_penalty"}
_SAMPLING = {"temperature", "top_p", "top_k", "min_p", "seed"} | _PENALTIES
_TEMPLATE = {"chat_template_kwargs", "enable_thinking", "reasoning", "thinking"}
_TASKS_OWN = _SAMPLING | _TEMPLATE
"""Parameters that are the task's."""
_CACHE = {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "prediction"}
_EFFORT = {"reasoning_effort", "verbosity", "service_tier", "parallel_tool_calls"}
_CHANGES_NOTHING = (
    {"metadata", "moderation", "safety_identifier", "store", "user"} | _CACHE | _EFFORT
)
_REASONING = ("reasoning_content", "reasoning", "reasoning_details")
_STATUS: dict[ErrorKind, tuple[int, str, str | None]] = {
    "invalid_request": (400, "invalid_request_error", None),
    "context_full": (400, "invalid_request_error", "context_length_exceeded"),
    "no_session": (401, "invalid_request_error", "invalid_api_key"),
    "ended": (410, "invalid_request_error", "session_ended"),
    "busy": (429, "rate_limit_error", "rate_limit_exceeded"),
    "too_large": (413, "invalid_request_error", "request_too_large"),
    "unavailable": (503, "server_error", "unavailable"),
}
"""HTTP status, `type` and `code` of each kind of error."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Function(_Body):
    name: str
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class _OfferedTool(_Body):
    type: Literal["function"]
    function: _Function
    cache_control: JsonValue = None


class _Named(_Body):
    name: str


class _ToolName(_Body):
    type: Literal["function"]
    function: _Named


class _AllowedTools(_Body):
    mode: Literal["auto", "required"]
    tools: list[_ToolName]


class _ToolChoice(_Body):
    type: Literal["function", "custom", "allowed_tools"]
    function: _Named | None = None
    custom: _Named | None = None
    allowed_tools: _AllowedTools | None = None


class _ResponseFormat(_Body):
    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"] = "text"


class _StreamOptions(_Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ChatRequest(_Body):
    """Body of a request."""

    model_config = ConfigDict(extra="allow")

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

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        given = {name for name, value in self.others.items() if value is not None}
        unknown = sorted(given - _TASKS_OWN - _CHANGES_NOTHING)
        if unknown:
            names = ", ".join(f"{name:.40}" for name in unknown[:8])
            raise ValueError(f"unknown fields: {names}; leave them out")
        return self

    @property
    def others(self) -> dict[str, Any]:
        """Fields that make no difference to what is sampled."""
        return self.model_extra or {}

    def asked(self, retries: int) -> Asked:
        """Return what is asked of the session.

        Raises:
            WireError: it cannot be asked.
        """
        if self.top_logprobs:
            _refuse(
                "top_logprobs",
                f"top_logprobs ({self.top_logprobs}) must be 0: sessions record the log-probability"
                " of sampled tokens alone; leave it out",
            )
        messages = tuple(_read_message(i, message) for i, message in enumerate(self.messages))
        if messages[-1].role == "assistant":
            _refuse(
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
            _refuse(
                "stop", f"stop has {len(stops)} texts; the limit is {MAX_STOPS}: leave some out"
            )
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

    def overruled(self) -> list[str]:
        """Return the names of its parameters that are the task's."""
        return [name for name in _TASKS_OWN if self.others.get(name) is not None]


def add_chat(app: FastAPI, sessions: Sessions) -> None:
    """Add the routes of Chat Completions, and give all errors of an application OpenAI's form."""
    noted: set[str] = set()
    started = int(time.time())

    @app.post("/sessions/{session_id}/v1/chat/completions")
    async def complete(session_id: str, request: Request) -> Response:
        session = await sessions.find(session_id, read_key(request))
        _check_type(request.headers.get("content-type", ""))
        try:
            body = parse_body(ChatRequest, await request.body())
        except HTTPException as exc:
            _refuse("", exc.detail, exc)
        retries = request.headers.get("x-stainless-retry-count", "")
        asked = body.asked(int(retries) if retries.isdecimal() and len(retries) < 4 else 0)
        for name in set(body.overruled()) - noted:
            noted.add(name)
            logger.warning("parameter of an agent is the task's, so it is ignored name=%s", name)
        return _Response(_Answer(session, body, asked))

    @app.get("/sessions/{session_id}/v1/models")
    async def models(session_id: str, request: Request) -> Response:
        name = (await sessions.find(session_id, read_key(request))).model
        model = Model(id=name, created=started, object="model", owned_by="agent-r1")
        return JSONResponse({"object": "list", "data": [model.model_dump()]})

    @app.exception_handler(WireError)
    async def refuse(_: Request, error: WireError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def refuse_route(_: Request, error: HTTPException) -> Response:
        text = (
            f"{error.detail}; the routes of a session are POST /v1/chat/completions, GET "
            "/v1/models, GET /tools and POST /tools/NAME"
        )
        return JSONResponse(error_body(error.status_code, text), error.status_code, error.headers)


def read_key(request: Request) -> str:
    """Return the key of a session that a request has; "" without one."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def error_body(status: int, message: str) -> object:
    """Return an error in OpenAI's form, for refusals that come before any session."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def error_response(error: WireError) -> JSONResponse:
    """Return the answer to a request that is refused."""
    status = _STATUS[error.kind][0]
    wait = error.retry_after_s
    headers = {} if wait is None else {"retry-after": str(math.ceil(wait))}
    return JSONResponse(_error(error), status, headers)


def _error(error: WireError) -> dict[str, Any]:
    _, kind, code = _STATUS[error.kind]
    param = error.param or None
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


def _refuse(param: str, message: str, cause: Exception | None = None) -> NoReturn:
    raise WireError("invalid_request", message, param=param) from cause


def _check_type(content_type: str) -> None:
    if content_type.partition(";")[0].strip().lower() != "application/json":
        _refuse("", f"content-type ({content_type!r:.100}) must be application/json; send JSON")


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
        if message.tool_calls:  # JSON in JSON, in which half a surrogate pair comes in
            message.shown().encode()
    except (ValueError, RecursionError) as exc:
        _refuse(where := f"messages.{index}", f"{where}: {_problem(exc)}", exc)
    return message


def _read_call(given: JsonValue) -> JsonValue:
    """Return a call whose arguments are an object: what is none is an argument of that name."""
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(function, dict):
        return given
    arguments = function.get("arguments")
    if not isinstance(arguments, str) or not arguments.strip():
        return {**given, "function": {**function, "arguments": arguments or {}}}
    try:
        parsed: JsonValue = json.loads(arguments)
    except ValueError:
        parsed = arguments
    whole: JsonValue = parsed if isinstance(parsed, dict) else {"arguments": parsed}
    return {**given, "function": {**function, "arguments": whole}}


def _read_tool(index: int, function: _Function) -> ToolSpec:
    try:
        return ToolSpec(
            name=function.name,
            version="",
            description=function.description or "",
            parameters=function.parameters or {"type": "object", "properties": {}},
        )
    except ValidationError as exc:
        _refuse(where := f"tools.{index}.function", f"{where}: {_problem(exc)}", exc)


def _problem(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    text = first["msg"].removeprefix("Value error, ")
    return f"{where}: {text}" if where else text


@dataclass
class _Choice:
    """One answer as it grows."""

    session: Session
    index: int
    turn: int = -1
    speaker: Speaker | None = None
    thought: str = ""
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    tokens: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    ended: Ended | None = None

    def take(self, event: Begun | Said | Ended) -> dict[str, Any]:
        """Take what happened, and return the delta that tells it; empty where it tells nothing."""
        if isinstance(event, Begun):
            self.turn = event.turn
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
                    "id": self.session.call_id(self.turn, len(self.calls)),
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


class _Answer:
    """The answer to one request, in pieces as they are written."""

    def __init__(self, session: Session, body: ChatRequest, asked: Asked) -> None:
        self.is_stream = bool(body.stream)
        self._session = session
        self._asked = asked
        self._has_logprobs = bool(body.logprobs)
        self._has_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._choices = [_Choice(session, i) for i in range(asked.n)]
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": session.model,
        }

    async def pieces(self) -> AsyncGenerator[bytes]:
        """Yield what is written; closing it ends what the session samples.

        Raises:
            WireError: the session refuses, or cannot go on.
        """
        async with aclosing(self._session.ask(self._asked)) as events:
            async for event in events:
                if isinstance(event, Waiting):
                    if self.is_stream:
                        yield b": ping\n\n"
                    continue
                choice = self._choices[event.choice]
                delta = choice.take(event)
                tokens = _logprobs(event) if self._has_logprobs and isinstance(event, Said) else []
                if not self.is_stream:
                    choice.tokens += tokens
                    continue
                if delta or tokens:
                    yield self._chunk([_part(choice, tokens, delta=delta)])
                if choice.ended is not None:
                    end = choice.finish_reason
                    yield self._chunk([_part(choice, [], delta={}, finish_reason=end)])
        if not self.is_stream:
            yield self._completion()
            return
        if self._has_usage:
            yield self._chunk([], self._usage())
        yield b"data: [DONE]\n\n"

    async def delivered(self) -> None:
        """Tell the session that everything was written."""
        for choice in self._choices:
            await self._session.delivered(choice.turn)

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        fields = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        if self._has_usage:
            fields["usage"] = usage
        chunk = ChatCompletionChunk.model_validate(fields)
        return _event(chunk.model_dump_json(exclude_unset=True))

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
        ended = [choice.ended for choice in self._choices if choice.ended is not None]
        read = max(one.prompt_tokens for one in ended)
        sampled = sum(one.sampled_tokens for one in ended)
        return {
            "prompt_tokens": read,
            "completion_tokens": sampled,
            "total_tokens": read + sampled,
            "prompt_tokens_details": {"cached_tokens": max(one.cached_tokens for one in ended)},
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


def _event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


class _Response(Response):
    """The writing of an answer to a connection that may end, or never be read."""

    def __init__(self, answer: _Answer) -> None:
        super().__init__(media_type=STREAM_TYPE if answer.is_stream else "application/json")
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_until_gone(receive))
        write = asyncio.create_task(self._write(scope, receive, send, gone))
        try:
            await asyncio.wait((gone, write), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            write.cancel()
            await asyncio.gather(gone, write, return_exceptions=True)
        if not write.cancelled() and write.result():
            # Not in the task, which ends with the connection: clients hang up once they have all.
            await self._answer.delivered()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(
        self, scope: Scope, receive: Receive, send: Send, gone: asyncio.Task[None]
    ) -> bool:
        """Write the answer but for its end, and return whether the client has all of it."""
        is_begun = False
        try:
            async with aclosing(self._answer.pieces()) as pieces:
                async for piece in pieces:
                    if not is_begun:
                        await self._start(send, None if self._answer.is_stream else len(piece))
                        is_begun = True
                    await _send(send, piece)
            await _send(send, b"")  # waits until little of the last piece is left in this process
        except _ClientStuckError:
            logger.warning("a client does not read, so its connection is given up")
            return False
        except Exception as exc:  # noqa: BLE001 - whatever it is, the client reads an error
            error = _as_wire_error(exc)
            if not is_begun:
                await error_response(error)(scope, receive, send)
            elif self._answer.is_stream:
                with suppress(_ClientStuckError):
                    await _send(send, _event(json.dumps(_error(error))), more_body=False)
            return False
        # One turn of the loop, in which an end of the connection that came before is seen.
        await asyncio.sleep(0)
        return not gone.done()

    async def _start(self, send: Send, length: int | None) -> None:
        headers = {"content-type": str(self.media_type), "cache-control": "no-cache"}
        if length is not None:
            headers["content-length"] = str(length)
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})


class _ClientStuckError(Exception):
    """A client that does not read what is written."""


def _as_wire_error(error: Exception) -> WireError:
    if isinstance(error, WireError):
        return error
    logger.error("a request of an agent failed", exc_info=error)
    return WireError("unavailable", "the gateway failed; its log says why. Send the request again")


async def _send(send: Send, body: bytes, *, more_body: bool = True) -> None:
    """Write, once the client has read most of what was written before.

    Raises:
        _ClientStuckError: it has not.
    """
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await send({"type": "http.response.body", "body": body, "more_body": more_body})
    except TimeoutError as exc:
        raise _ClientStuckError from exc


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
