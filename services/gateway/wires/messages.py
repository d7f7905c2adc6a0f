"""Anthropic's Messages: how agents that speak it ask a session for the next turn.

An agent --POST /sessions/ID/v1/messages--> `Asked`; what the session says --> blocks, in events or
at once. The signature of a thought and the ids of calls carry the turn that they are of.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field, JsonValue

from agent_r1.gateway.wire import Asked, ErrorKind, Session, Sessions, WireError, turn_id_in
from agent_r1.gateway.wires.blocks import Block, BlockAnswer, Fields, models_by_type
from agent_r1.gateway.wires.history import History, read_texts, read_tool, table
from agent_r1.gateway.wires.http import (
    STATUSES,
    AnswerResponse,
    ErrorForm,
    HostedToolsRequest,
    event,
    find_session,
    note_ignored,
    read_request,
    refuse,
    retries_of,
)
from agent_r1.runtime.imports import quick_imports
from agent_r1_proto.tools import ToolSpec

with quick_imports():
    from anthropic import types

MAX_STOPS = 16
"""Most texts at which a turn ends."""
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    410: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
"""Types of errors by status; others are an `api_error`, or a request that is wrong."""
_EVENTS = models_by_type(
    types.RawMessageStartEvent,
    types.RawContentBlockStartEvent,
    types.RawContentBlockDeltaEvent,
    types.RawContentBlockStopEvent,
    types.RawMessageDeltaEvent,
    types.RawMessageStopEvent,
)


class AnthropicErrors(ErrorForm):
    """Errors as Anthropic's clients read them."""

    statuses: Mapping[ErrorKind, int] = {**STATUSES, "unavailable": 529}

    def body(self, error: WireError) -> dict[str, Any]:
        """Return what a refusal says; agents know a full context by these words."""
        text = str(error)
        if error.kind == "context_full":
            tokens, limit = error.tokens
            text = f"prompt is too long: {tokens} tokens > {limit} maximum; {text}"
        return self.body_of_status(self.statuses[error.kind], text)

    def body_of_status(self, status: int, message: str) -> dict[str, Any]:
        """Return what a refusal says that comes before any wire."""
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}


ANTHROPIC_ERRORS = AnthropicErrors()


class _ToolChoice(BaseModel):
    type: str


class _Thinking(BaseModel):
    type: str
    display: str | None = None


class _OutputConfig(BaseModel):
    format: JsonValue = None


class CountRequest(HostedToolsRequest):
    """Body of a request that counts tokens, and what all requests have."""

    sampling: ClassVar[frozenset[str]] = frozenset({"temperature", "top_p", "top_k"})
    changes_nothing: ClassVar[frozenset[str]] = frozenset(
        {"betas", "billing_policy", "cache_control", "compaction", "context_management"}
        | {"diagnostics", "fallback_credit_token", "fallbacks", "inference_geo", "metadata"}
        | {"service_tier", "speed", "user_profile_id", "workspace_id"}
    )

    own_tools: ClassVar[frozenset[str]] = frozenset({"custom"})

    model: str
    messages: Annotated[list[dict[str, JsonValue]], Field(min_length=1, fail_fast=True)]
    system: str | list[JsonValue] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    output_format: JsonValue = None

    def asked(self, **more: Any) -> Asked:
        """Return what is asked of the session.

        Raises:
            WireError: it cannot be asked.
        """
        history = History()
        for i, message in enumerate(self.messages):
            _read_message(history, f"messages.{i}", message)
        messages, turn_ids = history.finish(read_texts("system", self.system or []))
        if not messages:
            refuse("messages", "the messages say nothing; send one that the policy answers")
        is_none = self.tool_choice is not None and self.tool_choice.type == "none"
        offered = [] if is_none else self.tools or []
        return Asked(
            messages=messages,
            turn_ids=turn_ids,
            tools=tuple(
                _read_tool(f"tools.{i}", tool)
                for i, tool in enumerate(offered)
                if (tool.get("type") or "custom") in self.own_tools
            ),
            constrained=self._constraint(),
            **more,
        )

    def _constraint(self) -> str:
        """Return the field that forces the answer, and how; "" where none does."""
        choice = self.tool_choice.type if self.tool_choice else "auto"
        if choice not in ("auto", "none"):
            return f"tool_choice {choice}"
        if self.output_format or (self.output_config and self.output_config.format):
            return "output_config.format"
        return ""


