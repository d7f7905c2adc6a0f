"""Behind HTTP: how services bind and start."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agent_r1.runtime.config import ListenConfig
from agent_r1.runtime.http.serving import advertised_url, bind, http_config, serve_app
from agent_r1.runtime.http.token import RunToken


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "gpu7.example.org", ""])
def test_other_machines_are_let_in_with_a_token_only(host: str):
    with pytest.raises(ValueError, match=r"host \(.*\) lets other machines.*run.token_file"):
        bind("search", ListenConfig(host=host), None)


@pytest.mark.parametrize(
    ("host", "token"),
    [
        ("127.0.0.1", None),
        ("127.8.9.1", None),
        ("LocalHost", None),
        ("0.0.0.0", RunToken("0123456789abcdef")),
    ],
)
def test_this_machine_needs_no_token(host: str, token: RunToken | None):
    with bind("search", ListenConfig(host=host), token) as listener:
        assert listener.getsockname()[1] > 0


@pytest.mark.parametrize(
    ("limits", "soft", "warned"),
    [((256, 8000), 2048 + 256 + 1024, False), ((256, 500), 500, True), ((7000, 8000), 7000, False)],
)
def test_a_service_may_open_as_many_files_as_connections(
    limits: tuple[int, int], soft: int, warned: bool
):
    program = (
        f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, {limits})\n"
        "from agent_r1.runtime.config import ListenConfig\n"
        "from agent_r1.runtime.http.serving import http_config\n"
        "http_config(None, ListenConfig(), None)\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), "too few files" in done.stderr) == (str(soft), warned)


def test_a_server_closes_idle_connections_long_after_clients_do():
    # A request must never meet a connection that its server is closing.
    kept_s = httpx.Limits(max_connections=1).keepalive_expiry
    assert kept_s is not None
    assert http_config(Starlette(), ListenConfig(), None).timeout_keep_alive >= 2 * kept_s


async def test_connections_to_a_bound_socket_send_small_answers_at_once():
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = bind("test", ListenConfig(), None)
    async with await asyncio.start_server(answer, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await asyncio.wait_for(accepted, 5) != 0
        writer.close()
        await writer.wait_closed()


async def serve(app: Starlette) -> None:
    """Serve an application that is told to stop as soon as it is up."""

    async def nothing() -> None: ...

    until = asyncio.get_running_loop().create_future()
    await serve_app(
        app,
        name="test",
        listen=ListenConfig(),
        token=None,
        announce_dir=None,
        before_stop=nothing,
        on_up=until.set_result,
        until=until,
    )


@pytest.mark.parametrize("error", [ValueError("set bwrap to its path"), KeyError("bwrap")])
async def test_what_an_application_refuses_at_start_is_raised(
    error: Exception, caplog: pytest.LogCaptureFixture
):
    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        raise error
        yield

    kind = ValueError if isinstance(error, ValueError) else RuntimeError
    with pytest.raises(kind, match=r"set bwrap to its path|'test' did not start"):
        await serve(Starlette(lifespan=lifespan))
    assert ("Traceback" in caplog.text) == (kind is RuntimeError)


async def test_what_an_application_raises_at_its_end_is_logged(caplog: pytest.LogCaptureFixture):
    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        raise KeyError("a session that was closed before")

    await serve(Starlette(lifespan=lifespan))
    assert "a session that was closed before" in caplog.text


async def test_a_signal_stops_a_service_in_order_and_a_second_one_at_once():
    stopping = asyncio.Event()

    async def stop_slowly() -> None:
        stopping.set()
        await asyncio.Event().wait()  # for ever

    async def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await stopping.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    interrupting: list[asyncio.Task[None]] = []
    async with asyncio.timeout(30):
        await serve_app(
            Starlette(),
            name="test",
            listen=ListenConfig(),
            token=None,
            announce_dir=None,
            before_stop=stop_slowly,
            on_up=lambda _: interrupting.append(asyncio.create_task(interrupt())),
        )
    assert interrupting[0].done()


async def test_a_request_that_outlives_its_service_is_told_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agent_r1.runtime.http.serving._CLOSE_TIMEOUT_S", 0.1)
    asked, url = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def wait_for_ever(request: Request) -> Response:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def nothing() -> None: ...

    async with httpx.AsyncClient(timeout=30) as client, asyncio.timeout(30):
        serving = asyncio.create_task(
            serve_app(
                Starlette(routes=[Route("/load", wait_for_ever)]),
                name="test",
                listen=ListenConfig(),
                token=None,
                announce_dir=None,
                before_stop=nothing,
                on_up=url.set_result,
            )
        )
        asking = asyncio.create_task(client.get(await url + "/load"))
        await asked.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        answer = await asking
        await serving
    assert (answer.status_code, "has ended" in answer.json()["detail"]) == (503, True)
    assert "Traceback" not in caplog.text


def test_a_service_on_every_address_must_say_where_others_reach_it():
    with pytest.raises(ValueError, match=r'host \(0.0.0.0\).*advertise_host.*or to "auto"'):
        advertised_url("search", ListenConfig(host="0.0.0.0"), 8001)


def test_a_service_finds_out_under_which_address_others_reach_it():
    listen = ListenConfig(host="0.0.0.0", advertise_host="auto")
    with bind("search", listen, RunToken("0123456789abcdef")) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        address = urlsplit(advertised_url("search", listen, port))
        assert address.port == port
        assert address.hostname is not None
        # A machine has the address it names: what listens everywhere is reached by it.
        socket.create_connection((address.hostname, port), timeout=10).close()


def test_a_machine_without_a_way_to_others_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    listen = ListenConfig(host="0.0.0.0", advertise_host="auto")
    with pytest.raises(ValueError, match=r"search.*Network is unreachable.*set advertise_host to"):
        advertised_url("search", listen, 8001)
