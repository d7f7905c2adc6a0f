"""HTTP server of a service: bind, announce, serve, stop in order.

Every service's main.py uses it; the launcher reads the announcement `{announce_dir}/{name}.json`
to learn the port and that the service is up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp

from agent_r1.runtime.announcements import write_announcement
from agent_r1.runtime.config import OWN_ADDRESS, ListenConfig
from agent_r1.runtime.exit_status import STOP_SIGNALS
from agent_r1.runtime.http.guard import (
    MAX_CONNECTIONS,
    MAX_OPEN_CONNECTIONS,
    ErrorBody,
    HttpGuard,
    TimedProtocol,
    detail,
    is_loopback,
)
from agent_r1.runtime.http.token import TOKEN_SOURCES, RunToken

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5
_IDLE_S = 15
"""Time after which idle connections are closed. Clients (httpx) give theirs up after 5 s, so no
server closes one on which a request is on its way."""
_OTHER_FILES = 1024
"""Most files that a service has open beside its connections."""
_WILDCARDS = ("0.0.0.0", "::")
_ELSEWHERE = ("192.0.2.1", 9)
"""An address for documentation (RFC 5737): it asks for the route, and nothing is sent."""


class Server(uvicorn.Server):
    """A uvicorn server that leaves signals to us and says when it is up.

    Args:
        config: as `http_config` returns it.
        on_up: called once the application answers.
    """

    def __init__(self, config: uvicorn.Config, *, on_up: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_up = on_up

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_up()


async def serve_app(
    app: Starlette,
    *,
    name: str,
    listen: ListenConfig,
    token: RunToken | None,
    announce_dir: Path | None,
    before_stop: Callable[[], Awaitable[None]],
    until: asyncio.Future[None] | None = None,
    on_up: Callable[[str], None] | None = None,
    asks_for_token: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT; then run `before_stop`, close connections and return.

    A second signal skips `before_stop`. The end of `until` stops the service like a signal.
    `on_up` gets the base URL once the service answers. With `asks_for_token`, the application
    itself asks for the token: a browser sends it once, and then a cookie.

    Raises:
        ValueError: the address cannot be bound, is open to other machines without a token, or must
            be advertised under another name; or what the application raised while it started.
        RuntimeError: the application did not start for another reason; its log says why.
    """
    listener = bind(name, listen, token)
    with contextlib.closing(listener), stop_signals() as (stop, hurry):
        url = advertised_url(name, listen, listener.getsockname()[1])
        guarded_by = None if asks_for_token else token
        async with _lifespan(app, name), serving(app, listener, listen, guarded_by) as server:
            if announce_dir is not None:
                write_announcement(announce_dir, name, url)
            if on_up is not None:
                on_up(url)
            await _first(server, stop.wait(), *([] if until is None else [until]))
            if not server.done():
                await _first(before_stop(), hurry.wait(), server)


@contextlib.contextmanager
def stop_signals() -> Generator[tuple[asyncio.Event, asyncio.Event]]:
    """Yield what the first and the second SIGTERM or SIGINT set."""
    stop, hurry, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()
    for signal in STOP_SIGNALS:
        loop.add_signal_handler(signal, lambda: (hurry if stop.is_set() else stop).set())
    try:
        yield stop, hurry
    finally:
        for signal in STOP_SIGNALS:
            loop.remove_signal_handler(signal)


@contextlib.asynccontextmanager
async def _lifespan(app: Starlette, name: str) -> AsyncGenerator[None]:
    """Start an application, and end it; an error at its end is logged, as nothing depends on it."""
    lifespan = app.router.lifespan_context(app)
    try:
        await lifespan.__aenter__()
    except ValueError:
        raise  # a message for the user, who needs no traceback
    except Exception as exc:
        logger.exception("service did not start name=%s", name)
        raise RuntimeError(
            f"service {name!r} did not start; the lines above give the reason"
        ) from exc
    try:
        yield
    finally:
        try:
            await lifespan.__aexit__(None, None, None)
        except Exception:
            logger.exception("service did not end in order name=%s", name)


