"""The HTTP client of the learner for the weight routes of rollout servers; delivery.py uses it."""

from __future__ import annotations

import asyncio
from typing import Self, TypeVar

import httpx
from httpx_aiohttp import AiohttpTransport
from pydantic import ValidationError

from agent_r1.learner.config import LearnerConfig
from agent_r1.runtime.http.token import RunToken, token_headers
from agent_r1_proto.messages import StrictMessage
from agent_r1_proto.registry import RolloutServer

R = TypeVar("R", bound=StrictMessage)


class ServerError(RuntimeError):
    """One rollout server could not be reached, or refused a request."""

    def __init__(self, message: str, *, refused: bool = False, status: int | None = None) -> None:
        super().__init__(message)
        self.refused = refused
        self.status = status
        """Status of its HTTP answer; None without one."""


class ServerClient:
    """Sends requests to rollout servers; use as `async with`."""

    def __init__(self, config: LearnerConfig, token: RunToken | None) -> None:
        self._client = httpx.AsyncClient(
            transport=AiohttpTransport(),
            timeout=httpx.Timeout(None, connect=config.push_connect_timeout_s),
            headers=token_headers(token),
        )

    async def __aenter__(self) -> Self:
        """Open connections as requests need them."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Close them."""
        await self._client.aclose()

    async def post(
        self,
        server: RolloutServer,
        path: str,
        body: StrictMessage,
        reply_type: type[R],
        limit_s: float,
    ) -> R:
        """POST a message and return the answer, which may take so many seconds.

        Raises:
            ServerError: the server was not reached in time, or refused.
        """
        where = f"server {server.server_id} at {server.url}{path}"
        try:
            response = await asyncio.wait_for(
                self._client.post(server.url.rstrip("/") + path, json=body.model_dump()),
                limit_s,
            )
        except (httpx.HTTPError, TimeoutError) as exc:
            raise ServerError(f"{where}: {type(exc).__name__} {exc}") from exc
        if response.status_code != httpx.codes.OK:
            raise ServerError(
                f"{where}: HTTP {response.status_code}: {response.text[:500]}",
                # 5xx is an outage: the server is being replaced and asked again, like one away.
                refused=response.is_client_error,
                status=response.status_code,
            )
        try:
            return reply_type.model_validate_json(response.content)
        except ValidationError as exc:
            raise ServerError(f"{where}: the answer does not parse: {exc}", refused=True) from exc
