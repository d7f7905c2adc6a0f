"""Calls over real HTTP: batches, deadlines, retries, sessions, and replies that are wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from agent_r1.attempts.tool_client import ToolClient, ToolOutageError
from agent_r1.runtime.http.token import RunToken
from agent_r1_proto.parts import TextPart
from agent_r1_proto.registry import ToolRegistry
from agent_r1_proto.tool_pool import ToolState
from agent_r1_proto.tools import CallRequest, ToolCall, ToolResult
from tests.support.fakes import FakeToolServer


@asynccontextmanager
async def client_of(*servers: FakeToolServer, **options: Any) -> AsyncIterator[ToolClient]:
    client = ToolClient({server.name: server.url for server in servers}, **options)
    try:
        await client.start(wait_s=60.0)
        yield client
    finally:
        await client.stop()


TOKEN = RunToken("0123456789abcdef")


async def test_every_request_has_the_token_of_the_run():
    async with (
        FakeToolServer(sessions=True, token=TOKEN) as server,
        client_of(server, token=TOKEN) as client,
    ):
        await client.open_session("search", "r/1/0/0/0", None)
        assert await search(client) == 'result of {"query": "a"}'
        await client.close_session("search", "r/1/0/0/0")
    assert (server.opened, server.closed) == (["r/1/0/0/0"], ["r/1/0/0/0"])


async def test_a_tool_of_another_token_ends_the_start_at_once():
    async with FakeToolServer(token=TOKEN) as server:
        client = ToolClient({"search": server.url})
        with pytest.raises(ValueError, match=r"'search' refuses this run: .* another token"):
            await client.start(wait_s=600.0)
        await client.stop()


async def search(client: ToolClient, query: str = "a", **options: Any) -> str:
    fields = {"rollout_id": "r/1/0/0/0", "turn": 0} | options
    reply = await client.call("search", {"query": query}, **fields)
    return reply.result.text()


async def test_call_carries_what_the_tool_needs():
    async with FakeToolServer() as server, client_of(server, timeout_s=9.0) as client:
        reply = await client.call(
            "search", {"query": "é"}, rollout_id="r/1/0/0/0", turn=3, tool_context={"k": 1}
        )
    (call,) = server.calls
    assert (call.arguments, call.turn, call.tool_context) == ({"query": "é"}, 3, {"k": 1})
    assert 8.0 < call.timeout_s <= 9.0
    assert (reply.version, reply.instance, reply.attempt) == ("7", "fake-1", 0)


async def test_concurrent_calls_travel_together_and_get_their_own_results():
    async with FakeToolServer(max_batch=3) as server, client_of(server) as client:
        texts = await asyncio.gather(*(search(client, str(i)) for i in range(7)))
    assert texts == [f'result of {{"query": "{i}"}}' for i in range(7)]
    assert sorted(len(request.calls) for request in server.requests) == [1, 3, 3]


async def test_tool_that_takes_one_call_gets_one():
    async with FakeToolServer(max_batch=1) as server, client_of(server) as client:
        await asyncio.gather(*(search(client, str(i)) for i in range(3)))
    assert [len(request.calls) for request in server.requests] == [1, 1, 1]


@pytest.mark.parametrize(("status", "requests"), [(500, 1), (503, 2)])
async def test_a_call_that_may_have_run_is_sent_again_only_where_that_is_harmless(
    status: int, requests: int
):
    async with (
        FakeToolServer(idempotent=False, statuses=[status]) as server,
        client_of(server) as client,
    ):
        if requests == 1:  # the tool may have done it
            with pytest.raises(ToolOutageError, match="tool_http_5xx"):
                await search(client)
        else:  # the service refused before the tool saw it
            await search(client)
    assert len(server.requests) == requests


async def test_a_reply_over_the_size_limit_is_an_outage(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("agent_r1.attempts.tool_transport.MAX_REPLY_BYTES", 100)
    async with FakeToolServer(reply=b" " * 101) as server, client_of(server) as client:
        with pytest.raises(ToolOutageError, match=r"tool_too_large: .* more than 100 bytes"):
            await search(client)


@asynccontextmanager
async def raw_service(answer: bytes) -> AsyncIterator[FakeToolServer]:
    """A service whose spec is right and whose every /call is answered with these bytes."""
    asked = FakeToolServer()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /spec"):
            spec = asked.spec.model_dump_json().encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(spec), spec))
        else:
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            asked.requests.append(CallRequest.model_validate_json(await reader.readexactly(length)))
            writer.write(answer)
        await writer.drain()
        writer.close()

    service = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with service:
        host, port = service.sockets[0].getsockname()
        asked.url = f"http://{host}:{port}"
        yield asked


GOOD = (
    b'{"version": "7", "instance": "a", '
    b'"results": [{"parts": [{"type": "text", "text": "\xc3\xa9"}]}]}'
)
LATIN_1 = GOOD.replace(b"\xc3\xa9", b"\xe9")


def http(body: bytes, *, length: int | None = None, header: bytes = b"") -> bytes:
    size = len(body) if length is None else length
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%b\r\n%b" % (size, header, body)


@pytest.mark.parametrize(
    ("answer", "kind", "requests"),
    [
        (http(GOOD[:20], length=len(GOOD)), "tool_unreachable", 3),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n20\r\n{", "tool_unreachable", 3),
        (b"", "tool_unreachable", 3),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "tool_unreachable", 3),
        (http(GOOD, header=b"Content-Encoding: gzip\r\n"), "tool_bad_reply", 1),
        (http(LATIN_1), "tool_bad_reply", 1),
        (
            http(LATIN_1, header=b"Content-Type: application/json; charset=latin-1\r\n"),
            "tool_bad_reply",
            1,
        ),
        (http(GOOD.decode().encode("utf-16")), "tool_bad_reply", 1),
        (b"HTTP/1.1 500 X\r\nContent-Length: 1\r\n\r\n\xe9", "tool_http_5xx", 3),
        (b"HTTP/1.1 501 X\r\nContent-Length: 0\r\n\r\n", "tool_broken", 1),
    ],
    ids=[
        "cut",
        "cut-chunk",
        "nothing",
        "not-http",
        "no-gzip",
        "latin-1",
        "said",
        "utf-16",
        "500",
        "501",
    ],
)
async def test_an_answer_half_sent_or_wrongly_encoded_is_an_outage(
    answer: bytes, kind: str, requests: int
):
    async with raw_service(answer) as service, client_of(service, retries=2) as client:
        with pytest.raises(ToolOutageError, match=f"^{kind}: search: "):
            await search(client)
    assert len(service.requests) == requests


async def test_the_service_of_these_tests_is_understood_when_it_answers_right():
    async with raw_service(http(GOOD)) as service, client_of(service) as client:
        assert await search(client) == "é"


async def test_a_slow_tool_does_not_hold_up_another():
    async def never(_: ToolCall) -> ToolResult:
        await asyncio.sleep(60)
        return ToolResult()

    async with (
        FakeToolServer(name="slow", answer=never, max_batch=1) as slow,
        FakeToolServer() as quick,
        client_of(slow, quick, max_requests=2) as client,
    ):
        waiting = [
            asyncio.create_task(client.call("slow", {"query": "a"}, rollout_id=f"r{i}", turn=0))
            for i in range(8)
        ]
        while len(slow.requests) < 2:  # noqa: ASYNC110 - both slots of the slow tool are taken
            await asyncio.sleep(0.01)
        assert await asyncio.wait_for(search(client), 5)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_retries_travel_alone():
    async with FakeToolServer(statuses=[500]) as server, client_of(server) as client:
        await asyncio.gather(*(search(client, str(i)) for i in range(3)))
    assert sorted(len(request.calls) for request in server.requests) == [1, 1, 1, 3]


async def test_one_refused_call_does_not_take_its_neighbours_with_it():
    # The request of two is refused for one of them: each is asked again alone.
    async with FakeToolServer(statuses=[409, 200, 409]) as server, client_of(server) as client:
        good, bad = asyncio.create_task(search(client)), asyncio.create_task(search(client))
        results = await asyncio.gather(good, bad, return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["ToolOutageError", "str"]
    assert [len(request.calls) for request in server.requests] == [2, 1, 1]


async def test_deadline_ends_a_call_that_hangs():
    async def hang(_: ToolCall) -> ToolResult:
        await asyncio.sleep(30)
        return ToolResult()

    started = time.monotonic()
    async with FakeToolServer(answer=hang) as server, client_of(server, timeout_s=0.2) as client:
        with pytest.raises(ToolOutageError) as caught:
            await search(client)
    assert caught.value.reason.startswith("tool_timeout: search: nothing usable within 0.2 s")
    assert "env.tool_timeout_s" in str(caught.value)
    assert time.monotonic() - started < 5
    assert caught.value.instance == ""  # a fixed URL, behind which any may be


async def test_a_call_that_the_end_of_its_trajectory_cuts_short_says_so():
    async def hang(_: ToolCall) -> ToolResult:
        await asyncio.sleep(30)
        return ToolResult()

    async with FakeToolServer(answer=hang) as server, client_of(server, timeout_s=9.0) as client:
        with pytest.raises(ToolOutageError, match=r"0\.[12].* s \(env\.trajectory_timeout_s\)"):
            await search(client, deadline=time.monotonic() + 0.2)


async def test_an_announced_instance_that_never_answers_is_named():
    async def hang(_: ToolCall) -> ToolResult:
        await asyncio.sleep(30)
        return ToolResult()

    async with FakeToolServer(answer=hang) as server, client_of(server, timeout_s=0.2) as client:
        (endpoint,) = client.directory.endpoints("search").values()
        endpoint.instance, endpoint.version = "search-1", "7"
        with pytest.raises(ToolOutageError, match=r"no answer from instance search-1$") as caught:
            await search(client)
    assert caught.value.instance == "search-1"


async def test_service_that_ran_out_of_time_is_a_timeout_and_not_asked_again():
    async with FakeToolServer(always=504) as server, client_of(server) as client:
        with pytest.raises(ToolOutageError) as caught:
            await search(client)
    assert caught.value.reason.startswith("tool_timeout: search: ")
    assert caught.value.attempts == 1
    assert len(server.requests) == 1


async def test_service_that_is_gone_is_unreachable():
    async with FakeToolServer() as server:
        client = ToolClient({"search": server.url}, retries=1)
        await client.start(wait_s=2.0)
    with pytest.raises(ToolOutageError) as caught:
        await search(client)
    await client.stop()
    assert caught.value.reason.startswith("tool_unreachable: search: ")
    assert caught.value.attempts == 2


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"not json", "does not parse"),
        (b'{"version": "1", "instance": "i", "results": []}', "0 results for 1 calls"),
        (
            b'{"version": "1", "instance": "i", "results": [{"status": "fine"}]}',
            "results.0.status",
        ),
        (b'{"version": "1", "instance": "i", "results": [{}], "extra": 1}', "extra"),
    ],
)
async def test_reply_that_breaks_the_contract_is_an_outage(reply: bytes, message: str):
    async with FakeToolServer(reply=reply) as server, client_of(server) as client:
        with pytest.raises(ToolOutageError, match=message) as caught:
            await search(client)
    assert caught.value.reason.startswith("tool_bad_reply: search: ")


async def test_waiting_for_a_free_place_takes_neither_retries_nor_time():
    # The pauses are at least half of 0.1 + 0.2 + 0.4 + 0.8 s: 0.75 s.
    async with (
        FakeToolServer(statuses=[429] * 4) as server,
        client_of(server, timeout_s=10.0, retries=0) as client,
    ):
        assert await search(client)
    assert all(call.timeout_s > 9.3 for call in server.calls)


async def test_waiting_for_a_free_place_ends_with_the_trajectory_or_after_a_long_time(
    monkeypatch: pytest.MonkeyPatch,
):
    async with FakeToolServer(always=429) as server, client_of(server) as client:
        with pytest.raises(ToolOutageError, match=r"^tool_timeout: search: "):
            await search(client, deadline=time.monotonic() + 0.3)
        monkeypatch.setattr("agent_r1.attempts.tool_client.LONGEST_WAIT_S", 0.3)
        with pytest.raises(ToolOutageError, match=r"^tool_full: search: "):
            await search(client)


async def test_waiting_for_requests_of_others_takes_no_time(monkeypatch: pytest.MonkeyPatch):
    async def take_time(_: ToolCall) -> ToolResult:
        await asyncio.sleep(0.4)
        return ToolResult()

    monkeypatch.setattr("agent_r1.attempts.tool_transport.SLOT_TIMEOUT_S", 0.05)
    async with (
        FakeToolServer(answer=take_time, max_batch=1) as server,
        client_of(server, max_requests=1, timeout_s=1.0, retries=0) as client,
    ):
        await asyncio.gather(*(search(client) for _ in range(4)))  # 1.6 s, one after the other
    assert len(server.calls) == 4


async def test_requests_in_flight_are_bounded():
    in_flight, most = 0, 0

    async def count(_: ToolCall) -> ToolResult:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        await asyncio.sleep(0.01)
        in_flight -= 1
        return ToolResult()

    async with (
        FakeToolServer(answer=count, max_batch=1) as server,
        client_of(server, max_requests=4) as client,
    ):
        await asyncio.gather(*(search(client) for _ in range(20)))
    assert most == 4


async def test_arguments_are_checked_against_the_schema():
    async with FakeToolServer() as server, client_of(server) as client:
        spec = client.specs["search"]
        assert client.argument_error(spec, {"query": "a"}) is None
        assert client.argument_error(spec, {}) == "'query' is a required property"
        assert client.argument_error(spec, {"query": 1}) == "query: 1 is not of type 'string'"


class NoTools:
    """A registry in which nothing is announced."""

    pool = "compose"

    async def read(self, names: Sequence[str]) -> dict[str, ToolState]:
        return {name: ToolState() for name in names}


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["python_exec"], "`docker compose --profile python up -d`"),
        (["code_tests", "x"], "`docker compose --profile code up -d`"),
        (["x"], ""),
    ],
)
async def test_a_tool_whose_compose_profile_is_off_is_named_with_the_line_that_turns_it_on(
    names: list[str], said: str
):
    client = ToolClient({}, registry=cast(ToolRegistry, NoTools()), announced=names)
    try:
        with pytest.raises(ValueError, match="is announced in the tool pool 'compose'") as caught:
            await client.start(wait_s=0.0)
    finally:
        await client.stop()
    assert said in str(caught.value)
    assert ("docker compose" in str(caught.value)) == bool(said)


async def test_a_schema_is_read_by_the_draft_that_it_names():
    schema = {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "type": "object",
        "properties": {"n": {"type": "number", "minimum": 0, "exclusiveMinimum": True}},
    }
    async with FakeToolServer(parameters=schema) as server, client_of(server) as client:
        spec = client.specs["search"]
        assert client.argument_error(spec, {"n": 1}) is None
        assert "less than or equal to the minimum of 0" in str(
            client.argument_error(spec, {"n": 0})
        )


async def test_a_reference_that_leads_nowhere_is_refused_at_the_start():
    schema = {"type": "object", "properties": {"query": {"$ref": "#/$defs/Gone"}}}
    async with FakeToolServer(parameters=schema) as server:
        with pytest.raises(ValueError, match=r"leads nowhere \(at \$\.properties\.query\.\$ref\)"):
            async with client_of(server):
                pass


async def test_arguments_nested_deeper_than_the_check_can_follow_are_refused():
    schema = {"type": "object", "properties": {"a": {"$ref": "#"}}}
    nested: dict[str, Any] = {}
    for _ in range(2000):
        nested = {"a": nested}
    async with FakeToolServer(parameters=schema) as server, client_of(server) as client:
        error = client.argument_error(client.specs["search"], nested)
    assert error == "the arguments are nested too deeply"


async def test_start_waits_for_a_service_that_comes_up_late():
    async with FakeToolServer(spec_statuses=[503, 502]) as server, client_of(server) as client:
        assert client.specs["search"].version == "7"
    assert server.spec_statuses == []


async def test_missing_service_is_named_with_the_keys_to_change():
    async with FakeToolServer() as server:
        url = server.url
    client = ToolClient({"search": url})
    with pytest.raises(ValueError, match=r"tools\.search\.url.*rollout\.tool_start_timeout_s"):
        await client.start(wait_s=0.3)
    await client.stop()


async def test_service_that_is_another_tool_is_refused():
    async with FakeToolServer(name="maps") as server:
        client = ToolClient({"search": server.url})
        with pytest.raises(ValueError, match="is the tool 'maps', expected 'search'"):
            await client.start(wait_s=1.0)
        await client.stop()


async def test_schema_that_is_none_is_refused():
    async with FakeToolServer(parameters={"type": "nonsense"}) as server:
        client = ToolClient({"search": server.url})
        with pytest.raises(ValueError, match="not a JSON Schema"):
            await client.start(wait_s=1.0)
        await client.stop()


async def test_cancelled_caller_leaves_its_neighbours_alone():
    arrived, gate = asyncio.Event(), asyncio.Event()

    async def wait(_: ToolCall) -> ToolResult:
        arrived.set()
        await gate.wait()
        return ToolResult(parts=[TextPart(text="late")])

    async with FakeToolServer(answer=wait) as server, client_of(server) as client:
        first = asyncio.create_task(search(client, "1"))
        second = asyncio.create_task(search(client, "2"))
        await arrived.wait()
        first.cancel()
        gate.set()
        assert await second == "late"
    assert len(server.requests) == 1


async def test_many_long_calls_of_one_tool_leave_connections_for_the_others():
    done = asyncio.Event()

    async def answer_later(call: ToolCall) -> ToolResult:
        await done.wait()
        return ToolResult()

    async with (
        FakeToolServer(name="agents", answer=answer_later, max_batch=1) as slow,
        FakeToolServer() as search,
    ):
        client = ToolClient({"agents": slow.url, "search": search.url}, max_requests=200)
        await client.start(wait_s=30.0)
        try:
            long = [
                asyncio.create_task(
                    client.call("agents", {"query": "x"}, rollout_id=str(i), turn=0)
                )
                for i in range(120)
            ]
            while len(slow.calls) < 120:  # noqa: ASYNC110 - the server tells nobody
                await asyncio.sleep(0.01)
            reply = await client.call("search", {"query": "x"}, rollout_id="r", turn=0)
            assert reply.result.status == "ok"
            done.set()
            assert len(await asyncio.gather(*long)) == 120
        finally:
            await client.stop()
