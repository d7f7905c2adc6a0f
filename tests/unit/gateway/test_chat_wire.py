"""Chat Completions over a real port: OpenAI's own client, and clients that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from agent_r1.gateway.wire import (
    ErrorKind,
    Event,
    Said,
    Waiting,
    WireError,
)
from agent_r1.gateway.wires import http as wire_http
from tests.unit.gateway.wire_fakes import CALL, KEY, WAIT_S, FakeSession, served, turn, without_port

USER = {"role": "user", "content": "Where?"}
SEARCH: Any = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}


@contextlib.asynccontextmanager
async def asking(session: FakeSession) -> AsyncIterator[Any]:
    """Yield OpenAI's client, over a real port."""
    async with (
        served(session) as (url, _),
        openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=WAIT_S) as client,
    ):
        yield client.chat.completions


async def post(session: FakeSession, body: Any = None, **how: Any) -> httpx.Response:
    how.setdefault("headers", {"authorization": f"Bearer {KEY}"})
    if body is not None:
        how["json"] = body
    async with without_port(session) as client:
        return await client.post("chat/completions", **how)


def request(**fields: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": [USER], **fields}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


# -- answers -------------------------------------------------------------------------------------


async def test_the_client_reads_thought_content_and_parallel_calls():
    session = FakeSession(turn("<think>Hm", "m</think>\nLet me see.\n", CALL, CALL))
    async with asking(session) as completions:
        got = await completions.create(**request(tools=[SEARCH]))
    choice = got.choices[0]
    assert (got.object, got.model, got.id[:9]) == ("chat.completion", "policy", "chatcmpl-")
    assert choice.message.reasoning_content == "Hmm"
    assert choice.message.content == "Let me see."
    calls = [
        (c.id, c.type, c.function.name, c.function.arguments) for c in choice.message.tool_calls
    ]
    assert calls == [
        ("call_3_0", "function", "search", '{"q": "東京"}'),
        ("call_3_1", "function", "search", '{"q": "東京"}'),
    ]
    assert choice.finish_reason == "tool_calls"
    usage = got.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (10, 4, 14)
    assert usage.prompt_tokens_details.cached_tokens == 4
    assert session.asked[0].tools[0].name == "search"
    assert session.delivered_turns == [3]


async def test_the_stream_says_what_the_whole_answer_says():
    texts = ["<th", "ink>Hm", "m</think>\nLet", " me see.\n", CALL[:20], CALL[20:], CALL]
    session = FakeSession([Waiting(), *turn(*texts)])
    async with asking(session) as completions:
        stream = await completions.create(
            **request(stream=True, stream_options={"include_usage": True})
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "Hmm"
    assert "".join(d.content or "" for d in deltas) == "Let me see."
    calls = [c for d in deltas for c in d.tool_calls or ()]
    assert [(c.index, c.id, c.type, c.function.name, c.function.arguments) for c in calls] == [
        (0, "call_3_0", "function", "search", '{"q": "東京"}'),
        (1, "call_3_1", "function", "search", '{"q": "東京"}'),
    ]
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]
    assert (chunks[-1].choices, chunks[-1].usage.total_tokens) == ([], 17)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert session.delivered_turns == [3]


def test_the_bytes_of_a_stream_are_those_of_the_api():
    session = FakeSession([Waiting(), *turn("Paris.", reason="length")])
    got = asyncio.run(post(session, request(stream=True)))
    assert got.headers["content-type"] == "text/event-stream; charset=utf-8"
    ping, *events, end = got.text.split("\n\n")
    assert (ping, events.pop(), end) == (": ping", "data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    head = {name: chunks[0].pop(name) for name in ("id", "created")}
    assert chunks[0] == {
        "model": "policy",
        "object": "chat.completion.chunk",
        "choices": [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        ],
    }
    rest = [
        (chunk["choices"][0]["delta"], chunk["choices"][0]["finish_reason"]) for chunk in chunks
    ]
    assert rest[1:] == [({"content": "Paris."}, None), ({}, "length")]
    assert all(head.items() <= chunk.items() for chunk in chunks[1:])


@pytest.mark.parametrize("stream", [False, True])
async def test_several_answers_with_logprobs(stream: bool):
    first, second = turn("Pa", "ris"), turn("<tool_", "call>x", choice=1)
    mixed = [event for pair in zip(first, second, strict=True) for event in pair]
    session = FakeSession(mixed)
    async with asking(session) as completions:
        got = await completions.create(**request(n=2, logprobs=True, stop=["\n"], stream=stream))
        contents, tokens = ["", ""], [list[Any](), list[Any]()]
        for chunk in [one async for one in got] if stream else [got]:
            for choice in chunk.choices:
                said = choice.delta if stream else choice.message
                contents[choice.index] += said.content or ""
                if choice.logprobs is not None:
                    tokens[choice.index] += choice.logprobs.content
    assert contents == ["Paris", "<tool_call>x"]  # which is no call
    assert [[(t.token, t.logprob) for t in one] for one in tokens] == [
        [("token_id:7", 0.0), ("token_id:8", -0.5)]
    ] * 2
    assert (session.asked[0].n, session.asked[0].stop) == (2, ("\n",))
    assert session.delivered_turns == [3, 4]


def test_the_blocking_client_reads_it_too():
    session = FakeSession(turn("Paris."))
    up, stop = threading.Event(), threading.Event()
    urls: list[str] = []

    async def serve() -> None:
        async with served(session) as (url, _):
            urls.append(url)
            up.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=asyncio.run, args=[serve()])
    thread.start()
    try:
        assert up.wait(WAIT_S)
        with openai.OpenAI(base_url=urls[0], api_key=KEY, timeout=WAIT_S) as client:
            assert [model.id for model in client.models.list()] == ["policy"]
            messages: Any = [USER]
            create = client.chat.completions.create
            whole = create(model="gpt-4o", messages=messages)
            assert whole.choices[0].message.content == "Paris."
            said = [
                chunk.choices[0].delta.content or ""
                for chunk in create(model="gpt-4o", messages=messages, stream=True)
            ]
            assert "".join(said) == "Paris."
    finally:
        stop.set()
        thread.join(WAIT_S)


# -- requests ------------------------------------------------------------------------------------


async def test_what_changes_nothing_is_taken_and_sampling_is_noted_once(
    caplog: pytest.LogCaptureFixture,
):
    session = FakeSession()
    fields = {"user": "u", "store": True, "metadata": {"a": "b"}, "reasoning_effort": "low"}
    fields |= {"parallel_tool_calls": False, "service_tier": "auto", "temperature": 0.3, "seed": 1}
    async with asking(session) as completions:
        for _ in range(2):
            await completions.create(**request(**fields, max_tokens=5, tool_choice="auto"))
    noted = [r.getMessage().rpartition("=")[2] for r in caplog.records if "ignored" in r.message]
    assert sorted(noted) == ["seed", "temperature"]
    assert session.asked[0].max_tokens == 5
    assert session.asked[0].constrained == ""


async def test_messages_come_without_reasoning_and_markers():
    session = FakeSession()
    thought = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": None}
    call = {"id": "call_3_0", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    marked = {"type": "text", "text": "Where?", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [marked]},
        thought,
        USER,
        {"role": "assistant", "content": None, "reasoning": "x", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_3_0", "content": "here"},
    ]
    got = await post(session, request(messages=messages))
    assert got.status_code == 200, got.text
    asked = session.asked[0].messages
    roles = ["system", "user", "assistant", "user", "assistant", "tool"]
    assert [message.role for message in asked] == roles
    assert [message.text() for message in asked] == [
        "Be brief.",
        "Where?",
        "",
        "Where?",
        "",
        "here",
    ]
    assert [(c.name, c.arguments, c.id) for c in asked[4].tool_calls] == [
        ("f", {"a": 1}, "call_3_0")
    ]


@pytest.mark.parametrize(
    ("fields", "constrained"),
    [
        ({"tool_choice": "required", "tools": [SEARCH]}, "tool_choice required"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice function",
        ),
        ({"response_format": {"type": "json_object"}}, "response_format json_object"),
        ({"response_format": {"type": "text"}, "logit_bias": {"5": 1}}, "logit_bias"),
        ({"tool_choice": "none", "tools": [SEARCH], "logit_bias": {}}, ""),
        ({"tool_choice": allowed("required", "search")}, "tool_choice allowed_tools"),
        ({"tool_choice": allowed("auto", "find"), "tools": [SEARCH]}, ""),
    ],
)
async def test_what_forces_the_answer_is_named(fields: dict[str, Any], constrained: str):
    session = FakeSession()
    got = await post(session, request(**fields))
    assert got.status_code == 200, got.text
    assert session.asked[0].constrained == constrained
    assert len(session.asked[0].tools) == (fields.get("tool_choice") == "required")


async def test_a_retry_says_how_often_it_was_sent():
    session = FakeSession()
    headers = {"authorization": f"bearer {KEY}", "x-stainless-retry-count": "2"}
    assert (await post(session, request(), headers=headers)).status_code == 200
    assert session.asked[0].retries == 2


async def test_tools_that_are_allowed_and_not_forced_are_offered():
    session = FakeSession()
    find = {"type": "function", "function": {"name": "lib.find"}}
    got = await post(
        session, request(tools=[SEARCH, find], tool_choice=allowed("auto", "lib.find"))
    )
    assert got.status_code == 200, got.text
    assert [tool.name for tool in session.asked[0].tools] == ["lib.find"]


async def test_histories_of_others_are_taken_as_they_are():
    session = FakeSession()
    arguments = ["", "{}", '{"a": 1}', "{", "[1]"]
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": one}}
        for i, one in enumerate(arguments)
    ]
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": "c0", "content": None}
    rule = {"role": "developer", "content": "Be brief."}
    fields = {"functions": None, "chat_template_kwargs": {}, "thinking": {"type": "disabled"}}
    got = await post(session, request(messages=[USER, said, result, rule], **fields))
    assert got.status_code == 200, got.text
    _, said, result, rule = session.asked[0].messages
    read = [call.arguments for call in said.tool_calls]
    assert read == [{}, {}, {"a": 1}, {"arguments": "{"}, {"arguments": [1]}]
    assert (result.text(), rule.role) == ("", "system")


DEEP = "[" * 100_000

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def answered(arguments: str) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return request(messages=[USER, {"role": "assistant", "tool_calls": [call]}, USER])


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (request(frobnicate=1), "frobnicate"),
        (request(functions=[]), "functions"),
        (request(messages=[]), "messages"),
        (request(messages=[{"content": "x"}]), "messages.0: role is missing"),
        (request(messages=[{"role": "user", "content": [IMAGE]}]), "image_url"),
        (request(messages=[USER, {"role": "assistant", "content": "x"}]), "is the assistant's"),
        (request(messages=[USER | {"frob": 1}]), "frob"),
        (request(top_logprobs=5, logprobs=True), "top_logprobs (5) must be 0"),
        (request(n=17), "n: "),
        (request(max_tokens=0), "max_tokens"),
        (request(stop=["x"] * 17), "stop has 17 texts"),
        (request(tools=[{"type": "custom", "custom": {}}]), "tools.0"),
        (
            request(tools=[{"type": "function", "function": {"name": "no name"}}]),
            "tools.0.function",
        ),
        (answered(DEEP), "messages.1"),
        (answered('{"a": "\\ud800"}'), "messages.1"),
        (request(response_format={"type": 5}), "response_format"),
        (request(tool_choice={"type": ["x"]}), "tool_choice"),
        (request(frobnicate=1, **{"x" * 5000: 1}), "x" * 40 + ";"),
    ],
)
async def test_a_wrong_request_is_told_so(body: Any, says: str):
    session = FakeSession()
    got = await post(session, body)
    error = got.json()["error"]
    assert (got.status_code, error["type"]) == (400, "invalid_request_error")
    assert says in error["message"]
    assert session.asked == []


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"\xff\xfe{}", {}, 400),
        (b'{"messages": ' + DEEP.encode(), {}, 413),
        (b'{"messages": ' + DEEP[:9000].encode(), {}, 400),
        (b"{}", {"content-type": "text/plain"}, 400),
        (b"a" * (50 << 20), {}, 413),
        (b"{}", {"authorization": "Bearer other"}, 401),
        (b"{}", {"authorization": ""}, 401),
        (b"{}", {"host": "evil.example"}, 421),
    ],
    ids=["cut", "bytes", "dense", "deep", "type", "large", "key", "no key", "host"],
)
async def test_what_is_no_request_is_refused_in_the_form_of_the_api(
    content: bytes, headers: dict[str, str], status: int
):
    session = FakeSession()
    own = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    got = await post(session, content=content, headers=own | headers)
    assert got.status_code == status
    assert set(got.json()["error"]) == {"message", "type", "param", "code"}
    assert KEY not in got.text
    assert session.asked == []


