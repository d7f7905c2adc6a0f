"""ASGI middleware: refuses requests before any application sees them.

serving.py puts the application of every service behind `HttpGuard`, and its connections under
`TimedProtocol` and `MAX_CONNECTIONS`:

- a name in `Host`, or an `Origin`, that is not this service's (a web page whose name was pointed at
  this machine: DNS rebinding): 421 and 403;
- a request without the run's token, where the service has one: 401. `OPEN_PATHS` need none;
- a body over `MAX_BODY_BYTES`: 413, and no more of it than the limit is ever held; and one with
  more values than `MAX_VALUES`, `MAX_CONTAINERS` or `MAX_KEYS`: to read it holds the event loop to
  its end, which takes seconds for eight MiB of `[],[],…`, or to list millions of wrong values;
- a body that does not arrive in time: 408; headers that do not: the connection is closed;
- headers (or what else is no body) over `MAX_HEADER_BYTES`, or more than `MAX_WAITING` requests
  sent ahead of their answers: the connection is closed;
- more than `MAX_REQUESTS_PER_S` requests of one address in a second: 429;
- a request that is still worked on when the service ends: 503;
- more connections than `MAX_CONNECTIONS`: the address with most of those that wait for a request
  loses its oldest. Where too few wait: 503, and over `MAX_OPEN_CONNECTIONS`: closed unread.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agent_r1.runtime.config import ListenConfig
from agent_r1.runtime.http.token import TOKEN_SOURCES, RunToken

MAX_BODY_BYTES = 8 << 20
MAX_VALUES = 250_000
"""Most values in one body, by its commas; the longest list of honest callers has the tokens of an
interaction."""
MAX_CONTAINERS = 50_000
"""Most lists and objects in one body, which cost ten times a number."""
MAX_KEYS = 100_000
"""Most keys in one body."""
MAX_CONNECTIONS = 2048
MAX_OPEN_CONNECTIONS = MAX_CONNECTIONS + 256
ROOM_SHARE = 8
"""One in so many of the connections that wait for a request is closed at once: to look for them
takes as long as to accept a hundred."""
MAX_REQUESTS_PER_S = 2000
"""Requests of one address in a second; a service answers some 800 (docs/benchmarks.md, tools)."""
HEADER_TIMEOUT_S = 10.0
"""Time from the opening of a connection, or the first byte of a later request, to the end of the
request's headers."""
BODY_TIMEOUT_S = 30.0
"""Time for the body of one request."""
MAX_HEADER_BYTES = 64 << 10
"""Most bytes that may come without any byte of a body: address, headers, trailers, chunk sizes."""
MAX_WAITING = 8
"""Most requests of one connection that may wait until an earlier one is answered."""
LINGER_S = 2.0
"""Time for which a refused body is read and thrown away: a socket closed over unread bytes would
take the answer with it."""
OPEN_PATHS = ("/healthz", "/readyz")
"""Paths that need no token: whether a service is up or ready, and nothing that a run works on."""
GUARD_ERRORS = {
    "401": "The request has no run token, or another one.",
    "403": "A web page of another host has sent the request.",
    "421": "The request names another host.",
    "429": "Too many requests in a second.",
}
"""Errors that every route may answer, as its description says it; OPEN_PATHS never answer 401."""
_MORE_HEADERS = {401: [(b"www-authenticate", b"Bearer")], 429: [(b"retry-after", b"1")]}
_PRIVATE_SUFFIXES = (".localhost", ".svc", ".cluster.local")


ErrorBody = Callable[[str, int, str], object]
"""Gives the JSON of a refusal, from the path that was called, its status and its text."""


def detail(path: str, status: int, text: str) -> object:
    """Return a refusal as services write it."""
    return {"detail": text}


