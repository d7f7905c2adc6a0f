"""OpenAI's Responses: how agents that speak it ask a session for the next turn.

An agent --POST /sessions/ID/v1/responses--> `Asked`; what the session says --> items, in events or
at once. Ids of answers and items carry the turn that they are of, and so does what stands in
`encrypted_content`: whatever of it a client sends back, its history is joined to that turn.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NoReturn

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field, JsonValue

from agent_r1.gateway.wire import Asked, ErrorKind, Session, Sessions, WireError, turn_id_in
from agent_r1.gateway.wires.blocks import Block, BlockAnswer, Fields, models_by_type
from agent_r1.gateway.wires.chat import OPENAI_ERRORS
from agent_r1.gateway.wires.history import History, read_arguments, read_texts, read_tool, table
from agent_r1.gateway.wires.http import (
    STREAM_TYPE,
    AnswerResponse,
    HostedToolsRequest,
    event,
    find_session,
    note_ignored,
    read_request,
    refuse,
    retries_of,
)
from agent_r1.runtime.imports import quick_imports
from agent_r1.text.tool_formats import ParsedCall
from agent_r1_proto.parts import shown_text
from agent_r1_proto.tasks import ChatMessage
from agent_r1_proto.tools import ToolSpec

with quick_imports():
    from openai.types import responses as types

COMPACT_ITEM = "compaction_trigger"
COMPACT = (
    "Summarize this conversation for yourself; the summary will be all that you have of it. Say "
    "what was asked, what has been done and found, and what is left to do."
)
"""What the policy is asked where a client wants a history compacted."""
SUMMARY = "Summary of the conversation so far:\n"
"""What stands before it when it comes back."""
CUSTOM_INPUT = "input"
"""The one parameter of the function that a custom tool is for the policy."""
_ENCRYPTED = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"
_PREVIOUS = "previous_response_id"
_FAILURES: Mapping[ErrorKind, str] = {
    "context_full": "context_length_exceeded",
    "busy": "rate_limit_exceeded",
    "invalid_request": "invalid_prompt",
}
"""`code` of a response that failed; every other one is a `server_error`."""
_EVENTS = models_by_type(
    types.ResponseCreatedEvent,
    types.ResponseInProgressEvent,
    types.ResponseOutputItemAddedEvent,
    types.ResponseOutputItemDoneEvent,
    types.ResponseContentPartAddedEvent,
    types.ResponseContentPartDoneEvent,
    types.ResponseTextDeltaEvent,
    types.ResponseTextDoneEvent,
    types.ResponseReasoningSummaryPartAddedEvent,
    types.ResponseReasoningSummaryPartDoneEvent,
    types.ResponseReasoningSummaryTextDeltaEvent,
    types.ResponseReasoningSummaryTextDoneEvent,
    types.ResponseFunctionCallArgumentsDeltaEvent,
    types.ResponseFunctionCallArgumentsDoneEvent,
    types.ResponseCustomToolCallInputDeltaEvent,
    types.ResponseCustomToolCallInputDoneEvent,
    types.ResponseCompletedEvent,
    types.ResponseIncompleteEvent,
)


@dataclass(frozen=True)
class _Tool:
    """A tool as the client knows it."""

    spec: ToolSpec
    """As the policy does."""
    name: str
    namespace: str = ""
    is_custom: bool = False


class _TextConfig(BaseModel):
    format: dict[str, JsonValue] | None = None


class ResponsesRequest(HostedToolsRequest):
    """Body of a request for a turn, or to compact a history."""

    sampling: ClassVar[frozenset[str]] = frozenset({"temperature", "top_p"})
    changes_nothing: ClassVar[frozenset[str]] = frozenset(
        {"metadata", "moderation", "safety_identifier", "user", "client_metadata"}
        | {"reasoning", "service_tier", "parallel_tool_calls", "max_tool_calls", "truncation"}
        | {"context_management", "access_programs", "image", "stream_options"}
        | {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
    )
    own_tools: ClassVar[frozenset[str]] = frozenset({"function", "custom", "namespace"})

    model: str
    input: str | Annotated[list[dict[str, JsonValue]], Field(fail_fast=True)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tool_choice: str | dict[str, JsonValue] | None = None
    text: _TextConfig | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    include: list[str] | None = None
    store: bool | None = None
    stream: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=0)] = None
    background: Literal[False] | None = None

    def items(self) -> list[dict[str, JsonValue]]:
        """Return the items of its input; at the end of a history may be the wish to compact it."""
        told = self.input or []
        return [{"role": "user", "content": told}] if isinstance(told, str) else list(told)

    def offered(self) -> dict[str, _Tool]:
        """Return the tools that the policy is offered, by the name under which it knows them."""
        tools = [tool for i, one in enumerate(self.tools or ()) for tool in _read_tool(i, one)]
        choice = self.tool_choice
        allowed = choice.get("tools") if isinstance(choice, dict) else None
        if isinstance(allowed, list):
            names = [one.get("name") for one in allowed if isinstance(one, dict)]
            tools = [tool for tool in tools if tool.name in names]
        return {} if choice == "none" else {tool.spec.name: tool for tool in tools}

    def asked(
        self,
        session: Session,
        items: Sequence[Mapping[str, JsonValue]],
        tools: Mapping[str, _Tool],
        **more: Any,
    ) -> Asked:
        """Return what is asked of the session.

        Raises:
            WireError: it cannot be asked.
        """
        if _LOGPROBS in (self.include or ()):
            refuse("include", f"include names {_LOGPROBS}, which Chat Completions alone has here")
        history = History()
        if self.previous_response_id:
            is_answer = self.previous_response_id.startswith("resp_")
            kept = session.dialogue(turn_id_in(self.previous_response_id)) if is_answer else None
            kept = kept or _refuse_unknown(_PREVIOUS, self.previous_response_id)
            history.extend(_since_compaction(kept))
        for i, item in enumerate(items):
            _read_item(history, f"input.{i}", item, session)
        messages, turn_ids = history.finish([self.instructions] if self.instructions else [])
        if not messages or messages[-1].role == "assistant":
            refuse("input", "input is empty or ends with the assistant; end with what it answers")
        return Asked(
            messages=messages,
            turn_ids=turn_ids,
            kept=None if self.store is False else history.finish()[0],
            tools=tuple(tool.spec for tool in tools.values()),
            max_tokens=self.max_output_tokens,
            constrained=self._constraint(),
            **more,
        )

    def _constraint(self) -> str:
        """Return the field that forces the answer, and how; "" where none does."""
        choice, form = self.tool_choice, self.text.format if self.text is not None else None
        if isinstance(choice, dict):
            choice = "auto" if choice.get("mode") == "auto" else str(choice.get("type"))
        if choice not in (None, "auto", "none"):
            return f"tool_choice {choice}"
        kind = "text" if form is None else form.get("type")
        return "" if kind == "text" else f"text.format {kind}"


def add_responses(app: FastAPI, sessions: Sessions) -> None:
    """Add the routes of Responses to an application."""
    noted: set[str] = set()

    async def answer(session_id: str, request: Request, *, is_compact: bool) -> Response:
        session = await find_session(sessions, request, session_id)
        body = await read_request(ResponsesRequest, request)
        note_ignored(body, noted)
        tools, items = body.offered(), body.items()
        items += [{"type": COMPACT_ITEM}] if is_compact else []
        is_streamed = bool(body.stream) and not is_compact
        more = {"is_streamed": is_streamed, "retries": retries_of(request)}
        asked = body.asked(session, items, tools, **more)
        made = _Responses(session, asked, body, tools)
        made.compacts = bool(items) and items[-1].get("type") == COMPACT_ITEM
        made.is_compact = is_compact
        return AnswerResponse(made)

    @app.post("/sessions/{session_id}/v1/responses")
    async def respond(session_id: str, request: Request) -> Response:
        return await answer(session_id, request, is_compact=False)

    @app.post("/sessions/{session_id}/v1/responses/compact")
    async def compact(session_id: str, request: Request) -> Response:
        return await answer(session_id, request, is_compact=True)


# -- reading -------------------------------------------------------------------------------------


def _read_item(
    history: History, where: str, item: Mapping[str, JsonValue], session: Session
) -> None:
    """Add an item to a history.

    Raises:
        WireError: it cannot be shown to a policy.
    """
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    turn_id = turn_id_in(str(item.get("encrypted_content") or item.get("id")))
    match kind:
        case "message":
            role, texts = item.get("role"), read_texts(where, item.get("content"))
            if role == "assistant":
                history.say(where, turn_id=turn_id, texts=texts)
                return
            if role not in ("user", "system", "developer"):
                refuse(where, f"{where}: role ({role!r:.50}) is none of the API's")
            history.end_message()
            history.tell(where, "user" if role == "user" else "system", texts)
            history.end_message()
        case "reasoning":
            if turn_id:
                history.say(where, turn_id=turn_id)
        case "function_call" | "custom_tool_call":
            history.say(where, turn_id=turn_id, call=_read_call(where, item))
        case "function_call_output" | "custom_tool_call_output":
            output = read_texts(f"{where}.output", item.get("output") or "")
            history.result(where, str(item.get("call_id") or ""), output)
        case _ if kind == COMPACT_ITEM:
            history.end_message()
            history.tell(where, "user", [COMPACT])
        case "compaction" | "compaction_summary":
            said = session.said(turn_id)
            if said is None:
                _refuse_unknown(f"{where}.encrypted_content", item.get("encrypted_content"))
            _tell_summary(history, where, said)
        case "item_reference":
            _read_reference(history, where, str(item.get("id")), session)
        case _:
            refuse(where, f"{where}: items of type {kind!r:.50} are not known here; leave them out")


def _read_call(where: str, item: Mapping[str, JsonValue]) -> dict[str, Any]:
    name = f"{item['namespace']}__{item.get('name')}" if item.get("namespace") else item.get("name")
    arguments: JsonValue = {CUSTOM_INPUT: item.get("input")}
    if item.get("type") == "function_call":
        try:
            arguments = read_arguments(str(item.get("arguments") or ""))
        except RecursionError as exc:
            refuse(where, f"{where}.arguments: they are nested too deep; send flatter JSON", exc)
    return {"name": name, "arguments": arguments, "id": str(item.get("call_id") or "")}


def _read_reference(history: History, where: str, item_id: str, session: Session) -> None:
    turn_id, kind, number = turn_id_in(item_id), item_id.partition("_")[0], item_id.split("_")[-1]
    said = session.said(turn_id) if session.is_kept(turn_id) else None
    if said is None:
        _refuse_unknown(f"{where}.id", item_id)
    if kind == "cmp":
        _tell_summary(history, where, said)
    elif kind == "msg":
        history.say(where, turn_id=turn_id, texts=[shown_text(said.content)])
    elif kind in ("fc", "ctc") and int(number) < len(said.tool_calls):
        call = said.tool_calls[int(number)].model_dump()
        history.say(where, turn_id=turn_id, call=call)
    else:
        history.say(where, turn_id=turn_id)


def _tell_summary(history: History, where: str, said: ChatMessage) -> None:
    history.end_message()
    history.tell(where, "user", [SUMMARY + said.shown()])
    history.end_message()


def _since_compaction(
    kept: Sequence[tuple[ChatMessage, str]],
) -> Sequence[tuple[ChatMessage, str]]:
    """Return a history as its summary, where its last turn compacted it."""
    if [(one.role, one.content) for one, _ in kept[-2:-1]] != [("user", COMPACT)]:
        return kept
    return [(ChatMessage(role="user", content=SUMMARY + kept[-1][0].shown()), "")]


def _refuse_unknown(param: str, value: object) -> NoReturn:
    refuse(
        param,
        f"{param} ({value!r:.100}) names nothing that this session has: answers are kept until the "
        "session ends, unless they were asked for with store = false; send the whole history",
    )


def _read_tool(index: int, tool: Mapping[str, JsonValue], namespace: str = "") -> Iterator[_Tool]:
    """Yield what a tool of the client is for the policy; what a provider would run is left out."""
    where, name = f"tools.{index}", tool.get("name")
    own = f"{namespace}__{name}" if namespace else name
    match tool.get("type"):
        case "function":
            spec = read_tool(where, own, tool.get("description"), tool.get("parameters"))
            yield _Tool(spec, str(name), namespace)
        case "custom":
            form = table(f"{where}.format", tool.get("format") or {})
            texts = (tool.get("description"), form.get("syntax"), form.get("definition"))
            said = "\n\n".join(str(text) for text in texts if text)
            schema: dict[str, JsonValue] = {
                "type": "object",
                "properties": {CUSTOM_INPUT: {"type": "string"}},
                "required": [CUSTOM_INPUT],
            }
            yield _Tool(read_tool(where, own, said, schema), str(name), namespace, is_custom=True)
        case "namespace":
            inner = tool.get("tools")
            for one in inner if isinstance(inner, list) else ():
                yield from _read_tool(index, table(where, one), str(name))
        case _:
            pass  # what the provider would run


# -- answers -------------------------------------------------------------------------------------


class _Responses(BlockAnswer):
    """The answer to one request."""

    form = OPENAI_ERRORS
    types = _EVENTS
    compacts = False
    """The answer is one compaction item, and nothing is told before it is complete."""
    is_compact = False
    """The route was that of compactions."""

    def __init__(
        self,
        session: Session,
        asked: Asked,
        body: ResponsesRequest,
        tools: Mapping[str, _Tool],
    ) -> None:
        super().__init__(session, asked)
        self._previous = body.previous_response_id
        self._tools = tools
        self._is_encrypted = _ENCRYPTED in (body.include or ())
        self._created = int(time.time())
        self._events = 0

    def encode(self, fields: Fields) -> bytes:
        """Return an event of a stream, with its number."""
        self._events += 1
        return super().encode(fields | {"sequence_number": self._events - 1})

    def refusal(self, error: WireError) -> Response:
        """Return the answer where nothing was begun.

        Codex shortens its history at `response.failed`, and not at a status.
        """
        if error.kind != "context_full" or not self.asked.is_streamed:
            return super().refusal(error)
        return Response(self._write(self.start()) + self.failure(error), media_type=STREAM_TYPE)

    def failure(self, error: WireError) -> bytes:
        """Return what ends a stream that cannot go on."""
        problem = {"code": _FAILURES.get(error.kind, "server_error"), "message": str(error)}
        response = self._response("failed") | {"error": problem}
        kind = "response.failed"
        fields = {"type": kind, "sequence_number": self._events, "response": response}
        return event(fields, kind)

    def start(self) -> Iterator[Fields]:
        """Yield the events that begin a stream."""
        for kind in ("response.created", "response.in_progress"):
            yield {"type": kind, "response": self._response("in_progress")}

    def opened(self, block: Block) -> Iterator[Fields]:
        """Yield the events that begin an item."""
        if self.compacts:
            return
        item = self._item(block)
        yield {"type": "response.output_item.added", "output_index": block.index, "item": item}
        place = self._place(block)
        if block.kind == "thought":
            part = {"type": "summary_text", "text": ""}
            yield {"type": "response.reasoning_summary_part.added", **place, "part": part}
        elif block.kind == "content":
            yield {"type": "response.content_part.added", **place, "part": _text_part("")}

    def grown(self, block: Block, text: str) -> Iterator[Fields]:
        """Yield the event that tells more text of an item."""
        if self.compacts:
            return
        place = self._place(block)
        if block.kind == "thought":
            yield {"type": "response.reasoning_summary_text.delta", **place, "delta": text}
        else:
            yield {"type": "response.output_text.delta", **place, "delta": text, "logprobs": []}

    def closed(self, block: Block) -> Iterator[Fields]:
        """Yield the events that end an item."""
        if self.compacts:
            return
        place, item = self._place(block), self._item(block)
        if block.kind == "thought":
            part = {"type": "summary_text", "text": block.text}
            said = {**place, "text": block.text}
            yield {"type": "response.reasoning_summary_text.done", **said}
            yield {"type": "response.reasoning_summary_part.done", **place, "part": part}
        elif block.kind == "content":
            said = {**place, "text": block.text, "logprobs": []}
            yield {"type": "response.output_text.done", **said}
            yield {"type": "response.content_part.done", **place, "part": _text_part(block.text)}
        else:
            name = "input" if item["type"] == "custom_tool_call" else "arguments"
            kind = "custom_tool_call_input" if name == "input" else "function_call_arguments"
            yield {"type": f"response.{kind}.delta", **place, "delta": item[name]}
            done = {**place, name: item[name]}
            if name == "arguments":
                done["name"] = item["name"]
            yield {"type": f"response.{kind}.done", **done}
        yield {"type": "response.output_item.done", "output_index": block.index, "item": item}

    def end(self) -> Iterator[Fields]:
        """Yield the events that end a stream."""
        if self.compacts:
            for kind in ("added", "done"):
                item = self._compaction()
                yield {"type": f"response.output_item.{kind}", "output_index": 0, "item": item}
        status = self._status()
        yield {"type": f"response.{status}", "response": self._response(status)}

    def whole(self) -> BaseModel:
        """Return the whole response."""
        if self.is_compact:
            fields = {"id": self._id("resp"), "object": "response.compaction"}
            fields |= {"created_at": self._created, "output": self.output(), "usage": self.usage()}
            return types.CompactedResponse.model_validate(fields)
        return types.Response.model_validate(self._response(self._status()))

    def usage(self) -> Fields:
        """Return the tokens that were read and sampled."""
        read, sampled = self.begun.prompt_tokens, self.ended.sampled_tokens if self.ended else 0
        cached = {"cached_tokens": self.begun.cached_tokens, "cache_write_tokens": 0}
        return {
            "input_tokens": read,
            "input_tokens_details": cached,
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + sampled,
        }

    def output(self) -> list[Fields]:
        """Return the items."""
        return [self._compaction()] if self.compacts else [self._item(one) for one in self.blocks]

    def _id(self, prefix: str, number: int | None = None) -> str:
        turn_id = self.session.turn_id(self.begun.turn)
        return f"{prefix}_{turn_id}" if number is None else f"{prefix}_{turn_id}_{number}"

    def _status(self) -> Literal["completed", "incomplete"]:
        cut = self.ended is not None and self.ended.reason == "length"
        return "incomplete" if cut and not self.compacts else "completed"

    def _response(self, status: str) -> Fields:
        fields: Fields = {
            "id": self._id("resp"),
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "model": self.session.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": self._previous,
            "tool_choice": "auto" if self._tools else "none",
            "tools": [],
        }
        if status in ("completed", "incomplete"):
            fields |= {"output": self.output(), "usage": self.usage()}
        if status == "incomplete":
            fields["incomplete_details"] = {"reason": "max_output_tokens"}
        return fields

    def _compaction(self) -> Fields:
        name = self._id("cmp")
        return {"type": "compaction", "id": name, "encrypted_content": name}

    def _place(self, block: Block) -> Fields:
        """Return where an event of a part of an item belongs."""
        place: Fields = {"item_id": self._item(block)["id"], "output_index": block.index}
        if block.kind == "thought":
            place["summary_index"] = 0
        elif block.kind == "content":
            place["content_index"] = 0
        return place

    def _item(self, block: Block) -> Fields:
        """Return an item as it stands."""
        if block.call is not None:
            return self._call(block, block.call)
        if block.kind == "thought":
            told = [] if block.is_open else [{"type": "summary_text", "text": block.text}]
            item: Fields = {
                "type": "reasoning",
                "id": self._id("rs", block.index),
                "summary": told,
            }
            return item | ({"encrypted_content": self._id("rs")} if self._is_encrypted else {})
        is_last = block is self.blocks[-1]
        status = "in_progress" if block.is_open else self._status() if is_last else "completed"
        return {
            "type": "message",
            "id": self._id("msg", block.index),
            "role": "assistant",
            "status": status,
            "content": [] if block.is_open else [_text_part(block.text)],
        }

    def _call(self, block: Block, call: ParsedCall) -> Fields:
        tool = self._tools.get(call.name)
        arguments: dict[str, Any] = call.arguments
        fields: Fields = {
            "call_id": self.session.call_id(self.begun.turn, block.number),
            "name": call.name if tool is None else tool.name,
            "status": "in_progress" if block.is_open else "completed",
        }
        if tool is not None and tool.namespace:
            fields["namespace"] = tool.namespace
        text = json.dumps(arguments, ensure_ascii=False)
        if tool is None or not tool.is_custom:
            item_id = self._id("fc", block.number)
            told = "" if block.is_open else text
            return {"type": "function_call", "id": item_id, "arguments": told, **fields}
        given = arguments.get(CUSTOM_INPUT)
        text = given if isinstance(given, str) and len(arguments) == 1 else text
        item_id = self._id("ctc", block.number)
        del fields["status"]
        told = "" if block.is_open else text
        return {"type": "custom_tool_call", "id": item_id, "input": told, **fields}


def _text_part(text: str) -> Fields:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
