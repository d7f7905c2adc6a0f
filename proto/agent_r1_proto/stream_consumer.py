"""Reading a Redis Stream as one member of a consumer group, at least once.

`Broker.consumer` (streams.py) --stream, group--> `StreamConsumer` --Entry--> a service

What it promises (the learner's ledger does the rest, see docs/architecture.md):

- publish, acknowledge and delete happen in one MULTI, so no entry that led to another is half done;
- entries in flight are leased: the lease is renewed while the consumer lives, and the entries of a
  dead consumer go to another one after `lease_s`;
- an entry that cannot be parsed is dead-lettered with a reason; one of a newer major schema stays
  pending; one whose processing failed `max_processing_failures` times is dead-lettered;
- an entry of a consumer that ended without giving it back is a suspect, and is processed alone: one
  that ended `MAX_ENDS` processes while nothing else was in flight there is dead-lettered;
- a Redis that is away or full pauses the caller, with back-off; nothing is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Self, TypeVar, cast

from redis.exceptions import ResponseError

from agent_r1_proto.component_notes import NOTE
from agent_r1_proto.connection import RedisConnection
from agent_r1_proto.dead_letters import MAX_LETTERS, Fields, encode_letter
from agent_r1_proto.messages import (
    EntryError,
    NewerSchemaError,
    StreamMessage,
    decode_entry,
    encode_entry,
)

logger = logging.getLogger(__name__)

LONGEST_BLOCK_S = 5.0
"""One XREADGROUP blocks at most this long: between two, entries of the dead are reclaimed."""
LEAVE_TIMEOUT_S = 2.0
"""Longest a consumer that leaves waits for Redis."""
MAX_ENDS = 2
"""Processes that an entry may end while it is processed alone."""
CLEARED_FOR_MORE = 4
"""After twice as many suspects that ended well, two are taken at a time, after thrice as many
three: a machine that vanished leaves hundreds, of which none is to blame."""
PENDING_PAGE = 500
AFTER_ALL = f"{2**64 - 1}-{2**64 - 2}"
"""No entry has a higher id; the highest of all means new entries to Redis."""

T = TypeVar("T")
M = TypeVar("M", bound=StreamMessage)

# Renews only what this consumer still owns: a plain XCLAIM would steal back an entry that
# another consumer has taken over.
_RENEW_OWNED = """
local renewed = 0
for i = 3, #ARGV do
  local mine = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2])
  if #mine > 0 then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'JUSTID')
    renewed = renewed + 1
  end
