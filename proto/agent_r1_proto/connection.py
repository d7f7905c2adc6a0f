"""The connection to Redis: names of keys, and waiting while the server is away or full.

All that reads or writes Redis in this package builds on it, and services use no other client.
config/redis_server.py and launch/local_redis.py only ask a server whether and how it answers.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar, cast

from redis import exceptions as redis_errors
from redis.asyncio import BlockingConnectionPool, Redis
from redis.exceptions import ResponseError

from agent_r1_proto.addresses import hide_password
from agent_r1_proto.policies import DEFAULT_POLICY
from agent_r1_proto.redis_trouble import (
    NOT_REDIS,
    PASSING,
    close_client,
    error_code,
    trouble_of,
)
from agent_r1_proto.shared_commits import SharedCommits

logger = logging.getLogger(__name__)

FIRST_DELAY_S = 0.05
LONGEST_DELAY_S = 5.0
AWAY_S = 1.5
"""Redis was away where nobody had an answer for so long, or for half a lease."""
SOCKET_TIMEOUT_S = 30.0
MAX_CONNECTIONS = 32
"""Connections of one process; an operation beyond them waits for one to be free."""

T = TypeVar("T")


ROLLOUT_GROUP, REWARD_GROUP, LEARNER_GROUP = "rollout", "reward", "learner"
"""Consumer groups: each entry of a stream goes to one consumer of the group that reads it."""


class Keys:
    """Names of everything one run keeps in Redis, under `agent_r1:{run_id}:`."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.prefix = f"agent_r1:{run_id}:"
        self.tasks = self.prefix + "tasks"
        self.trajectories = self.prefix + "trajectories"
        self.scored = self.prefix + "scored_trajectories"
        self.dead_letters = self.prefix + "dead_letters"
        self.dead_letter_count = self.prefix + "dead_letters:count"
        self.deadly_count = self.prefix + "dead_letters:deadly"
        self.newest_version = self.newest_version_of(DEFAULT_POLICY)
        self.incarnation = self.prefix + "incarnation"
        self.heartbeat = self.prefix + "learner"
        self.join_offer = self.prefix + "join_offer"
        self.failure_counts = self.prefix + "failures:counts"
        self.first_failures = self.prefix + "failures:first"
        self.probe = self.prefix + "probe"
        self.scoring_model_uses = self.prefix + "scoring_models:uses"

    def stages(self) -> dict[str, tuple[str, str]]:
        """Return the streams that a sample passes, in order: stream and reading group by name."""
        return {
            "tasks": (self.tasks, ROLLOUT_GROUP),
            "trajectories": (self.trajectories, REWARD_GROUP),
            "scored": (self.scored, LEARNER_GROUP),
        }

    def newest_version_of(self, policy: str) -> str:
        """Return the key of a policy's newest version; the default one's has no name in it."""
        named = "" if policy == DEFAULT_POLICY else f":{policy}"
        return f"{self.prefix}weights:newest{named}"

    def replies(self, client_id: str) -> str:
        """Return the stream on which one evaluation or chat client gets its results."""
        return f"{self.prefix}replies:{client_id}"

    def failures(self, stream: str) -> str:
        """Return the hash that counts failed processings of a stream's entries."""
        return f"{stream}:failures"

    def suspects(self, stream: str) -> str:
        """Return the hash that says of suspect entries how often each was processed alone."""
        return f"{stream}:suspects"

    def rollout_server(self, server_id: str) -> str:
        """Return the key under which one rollout server announces itself."""
        return f"{self.prefix}rollout_servers:{server_id}"

    def rollout_drain(self, server_id: str) -> str:
        """Return the key that tells one rollout server to drain."""
        return f"{self.prefix}rollout_drains:{server_id}"

    def session(self, session_id: str) -> tuple[str, str]:
        """Return the list that logs one session of an agent, and the number of its owner."""
        return f"{self.prefix}sessions:{session_id}", f"{self.prefix}session_owners:{session_id}"

    def scoring_models(self, component: str) -> tuple[str, str]:
        """Return the list of versions of the model a component asks, and the hash of their URLs."""
        return f"{self.prefix}scoring_models:{component}", f"{self.prefix}scoring_urls:{component}"

    def scoring_pin(self, component: str, group: str) -> str:
        """Return the key that keeps the version of a component's model which scores a group."""
        return f"{self.prefix}scoring_pins:{component}:{group}"


class PoolKeys:
    """Names of what the tools of one pool keep in Redis; `@` cannot begin the id of a run."""

    def __init__(self, pool: str) -> None:
        self.prefix = f"agent_r1:@{pool}:"
        self.instance_ids = self.prefix + "tool_instances"
        self.draining = self.prefix + "tool_draining"
        self.pin_reporters = self.prefix + "tool_pins"

    def instance(self, instance: str) -> str:
        """Return the key under which one instance announces itself."""
        return f"{self.prefix}tool_instances:{instance}"

    def pins(self, server_id: str) -> str:
        """Return the key under which one rollout server reports the versions it has pinned."""
        return f"{self.prefix}tool_pins:{server_id}"

    def versions(self, tool: str) -> str:
        """Return the list of a tool's versions, in the order they were first announced."""
        return f"{self.prefix}tool_versions:{tool}"

    def weights(self, tool: str) -> str:
        """Return the hash of a tool's traffic weights, by version."""
        return f"{self.prefix}tool_weights:{tool}"


class NotRedisError(ValueError):
    """Something else than a Redis that can be used answers at the address of one."""


