"""Delays TCP: passes every connection that the kernel redirects here on, a while later.

    python delay_relay.py PORT SECONDS MARK

The rule that redirects leaves connections with the mark MARK alone: those are the relay's own.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from collections.abc import Coroutine
from contextlib import suppress

SO_ORIGINAL_DST = 80
PIECE = 64 * 1024
IN_FLIGHT = 256
"""Pieces on their way in one direction; whoever sends more waits."""


def destination(connection: socket.socket) -> tuple[str, int]:
    """Return the address that a redirected IPv4 connection was meant for."""
    _, port, address = struct.unpack(
        "!HH4s8x", connection.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, 16)
    )
    return socket.inet_ntoa(address), port


async def pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float
) -> None:
    """Write what comes in `delay_s` seconds later, the end of the stream included."""
    loop = asyncio.get_running_loop()
    on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(IN_FLIGHT)

    async def take() -> None:
        piece = b"-"
        while piece:
            piece = await reader.read(PIECE)
            await on_the_way.put((loop.time() + delay_s, piece))

    async def give() -> None:
        while True:
            due, piece = await on_the_way.get()
            await asyncio.sleep(due - loop.time())
            if not piece:
                writer.write_eof()
                return
            writer.write(piece)
            await writer.drain()

    await both(take(), give())


async def both(*work: Coroutine[None, None, None]) -> None:
    """Wait for all; the first error cancels the others and is raised as it is."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def serve(port: int, delay_s: float, mark: int) -> None:
    """Relay connections until the process is ended."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward = socket.socket()
        onward.setblocking(False)
        onward.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
        writers = [writer]
        try:
            meant_for = destination(writer.get_extra_info("socket"))
            await asyncio.get_running_loop().sock_connect(onward, meant_for)
            other_reader, other_writer = await asyncio.open_connection(sock=onward)
            writers.append(other_writer)
            there = pass_on(reader, other_writer, delay_s)
            await both(there, pass_on(other_reader, writer, delay_s))
        except OSError:
            for one in writers:
                one.transport.abort()  # the other side learns of it, as without a relay
        finally:
            onward.close()
            for one in writers:
                one.close()

    server = await asyncio.start_server(relay, "0.0.0.0", port, backlog=1024)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