end
return renewed
"""


# A stream without entries says nothing; consumers that block on it would have to create it again.
_DELETE_IF_LAST = """
if redis.call('XLEN', KEYS[1]) > 0 then return 0 end
local consumers = redis.pcall('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])
if consumers.err then return 0 end
for _, consumer in ipairs(consumers) do
  local fields = {}
  for i = 1, #consumer, 2 do fields[consumer[i]] = consumer[i + 1] end
  if fields.name ~= ARGV[2] and fields.idle < tonumber(ARGV[3]) then return 0 end
end
return redis.call('DEL', KEYS[1])
"""


@dataclass(frozen=True)
class Entry(Generic[M]):
    """One message taken from a stream."""

    entry_id: str
    message: M
    suspect: bool = False
    """Whether a consumer that had it ended without giving it back."""


@dataclass(frozen=True)
class _LeftBehind:
    """Ids of entries that consumers hold no longer."""

    released: list[str]
    suspects: list[str]


async def _no_result(message: StreamMessage, reason: str) -> Sequence[tuple[str, StreamMessage]]:
    return ()


@dataclass(eq=False)
class StreamConsumer(Generic[M]):
    """One member of a consumer group.

    Reading order: what this consumer's name left pending in an earlier life, then what dead
    consumers left, then new entries. Suspects are taken when nothing else is in flight, and nothing
    else is taken meanwhile.
    """

    broker: RedisConnection
    stream: str
    message_type: type[M]
    group: str
    consumer: str
    on_deadly: Callable[[M, str], Awaitable[Sequence[tuple[str, StreamMessage]]]] = _no_result
    """Callback for a message that ended its processes, and the reason; returns what is published
    with its dead letter, so that whoever waits for a result gets one."""
    _in_flight: set[str] = field(default_factory=set[str], init=False)
    _has_read_own: bool = field(default=False, init=False)
    _next_reclaim: float = field(default=0.0, init=False)
    _seen_newer: set[str] = field(default_factory=set[str], init=False)
    """Notes already given of entries of a newer schema."""
    _newer: set[str] = field(default_factory=set[str], init=False)
    """Ids of such entries: they wait for another reader."""
    _renewal: asyncio.Task[None] | None = field(default=None, init=False)
    _suspects: set[str] = field(default_factory=set[str], init=False)
    """Suspects in flight; nothing else is then."""
    _alone: str | None = field(default=None, init=False)
    """The suspect that is in flight alone."""
    _suspects_wait: bool = field(default=False, init=False)
    """Suspects were seen, and are taken when nothing is in flight any more."""
    _cleared: int = field(default=0, init=False)
    """Suspects that ended well here."""
    _landed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set when an entry is no longer in flight."""

    def __post_init__(self) -> None:
        """Prepare the scripts."""
        self._renew_script: Any = self.broker.redis.register_script(_RENEW_OWNED)
        self._delete_if_last: Any = self.broker.redis.register_script(_DELETE_IF_LAST)

    async def __aenter__(self) -> Self:
        """Create the group if needed and start renewing leases."""
        await self._ensure_group()
        self._renewal = asyncio.create_task(self._renew_forever())
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        """Stop renewing leases; entries still in flight go to others when their lease ends.

        After an error they are suspects, for one of them may have led to it. The last consumer of a
        stream that has no entries takes the stream with it.
        """
        if self._renewal is not None:
            self._renewal.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._renewal
        arguments = [self.group, self.consumer, self._lease_ms]
        in_order = exc_type is None or not issubclass(exc_type, Exception)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                if in_order:
                    await self._give_back(sorted(self._in_flight), idle_ms=0)
                await self.broker.retrying(
                    lambda: self._delete_if_last(keys=[self.stream], args=arguments), "leave"
                )

    @property
    def num_in_flight(self) -> int:
        """Number of entries read and neither finished, failed nor released."""
        return len(self._in_flight)

    async def read(self, count: int, block_s: float) -> list[Entry[M]]:
        """Take up to `count` entries.

        Args:
            count: most entries to take.
            block_s: seconds to wait for a new entry; 0 does not wait.

        Returns:
            Entries in stream order; [] when none came in time.
        """
        entries = await self._read_left(count)
        deadline = time.monotonic() + block_s
        longest_block_s = min(LONGEST_BLOCK_S, self.broker.lease_s / 2)
        while not entries:
            left_s = min(max(deadline - time.monotonic(), 0.0), longest_block_s)
            if self._suspects or self._suspects_wait:
                await self._wait_for_landing(left_s)
            elif self._has_read_own:  # else a suspect has landed while others were looked for
                entries = await self._read_new(count, left_s)
            if not entries:
                if time.monotonic() >= deadline:
                    return []
                entries = await self._read_left(count)
        return entries

    async def _read_left(self, count: int) -> list[Entry[M]]:
        """Take what others left, or this consumer's name in an earlier life, before new entries."""
        return await self._read_own(count) or await self._reclaim(count)

    async def finish(
        self, entry: Entry[M], publish: Sequence[tuple[str, StreamMessage]] = ()
    ) -> None:
        """Publish what the entry led to, and acknowledge and delete it, in one MULTI."""
        if publish:
            await self._replace([entry.entry_id], publish, "finish")
        else:
            await self.finish_many([entry])

    async def finish_many(self, entries: Sequence[Entry[M]]) -> None:
        """Acknowledge and delete entries that lead to nothing further."""
        if not entries:
            return
        ids = [entry.entry_id for entry in entries]

        async def remove() -> None:
            # No MULTI: a full Redis refuses every command of one, and this makes room. What is
            # deleted first and never acknowledged is forgotten by whoever gets it next.
            async with self.broker.redis.pipeline(transaction=False) as pipe:
                self._remove(pipe, ids)
                await pipe.execute()

        await self.broker.retrying(remove, f"finish {self.stream}")
        self._land(ids, well=True)

    async def fail(
        self, entry: Entry[M], reason: str, publish: Sequence[tuple[str, StreamMessage]] = ()
    ) -> bool:
        """Count a failed processing and give the entry back, or dead-letter it at the limit.

        Args:
            entry: what could not be processed.
            reason: why.
            publish: published with the dead letter, so that whoever waits for a result gets one.

        Returns:
            True when the entry was dead-lettered.
        """
        failures_key = self.broker.keys.failures(self.stream)
        count = await self.broker.retrying(
            lambda: self.broker.redis.hincrby(failures_key, entry.entry_id, 1),
            "count failure",
        )
        if int(count) >= self.broker.max_processing_failures:
            text = f"failed {count} times: {reason}"
            await self._dead_letter(entry.entry_id, None, text, publish)
            return True
        logger.warning(
            "processing failed; trying again stream=%s entry_id=%s failures=%d limit=%d reason=%s",
            self.stream,
            entry.entry_id,
            count,
            self.broker.max_processing_failures,
            reason,
        )
        await self.release(entry)
        return False

    async def release(self, entry: Entry[M]) -> None:
        """Give an entry back at once, for any consumer to take."""
        # An idle time of a whole lease makes the entry reclaimable now.
        await self._give_back([entry.entry_id], idle_ms=self._lease_ms)
        self._next_reclaim = 0.0

    async def _give_back(self, ids: Sequence[str], *, idle_ms: int) -> None:
        """Hold entries no longer, which then have ended no process."""
        for entry_id in ids:
            is_suspect, was_alone = entry_id in self._suspects, entry_id == self._alone
            self._land([entry_id])
            if was_alone:
                await self._count_alone(entry_id, -1)
            await self._with_group(
                lambda one=entry_id, count=None if is_suspect else 0: self.broker.redis.xclaim(
                    self.stream,
                    self.group,
                    self.consumer,
                    min_idle_time=0,
                    message_ids=[one],
                    idle=idle_ms,
                    retrycount=count,
                    justid=True,
                ),
                "release",
            )

    def note_components(self, entry: Entry[M]) -> None:
        """Keep, for the dead letter of a suspect, what this asyncio task passes to
        `begin_component`."""
        NOTE.set(partial(self._note_component, entry.entry_id) if entry.suspect else None)

    async def _note_component(self, entry_id: str, name: str) -> None:
        key = self.broker.keys.suspects(self.stream)
        await self.broker.retrying(
            lambda: self.broker.redis.hset(key, _component_field(entry_id), name), "note component"
        )

    async def _count_alone(self, entry_id: str, by: int) -> None:
        key = self.broker.keys.suspects(self.stream)
        await self.broker.retrying(
            lambda: self.broker.redis.hincrby(key, entry_id, by), "count suspect"
        )

    def _land(self, ids: Sequence[str], *, well: bool = False) -> None:
        landed = self._suspects.intersection(ids)
        self._cleared += well * len(landed)
        self._in_flight.difference_update(ids)
        self._suspects.difference_update(ids)
        self._alone = None if self._alone in ids else self._alone
        if (landed or self._suspects_wait) and not self._in_flight:
            self._next_reclaim = 0.0  # the next suspect comes before new entries
        self._landed.set()

    async def _wait_for_landing(self, timeout_s: float) -> None:
        if not self._in_flight:  # the last has landed while suspects were looked for
            self._next_reclaim = 0.0
            return
        self._landed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._landed.wait()

    @property
    def _lease_ms(self) -> int:
        return max(1, int(self.broker.lease_s * 1000))

    async def _replace(
        self,
        ids: Sequence[str],
        publish: Sequence[tuple[str, StreamMessage]],
        what: str,
        letter: Fields | None = None,
    ) -> None:
        """Publish, acknowledge and delete in one MULTI; `letter` joins the dead letters."""
        keys = self.broker.keys
        encoded = [(stream, encode_entry(message)) for stream, message in publish]

        def commit(pipe: Any) -> None:
            if letter is not None:
                pipe.xadd(keys.dead_letters, letter, maxlen=MAX_LETTERS, approximate=False)
                pipe.incr(keys.dead_letter_count)
            for stream, fields in encoded:
                pipe.xadd(stream, fields)
            self._remove(pipe, ids)

        await self.broker.transact(commit, f"{what} {self.stream}")
        self._land(ids, well=letter is None)

    def _remove(self, pipe: Any, ids: Sequence[str]) -> None:
        pipe.xdel(self.stream, *ids)
        pipe.xack(self.stream, self.group, *ids)
        pipe.hdel(self.broker.keys.failures(self.stream), *ids)
        pipe.hdel(self.broker.keys.suspects(self.stream), *ids, *map(_component_field, ids))

    async def _ensure_group(self) -> None:
        async def create() -> None:
            try:
                await self.broker.redis.xgroup_create(
                    self.stream, self.group, id="0", mkstream=True
                )
            except ResponseError as exc:
                if "BUSYGROUP" not in str(exc):
                    raise

        await self.broker.retrying(create, f"create group on {self.stream}")

    async def _with_group(self, operation: Callable[[], Awaitable[T]], what: str) -> T:
        """Run an operation, creating the group again if Redis came back without its data."""
        while True:
            try:
                return await self.broker.retrying(operation, what)
            except ResponseError as exc:
                # Redis 7.0 says UNBLOCKED to a read that waits while its stream is deleted.
                if not str(exc).startswith(("NOGROUP", "UNBLOCKED")):
                    raise
                logger.warning("consumer group is gone; creating it stream=%s", self.stream)
                await self._ensure_group()

    async def _read_own(self, count: int) -> list[Entry[M]]:
        """Take what this consumer's name left in an earlier life, until nothing is left of it."""
        if self._has_read_own:
            return []
        await self._register()
        left = await self._left_behind(0, self.consumer)
        entries = await self._take(left, count, 0)
        self._has_read_own = not (entries or self._suspects or self._suspects_wait)
        return entries

    async def _register(self) -> None:
        """Let Redis list this consumer, which has read nothing yet: a stream has readers."""
        await self._with_group(
            lambda: self.broker.redis.xreadgroup(
                self.group, self.consumer, {self.stream: AFTER_ALL}, count=1
            ),
            "register",
        )

    async def _reclaim(self, count: int) -> list[Entry[M]]:
        """Take what other consumers gave back, or no longer renew."""
        now = time.monotonic()
        if now < self._next_reclaim:
            return []
        left = await self._left_behind(self._lease_ms)
        if now < self.broker.answers_since + self.broker.lease_s:
            # While Redis was away nobody could renew a lease.
            left = replace(left, suspects=[])
        entries = await self._take(left, count, self._lease_ms)
        if entries:
            logger.info(
                "reclaimed entries stream=%s count=%d consumer=%s",
                self.stream,
                len(entries),
                self.consumer,
            )
        else:
            self._next_reclaim = now + min(1.0, self.broker.lease_s / 3)
        return entries

    async def _left_behind(self, idle_ms: int, consumer: str | None = None) -> _LeftBehind:
        """Return which entries are pending for so long, of one consumer or of all."""
        left, first, skipped = _LeftBehind([], []), "-", self._in_flight | self._newer
        while True:
            rows: list[dict[str, Any]] = await self._with_group(
                lambda start=first: self.broker.redis.xpending_range(
                    self.stream,
                    self.group,
                    min=start,
                    max="+",
                    count=PENDING_PAGE,
                    consumername=consumer,
                    idle=idle_ms or None,
                ),
                "list pending",
            )
            for row in rows:
                entry_id = row["message_id"].decode()
                if entry_id not in skipped:
                    # Who releases an entry sets the count back.
                    ended = row["times_delivered"] > 0
                    (left.suspects if ended else left.released).append(entry_id)
            if len(rows) < PENDING_PAGE:
                return left
            first = f"({rows[-1]['message_id'].decode()}"

    async def _take(self, left: _LeftBehind, count: int, idle_ms: int) -> list[Entry[M]]:
        """Take entries that were released, as long as no suspect is in flight; else suspects."""
        if self._suspects:
            return []
        entries = await self._claim(left.released[:count], idle_ms) if left.released else []
        self._suspects_wait = bool(left.suspects) and bool(self._in_flight)
        if entries or self._suspects_wait:
            return entries
        return await self._take_suspects(left.suspects, min(count, self._room), idle_ms)

    @property
    def _room(self) -> int:
        """Suspects that may be in flight together."""
        return max(1, self._cleared // CLEARED_FOR_MORE)

    async def _take_suspects(self, ids: Sequence[str], count: int, idle_ms: int) -> list[Entry[M]]:
        entries: list[Entry[M]] = []
        for entry_id in ids:
            for entry in await self._claim([entry_id], idle_ms):
                if not await self._bury_deadly(entry):
                    self._suspects.add(entry_id)
                    entries.append(replace(entry, suspect=True))
            if len(entries) == count:
                break
        if len(entries) == 1:
            self._alone = entries[0].entry_id
            await self._count_alone(self._alone, 1)
        return entries

    async def _bury_deadly(self, entry: Entry[M]) -> bool:
        """Dead-letter an entry that ended too many processes; say whether it did."""
        key, fields = self.broker.keys.suspects(self.stream), _fields_of(entry.entry_id)
        ends, component = await self.broker.retrying(
            lambda: self.broker.redis.hmget(key, fields), "read suspect"
        )
        if int(ends or 0) < MAX_ENDS:
            return False
        where = component.decode() if component else f"the service {self.group}"
        reason = (
            f"ended {int(ends)} processes while nothing else was in flight there, as a crash or a "
            f"lack of memory does; the last time in {where}"
        )
        publish = await self.on_deadly(entry.message, reason)
        await self._dead_letter(entry.entry_id, None, reason, publish)
        deadly = self.broker.keys.deadly_count
        await self.broker.retrying(lambda: self.broker.redis.incr(deadly), "count deadly entry")
        return True

    async def _claim(self, ids: Sequence[str], idle_ms: int) -> list[Entry[M]]:
        rows: Any = await self._with_group(
            lambda: self.broker.redis.xclaim(
                self.stream, self.group, self.consumer, min_idle_time=idle_ms, message_ids=ids
            ),
            "claim",
        )
        claimed = {row[0].decode() for row in rows if row[0] is not None}
        for entry_id in ids:
            if entry_id not in claimed:
                await self._forget_deleted(entry_id)
        return await self._decode(rows)

    async def _forget_deleted(self, entry_id: str) -> None:
        """Forget an entry that was deleted while it was pending; another may have claimed it."""
        rows = await self.broker.retrying(
            lambda: self.broker.redis.xrange(self.stream, entry_id, entry_id), "look for entry"
        )
        if not rows:
            await self._forget(entry_id)

    async def _read_new(self, count: int, block_s: float) -> list[Entry[M]]:
        block_ms = int(block_s * 1000)
        reply: Any = await self._with_group(
            lambda: self.broker.redis.xreadgroup(
                self.group,
                self.consumer,
                {self.stream: ">"},
                count=count,
                block=block_ms if block_ms > 0 else None,
            ),
            "read",
        )
        return await self._decode(_rows(reply))

    async def _decode(self, rows: Sequence[tuple[bytes | None, Fields | None]]) -> list[Entry[M]]:
        entries: list[Entry[M]] = []
        for raw_id, fields in rows:
            # Redis 6.2 hands out entries that were deleted while pending as (None, None) or
            # (id, None), and leaves them pending.
            if raw_id is None:
                continue
            entry_id = raw_id.decode()
            if fields is None or not fields:
                await self._forget(entry_id)
                continue
            try:
                message = decode_entry(self.message_type, fields)
            except NewerSchemaError as exc:
                self._newer.add(entry_id)
                if str(exc) not in self._seen_newer:
                    self._seen_newer.add(str(exc))
                    logger.error("entry left pending stream=%s reason=%s", self.stream, exc)
                continue
            except EntryError as exc:
                await self._dead_letter(entry_id, fields, str(exc))
                continue
            self._in_flight.add(entry_id)
            entries.append(Entry(entry_id, message))
        return entries

    async def _forget(self, entry_id: str) -> None:
        await self.broker.retrying(
            lambda: self.broker.redis.xack(self.stream, self.group, entry_id), "forget"
        )

    async def _dead_letter(
        self,
        entry_id: str,
        fields: Fields | None,
        reason: str,
        publish: Sequence[tuple[str, StreamMessage]] = (),
    ) -> None:
        logger.error(
            "entry dead-lettered stream=%s entry_id=%s reason=%s", self.stream, entry_id, reason
        )
        original: Fields = fields or {}
        if fields is None:
            rows = await self.broker.retrying(
                lambda: self.broker.redis.xrange(self.stream, entry_id, entry_id), "dead letter"
            )
            original = rows[0][1] if rows else {}
        letter = encode_letter(
            self.stream, entry_id, reason, original, unreadable=fields is not None
        )
        await self._replace([entry_id], publish, "dead letter", letter)

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(self.broker.lease_s / 3)
            if not self._in_flight:
                continue
            arguments = [self.group, self.consumer, *sorted(self._in_flight)]
            try:
                await self.broker.retrying(
                    lambda args=arguments: self._renew_script(keys=[self.stream], args=args),
                    "renew leases",
                )
            except ResponseError as exc:
                # The group is gone (Redis restarted empty); the next read creates it again.
                logger.warning("leases not renewed stream=%s error=%s", self.stream, exc)


def _component_field(entry_id: str) -> str:
    return f"{entry_id}/component"


def _fields_of(entry_id: str) -> list[str]:
    """Return the fields of a suspect: how often it was taken alone, and what was at work last."""
    return [entry_id, _component_field(entry_id)]


def _rows(reply: Any) -> list[tuple[bytes, Fields | None]]:
    """Return the rows of an XREADGROUP reply of one stream, in either of its two shapes."""
    if not reply:
        return []
    if isinstance(reply, dict):  # RESP3: {stream: [[row, ...]]}
        groups = next(iter(cast(dict[Any, Any], reply).values()))
        return list(groups[0]) if groups and isinstance(groups[0], list) else list(groups)
    return list(reply[0][1])