def _is_transient(exc: Exception) -> bool:
    kinds = (
        redis_errors.ConnectionError,
        redis_errors.TimeoutError,
        # A transaction that Redis refused to queue reports only that it was dropped.
        redis_errors.ExecAbortError,
        ConnectionError,
    )
    return isinstance(exc, kinds) or error_code(exc) in PASSING


@dataclass(eq=False)
class RedisConnection:
    """A connection to Redis for one run."""

    redis: Any
    keys: Keys
    lease_s: float = 30.0
    """Seconds after which entries of a silent consumer go to another one."""
    max_processing_failures: int = 3
    """Failed processings of one entry before it is dead-lettered."""
    address: str = field(default="", init=False)
    """The URL without its password, for messages."""
    answers_since: float = field(default_factory=time.monotonic)
    """`time.monotonic` since when Redis has answered without an outage that was noticed."""
    _answered: float = field(default_factory=time.monotonic, init=False)
    """When it last did."""
    _commits: SharedCommits = field(init=False)

    def __post_init__(self) -> None:
        """Prepare the transactions."""
        self._commits = SharedCommits(self.redis)

    @classmethod
    async def connect(
        cls, url: str, run_id: str, *, lease_s: float = 30.0, max_processing_failures: int = 3
    ) -> Self:
        """Connect, waiting with back-off until Redis answers.

        Args:
            url: redis://, rediss:// or unix:// address.
            run_id: names the run; see `Keys`.
            lease_s: as the attribute.
            max_processing_failures: as the attribute.

        Raises:
            NotRedisError: something answers there that is not Redis, or lets this user do nothing.
        """
        # redis-py leaves half of its types open; strict checking stops at its door.
        pool: Any = cast(Any, BlockingConnectionPool).from_url(
            url, socket_timeout=SOCKET_TIMEOUT_S, max_connections=MAX_CONNECTIONS, timeout=None
        )
        client: Any = cast(Any, Redis).from_pool(pool)
        connection = cls(client, Keys(run_id), lease_s, max_processing_failures)
        connection.address = hide_password(url)
        try:
            await connection.retrying(lambda: client.ping(), "connect")
        except BaseException as exc:
            await close_client(client)
            if isinstance(exc, (ResponseError, *NOT_REDIS)):
                raise connection.not_redis(exc) from exc
            raise
        return connection

    def not_redis(self, exc: Exception) -> NotRedisError:
        """Return the error that says in one line what is wrong at the address."""
        if isinstance(exc, NotRedisError):
            return exc
        return NotRedisError(trouble_of(exc).of(f"redis.url ({self.address})"))

    async def close(self) -> None:
        """Close the connections."""
        await close_client(self.redis)

    async def __aenter__(self) -> Self:
        """Return self; the connections close on exit."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Close the connections."""
        await self.close()

    async def knows_run(self) -> bool:
        """Return whether Redis keeps anything of the run."""

        async def look() -> bool:
            pattern = f"{self.keys.prefix}*"
            async for key in self.redis.scan_iter(match=pattern, count=1000):
                if key != self.keys.probe.encode():  # which an asker writes itself
                    return True
            return False

        return await self.retrying(look, "look for the run")

    async def forget_run(self) -> None:
        """Delete everything of the run, and of the tools it does not share with other runs.

        For a run whose services have stopped; a resumed one needs nothing of it.
        """
        pool = PoolKeys(self.keys.run_id)

        async def forget() -> None:
            for prefix in (self.keys.prefix, pool.prefix):
                keys = [key async for key in self.redis.scan_iter(match=f"{prefix}*", count=1000)]
                if keys:
                    await self.redis.delete(*keys)

        await self.retrying(forget, "forget run")

    async def transact(self, fill: Callable[[Any], object], what: str) -> list[Any]:
        """Run the commands that `fill` puts on a pipeline in one MULTI; see `retrying`.

        Transactions of other tasks may be in the same MULTI. `fill` runs again for another try.
        """
        answers = await self._commits.join(fill)
        if answers is not None:
            return answers

        async def run() -> list[Any]:
            async with self.redis.pipeline(transaction=True) as pipe:
                fill(pipe)
                return await pipe.execute()

        return await self.retrying(run, what)

    async def retrying(self, operation: Callable[[], Awaitable[T]], what: str) -> T:
        """Run one Redis operation, again and again while Redis is away or full.

        The operation may run more than once even where it took effect (the answer was lost), so
        it must be one that may be repeated; duplicates of a published message are dropped by the
        learner's group slots.
        """
        delay_s = FIRST_DELAY_S
        waiting = False
        task = asyncio.current_task()
        cancellations = task.cancelling() if task else 0
        while True:
            try:
                result = await operation()
            except Exception as exc:
                if isinstance(exc, redis_errors.InvalidResponse):
                    raise self.not_redis(exc) from exc
                if not _is_transient(exc):
                    raise
                if not waiting:
                    logger.warning(
                        "redis is unreachable or full; waiting and retrying operation=%s error=%s",
                        what,
                        exc,
                    )
                    waiting = True
                await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
                delay_s = min(delay_s * 2, LONGEST_DELAY_S)
                continue
            now = time.monotonic()
            if waiting:
                logger.warning("redis answers again operation=%s", what)
                # One connection that was idle while Redis restarted fails long after: others had
                # their answers meanwhile, and leases were renewed.
                if now - self._answered > min(AWAY_S, self.lease_s / 2):
                    self.answers_since = now
            self._answered = now
            if task and task.cancelling() > cancellations:
                # redis-py sends inside `asyncio.wait_for`, which in Python 3.11 loses a
                # cancellation that meets the end of what it waits for.
                raise asyncio.CancelledError
            return result