@contextlib.asynccontextmanager
async def serving(
    app: ASGIApp,
    listener: socket.socket,
    listen: ListenConfig,
    token: RunToken | None,
    error_body: ErrorBody = detail,
) -> AsyncGenerator[asyncio.Task[None]]:
    """Serve an application on a socket bound for `listen` while the context lasts.

    Yields:
        The serving task, once it answers; it ends early only by an error.
    """
    is_up = asyncio.Event()
    server = Server(http_config(app, listen, token, error_body), on_up=is_up.set)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    up = asyncio.create_task(is_up.wait())
    try:
        await asyncio.wait([task, up], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield task
    finally:
        up.cancel()
        server.should_exit = True
        await task


def http_config(
    app: ASGIApp, listen: ListenConfig, token: RunToken | None, error_body: ErrorBody = detail
) -> uvicorn.Config:
    """Return how every service serves its application: guarded, with limits, logging as we do."""
    _allow_connections()
    return uvicorn.Config(
        HttpGuard(app, listen, token, error_body=error_body),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
        timeout_keep_alive=_IDLE_S,
        http=TimedProtocol,
        ws="none",
        limit_concurrency=MAX_CONNECTIONS,
    )


def _allow_connections() -> None:
    """Let this process have as many files as connections may be open; 1,024 is a usual limit.

    Without a file none can be accepted, and the share of each address would not be looked at.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_CONNECTIONS + _OTHER_FILES
    if resource.RLIM_INFINITY not in (soft, hard) and hard < wanted:
        logger.warning("this process may open too few files limit=%d wanted=%d", hard, wanted)
        wanted = hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _first(*awaitables: Awaitable[object]) -> None:
    tasks = [asyncio.ensure_future(item) for item in awaitables]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for item, task in zip(awaitables, tasks, strict=True):
        if task is not item and not task.done():  # what came in as a task continues
            task.cancel()


def require_token(name: str, listen: ListenConfig, token: RunToken | None) -> None:
    """Refuse to let other machines call a service that no token protects.

    Raises:
        ValueError: they could.
    """
    if token is None and not is_loopback(listen.host.lower()):
        raise ValueError(
            f"{name}: host ({listen.host}) lets other machines call this service, and no token "
            f"protects it; set {TOKEN_SOURCES}, the same for every service of the run, or host to "
            "127.0.0.1"
        )


def bind(name: str, listen: ListenConfig, token: RunToken | None) -> socket.socket:
    """Return a bound socket; port 0 takes a free port.

    Raises:
        ValueError: the address is in use or not of this machine, or other machines could call it
            without a token.
    """
    require_token(name, listen, token)
    return bind_unprotected(name, listen)


def bind_unprotected(name: str, listen: ListenConfig) -> socket.socket:
    """Return a bound socket of a service that may have a token later.

    Raises:
        ValueError: the address is in use or not of this machine.
    """
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it on, an answer in
    # two writes waits 40 ms for the other side's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((listen.host, listen.port))
    except OSError as exc:
        listener.close()
        raise ValueError(
            f"{name}: host {listen.host!r} port {listen.port} cannot be bound: {exc.strerror}; "
            "stop what listens there, or set port = 0 to take a free one"
        ) from exc
    return listener


def advertised_url(name: str, listen: ListenConfig, port: int) -> str:
    """Return the base URL under which other services reach this one.

    Raises:
        ValueError: the service listens on every address and has no name to give, or asks for this
            machine's address where there is none.
    """
    host = listen.advertise_host or listen.host
    if host in _WILDCARDS:
        raise ValueError(
            f"{name}: host ({host}) listens on every address, so it is not one that other "
            f'services can call; set advertise_host to a name they can reach, or to "{OWN_ADDRESS}"'
        )
    if host == OWN_ADDRESS:
        host = _own_address(name)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _own_address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
        except OSError as exc:
            raise ValueError(
                f'{name}: advertise_host ("{OWN_ADDRESS}") needs a route to other machines, and '
                f"there is none ({exc.strerror}); set advertise_host to a name they can reach"
            ) from exc
        return str(probe.getsockname()[0])