class MessagesRequest(CountRequest):
    """Body of a request for a turn."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[str] | None, Field(max_length=MAX_STOPS)] = None
    stream: bool | None = None


def add_messages(app: FastAPI, sessions: Sessions) -> None:
    """Add the routes of Messages to an application."""
    noted: set[str] = set()

    @app.post("/sessions/{session_id}/v1/messages")
    async def answer(session_id: str, request: Request) -> Response:
        session = await find_session(sessions, request, session_id)
        body = await read_request(MessagesRequest, request)
        asked = body.asked(
            max_tokens=body.max_tokens,
            stop=tuple(stop for stop in body.stop_sequences or () if stop),
            is_streamed=bool(body.stream),
            retries=retries_of(request),
        )
        if asked.messages[-1].role == "assistant":
            refuse(
                "messages",
                "the last message is the assistant's; it must be one that the policy answers, for "
                "which the beginning of the answer cannot be given",
            )
        note_ignored(body, noted)
        return AnswerResponse(_Message(session, asked, body.thinking))

    @app.post("/sessions/{session_id}/v1/messages/count_tokens")
    async def count(session_id: str, request: Request) -> Response:
        session = await find_session(sessions, request, session_id)
        body = await read_request(CountRequest, request)
        count = types.MessageTokensCount(input_tokens=session.count_tokens(body.asked()))
        return JSONResponse(count.model_dump())


# -- reading -------------------------------------------------------------------------------------


def _read_message(history: History, where: str, message: Mapping[str, JsonValue]) -> None:
    """Add a message, whose content may be a text or a list of blocks.

    Raises:
        WireError: it cannot be shown to a policy.
    """
    role, content = str(message.get("role")), message.get("content")
    if role not in ("user", "assistant", "system"):
        refuse(where, f"{where}: role ({role!r:.50}) must be user, assistant or system")
    history.end_message()
    if role == "assistant" and not content:
        history.say(where)
    if not isinstance(content, list):
        content = [{"type": "text", "text": content}]
    for i, one in enumerate(content):
        _read_block(history, f"{where}.content.{i}", role, table(where, one))


def _read_block(history: History, where: str, role: str, block: dict[str, JsonValue]) -> None:
    match block.get("type"):
        case "tool_result" if role == "user":
            texts = read_texts(where, block.get("content") or "")
            history.result(where, str(block.get("tool_use_id") or ""), texts)
        case _ if role != "assistant":
            history.tell(where, "user" if role == "user" else "system", read_texts(where, [block]))
        case "thinking" | "redacted_thinking":
            mark = block.get("signature") or block.get("data")
            history.say(where, turn_id=turn_id_in(str(mark)))
        case "tool_use":
            call = {"name": block.get("name"), "arguments": block.get("input") or {}}
            history.say(where, call=call | {"id": str(block.get("id") or "")})
        case _:
            history.say(where, texts=read_texts(where, [block]))


def _read_tool(where: str, tool: Mapping[str, JsonValue]) -> ToolSpec:
    return read_tool(where, tool.get("name"), tool.get("description"), tool.get("input_schema"))


# -- answers -------------------------------------------------------------------------------------


class _Message(BlockAnswer):
    """The answer to one request."""

    form = ANTHROPIC_ERRORS
    types = _EVENTS

    def __init__(self, session: Session, asked: Asked, thinking: _Thinking | None) -> None:
        super().__init__(session, asked)
        self.tells_thoughts = thinking is not None and thinking.type != "disabled"
        self._omits_thoughts = thinking is not None and thinking.display == "omitted"

    def ping(self) -> bytes:
        """Return what says that the connection is alive; the first event must be a message's."""
        return super().ping() if self.begun.turn < 0 else event({"type": "ping"}, "ping")

    def failure(self, error: WireError) -> bytes:
        """Return what ends a stream that has begun and cannot go on."""
        return event(self.form.body(error), "error")

    def start(self) -> Iterator[Fields]:
        """Yield the event that begins a stream."""
        yield {"type": "message_start", "message": self._message()}

    def opened(self, block: Block) -> Iterator[Fields]:
        """Yield the event that begins a block."""
        begun = {"text": "", "thinking": "", "signature": "", "input": {}}
        content = {name: begun.get(name, value) for name, value in self._content(block).items()}
        yield {"type": "content_block_start", "index": block.index, "content_block": content}

    def grown(self, block: Block, text: str) -> Iterator[Fields]:
        """Yield the event that tells more text of a block."""
        if block.kind == "content":
            yield self._delta(block, {"type": "text_delta", "text": text})
        elif not self._omits_thoughts:
            yield self._delta(block, {"type": "thinking_delta", "thinking": text})

    def closed(self, block: Block) -> Iterator[Fields]:
        """Yield the events that end a block."""
        content = self._content(block)
        if block.kind == "thought":
            signature = {"type": "signature_delta", "signature": content["signature"]}
            yield self._delta(block, signature)
        elif block.call is not None:
            told = json.dumps(content["input"], ensure_ascii=False)
            yield self._delta(block, {"type": "input_json_delta", "partial_json": told})
        yield {"type": "content_block_stop", "index": block.index}

    def end(self) -> Iterator[Fields]:
        """Yield the events that end a stream."""
        message = self._message()
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": delta, "usage": message["usage"]}
        yield {"type": "message_stop"}

    def whole(self) -> BaseModel:
        """Return the whole message."""
        blocks = [self._content(block) for block in self.blocks]
        return types.Message.model_validate(self._message(blocks))

    def _message(self, content: Sequence[Fields] = ()) -> Fields:
        begun, ended = self.begun, self.ended
        usage = {
            "input_tokens": begun.prompt_tokens - begun.cached_tokens,
            "cache_read_input_tokens": begun.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": 0 if ended is None else ended.sampled_tokens,
        }
        return {
            "id": f"msg_{self.session.turn_id(begun.turn)}",
            "type": "message",
            "role": "assistant",
            "model": self.session.model,
            "content": list(content),
            "stop_reason": self._stop_reason(),
            "stop_sequence": (ended.stop or None) if ended else None,
            "usage": usage,
        }

    def _stop_reason(self) -> str | None:
        if self.ended is None:
            return None
        if self.ended.reason == "length":
            return "max_tokens"
        if self.ended.stop:
            return "stop_sequence"
        return "tool_use" if any(block.call for block in self.blocks) else "end_turn"

    def _content(self, block: Block) -> Fields:
        """Return a block as it stands."""
        if block.call is not None:
            name = self.session.call_id(self.begun.turn, block.number)
            arguments = block.call.arguments
            return {"type": "tool_use", "id": name, "name": block.call.name, "input": arguments}
        if block.kind == "content":
            return {"type": "text", "text": block.text}
        signature = f"turn_{self.session.turn_id(self.begun.turn)}"
        text = "" if self._omits_thoughts else block.text
        return {"type": "thinking", "thinking": text, "signature": signature}

    def _delta(self, block: Block, delta: Fields) -> Fields:
        return {"type": "content_block_delta", "index": block.index, "delta": delta}
