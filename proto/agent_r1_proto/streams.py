"""Broker of one run: messages --XADD--> Redis Streams.

`StreamConsumer` (stream_consumer.py) reads them; `registry.py`, `failures.py` and
`scoring_models.py` hold the few keys that are not streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from redis.exceptions import ResponseError

from agent_r1_proto.connection import RedisConnection
from agent_r1_proto.dead_letters import DeadLetter, decode_letter
from agent_r1_proto.messages import StreamMessage, encode_entry
from agent_r1_proto.stream_consumer import StreamConsumer

M = TypeVar("M", bound=StreamMessage)


@dataclass(frozen=True)
class RedisMemory:
    """Memory of a Redis server, in bytes."""

    used: int = 0
    limit: int | None = None
    """maxmemory; None when it has none."""


class Broker(RedisConnection):
    """Connection through which a service publishes and consumes, for one run."""

    async def publish(self, stream: str, message: StreamMessage) -> None:
        """Append one message to a stream, waiting while Redis is away or full."""
        await self.publish_many(stream, [message])

    async def publish_many(self, stream: str, messages: Sequence[StreamMessage]) -> None:
        """Append messages to a stream, all or none."""
        if not messages:
            return
        entries = [encode_entry(message) for message in messages]
        await self.transact(
            lambda pipe: [pipe.xadd(stream, fields) for fields in entries], f"publish to {stream}"
        )

    async def depth(self, stream: str) -> int:
        """Return how many entries of a stream are waiting or in flight."""
        return int(await self.retrying(lambda: self.redis.xlen(stream), "depth"))

    async def delete_stream(self, stream: str) -> None:
        """Delete a stream and everything in it."""
        await self.retrying(lambda: self.redis.delete(stream), "delete stream")

    async def pending(self, stream: str, group: str) -> int:
        """Return how many entries of a stream consumers of a group have taken and not finished."""

        async def ask() -> int:
            try:
                return int((await self.redis.xpending(stream, group))["pending"])
            except ResponseError:  # no consumer has made the group yet
                return 0

        return await self.retrying(ask, "pending")

    async def wait_for_writes(self) -> None:
        """Write a key that expires at once, waiting while Redis takes no writes."""
        await self.retrying(lambda: self.redis.set(self.keys.probe, b"", px=1), "probe")

    async def time(self) -> float:
        """Return the time of the Redis server, Unix time in seconds."""
        seconds, microseconds = await self.retrying(lambda: self.redis.time(), "time")
        return float(seconds) + float(microseconds) / 1e6

    async def memory(self) -> RedisMemory:
        """Return what the Redis server uses and may use."""
        info = await self.retrying(lambda: self.redis.info("memory"), "memory")
        return RedisMemory(int(info.get("used_memory", 0)), int(info.get("maxmemory", 0)) or None)

    def consumer(
        self, stream: str, message_type: type[M], *, group: str, consumer: str
    ) -> StreamConsumer[M]:
        """Return a consumer of one stream; use it as `async with`."""
        return StreamConsumer(self, stream, message_type, group=group, consumer=consumer)

    async def dead_letters(self, after: str = "") -> list[DeadLetter]:
        """Return the dead letters of the run, oldest first.

        Args:
            after: id of a letter; those up to it are left out.
        """
        first = f"({after}" if after else "-"
        key = self.keys.dead_letters
        rows = await self.retrying(lambda: self.redis.xrange(key, min=first), "list")
        return [decode_letter(letter_id, fields) for letter_id, fields in rows]

    async def newest_dead_letter(self) -> str:
        """Return the id of the newest dead letter; "" without one."""
        key = self.keys.dead_letters
        rows = await self.retrying(lambda: self.redis.xrevrange(key, count=1), "newest")
        return rows[0][0].decode() if rows else ""

    async def dead_letter_count(self) -> int:
        """Return how many entries the run has dead-lettered, those no longer kept included."""
        key = self.keys.dead_letter_count
        return int(await self.retrying(lambda: self.redis.get(key), "dead letters") or 0)

    async def deadly_count(self) -> int:
        """Return how many of those entries ended processes."""
        key = self.keys.deadly_count
        return int(await self.retrying(lambda: self.redis.get(key), "deadly entries") or 0)

    async def forget_training(self) -> None:
        """Delete everything of a finished run but what its services say of themselves.

        They may stay, and wait for the next learner of this run id.
        """
        keys = self.keys
        streams = (keys.tasks, keys.trajectories, keys.scored)
        names = [*map(keys.failures, streams), *map(keys.suspects, streams)]
        names += [keys.newest_version, keys.incarnation, keys.join_offer, keys.heartbeat]
        names += [keys.dead_letters, keys.dead_letter_count, keys.deadly_count]
        names += [keys.failure_counts, keys.first_failures]

        async def forget() -> None:
            async with self.redis.pipeline(transaction=True) as pipe:
                pipe.delete(*names)
                for stream in streams:  # the last consumer of each takes it along
                    pipe.xtrim(stream, maxlen=0, approximate=False)
                await pipe.execute()

        await self.retrying(forget, "forget training")

    async def retry_dead_letter(self, letter: DeadLetter) -> None:
        """Put a dead letter back on its stream.

        Raises:
            ValueError: only its beginning was kept.
        """
        if letter.cut:
            raise ValueError(
                f"dead letter {letter.letter_id} cannot be retried: of its {letter.size_bytes} "
                "bytes only the beginning was kept; the learner asks again for what it still needs"
            )

        def move(pipe: Any) -> None:
            pipe.xadd(letter.stream, dict(letter.fields))
            pipe.xdel(self.keys.dead_letters, letter.letter_id)

        await self.transact(move, "retry dead letter")
