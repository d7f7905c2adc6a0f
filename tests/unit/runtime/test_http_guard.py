"""What every service refuses before its application sees it, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from agent_r1.runtime.config import ListenConfig
from agent_r1.runtime.http import guard as http_guard
from agent_r1.runtime.http.guard import HttpGuard, is_known_host
from agent_r1.runtime.http.serving import bind, http_config
from agent_r1.runtime.http.token import RunToken, token_headers

WAIT_S = 20.0


class Service:
    """An application behind the guard that notes the bodies it was given."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.port = 0

        async def call(request: Request) -> JSONResponse:
            self.bodies.append(await request.body())
            return JSONResponse({"bytes": len(self.bodies[-1])})

        async def healthz(_: Request) -> JSONResponse:
            return JSONResponse({"status": "ok"})

        self.app = Starlette(
            routes=[
                Route("/call", call, methods=["GET", "POST"]),
                Route("/healthz", healthz),
                Route("/readyz", healthz),
                Route("/healthz/all", healthz),
            ]
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


@contextlib.asynccontextmanager
async def serving(token: RunToken | None = None, **names: object) -> AsyncIterator[Service]:
    service = Service()
    listen = ListenConfig.model_validate(names)
    listener = bind("test", listen, token)
    service.port = listener.getsockname()[1]
    server = uvicorn.Server(http_config(service.app, listen, token))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    task = asyncio.create_task(server.serve(sockets=[listener]))
    async with asyncio.timeout(WAIT_S):
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
    try:
        yield service
    finally:
        server.should_exit = True
        await task


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, str]:
    """Return status and body of what comes until the connection ends."""
    raw = await asyncio.wait_for(reader.read(), WAIT_S)
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()


LISTEN = ListenConfig(
    host="0.0.0.0",
    advertise_host="Gpu7.example.org",
    allowed_hosts=["tools.example.org"],
)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("10.1.2.3", True),
        ("localhost", True),
        ("search", True),  # a compose service
        ("search.rl.svc", True),
        ("search.rl.svc.cluster.local", True),
        ("gpu7.example.org", True),  # advertise_host
        ("tools.example.org", True),  # allowed_hosts
        ("evil.example", False),
        ("gpu7.example.org.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("example.org", False),
        ("", False),
    ],
)
def test_only_names_that_nobody_else_can_point_here_are_known(name: str, known: bool):
    assert is_known_host(name, LISTEN) is known


async def test_requests_that_name_another_host_never_reach_the_application():
    hosts = {
        "127.0.0.1:8001": 200,
        "Tools.Example.org.:8001": 200,  # written in full
        "[::1]": 200,
        "evil.example:8001": 421,
        "[": 421,
    }
    async with (
        serving(allowed_hosts=["tools.example.org"]) as service,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        answers = {
            host: await client.post(f"{service.url}/call", headers={"host": host}) for host in hosts
        }
    assert {host: answer.status_code for host, answer in answers.items()} == hosts
    assert len(service.bodies) == 3
    assert "name the host in allowed_hosts" in answers["evil.example:8001"].json()["detail"]


async def test_web_pages_of_other_hosts_are_refused():
    origins = {
        "http://localhost:3000": 200,
        "https://board.example.org": 200,  # allowed_hosts
        "http://evil.example": 403,
        "http://192.168.1.1": 403,
        "http://127.0.0.1.evil.example": 403,
        "null": 403,
    }
    async with (
        serving(allowed_hosts=["board.example.org"]) as service,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        origins[service.url] = 200
        found = {
            origin: (await client.post(f"{service.url}/call", headers={"origin": origin}))
            for origin in origins
        }
    assert {origin: answer.status_code for origin, answer in found.items()} == origins
    assert len(service.bodies) == 3


TOKEN = RunToken("0123456789abcdef")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": ""}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": "Bearer 0123456789abcde"}, 401),
        ({"authorization": "Bearer 0123456789abcdef0"}, 401),
        ({"authorization": "Basic 0123456789abcdef"}, 401),
        ({"authorization": "0123456789abcdef"}, 401),
        ({"authorization": "Bearer \xe9\xe9"}, 401),
        ({"authorization": "Bearer 0123456789abcdef"}, 200),
        ({"authorization": "bearer  0123456789abcdef"}, 200),  # RFC 9110: the scheme has no case
        (token_headers(TOKEN), 200),
    ],
)
async def test_only_requests_with_the_token_reach_the_application(
    headers: dict[str, str], status: int
):
    sent = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    async with serving(TOKEN) as service, httpx.AsyncClient(trust_env=False) as client:
        answer = await client.post(f"{service.url}/call", headers=sent, content=b"12")
    assert answer.status_code == status
    assert service.bodies == ([b"12"] if status == 200 else [])
    if status == 401:
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "run.token_file or the variable AGENT_R1_TOKEN" in answer.json()["detail"]
        assert TOKEN.value not in answer.text


