"""Registry in Redis: what services know of each other.

Of a run (`Registry`): rollout announces its servers here (with an expiry they renew); learner reads
them and writes the newest policy version, its incarnation, and how other hosts join.

Of a pool of tools that several runs may share (`ToolRegistry`): tool services announce their
instances (with an expiry they renew), rollout servers read them, the `agent-r1 tools` commands set
weights and drain. Where a tool is and in which version is decided here; which tools a model is
offered, never.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import Field, ValidationError

from agent_r1_proto.connection import PoolKeys, RedisConnection
from agent_r1_proto.messages import Message
from agent_r1_proto.run_bundle import JoinOffer
from agent_r1_proto.streams import Broker
from agent_r1_proto.tool_pool import (
    NewVersionRule,
    PinReport,
    ToolInstance,
    ToolState,
    check_weights,
)
from agent_r1_proto.weights import NewestVersion

logger = logging.getLogger(__name__)

KEPT_S = 24 * 3600
"""Time for which a pool remembers a tool without an instance, in seconds."""

NOTICE_S = 1.5
"""Rollout servers have seen that an instance drains, and reported what they keep, within this."""
WITHDRAW_TIMEOUT_S = 2.0
"""Longest a service that ends waits for Redis to take its announcement or report away."""
DRAIN_EXPIRY_S = 60
"""A rollout server renews its announcement, and sees that it is to drain, within this time."""


# In one step: two starts of a learner must not publish the same number.
_PUBLISH = """
local known = tonumber(redis.call('GET', KEYS[2]) or '0')
if known > tonumber(ARGV[2]) then return known end
redis.call('SET', KEYS[1], ARGV[1])
return 0
"""


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


class LearnerHeartbeat(Message):
    """A sign of life of the learner that trains a run."""

    pid: int
    host: str
    folder: str
    """Its run folder."""
    started_at: float
    """Unix time, seconds."""
    beats: int = 0
    """Signs of life so far: it changes while the learner lives."""

    def is_of(self, other: LearnerHeartbeat) -> bool:
        """Return whether both are of the same start."""
        return self.model_copy(update={"beats": other.beats}) == other


class KnownNumbers(NamedTuple):
    """The highest numbers that the services of a run know; 0 where they know none."""

    incarnation: int
    policy_version: int
    """Published in Redis, or held by a rollout server."""


class Registry:
    """The run's shared facts. Every call waits with back-off while Redis is away."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._publish: Any = broker.redis.register_script(_PUBLISH)

    async def announce_rollout_server(self, server: RolloutServer, expiry_s: float) -> float | None:
        """Write or renew one server's announcement, valid for `expiry_s` seconds.

        Returns:
            seconds the server gets to finish its samples, where it has been told to drain.
        """
        keys = self._broker.keys

        def write(pipe: Any) -> None:
            announcement = server.model_dump_json()
            pipe.set(keys.rollout_server(server.server_id), announcement, px=int(expiry_s * 1000))
            pipe.get(keys.rollout_drain(server.server_id))

        told = (await self._broker.transact(write, "announce"))[-1]
        return None if told is None else float(told)

    async def withdraw_rollout_server(self, server_id: str) -> None:
        """Remove a server's announcement, and what it was told."""
        keys = self._broker.keys
        await self._broker.retrying(
            lambda: self._broker.redis.delete(
                keys.rollout_server(server_id), keys.rollout_drain(server_id)
            ),
            "withdraw",
        )

    async def drain_rollout_server(self, server_id: str, timeout_s: float) -> None:
        """Tell a server to take no more samples, to finish those it has, and to leave.

        Args:
            server_id: its name.
            timeout_s: seconds after which it gives back the samples that it has not finished.
        """
        await self._set(self._broker.keys.rollout_drain(server_id), timeout_s, DRAIN_EXPIRY_S)

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
        await self._set(self._broker.keys.newest_version, newest.model_dump_json())

    async def publish_version(self, newest: NewestVersion, incarnation: int) -> int:
        """Publish which weights are the newest, unless a later start of the learner is at work.

        Returns:
            The incarnation of that start; 0 where there is none, and the version is published.
        """
        keys = (self._broker.keys.newest_version, self._broker.keys.incarnation)
        arguments = [newest.model_dump_json(), incarnation]
        return int(
            await self._broker.retrying(
                lambda: self._publish(keys=keys, args=arguments), "publish version"
            )
        )

    async def newest_version(self) -> NewestVersion | None:
        """Return the newest version; None before the learner has set one."""
        value = await self._get(self._broker.keys.newest_version)
        return None if value is None else NewestVersion.model_validate_json(value)

    async def set_incarnation(self, number: int) -> None:
        """Publish which start of the learner is the current one."""
        await self._set(self._broker.keys.incarnation, number)

    async def incarnation(self) -> int | None:
        """Return the learner's current incarnation; None before its first start."""
        value = await self._get(self._broker.keys.incarnation)
        return None if value is None else int(value)

    async def set_heartbeat(self, heartbeat: LearnerHeartbeat, expiry_s: float) -> None:
        """Write or renew the sign of life of the learner, valid for `expiry_s` seconds."""
        key, value = self._broker.keys.heartbeat, heartbeat.model_dump_json()
        await self._broker.retrying(
            lambda: self._broker.redis.set(key, value, px=int(expiry_s * 1000)), f"set {key}"
        )

    async def heartbeat(self) -> LearnerHeartbeat | None:
        """Return the sign of life of the learner; None where none lives."""
        value = await self._get(self._broker.keys.heartbeat)
        return None if value is None else LearnerHeartbeat.model_validate_json(value)

    async def withdraw_heartbeat(self) -> None:
        """Remove the sign of life of the learner."""
        key = self._broker.keys.heartbeat
        await self._broker.retrying(lambda: self._broker.redis.delete(key), f"delete {key}")

    async def known_numbers(self) -> KnownNumbers:
        """Return the numbers that no later start of the learner may use again."""
        newest, incarnation = await self.newest()
        held = [server.policy_version for server in await self.rollout_servers()]
        published = 0 if newest is None else newest.policy_version
        return KnownNumbers(incarnation or 0, max([published, *held]))

    async def newest(self) -> tuple[NewestVersion | None, int | None]:
        """Return newest version and incarnation in one request, each None before it is set."""
        keys = self._broker.keys
        version, number = await self._broker.retrying(
            lambda: self._broker.redis.mget(keys.newest_version, keys.incarnation),
            f"get {keys.newest_version}",
        )
        return (
            None if version is None else NewestVersion.model_validate_json(version),
            None if number is None else int(number),
        )

    async def set_join_offer(self, offer: JoinOffer) -> None:
        """Publish how a service joins the run."""
        await self._set(self._broker.keys.join_offer, offer.model_dump_json())

    async def join_offer(self) -> JoinOffer | None:
        """Return how a service joins the run; None before the learner has said it."""
        value = await self._get(self._broker.keys.join_offer)
        return None if value is None else JoinOffer.model_validate_json(value)

    async def _set(self, key: str, value: str | float, expiry_s: int | None = None) -> None:
        await self._broker.retrying(
            lambda: self._broker.redis.set(key, value, ex=expiry_s), f"set {key}"
        )

    async def _get(self, key: str) -> bytes | None:
        return await self._broker.retrying(lambda: self._broker.redis.get(key), f"get {key}")


