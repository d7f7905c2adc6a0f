"""A gateway as agents see it: Chat Completions of one session, behind its key."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any, Self

KEY = "key-of-the-session"


@dataclass
class ModelGateway:
    """Answers every request with `answer`. Use it as a context manager."""

    answer: str = "Paris"
    path: str = "/sessions/s1/v1"
    key: str = KEY
    holds_from: int | None = None
    """The answers from this request on are never sent."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of the requests that had the key."""
    refused: int = 0
    """Requests that had another key or path."""

    def __post_init__(self) -> None:
        self.holds = asyncio.Event()
        """Set once there is a request whose answer is not sent."""
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}{self.path}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    async def die(self) -> None:
        """Close every connection and the port, as a killed process does."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = head.split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                status, answer = self._read(lines[0].split()[1], headers, body)
                if self.holds_from is not None and len(self.requests) > self.holds_from:
                    self.holds.set()
                    await asyncio.Event().wait()
                text = json.dumps(answer).encode()
                writer.write(
                    f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
                    f"content-length: {len(text)}\r\n\r\n".encode()
                    + text
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    def _read(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Any]:
        if path != f"{self.path}/chat/completions":
            self.refused += 1
            return 404, {"error": {"message": "no session"}}
        if headers.get("authorization") != f"bearer {self.key}":
            self.refused += 1
            return 401, {"error": {"message": "wrong key"}}
        self.requests.append(json.loads(body))
        message = {"role": "assistant", "content": self.answer}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return 200, {
            "id": f"turn-{len(self.requests)}",
            "object": "chat.completion",
            "created": 0,
            "model": "policy",
            "choices": [choice],
        }
