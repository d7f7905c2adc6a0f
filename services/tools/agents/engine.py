"""`Engine`: what runs containers, as containers.py asks it; and the HTTP that engines share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import httpx

Json = dict[str, Any]

USER = 65532
"""Number of the user and group that agents have: of no account of a machine."""
OWN_PROCESSES = 4
"""Processes of an attempt beside the agent's: the shell, its timer and what it starts."""
LOG_BYTES = 8 << 20
"""Of what a container prints, so much of the end is read."""
CALL_TIMEOUT_S = 30.0
MAX_MESSAGE_CHARS = 500


class EngineError(Exception):
    """An engine refused a request, or did not answer; the text says which and why."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        """HTTP status; None: there was no answer."""


@dataclass(frozen=True)
class Container:
    """What an engine is to start."""

    name: str
    labels: Mapping[str, str]
    command: list[str]
    environment: Mapping[str, str]
    limit_s: int
    """Time after which it ends by itself, in seconds."""


@dataclass(frozen=True)
class Ended:
    """End of a container."""

    why: Literal["ended", "memory", "timeout"]
    """By itself, or the limit that it reached."""
    code: int = 0
    """Exit status of its process 1."""


class Engine(Protocol):
    """Runs containers; each method raises `EngineError`."""

    joins_outputs: bool
    """Whether the log has standard output and error in one."""

    async def connect(self) -> str:
        """Make ready to start containers; returns an address that they reach this process at."""
        ...

    async def create(self, container: Container) -> None:
        """Start a container; what could not be started is left, and is to be removed."""
        ...

    async def wait(self, name: str, deadline: float) -> Ended:
        """Wait for a container's end; at the deadline, which the loop's clock has, it may run."""
        ...

    async def read_log(self, name: str) -> tuple[bytes, bytes]:
        """Return the end of its standard output and error."""
        ...

    async def remove(self, name: str) -> None:
        """Kill and remove a container, if it is there."""
        ...

    async def find(self) -> dict[str, Mapping[str, str]]:
        """Return the labels of every container of an agent, by name."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...


class Api:
    """JSON over HTTP.

    Args:
        url: of the engine; `unix://` and the path of a socket, or `http(s)://`.
        name: what it is called in errors.
        options: further ones of the HTTP client.
    """

    def __init__(self, url: str, name: str, **options: Any) -> None:
        path = url.removeprefix("unix://")
        if path != url:
            options["transport"] = httpx.AsyncHTTPTransport(uds=path)
        self._where = f"{name} ({url})"
        self._http = httpx.AsyncClient(
            base_url="http://engine" if path != url else url,
            timeout=httpx.Timeout(CALL_TIMEOUT_S),
            # An attempt waits on a connection of its own.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=16),
            trust_env=False,
            **options,
        )

    async def call(
        self, method: str, path: str, body: Json | None = None, *, waits: bool = False, **query: Any
    ) -> Any:
        """Return the answer; None where there is no text. `waits` sets no limit of time.

        Raises:
            EngineError: there is none, or it is an error.
        """
        async with self.stream(method, path, body, waits=waits, **query) as response:
            await response.aread()
        return response.json() if response.content.strip() else None

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, body: Json | None = None, *, waits: bool = True, **query: Any
    ) -> AsyncIterator[httpx.Response]:
        """Open an answer, to be read as it comes.

        Raises:
            EngineError: there is none, it is an error, or it breaks off.
        """
        timeout = httpx.Timeout(CALL_TIMEOUT_S, read=None if waits else CALL_TIMEOUT_S)
        try:
            async with self._http.stream(
                method, path, json=body, params=query, timeout=timeout
            ) as response:
                if response.is_error:
                    await response.aread()
                    raise EngineError(
                        f"{self._where}: {method} {path}: HTTP {response.status_code}: "
                        f"{_message(response)}",
                        response.status_code,
                    )
                yield response
        except httpx.HTTPError as exc:
            said = str(exc) or type(exc).__name__
            raise EngineError(f"{self._where}: {method} {path}: {said}") from exc

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()


def _message(response: httpx.Response) -> str:
    try:
        said = response.json()["message"]
    except (ValueError, KeyError, TypeError):
        said = response.text
    return " ".join(str(said).split())[:MAX_MESSAGE_CHARS]


def keep_end(kept: bytearray, chunk: bytes) -> None:
    """Add to what was read, and drop all but its end."""
    kept += chunk
    del kept[:-LOG_BYTES]