class ToolRegistry:
    """The tools of one pool. Every call waits with back-off while Redis is away.

    Args:
        connection: to Redis.
        pool: its name.
    """

    def __init__(self, connection: RedisConnection, pool: str) -> None:
        self.pool = pool
        self._connection = connection
        self._redis: Any = connection.redis
        self._keys = PoolKeys(pool)

    async def announce(
        self, instance: ToolInstance, expiry_s: float, new_version: NewVersionRule = "all"
    ) -> bool:
        """Write or renew an announcement, valid for `expiry_s` seconds.

        Args:
            instance: what is announced.
            expiry_s: its life.
            new_version: what its version gets of new trajectories if it was never announced.

        Returns:
            whether the instance has been told to drain.
        """
        keys = self._keys

        async def write() -> bool:
            versions = await self._redis.lrange(keys.versions(instance.tool), 0, -1)
            is_new = instance.version.encode() not in versions
            weights: Mapping[str, float] | None = None
            if is_new:
                state = (await self.read([instance.tool]))[instance.tool]
                weights = state.weights_with(instance.version, new_version)
            async with self._redis.pipeline(transaction=True) as pipe:
                if is_new:
                    pipe.rpush(keys.versions(instance.tool), instance.version)
                if weights is not None:
                    self._replace_weights(pipe, instance.tool, weights)
                pipe.sadd(keys.instance_ids, instance.instance)
                of_tool = (keys.versions(instance.tool), keys.weights(instance.tool))
                for kept in (*of_tool, keys.instance_ids, keys.draining):
                    pipe.expire(kept, KEPT_S)
                key = keys.instance(instance.instance)
                pipe.set(key, instance.model_dump_json(), px=int(expiry_s * 1000))
                pipe.sismember(keys.draining, instance.instance)
                return bool((await pipe.execute())[-1])

        return await self._connection.retrying(write, "announce tool")

    async def withdraw(self, instance: str) -> None:
        """Remove an announcement and what was said about the instance."""
        keys = self._keys

        def remove(pipe: Any) -> None:
            pipe.delete(keys.instance(instance))
            pipe.srem(keys.instance_ids, instance)
            pipe.srem(keys.draining, instance)

        await self._connection.transact(remove, "withdraw tool")

    async def read(self, tools: Sequence[str] | None = None) -> dict[str, ToolState]:
        """Return the state of the named tools; None is all that have an instance.

        An entry that does not parse is left out: it belongs to a newer or broken service.
        """
        keys = self._keys

        async def find() -> list[ToolInstance]:
            values = await self._present(keys.instance_ids, keys.instance, keys.draining)
            draining = {name.decode() for name in await self._redis.smembers(keys.draining)}
            return [
                one.model_copy(update={"draining": one.draining or one.instance in draining})
                for one in map(_parse, values.values())
                if one is not None
            ]

        instances = await self._connection.retrying(find, "read tools")
        names = sorted({one.tool for one in instances}) if tools is None else list(tools)
        found = await self._connection.transact(
            lambda pipe: [
                (pipe.lrange(keys.versions(name), 0, -1), pipe.hgetall(keys.weights(name)))
                for name in names
            ],
            "read tool versions",
        )
        states: dict[str, ToolState] = {}
        for name, versions, weights in zip(names, found[::2], found[1::2], strict=True):
            states[name] = ToolState(
                instances=[one for one in instances if one.tool == name],
                # Two instances that announce a version at once may both append it.
                versions=list(dict.fromkeys(version.decode() for version in versions)),
                weights=_usable_weights(name, weights),
            )
        return states

    async def _present(
        self, members: str, key_of: Callable[[str], str], *others: str
    ) -> dict[str, bytes]:
        """Return the values of the names in a set; a name without one leaves it and `others`."""
        names: list[str] = sorted(n.decode() for n in await self._redis.smembers(members))
        values: list[Any] = await self._redis.mget(map(key_of, names)) if names else []
        found = dict(zip(names, values, strict=True))
        expired = [name for name, value in found.items() if value is None]
        for key in (members, *others) if expired else ():
            await self._redis.srem(key, *expired)
        return {name: value for name, value in found.items() if value is not None}

    async def drain(self, instances: Sequence[str]) -> None:
        """Mark instances: they finish what they have and get nothing new."""
        if instances:
            await self._connection.retrying(
                lambda: self._redis.sadd(self._keys.draining, *instances), "drain tools"
            )

    async def undrain(self, instances: Sequence[str]) -> None:
        """Take the mark away: they take new trajectories again, unless they are shutting down."""
        if instances:
            await self._connection.retrying(
                lambda: self._redis.srem(self._keys.draining, *instances), "undrain tools"
            )

    async def report(self, server_id: str, report: PinReport, expiry_s: float) -> None:
        """Say what one rollout server does with its tools, for the next `expiry_s` seconds."""
        keys = self._keys

        def write(pipe: Any) -> None:
            pipe.sadd(keys.pin_reporters, server_id)
            pipe.expire(keys.pin_reporters, KEPT_S)
            pipe.set(keys.pins(server_id), report.model_dump_json(), px=int(expiry_s * 1000))

        await self._connection.transact(write, "report tool use")

    async def withdraw_report(self, server_id: str) -> None:
        """Remove what a rollout server that stops has said."""
        keys = self._keys

        def remove(pipe: Any) -> None:
            pipe.delete(keys.pins(server_id))
            pipe.srem(keys.pin_reporters, server_id)

        await self._connection.transact(remove, "withdraw tool use")

    async def reports(self) -> dict[str, PinReport]:
        """Return what rollout servers say, by server."""
        keys = self._keys
        values = await self._connection.retrying(
            lambda: self._present(keys.pin_reporters, keys.pins), "read tool use"
        )
        return {name: PinReport.model_validate_json(value) for name, value in values.items()}

    async def pinned(self, tool: str, version: str) -> int:
        """Return how many trajectories, on all rollout servers, keep a version."""
        return sum(
            pin.count
            for report in (await self.reports()).values()
            for pin in report.pins
            if (pin.tool, pin.version) == (tool, version)
        )

    async def set_weights(self, tool: str, weights: Mapping[str, float]) -> None:
        """Replace a tool's traffic weights; an empty mapping gives all to the newest version.

        Raises:
            ValueError: as `check_weights`.
        """
        check_weights(weights)
        await self._connection.transact(
            lambda pipe: self._replace_weights(pipe, tool, weights), "set tool weights"
        )

    def _replace_weights(self, pipe: Any, tool: str, weights: Mapping[str, float]) -> None:
        key = self._keys.weights(tool)
        pipe.delete(key)
        if weights:
            pipe.hset(key, mapping={name: str(value) for name, value in weights.items()})
            pipe.expire(key, KEPT_S)


def _usable_weights(tool: str, stored: Mapping[bytes, bytes]) -> dict[str, float]:
    """Return stored weights; one that cannot be used counts as 0, and the log says so."""
    weights: dict[str, float] = {}
    for name, value in stored.items():
        try:
            weight = {name.decode(): float(value)}
            check_weights(weight | {"any": 1.0})
        except ValueError as exc:
            logger.error("stored tool weight left out tool=%s error=%s", tool, exc)
        else:
            weights |= weight
    return weights


def _parse(value: bytes) -> ToolInstance | None:
    try:
        return ToolInstance.model_validate_json(value)
    except ValidationError:
        return None
