"""What every wire refuses, and how, and what it does where something fails."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types.beta import message_create_params as anthropic_params
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as openai_params

from agent_r1.gateway.session import SessionRules
from agent_r1.gateway.wire import Event, Waiting, WireError
from agent_r1.gateway.wires.chat import ChatRequest
from agent_r1.gateway.wires.messages import MessagesRequest
from agent_r1.gateway.wires.responses import ResponsesRequest
from agent_r1.text.chat_format import ChatFormat
from tests.unit.gateway.wire_clients import (
    PARAMETERS,
    Chat,
    Messages,
    Responses,
    Wire,
)
from tests.unit.gateway.wire_fakes import KEY, WAIT_S, FakeSession, turn, without_port
from tests.unit.gateway.wire_sessions import (
    ALL,
    faked,
    on,
    opened,
    post,
)

# -- refusals ------------------------------------------------------------------------------------


FORCED: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"tool_choice": "required"}, "tool_choice required"),
    ("chat", {"response_format": {"type": "json_object"}}, "response_format json_object"),
    ("responses", {"tool_choice": "required"}, "tool_choice required"),
    ("responses", {"tool_choice": {"type": "function", "name": "search"}}, "tool_choice function"),
    (
        "responses",
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": PARAMETERS}}},
        "text.format json_schema",
    ),
    ("messages", {"tool_choice": {"type": "any"}}, "tool_choice any"),
    ("messages", {"tool_choice": {"type": "tool", "name": "search"}}, "tool_choice tool"),
    (
        "messages",
        {"output_config": {"format": {"type": "json_schema", "schema": PARAMETERS}}},
        "output_config.format",
    ),
]


@on(*ALL)
async def test_what_forces_the_answer_is_refused(kind: type[Wire], chat: ChatFormat):
    forced = [(fields, named) for name, fields, named in FORCED if name == kind.name]
    async with opened(kind, chat, "one", sequences=None) as one:
        for fields, named in forced:
            with pytest.raises(_sdk(kind).BadRequestError, match=re.escape(named)) as refused:
                await one.wire.ask([one.wire.user("x")], tools=[one.wire.tool()], **fields)
            assert "agent.allow_constrained" in str(refused.value)
    assert one.client.session.forest.turns == []


@on(*ALL)
async def test_a_tool_choice_of_none_offers_none(kind: type[Wire]):
    session = FakeSession()
    choice: Any = {"type": "none"} if kind is Messages else "none"
    async with faked(kind, session) as wire:
        await wire.ask([wire.user("Where?")], tools=[wire.tool()], tool_choice=choice)
    assert (session.asked[0].tools, session.asked[0].constrained) == ((), "")


@on("chat", "responses")
@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_a_choice_of_allowed_tools_offers_those(kind: type[Wire], mode: str):
    session = FakeSession()
    names: list[Any] = ["search", "other"]
    tools: list[Any] = [{"type": "function", "name": name, "parameters": {}} for name in names]
    allowed: dict[str, Any] = {"mode": mode, "tools": [{"type": "function", "name": "other"}]}
    if kind is Chat:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        allowed["tools"] = [{"type": "function", "function": {"name": "other"}}]
        allowed = {"allowed_tools": allowed}
    async with faked(kind, session) as wire:
        choice = {"type": "allowed_tools", **allowed}
        await wire.ask([wire.user("Where?")], tools=tools, tool_choice=choice)
    assert [tool.name for tool in session.asked[0].tools] == ["other"]
    forced = "" if mode == "auto" else "tool_choice allowed_tools"
    assert session.asked[0].constrained == forced


def _sdk(kind: type[Wire]) -> Any:
    return anthropic if kind is Messages else openai


@on(*ALL)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_context_is_said_so_that_agents_know_it(
    kind: type[Wire], stream: bool, chat: ChatFormat
):
    rules = SessionRules(max_context=60)
    async with opened(kind, chat, "one", rules=rules, sequences=None) as one:
        asking = one.wire.ask([one.wire.user("x" * 100)], stream=stream)
        if kind is Responses and stream:
            got = await asking
            assert (got.reason, got.raw.error.code) == ("failed", "context_length_exceeded")
            return
        with pytest.raises(_sdk(kind).BadRequestError) as refused:
            await asking
        if kind is Messages:
            error = refused.value.body["error"]
            assert error["type"] == "invalid_request_error"
            assert re.match(r"prompt is too long: \d+ tokens > 60 maximum", error["message"])
        else:
            assert refused.value.code == "context_length_exceeded"
            assert "This model's maximum context length is 60 tokens" in str(refused.value)


REFUSALS = {
    "busy": ("RateLimitError", "rate_limit_error"),
    "no_session": ("AuthenticationError", "authentication_error"),
    "ended": ("APIStatusError", "not_found_error"),
    "too_large": ("APIStatusError", "request_too_large"),
    "unavailable": ("InternalServerError", "overloaded_error"),
    "invalid_request": ("BadRequestError", "invalid_request_error"),
}


@on(*ALL)
async def test_refusals_are_errors_of_the_client(kind: type[Wire]):
    session = FakeSession()
    async with faked(kind, session) as wire:
        for refusal, (error, form) in REFUSALS.items():
            name: Any = refusal
            session.events = [WireError(name, "too much", retry_after_s=1.2)]
            for stream in (False, True):
                with pytest.raises(getattr(_sdk(kind), error)) as caught:
                    await wire.ask([wire.user("Where?")], stream=stream)
                assert caught.value.response.headers["retry-after"] == "2"
                if kind is Messages:
                    assert caught.value.body["error"]["type"] == form
                    assert caught.value.status_code == {"unavailable": 529, "busy": 429}.get(
                        refusal, caught.value.status_code
                    )
    assert session.delivered_turns == []


@on(*ALL)
async def test_the_key_may_come_as_either_sdk_sends_it(kind: type[Wire]):
    wire = kind()
    session = FakeSession()
    name = "input" if kind is Responses else "messages"
    body = wire.body(**{name: [wire.user("Where?")]})
    for headers in ({"x-api-key": KEY}, {"authorization": f"BEARER {KEY}"}):
        assert (await post(kind, session, body, headers=headers)).status_code == 200
    for headers in ({"x-api-key": "other"}, {"authorization": KEY}, {}):
        got = await post(kind, session, body, headers=headers)
        assert got.status_code == 401
        assert "no session has this id" in got.json()["error"]["message"]


IMAGES = {
    "chat": {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    "responses": {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
    "messages": {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
    },
}


@on(*ALL)
async def test_images_are_refused(kind: type[Wire]):
    async with faked(kind, FakeSession()) as wire:
        message = {"role": "user", "content": [IMAGES[kind.name]]}
        with pytest.raises(_sdk(kind).BadRequestError, match="image"):
            await wire.ask([message])


@on(*ALL)
async def test_fields_that_are_not_known_are_refused_by_name(kind: type[Wire]):
    async with faked(kind, FakeSession()) as wire:
        with pytest.raises(_sdk(kind).BadRequestError, match="unknown fields: frobnicate"):
            await wire.ask([wire.user("Where?")], extra_body={"frobnicate": 1})


PARAMS: dict[str, tuple[Any, set[str]]] = {
    "chat": (
        chat_params.CompletionCreateParamsBase,
        {"audio", "functions", "function_call", "web_search_options"},
    ),
    "responses": (
        openai_params.ResponseCreateParamsBase,
        {"conversation", "prompt"},
    ),
    "messages": (
        anthropic_params.MessageCreateParamsBase,
        {"container", "mcp_servers", "thread"},
    ),
}


@on(*ALL)
async def test_every_parameter_of_the_api_is_known_or_refused_by_name(kind: type[Wire]):
    api, known = PARAMS[kind.name]
    refused: set[str] = set()
    wire = kind()
    name = "input" if kind is Responses else "messages"
    for field_name in api.__annotations__:
        for value in (None, {}):
            body = {field_name: value} | wire.body(**{name: [wire.user("Where?")]})
            got = await post(kind, FakeSession(), body)
            if "unknown fields" in got.text:
                assert f"unknown fields: {field_name};" in got.json()["error"]["message"]
                refused.add(field_name)
            assert value is not None or got.status_code == 200, got.text
    assert refused == known


BAD = {
    "chat": [{"messages": [{"role": "owner", "content": "x"}]}],
    "responses": [
        {"input": []},
        {"input": [{"type": "computer_call"}]},
        {"input": [{"role": "owner", "content": "x"}]},
        {"input": [{"role": "user", "content": 5}]},
        {"input": [{"role": "user", "content": [5]}]},
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        {"input": [{"type": "function_call", "arguments": "{}"}, {"role": "user", "content": ""}]},
        {
            "input": [
                {"type": "function_call", "name": "f", "arguments": "[" * 9000},
                {"role": "user", "content": ""},
            ]
        },
        {
            "input": [
                {"type": "function_call", "name": "f", "arguments": '{"a": "\\ud800"}'},
                {"role": "user", "content": ""},
            ]
        },
        {"input": [{"role": "assistant", "content": "x"}]},
        {"input": "x", "tools": [{"type": "function", "name": "no name"}]},
        {"input": "x", "background": True},
        {"input": "x", "include": ["message.output_text.logprobs"]},
        {"input": "x", "top_logprobs": 2},
    ],
    "messages": [
        {"messages": []},
        {"messages": [{"role": "owner", "content": "x"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": []}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "assistant", "content": "x"}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": 3}]}]},
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "no name"}]},
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0},
        {"messages": [{"role": "user", "content": "x"}], "stop_sequences": ["x"] * 17},
    ],
}


@on(*ALL)
async def test_a_wrong_request_is_refused_in_the_form_of_the_wire(kind: type[Wire]):
    session = FakeSession()
    for fields in BAD[kind.name]:
        got = await post(kind, session, kind().body(**fields))
        assert got.status_code == 400, (fields, got.text)
        error = got.json()["error"]
        assert (error["type"], bool(error["message"])) == ("invalid_request_error", True)
        assert ("type" in got.json()) == (kind is Messages)
    for content, status in ((b"{", 400), (b"\xff\xfe", 400), (b"a" * (9 << 20), 413)):
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        got = await post(kind, session, content=content, headers=headers)
        assert got.status_code == status
        assert ("type" in got.json()) == (kind is Messages)
        assert got.json()["error"]["message"]
    assert session.asked == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5) | st.just("user"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *(*ResponsesRequest.model_fields, *MessagesRequest.model_fields),
                    *("role", "content", "type", "id", "call_id", "name", "arguments", "text"),
                ]
            ),
            inner,
        )
    ),
    max_leaves=12,
)
TYPES = st.sampled_from(
    [
        *("message", "reasoning", "function_call", "function_call_output", "custom_tool_call"),
        *("item_reference", "compaction", "compaction_trigger"),
        *("tool_use", "tool_result", "thinking"),
    ]
)


@on(*ALL)
def test_no_body_whatever_is_an_error_of_the_gateway(kind: type[Wire]):
    name = "input" if kind is Responses else "messages"
    model = {"chat": ChatRequest, "responses": ResponsesRequest}.get(kind.name, MessagesRequest)
    bodies: list[Any] = []

    @settings(
        max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
    )
    @given(JSON, st.dictionaries(st.sampled_from([*model.model_fields]), JSON), TYPES, JSON)
    def draw(whole: Any, fields: dict[str, Any], item: str, inner: Any) -> None:
        user = kind().user("Where?")
        rest = inner if isinstance(inner, dict) else {"content": inner}
        bodies.append(whole)
        bodies.append(kind().body(**({name: [user]} | fields)))
        odd = {**rest, "type": item}
        odd = odd if kind is Responses else {"role": "user", "content": [odd]}
        bodies.append(kind().body(**{name: [odd, user]}))

    draw()

    async def send_all() -> None:
        async with without_port(FakeSession()) as client:
            for body in bodies:
                headers = {"authorization": f"Bearer {KEY}"}
                got = await client.post(kind.path, json=body, headers=headers)
                assert got.status_code in (200, 400), (body, got.text)
                assert got.status_code == 200 or got.json()["error"]["message"]

    asyncio.run(send_all())


# -- faults --------------------------------------------------------------------------------------


@on(*ALL)
async def test_a_stream_lives_while_nothing_is_said(kind: type[Wire]):
    events = turn("Pa", "ris")
    session = FakeSession([Waiting(), events[0], Waiting(), *events[1:]])
    async with faked(kind, session) as wire:
        got = await wire.ask([wire.user("Where?")], stream=True)
    assert got.content == "Paris"
    body = wire.body(**{"input" if kind is Responses else "messages": [wire.user("Where?")]})
    text = (await post(kind, session, body | {"stream": True})).text
    assert text.startswith(": ping\n\n")
    assert text.count("ping") == (3 if kind is Messages else 2)  # event and type of one


@on(*ALL)
async def test_a_fault_in_a_stream_ends_it_and_nothing_is_delivered(kind: type[Wire]):
    session = FakeSession([*turn("Pa")[:-1], RuntimeError("secret of the gateway")])
    async with faked(kind, session) as wire:
        asking = wire.ask([wire.user("Where?")], stream=True)
        if kind is Responses:
            got = await asking
            assert (got.reason, got.raw.error.code) == ("failed", "server_error")
            assert "secret" not in got.raw.error.message
        else:
            with pytest.raises(_sdk(kind).APIError) as caught:
                await asking
            assert "secret" not in str(caught.value)
        with pytest.raises(_sdk(kind).InternalServerError):
            await wire.ask([wire.user("Where?")])
    assert session.delivered_turns == []
    assert set(session.faults) == {"gateway_error: RuntimeError: secret of the gateway"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_delivery_that_cannot_be_noted_is_a_fault_of_ours(stream: bool):
    session = FakeSession(delivery_fails=ConnectionError("Redis is away"))
    async with faked(Chat, session) as wire:
        with contextlib.suppress(openai.APIError):  # whether it has all by then is the client's
            await wire.ask([wire.user("Where?")], stream=stream)
    assert session.faults[0] == "gateway_error: ConnectionError: Redis is away"


@on(*ALL)
async def test_a_client_that_goes_away_ends_what_is_sampled(kind: type[Wire]):
    begun = asyncio.Event()

    async def never() -> AsyncGenerator[Event]:
        begun.set()
        await asyncio.Event().wait()
        yield Waiting()

    session = FakeSession(turn("Pa")[:-1], never)
    async with faked(kind, session) as wire, asyncio.timeout(WAIT_S):
        asking = asyncio.create_task(wire.ask([wire.user("Where?")], stream=True))
        await begun.wait()
        asking.cancel()
        await session.closed.wait()
        await asyncio.gather(asking, return_exceptions=True)
    assert session.delivered_turns == []