async def test_health_and_readiness_alone_need_no_token():
    paths = {
        "/healthz": 200,
        "/healthz?deep=1": 200,
        "/readyz": 200,
        "/healthz/": 401,
        "/healthz/all": 401,
        "/healthz/../call": 401,
        "//healthz": 401,
        "/openapi.json": 401,
        "/metrics": 401,
        "/nothing": 401,
    }
    async with serving(TOKEN) as service:
        answers = {}
        for path in paths:  # as written: a client would shorten some of them
            reader, writer = await service.connect()
            head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            writer.write(head.encode())
            answers[path], _ = await answer_of(reader)
            writer.close()
    assert answers == paths


async def test_a_body_that_says_it_is_too_large_is_refused_unread():
    async with serving() as service:
        reader, writer = await service.connect()
        writer.write(b"POST /call HTTP/1.1\r\nHost: localhost\r\nContent-Length: 300000000\r\n\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)  # before any body
        writer.close()
    assert head.startswith(b"HTTP/1.1 413")
    assert service.bodies == []


async def test_a_body_of_unknown_length_is_held_up_to_the_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_guard, "MAX_BODY_BYTES", 1 << 20)

    async def body() -> AsyncIterator[bytes]:
        for _ in range(64):  # 4 MiB in all
            yield b"x" * 65536

    async with serving() as service, httpx.AsyncClient(trust_env=False) as client:
        answer = await client.post(f"{service.url}/call", content=body())
        small = await client.post(f"{service.url}/call", content=b"y" * (1 << 20))
    assert answer.status_code == 413
    assert "the limit of 1048576 bytes" in answer.json()["detail"]
    assert small.json() == {"bytes": 1 << 20}
    assert service.bodies == [b"y" * (1 << 20)]


async def test_a_body_of_unknown_length_is_refused_at_the_message_that_is_too_much(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(http_guard, "MAX_BODY_BYTES", 1 << 20)
    monkeypatch.setattr(http_guard, "LINGER_S", 0.0)
    read = 0
    refused: list[tuple[int, int]] = []

    async def receive() -> Message:
        nonlocal read
        read += 65536
        return {"type": "http.request", "body": b"x" * 65536, "more_body": read < 4 << 20}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            refused.append((message["status"], read))

    guard = HttpGuard(Service().app, LISTEN, None)
    headers = [(b"host", b"localhost")]
    scope = {"type": "http", "path": "/call", "headers": headers, "client": ("127.0.0.1", 1)}
    async with asyncio.timeout(WAIT_S):
        await guard(scope, receive, send)
    # 16 messages of 64 KiB are the limit of 1 MiB, and the 17th is too much.
    assert refused == [(413, 17 * 65536)]


async def test_a_body_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_guard, "BODY_TIMEOUT_S", 0.2)
    async with serving() as service:
        reader, writer = await service.connect()
        writer.write(b"POST /call HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n12345")
        status, body = await answer_of(reader)
        writer.close()
    assert status == 408
    assert "did not arrive within 0.2 s" in json.loads(body)["detail"]
    assert service.bodies == []


