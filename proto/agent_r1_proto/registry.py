"""What services know of each other through Redis: rollout servers, weights, the incarnation.

rollout announces itself here (with an expiry it renews); learner reads the servers and writes the
newest policy version and its incarnation. Tool services join with the registry of tools.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from agent_r1_proto.messages import Message
from agent_r1_proto.streams import Broker
from agent_r1_proto.weights import NewestVersion


class RolloutServer(Message):
    """One rollout server, as it announces itself."""

    server_id: str
    url: str
    """Base URL of its HTTP routes."""
    policy_version: Annotated[int, Field(ge=0)]
    pid: int
    host: str
    started_at: float
    """Unix time, seconds."""


class Registry:
    """The run's shared facts. Every call waits with back-off while Redis is away."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def announce_rollout_server(self, server: RolloutServer, expiry_s: float) -> None:
        """Write or renew one server's announcement, valid for `expiry_s` seconds."""
        key = self._broker.keys.rollout_server(server.server_id)
        await self._broker.retrying(
            lambda: self._broker.redis.set(key, server.model_dump_json(), px=int(expiry_s * 1000)),
            "announce",
        )

    async def withdraw_rollout_server(self, server_id: str) -> None:
        """Remove a server's announcement."""
        key = self._broker.keys.rollout_server(server_id)
        await self._broker.retrying(lambda: self._broker.redis.delete(key), "withdraw")

    async def rollout_servers(self) -> list[RolloutServer]:
        """Return the servers whose announcement has not expired, by name."""

        async def read() -> list[Any]:
            pattern = self._broker.keys.rollout_server("*")
            keys = [key async for key in self._broker.redis.scan_iter(match=pattern, count=1000)]
            return list(await self._broker.redis.mget(keys)) if keys else []

        values = await self._broker.retrying(read, "rollout servers")
        servers = [RolloutServer.model_validate_json(value) for value in values if value]
        return sorted(servers, key=lambda server: server.server_id)

    async def set_newest_version(self, newest: NewestVersion) -> None:
        """Publish which weights are the newest."""
        await self._broker.retrying(
            lambda: self._broker.redis.set(
                self._broker.keys.newest_version, newest.model_dump_json()
            ),
            "set newest version",
        )

    async def newest_version(self) -> NewestVersion | None:
        """Return the newest version; None before the learner has set one."""
        value = await self._broker.retrying(
            lambda: self._broker.redis.get(self._broker.keys.newest_version), "newest version"
        )
        return None if value is None else NewestVersion.model_validate_json(value)

    async def set_incarnation(self, number: int) -> None:
        """Publish which start of the learner is the current one."""
        await self._broker.retrying(
            lambda: self._broker.redis.set(self._broker.keys.incarnation, number),
            "set incarnation",
        )

    async def incarnation(self) -> int | None:
        """Return the learner's current incarnation; None before its first start."""
        value = await self._broker.retrying(
            lambda: self._broker.redis.get(self._broker.keys.incarnation), "incarnation"
        )
        return None if value is None else int(value)