async def test_routes_that_are_not_there_are_refused_in_the_form_of_the_api():
    async with without_port(FakeSession()) as client:
        statuses = [
            await client.get("chat/completions"),
            await client.post("completions", json={}),
            await client.get("/healthz"),
        ]
    assert [got.status_code for got in statuses] == [405, 404, 404]
    assert all("message" in got.json()["error"] for got in statuses)


REFUSALS: list[tuple[ErrorKind, type[openai.APIStatusError], str | None]] = [
    ("invalid_request", openai.BadRequestError, None),
    ("context_full", openai.BadRequestError, "context_length_exceeded"),
    ("no_session", openai.AuthenticationError, "invalid_api_key"),
    ("ended", openai.APIStatusError, "session_ended"),
    ("busy", openai.RateLimitError, "rate_limit_exceeded"),
    ("too_large", openai.APIStatusError, "request_too_large"),
    ("unavailable", openai.InternalServerError, "unavailable"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_of_the_session_is_an_error_of_the_client(stream: bool):
    session = FakeSession()
    async with asking(session) as completions:
        for kind, error, code in REFUSALS:
            session.events = [WireError(kind, "too much", param="messages", retry_after_s=1.2)]
            with pytest.raises(error) as caught:
                await completions.create(**request(stream=stream))
            assert (caught.value.code, caught.value.param) == (code, "messages")
            assert caught.value.response.headers["retry-after"] == "2"
    assert session.delivered_turns == []


# -- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", [WireError("unavailable", "no server samples"), RuntimeError("secret of the gateway")]
)
async def test_a_fault_in_a_stream_ends_it_without_done(fault: Exception):
    session = FakeSession([*turn("Pa")[:-1], fault])
    got = await post(session, request(stream=True))
    last = json.loads(got.text.strip().rpartition("data: ")[2])
    assert last["error"]["code"] == "unavailable"
    assert "[DONE]" not in got.text
    assert "secret" not in got.text
    assert session.delivered_turns == []
    async with asking(session) as completions:
        with pytest.raises(openai.APIError):
            async for _ in await completions.create(**request(stream=True)):
                pass
        with pytest.raises(openai.InternalServerError):
            await completions.create(**request())


async def connect(port: int, body: dict[str, Any]) -> tuple[asyncio.StreamReader, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    content = json.dumps(body).encode()
    head = (
        "POST /sessions/one/v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_ends_what_is_sampled(stream: bool):
    begun = asyncio.Event()

    async def never() -> AsyncGenerator[Event]:
        begun.set()
        await asyncio.Event().wait()
        yield Waiting()

    session = FakeSession(turn("Pa")[:-1], never)
    async with served(session) as (_, port), asyncio.timeout(WAIT_S):
        _, writer = await connect(port, request(stream=stream))
        await begun.wait()
        writer.transport.abort()
        await session.closed.wait()
    assert session.delivered_turns == []


async def test_a_client_that_never_reads_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wire_http, "WRITE_TIMEOUT_S", 0.3)
    said = 0

    async def endless() -> AsyncGenerator[Event]:
        nonlocal said
        while True:
            said += 1
            yield Said(0, "x" * 65536)

    session = FakeSession(turn("Pa")[:-1], endless)
    async with served(session) as (_, port), asyncio.timeout(WAIT_S):
        _, writer = await connect(port, request(stream=True))
        await session.closed.wait()
        writer.transport.abort()
    # What the sockets of both sides hold, and no more: megabytes.
    assert said < 1000
    assert session.delivered_turns == []


async def test_a_turn_is_delivered_once_its_end_is_written_and_not_before():
    end = asyncio.Event()

    async def later() -> AsyncGenerator[Event]:
        await end.wait()
        yield turn("Pa")[-1]

    session = FakeSession(turn("Pa")[:-1], later)
    async with served(session) as (_, port), asyncio.timeout(WAIT_S):
        reader, writer = await connect(port, request(stream=True))
        await reader.readuntil(b"Pa")
        assert session.delivered_turns == []
        end.set()
        await reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")
        assert session.delivered_turns == [3]
        writer.close()


async def test_a_client_that_hangs_up_once_it_has_all_does_not_stop_the_delivery():
    session = FakeSession(turn("Pa"), journal_writes=asyncio.Event())
    assert session.journal_writes is not None
    async with served(session) as (_, port), asyncio.timeout(WAIT_S):
        reader, writer = await connect(port, request(stream=True))
        await reader.readuntil(b"[DONE]\n\n\r\n")
        writer.transport.abort()
        # The server has seen the end of that connection once it answers on another one.
        other, writer = await connect(port, request() | {"messages": []})
        await other.readuntil(b"HTTP/1.1 400")
        writer.close()
        session.journal_writes.set()
    assert session.delivered_turns == [3]