HEAD = b"POST /call HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begun", "repeated"),
    [
        (b"GET /", b"a"),
        (HEAD + b"X-Long: ", b"a"),
        (HEAD, b"X-Many: a\r\n"),
        (CHUNKED + b"1;", b"a"),
        (CHUNKED + b"0\r\n", b"X-Trailer: a\r\n"),
    ],
    ids=["url", "header", "headers", "chunk extension", "trailers"],
)
async def test_what_is_no_body_is_held_up_to_a_limit_too(begun: bytes, repeated: bytes):
    async with serving() as service:
        reader, writer = await service.connect()
        writer.write(begun)
        with contextlib.suppress(ConnectionError):
            for _ in range(64):  # 4 MiB in all
                writer.write(repeated * ((1 << 16) // len(repeated)))
                await asyncio.wait_for(writer.drain(), WAIT_S)
        with contextlib.suppress(ConnectionError):
            # Less than the time that headers (10 s) and bodies (30 s) have.
            assert b"200" not in await asyncio.wait_for(reader.read(), 8.0)
        writer.close()
    assert service.bodies == []


async def test_requests_sent_ahead_are_not_collected():
    request = b"GET /call HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with serving() as service:
        reader, writer = await service.connect()
        writer.write(request * 3)
        for _ in range(3):
            await asyncio.wait_for(reader.readuntil(b"}"), WAIT_S)
        writer.write(request * 1000)
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), WAIT_S)  # the connection ends
        writer.close()
    assert len(service.bodies) < 100


async def test_long_connections_and_small_chunks_are_no_attack():
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(2000):  # 160 kB of framing and text
            yield b"x" * 73

    async with serving() as service, httpx.AsyncClient(trust_env=False) as client:
        for _ in range(100):  # 200 kB of headers on one connection
            answer = await client.get(f"{service.url}/call", headers={"x-long": "a" * 2000})
            assert answer.status_code == 200
        answer = await client.post(f"{service.url}/call", content=pieces())
    assert answer.json() == {"bytes": 146_000}


