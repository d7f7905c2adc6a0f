"""The only way out of an agent's sandbox: from its loopback to the gateway of its session.

The listening socket is made inside, in the network namespace of the attempt, and handed out
(inside.py). What connects to it there is accepted here, and its bytes go to the host of
`AgentAttempt.url` and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

CONNECTIONS = 64
"""Most connections of one attempt at once; more are closed."""
CONNECT_TIMEOUT_S = 5.0
RETRY_S = 0.2
_CHUNK_BYTES = 1 << 16
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Relay:
    """Carries the bytes of one attempt's connections.

    While the gateway does not answer, connections wait: SDKs retry for two or three seconds, and
    the gateway that takes a session over may need longer.

    Args:
        listener: accepts the agent's connections.
        url: of the session at its gateway.
    """

    def __init__(self, listener: socket.socket, url: str) -> None:
        self._listener = listener
        self._url = url
        self._open: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, sock=self._listener)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        tasks = list(self._open)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def move(self, url: str) -> None:
        """Go on with another gateway; what is open to the former one breaks, and is retried."""
        if url == self._url:
            return
        logger.info("agent moves to another gateway from=%s to=%s", self._url, url)
        self._url = url
        for writers in self._open.values():
            for writer in writers:
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._open) >= CONNECTIONS:
            writer.transport.abort()
            return
        writers = self._open[task] = []
        try:
            outside = await self._connect()
            # From here on: a connection that still waits has nothing of the former gateway.
            writers += [writer, outside[1]]
            await _carry((reader, writer), outside)
        except OSError as exc:
            logger.debug("a connection of an agent broke error=%s", exc)
        except asyncio.CancelledError:
            pass  # asyncio logs a cancelled handler as an error
        finally:
            del self._open[task]
            for one in (writer, *writers):
                one.transport.abort()

    async def _connect(self) -> _Streams:
        while True:
            url = self._url
            parts = urlsplit(url)
            secure = parts.scheme == "https"
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    streams = await asyncio.open_connection(
                        parts.hostname, parts.port or (443 if secure else 80), ssl=secure or None
                    )
                if url == self._url:
                    return streams
                streams[1].transport.abort()
            await asyncio.sleep(RETRY_S)  # a port that nobody listens on has no event to wait for


async def _carry(inside: _Streams, outside: _Streams) -> None:
    """Carry bytes both ways until the gateway has ended its answer."""
    asking = asyncio.create_task(_pump(inside[0], outside[1]))
    try:
        await _pump(outside[0], inside[1])
        inside[1].close()
        await inside[1].wait_closed()
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    except OSError:
        writer.transport.abort()  # whoever is behind it must not wait for what will not come
        raise
    if writer.can_write_eof():
        writer.write_eof()
