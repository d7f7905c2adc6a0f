"""Behind HTTP: how services bind."""

from __future__ import annotations

import asyncio
import socket

from agent_r1_proto.config import ListenTable
from agent_r1_proto.serving import bind


async def test_connections_to_a_bound_socket_send_small_answers_at_once():
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = bind("test", ListenTable())
    async with await asyncio.start_server(answer, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await asyncio.wait_for(accepted, 5) != 0
        writer.close()
        await writer.wait_closed()
