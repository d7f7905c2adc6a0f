"""Samples that were asked for and exist nowhere any more: Redis lost its last writes.

What a client has asked for and not received --compared with the run's streams--> what it has to
ask for again. The learner and `EvalClient` use it. A Redis that fails over may lose waiting entries
and nothing else, so that the streams look idle.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from agent_r1_proto.streams import Broker

READ_COUNT = 100
"""Entries that Redis looks at in one call: trajectories are large, and others wait meanwhile."""

# Only keys leave Redis. Clients number their questions alike: ARGV[3] tells whose an entry is.
_READ_KEYS = """
local rows = redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[2])
local last, keys = '', {}
for _, row in ipairs(rows) do
  local fields = {}
  for i = 1, #row[2], 2 do fields[row[2][i]] = row[2][i + 1] end
  if fields.key and string.find(fields.meta or '', ARGV[3], 1, true) then
    keys[#keys + 1] = fields.key
  end
  last = row[1]
end
return {last, keys}
"""


class LostSamples:
    """Compares the samples of one client with the entries of the run's streams.

    Args:
        broker: connection to Redis.
        reply_stream: where the client gets its results; None is the learner's.
    """

    def __init__(self, broker: Broker, reply_stream: str | None = None) -> None:
        keys = broker.keys
        # In the order in which entries move: one that moves meanwhile is found further on.
        self._streams = (keys.tasks, keys.trajectories, reply_stream or keys.scored)
        self._mark = f'"reply_stream":"{reply_stream}"' if reply_stream else ""
        self._broker = broker
        self._read_keys: Any = broker.redis.register_script(_READ_KEYS)
        self._missing: set[str] = set()
        """What the last comparison missed."""
        self._compared_at = 0.0

    async def find(self, asked: Collection[str]) -> set[str]:
        """Return the attempts that two comparisons in a row have missed.

        Compares once in half a lease, and not before Redis has answered for a whole one: until
        then other services may hold what they could not publish.

        Args:
            asked: keys of attempts that were published, without a result so far.

        Returns:
            Those to publish again; empty where no comparison is due.
        """
        since, lease_s = self._broker.answers_since, self._broker.lease_s
        if time.monotonic() < max(since + lease_s, self._compared_at + lease_s / 2):
            return set()
        before = self._missing if self._compared_at > since else set[str]()
        missing = await self._missing_now(asked)
        if self._broker.answers_since != since:  # Redis was away while it was read
            return set()
        lost = missing & before
        self._missing, self._compared_at = missing - lost, time.monotonic()
        return lost

    async def _missing_now(self, asked: Collection[str]) -> set[str]:
        missing = {key: _sample_and_attempt(key) for key in asked}
        for stream in self._streams:
            if not missing:
                break
            found = await self._attempts(stream)
            missing = {
                key: (sample, attempt)
                for key, (sample, attempt) in missing.items()
                if found.get(sample, -1) < attempt
            }
        return set(missing)

    async def _attempts(self, stream: str) -> dict[str, int]:
        """Return the highest attempt of every sample in a stream.

        A rollout server that repeats an attempt publishes it under a higher number.
        """
        attempts: dict[str, int] = {}
        first = "-"
        while True:
            arguments = [first, READ_COUNT, self._mark]
            last, keys = await self._broker.retrying(
                lambda args=arguments: self._read_keys(keys=[stream], args=args), "read keys"
            )
            for key in keys:
                sample, attempt = _sample_and_attempt(key.decode(errors="replace"))
                attempts[sample] = max(attempt, attempts.get(sample, -1))
            if not last:
                return attempts
            first = f"({last.decode()}"


def lost_reason(count: int) -> str:
    """Return what to say of samples that were lost."""
    return (
        f"lost_in_redis: {count} samples were in no stream any more and are asked for again; Redis "
        "lost its last writes, as in a failover or a restart: see its log, and let it write more "
        "often (appendfsync always) or wait for its replicas"
    )


def _sample_and_attempt(key: str) -> tuple[str, int]:
    """Split the text of a `RolloutKey`; an entry of anything else is no attempt of a sample."""
    sample, _, attempt = key.rpartition("/")
    return sample, int(attempt) if attempt.isdecimal() else -1