@dataclass
class HttpGuard:
    """ASGI middleware: checks host and token, limits requests, and buffers the body."""

    app: ASGIApp
    listen: ListenConfig
    """Names under which the service is known."""
    token: RunToken | None
    """Token that every request must have; None lets every caller in."""
    clock: Callable[[], float] = time.monotonic
    """Seconds that only grow."""
    error_body: ErrorBody = detail
    """Form in which callers of the application read errors."""
    _requests: Counter[str] = field(default_factory=Counter[str], init=False)
    """Requests of the second that ends at `_second_ends`, by address."""
    _second_ends: float = field(default=0.0, init=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        address = "" if scope["client"] is None else str(scope["client"][0])
        if self._is_flood(address):
            text = f"more than {MAX_REQUESTS_PER_S} requests in a second; wait a second"
            await self._answer(scope, send, 429, text)
            return
        refusal = self._refuse_name(headers) or self._refuse_token(scope["path"], headers)
        if refusal is not None:
            await self._answer(scope, send, *refusal, unread=receive)
            return
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await _read_body(headers.get("content-length"), receive)
        except TimeoutError:
            text = f"the body did not arrive within {BODY_TIMEOUT_S:g} s; send it at once"
            await self._answer(scope, send, 408, text)
        except _BodyTooLargeError:
            text = f"the body is over the limit of {MAX_BODY_BYTES} bytes; send less per request"
            await self._answer(scope, send, 413, text, unread=receive)
        else:
            problem = None if body is None else _density_problem(body)
            if problem is not None:
                await self._answer(
                    scope, send, 413, f"the body holds {problem}; send less per request"
                )
            elif body is not None:
                await self._pass_on(scope, _replay(body, receive), send)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def note(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, note)
        except asyncio.CancelledError:  # by uvicorn alone, when the service ends
            if not started:
                await self._answer(
                    scope, send, 503, "this service has ended; ask another one, or later"
                )

    def _is_flood(self, address: str) -> bool:
        now = self.clock()
        if now >= self._second_ends:
            self._requests.clear()
            self._second_ends = now + 1.0
        self._requests[address] += 1
        return self._requests[address] > MAX_REQUESTS_PER_S

    def _refuse_name(self, headers: dict[str, str]) -> tuple[int, str] | None:
        host = headers.get("host", "")
        if not is_known_host(_name_of(f"//{host}"), self.listen):
            return 421, (
                f"this service is not known as {host!r:.200}; call it by its address, or name the "
                "host in allowed_hosts of its table"
            )
        origin = headers.get("origin")
        if origin is None or origin == f"http://{host}" or origin == f"https://{host}":
            return None
        name = _name_of(origin)
        if is_loopback(name) or name in self.listen.allowed_hosts:
            return None
        return 403, (
            f"web pages of {origin!r:.200} may not call this service; name the page's host in "
            "allowed_hosts of the service's table"
        )

    def _refuse_token(self, path: str, headers: dict[str, str]) -> tuple[int, str] | None:
        if self.token is None or path in OPEN_PATHS:
            return None
        sent = headers.get("authorization", "")
        if self.token.admits(sent):
            return None
        return 401, (
            f"this service asks for the run's token, and the request has "
            f"{'another one' if sent else 'none'}; send `Authorization: Bearer TOKEN`, with the "
            f"token of the service's {TOKEN_SOURCES}"
        )

    async def _answer(
        self, scope: Scope, send: Send, status: int, text: str, *, unread: Receive | None = None
    ) -> None:
        """Answer with an error, read on for a moment where a body is under way, and hang up."""
        content = json.dumps(self.error_body(scope["path"], status, text)).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
            (b"connection", b"close"),
        ]
        headers += _MORE_HEADERS.get(status, ())
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content, "more_body": True})
        if unread is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    while (await unread()).get("more_body", False):
                        pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _BodyTooLargeError(Exception):
    """A body over the limit."""


async def _read_body(announced: str | None, receive: Receive) -> bytes | None:
    """Return the whole body; None when the caller has gone."""
    if announced is not None and announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
        raise _BodyTooLargeError
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise _BodyTooLargeError
        if not message.get("more_body", False):
            return bytes(body)