@pytest.mark.parametrize(
    "sent", [b"", b"POST /call HT", b"POST /call HTTP/1.1\r\nHost: localhost\r\nX-Slow: a"]
)
async def test_half_open_connections_are_closed_while_others_are_served(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(http_guard, "HEADER_TIMEOUT_S", 1.0)
    async with serving() as service, httpx.AsyncClient(trust_env=False) as client:
        pairs = await asyncio.gather(*(service.connect() for _ in range(200)))
        for _, writer in pairs:
            writer.write(sent)
        answer = await client.get(f"{service.url}/call")
        ends = await asyncio.wait_for(asyncio.gather(*(r.read() for r, _ in pairs)), WAIT_S)
        for _, writer in pairs:
            writer.close()
    assert answer.status_code == 200
    assert ends == [b""] * 200


async def test_a_second_request_gets_the_same_time_for_its_headers(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(http_guard, "HEADER_TIMEOUT_S", 0.2)
    async with serving() as service:
        reader, writer = await service.connect()
        writer.write(b"GET /call HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asyncio.wait_for(reader.readuntil(b"}"), WAIT_S)
        begun = time.monotonic()
        writer.write(b"GET /call HTTP/1.1\r\n")
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
        writer.close()
    assert time.monotonic() - begun < 4  # the limit for idle connections is 15 s


async def test_more_connections_than_allowed_are_answered_503(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("agent_r1.runtime.http.serving.MAX_CONNECTIONS", 3)
    async with serving() as service, httpx.AsyncClient(trust_env=False) as client:
        pairs = [await service.connect() for _ in range(3)]
        refused = await client.get(f"{service.url}/call")
        for _, writer in pairs:
            writer.close()
            await writer.wait_closed()
    assert refused.status_code == 503


@pytest.mark.parametrize(
    "sent",
    [b"GET /call HT", b"POST /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n"],
    ids=["headers", "body"],
)
async def test_idle_connections_of_one_address_shut_nobody_out(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(http_guard, "MAX_CONNECTIONS", 40)
    monkeypatch.setattr("agent_r1.runtime.http.serving.MAX_CONNECTIONS", 40)

    async def crowd(service: Service) -> asyncio.StreamWriter:
        _, writer = await asyncio.open_connection(
            "127.0.0.1", service.port, local_addr=("127.0.0.2", 0)
        )
        writer.write(sent)
        return writer

    async with serving() as service:
        early, to_early = await service.connect()  # honest, idle, and the oldest of all
        crowds = [await crowd(service) for _ in range(100)]
        late, to_late = await service.connect()
        for reader, writer in ((early, to_early), (late, to_late)):
            writer.write(b"GET /call HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert (await answer_of(reader))[0] == 200
        for writer in (*crowds, to_early, to_late):
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def test_an_honest_caller_gets_in_beside_a_crowd_of_its_own_address(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(http_guard, "MAX_CONNECTIONS", 40)
    monkeypatch.setattr("agent_r1.runtime.http.serving.MAX_CONNECTIONS", 40)
    async with serving() as service, httpx.AsyncClient(trust_env=False) as client:
        crowds = [await service.connect() for _ in range(100)]
        answers = [await client.get(f"{service.url}/call") for _ in range(3)]
        for _, writer in crowds:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
    assert [answer.status_code for answer in answers] == [200] * 3


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[" + b"[]," * 60_000 + b"[]]", "60002 lists and objects; the limit is 50000"),
        (b"[" + b'"",' * 2_700_000 + b'""]', "2700001 texts"),
        (b"[" + b"1," * 4_000_000 + b"1]", "4000000 values; the limit is 250000"),
        (b"{" + b",".join(b'"%x":1' % n for n in range(200_000)) + b"}", "200000 keys"),
        (b"[" + b'"\\\\",' * 1_600_000 + b'""]', "1600001 texts"),
        # Read anew from each of so many quotes, this would take minutes.
        (b"[" * 50_001 + b'"' + b'\\"' * 4_000_000, "50001 lists and objects"),
    ],
    ids=["lists", "texts", "numbers", "keys", "backslashes", "a text without end"],
)
async def test_a_body_that_would_take_seconds_to_read_is_refused(body: bytes, said: str):
    async with serving() as service, httpx.AsyncClient(trust_env=False) as client:
        answer = await client.post(f"{service.url}/call", content=body)
    assert answer.status_code == 413
    assert f"the body holds {said}" in answer.json()["detail"]
    assert service.bodies == []


@pytest.mark.parametrize(
    "body",
    [
        json.dumps(['def f(x): return {x: [x, x]}, \\ "[" \n' * 100_000]).encode(),
        json.dumps([['"', "\\", "a:b,c[d{e"]] * 40_000).encode(),
        json.dumps([0.5] * 240_000).encode(),
    ],
    ids=["code", "many texts", "numbers"],
)
async def test_a_large_body_of_text_or_numbers_is_read(body: bytes):
    async with serving() as service, httpx.AsyncClient(trust_env=False) as client:
        answer = await client.post(f"{service.url}/call", content=body)
    assert answer.json() == {"bytes": len(body)}


async def test_connections_that_nobody_can_answer_are_closed_at_once(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(http_guard, "MAX_OPEN_CONNECTIONS", 3)
    async with serving() as service:
        pairs = [await service.connect() for _ in range(4)]
        closed, _ = pairs[3]
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(closed.read(), WAIT_S) == b""
        reader, writer = pairs[0]
        writer.write(b"GET /call HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert (await answer_of(reader))[0] == 200
        for _, writer in pairs:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def test_a_flood_of_one_address_is_refused_for_a_second():
    now = 100.0
    answers: list[Message] = []

    async def app(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        answers.append(message)

    async def ask(address: str) -> int:
        headers = [(b"host", b"localhost")]
        answers.clear()
        scope = {"type": "http", "path": "/", "headers": headers, "client": (address, 1)}
        await guard(scope, receive, send)
        return answers[0]["status"]

    guard = HttpGuard(app, LISTEN, None, clock=lambda: now)
    limit = http_guard.MAX_REQUESTS_PER_S
    statuses = [await ask("192.0.2.1") for _ in range(limit + 2)]
    assert statuses == [200] * limit + [429] * 2
    assert (b"retry-after", b"1") in answers[0]["headers"]
    assert b"more than 2000 requests in a second" in answers[1]["body"]
    assert await ask("192.0.2.2") == 200
    now = 101.0
    assert await ask("192.0.2.1") == 200
