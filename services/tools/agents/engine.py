"""Engines that run agents' containers: what they are asked, and the HTTP that they share.

containers.py asks docker.py or kubernetes.py, each a class with the same methods.
"""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal, NamedTuple

import httpx
import jinja2

Json = dict[str, Any]

LABEL = "agent-r1/attempt"
"""Label of an agent's container: its name."""
NOT_FOUND, CONFLICT = 404, 409
LOG_BYTES = 8 << 20
"""Of what a container prints, so much of the end is read."""
CALL_TIMEOUT_S = 30.0
_MESSAGE_CHARS = 500


class EngineError(Exception):
    """An engine refused a request, did not answer, or lost a container."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        """HTTP status, where one is the reason."""


@dataclass(frozen=True)
class Container:
    """What an engine is to start."""

    name: str
    labels: Mapping[str, str]
    command: list[str]
    environment: Mapping[str, str]
    limit_s: int
    """Time after which it ends by itself, in seconds."""


class Ended(NamedTuple):
    """End of a container: by itself, or at a limit."""

    why: Literal["ended", "memory", "timeout"]
    code: int = 0
    """Exit status of its process 1."""


class Api:
    """JSON over HTTP.

    Args:
        url: of the engine; `unix://` and the path of a socket, or `http(s)://`.
        options: further ones of the HTTP client.
    """

    def __init__(self, url: str, **options: Any) -> None:
        path = url.removeprefix("unix://")
        if path != url:
            options["transport"] = httpx.AsyncHTTPTransport(uds=path)
        self._url = url
        self._http = httpx.AsyncClient(
            base_url="http://engine" if path != url else url,
            limits=httpx.Limits(max_keepalive_connections=16),  # each attempt waits on one
            trust_env=False,
            **options,
        )

    async def call(self, method: str, path: str, body: Json | None = None, **query: Any) -> Any:
        """Return the answer; None where it is empty.

        Raises:
            EngineError: there is none, or it is an error.
        """
        async with self.stream(method, path, body, CALL_TIMEOUT_S, **query) as response:
            content = await response.aread()
        return json.loads(content) if content.strip() else None

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        silence_s: float | None = None,
        **query: Any,
    ) -> AsyncIterator[httpx.Response]:
        """Open an answer, to be read as it comes; `silence_s` is the longest time between pieces.

        Raises:
            EngineError: there is none, it is an error, or it breaks off.
        """
        request = f"{method} {self._url}{path}"
        timeout = httpx.Timeout(CALL_TIMEOUT_S, read=silence_s)
        try:
            async with self._http.stream(
                method, path, json=body, params=query, timeout=timeout
            ) as response:
                if response.is_error:
                    said = " ".join((await response.aread()).decode(errors="replace").split())
                    status = response.status_code
                    raise EngineError(f"{request}: HTTP {status}: {said[:_MESSAGE_CHARS]}", status)
                yield response
        except httpx.HTTPError as exc:
            raise EngineError(f"{request}: {exc or type(exc).__name__}") from exc

    async def delete(self, path: str, **query: Any) -> None:
        """Delete what may be gone already, or going."""
        try:
            await self.call("DELETE", path, **query)
        except EngineError as exc:
            if exc.status not in (NOT_FOUND, CONFLICT):
                raise

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()


def keep_end(kept: bytearray, chunk: bytes) -> None:
    """Add to what was read, and drop all but its end."""
    kept += chunk
    del kept[:-LOG_BYTES]


@functools.cache
def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False
    )
    environment.filters["quote"] = shlex.quote
    return environment.from_string(
        resources.files("agent_r1.tools.agents").joinpath(name).read_text("utf-8")
    )


def render(name: str, **values: Any) -> str:
    """Return the text of a template beside this module."""
    return _template(name).render(values)