def _density_problem(body: bytes) -> str | None:
    """Return which limit a body breaks; None where it breaks none."""
    if _broken_limit(body) is None:  # texts hold such characters too, so that this is no less
        return None
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    texts = bare.count(b'"') // 2
    if texts > MAX_VALUES + MAX_KEYS:
        return f"{texts} texts; the limit is {MAX_VALUES} values"
    return _broken_limit(b"".join(bare.split(b'"')[::2]))


def _broken_limit(body: bytes) -> str | None:
    found = {
        "values": (body.count(b","), MAX_VALUES),
        "lists and objects": (body.count(b"[") + body.count(b"{"), MAX_CONTAINERS),
        "keys": (body.count(b":"), MAX_KEYS),
    }
    for name, (count, limit) in found.items():
        if count > limit:
            return f"{count} {name}; the limit is {limit}"
    return None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body first, and then what comes after it."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def is_known_host(name: str, listen: ListenConfig) -> bool:
    """Return whether a request may name this host: nobody else can point the name at this machine.

    Addresses cannot be pointed elsewhere, and names without a dot (compose, one Kubernetes
    namespace) or of a cluster cannot be registered. Of other names the service knows its own.
    """
    if not name:
        return False
    own = {listen.host, listen.advertise_host, *listen.allowed_hosts}
    return (
        _is_address(name)
        or "." not in name
        or name.endswith(_PRIVATE_SUFFIXES)
        or name in {one.lower() for one in own if one is not None}
    )


def _name_of(url: str) -> str:
    """Return the host of a URL in lower case, without port; "" for what is no URL."""
    try:
        return (urlsplit(url).hostname or "").removesuffix(".")
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(name: str) -> bool:
    """Return whether a name or an address means this machine, and no other can call it."""
    return name == "localhost" or (_is_address(name) and ipaddress.ip_address(name).is_loopback)


class TimedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with limits on headers and on requests sent ahead, which it lacks."""

    cycle: Any  # None before the first request, which uvicorn's annotation leaves out

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._waiting_for_headers: asyncio.TimerHandle | None = None
        self._bytes_without_body = 0
        self.idle_since = time.monotonic()

    @property
    def is_idle(self) -> bool:
        """Return whether no request of it is being answered: none came, or its body is missing."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    @property
    def address(self) -> str:
        """Address that it comes from; "" is a socket of this machine."""
        return self.client[0] if self.client else ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) >= MAX_CONNECTIONS:
            _make_room(self.connections)
        if len(self.connections) > MAX_OPEN_CONNECTIONS:
            transport.abort()
            return
        self._watch_headers()

    def data_received(self, data: bytes) -> None:
        self._bytes_without_body += len(data)
        super().data_received(data)
        self._watch_headers()
        if self._bytes_without_body > MAX_HEADER_BYTES or len(self.pipeline) > MAX_WAITING:
            self.transport.close()

    def on_message_begin(self) -> None:
        self._bytes_without_body = 0
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        self._bytes_without_body = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        self.idle_since = time.monotonic()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def _watch_headers(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_watching()  # the headers are complete; body and answer have other limits
        elif self._waiting_for_headers is None:
            loop = asyncio.get_running_loop()
            self._waiting_for_headers = loop.call_later(HEADER_TIMEOUT_S, self._give_up)

    def _stop_watching(self) -> None:
        if self._waiting_for_headers is not None:
            self._waiting_for_headers.cancel()
            self._waiting_for_headers = None

    def _give_up(self) -> None:
        self._waiting_for_headers = None
        self.transport.close()


def _make_room(connections: set[Any]) -> None:
    """Close idle connections of the addresses that have most of them, the oldest first."""
    idle = [one for one in connections if one.is_idle]
    crowds = Counter(one.address for one in idle)
    idle.sort(key=lambda one: (-crowds[one.address], one.idle_since))
    for one in idle[: -(-len(idle) // ROOM_SHARE)]:
        connections.discard(one)  # it goes a moment later, and more may come before
        one.transport.abort()
