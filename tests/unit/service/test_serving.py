"""Behind HTTP: how services bind and start."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.applications import Starlette

from agent_r1_service.config import ListenConfig
from agent_r1_service.serving import bind, serve_app


async def test_connections_to_a_bound_socket_send_small_answers_at_once():
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = bind("test", ListenConfig())
    async with await asyncio.start_server(answer, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await asyncio.wait_for(accepted, 5) != 0
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("error", [ValueError("set bwrap to its path"), KeyError("bwrap")])
async def test_what_an_application_refuses_at_start_is_raised(
    error: Exception, caplog: pytest.LogCaptureFixture
):
    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        raise error
        yield

    async def nothing() -> None: ...

    kind = ValueError if isinstance(error, ValueError) else RuntimeError
    with pytest.raises(kind, match=r"set bwrap to its path|'test' did not start"):
        await serve_app(
            Starlette(lifespan=lifespan),
            name="test",
            listen=ListenConfig(),
            announce_dir=None,
            before_stop=nothing,
        )
    assert ("Traceback" in caplog.text) == (kind is RuntimeError)
