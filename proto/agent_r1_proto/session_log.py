"""The log of a session in Redis: what its owner wrote, in order, behind a fence.

gateway/journal.py writes events of a session here before an agent sees them, and reads them where
it takes a session over. Taking it over raises the number of its owner; an earlier owner can write
no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_r1_proto.connection import RedisConnection

# A repeated append (its answer was lost) finds the list longer than its writer knew it, by entries
# with which it begins: more may have come behind them since.
_APPEND = """
if redis.call('GET', KEYS[2]) ~= ARGV[1] then return 0 end
local first = 4 + redis.call('LLEN', KEYS[1]) - tonumber(ARGV[2])
for i = first, #ARGV do redis.call('RPUSH', KEYS[1], ARGV[i]) end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return 1
"""
_TAKE = """
local owner = redis.call('INCR', KEYS[2])
redis.call('PEXPIRE', KEYS[2], ARGV[1])
return {owner, redis.call('LRANGE', KEYS[1], 0, -1)}
"""


class SessionTakenError(Exception):
    """Another owner has taken the session over; nothing may be done with it here."""


class SessionLog:
    """The log of one session, of which this is the owner once `take` has returned.

    Args:
        connection: to the Redis of the run.
        session_id: name of the session.
        kept_s: seconds after the last entry for which it is kept.
    """

    def __init__(self, connection: RedisConnection, session_id: str, kept_s: float) -> None:
        self._connection = connection
        self._keys = connection.keys.session(session_id)
        self._kept_ms = int(kept_s * 1000)
        self._append: Any = connection.redis.register_script(_APPEND)
        self._take: Any = connection.redis.register_script(_TAKE)
        self._owner = self._length = 0

    async def take(self) -> list[bytes]:
        """Become the owner, and return what has been written."""
        answer: list[Any] = await self._connection.retrying(
            lambda: self._take(keys=self._keys, args=[self._kept_ms]), "take session"
        )
        self._owner, entries = int(answer[0]), list(answer[1])
        self._length = len(entries)
        return entries

    async def append(self, entries: Sequence[bytes]) -> None:
        """Write entries behind the others; they are there when this returns. One call at a time.

        Where it raises anything else, the next call begins with the same entries.

        Raises:
            SessionTakenError: this is the owner no more.
        """
        args = [self._owner, self._length, self._kept_ms, *entries]
        written = await self._connection.retrying(
            lambda: self._append(keys=self._keys, args=args), "write session"
        )
        if not written:
            raise SessionTakenError("the session was taken over by another gateway")
        self._length += len(entries)

    async def first(self) -> bytes | None:
        """Return the first entry, whoever is the owner; None where nothing is written."""
        key = self._keys[0]
        return await self._connection.retrying(
            lambda: self._connection.redis.lindex(key, 0), "read session"
        )

    async def delete(self) -> None:
        """Delete it: nobody will ask for the session any more."""
        await self._connection.retrying(
            lambda: self._connection.redis.delete(*self._keys), "delete session"
        )
