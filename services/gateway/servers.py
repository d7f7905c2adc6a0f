"""The rollout servers as a gateway sees them: who holds the newest weights, and who samples.

session.py asks for tokens; worker.py of services/attempts asks which version is held. Servers
announce themselves in Redis. A session prefers the server that has its prefix in the cache; any
other one can go on, at the price of computing the prefix.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import aiohttp
from pydantic import ValidationError

from agent_r1.runtime.http.token import RunToken, token_headers
from agent_r1_proto.generation import GeneratedPart, GenerateRequest
from agent_r1_proto.registry import Registry, RolloutServer
from agent_r1_proto.weights import NewestVersion

logger = logging.getLogger(__name__)

POLL_S = 0.5
AVOID_S = 2.0
"""How long a server that failed is asked only where there is no other one."""
CATCH_UP_S = 10.0
SILENCE_S = 5.0
"""A silent answer goes on only while its server is announced."""
CONNECT_S = 5.0
MAX_LINE_BYTES = 16 << 20
_REFUSED = 422


class ServerError(Exception):
    """A server did not sample, or stopped in the middle; another one may."""


class RequestRefusedError(ValueError):
    """The engine does not take a prompt; no other one will."""


@dataclass(eq=False)
class RolloutServers:
    """The rollout servers of a run; use it as `async with`."""

    registry: Registry
    token: RunToken | None = None

    def __post_init__(self) -> None:
        self._servers: dict[str, RolloutServer] = {}
        self._in_flight: Counter[str] = Counter()
        self._failed_at: dict[str, float] = {}
        self._changed = asyncio.Event()
        self.moves = 0
        """Turns that went on at another server than the one they were begun at."""

    async def __aenter__(self) -> RolloutServers:
        """Begin to follow the announcements."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        self._http = aiohttp.ClientSession(
            timeout=timeout,
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=MAX_LINE_BYTES,
            headers=token_headers(self.token),
        )
        self._following = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Close the connections."""
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        await self._http.close()

    async def _follow(self) -> None:
        while True:
            try:
                self._servers = {s.server_id: s for s in await self.registry.rollout_servers()}
            except Exception:  # what is known stays in use
                logger.exception("rollout servers not followed")
            self._changed.set()
            self._changed.clear()
            await asyncio.sleep(POLL_S)

    # -- versions --------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Highest version that a server holds; -1 while there is none."""
        return max((s.policy_version for s in self._servers.values()), default=-1)

    async def catch_up(self, newest: NewestVersion) -> None:
        """Return once a server holds a version.

        Raises:
            TimeoutError: none does in time.
        """
        async with asyncio.timeout(CATCH_UP_S):
            while self.held < newest.policy_version:
                await self._changed.wait()

    # -- sampling --------------------------------------------------------------------------------

    def choose(self, preferred: str | None = None) -> RolloutServer | None:
        """Return the server to sample with: the preferred one, or the least busy of the newest.

        A server that failed just now is asked only where there is no other one.
        """
        now = time.monotonic()
        good = [
            s for s in self._servers.values() if now - self._failed_at.get(s.server_id, 0) > AVOID_S
        ]
        among = good or list(self._servers.values())
        found = next((s for s in among if s.server_id == preferred), None)
        if found is not None:
            return found
        newest = max((s.policy_version for s in among), default=0)
        return min(
            (s for s in among if s.policy_version == newest),
            key=lambda s: self._in_flight[s.server_id],
            default=None,
        )

    async def stream(
        self, server: RolloutServer, request: GenerateRequest
    ) -> AsyncGenerator[GeneratedPart]:
        """Let a server sample, and yield tokens as they come; the last part says why it ends.

        Raises:
            RequestRefusedError: the prompt cannot be sampled from.
            ServerError: it did not sample, or stopped in the middle.
        """
        name = server.server_id
        self._in_flight[name] += 1
        try:
            body = request.model_dump_json()
            async with self._http.post(
                f"{server.url}/generate", data=body, headers={"content-type": "application/json"}
            ) as answer:
                if answer.status == _REFUSED:
                    raise RequestRefusedError(await _detail(answer))
                if answer.status != 200:
                    raise ServerError(f"HTTP {answer.status}: {await _detail(answer)}")
                while True:
                    line = await self._line(name, answer)
                    part = GeneratedPart.model_validate_json(line)
                    if part.error:
                        raise ServerError(part.error)
                    yield part
                    if part.finish_reason is not None:
                        return
        except (aiohttp.ClientError, OSError, ValidationError) as exc:
            self._failed_at[name] = time.monotonic()
            raise ServerError(f"{name}: {type(exc).__name__}: {exc}") from exc
        except ServerError:
            self._failed_at[name] = time.monotonic()
            raise
        finally:
            self._in_flight[name] -= 1

    async def _line(self, name: str, answer: aiohttp.ClientResponse) -> bytes:
        """Return the next line of an answer, which a server that has gone does not write."""
        reading = asyncio.ensure_future(answer.content.readline())
        try:
            while not (await asyncio.wait([reading], timeout=SILENCE_S))[0]:
                if name not in self._servers:
                    raise ServerError(f"{name} is silent, and announced no more")
            line = await reading
        finally:
            if not reading.done():
                reading.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await reading
        if not line.endswith(b"\n"):
            raise ServerError(f"{name} stopped in the middle of an answer")
        return line


async def _detail(answer: aiohttp.ClientResponse) -> str:
    return (await answer.text())[:300]
