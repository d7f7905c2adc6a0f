"""The failure board: what went wrong on any service, where everybody who waits can see it.

rollout and reward --one failed attempt each--> the board in Redis --> the learner's watch loop and
evaluation clients, which show the first failure of each kind at once. The board has a bounded
number of kinds: how often each happened, and the first one in words.
"""

from __future__ import annotations

import re
import time
import traceback
from collections import Counter
from typing import Any, Literal

from pydantic import ValidationError

from agent_r1_proto.connection import RedisConnection
from agent_r1_proto.messages import Message
from agent_r1_proto.parts import TextPart
from agent_r1_proto.trajectory import ToolCallRecord, Trajectory

Where = Literal["rollout", "reward", "tools", "learner", "evaluation"]

MAX_KINDS = 64
"""Kinds the board tells apart; further ones are counted together as `OTHER_KINDS`."""
OTHER_KINDS = "failures of further kinds"
LONGEST_KIND = 300
LONGEST_REASON = 2000
"""Characters of a reason that are kept."""
TRACEBACK_FRAMES = 3
REWARD_ERROR = "reward_error"
"""A trajectory's `reason` begins with it when no component could score the trajectory."""

_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")

# One step, so that two services that fail at once count twice and write the first reason once.
_NOTE = """
local kind = ARGV[1]
local known = redis.call('HEXISTS', KEYS[1], kind) == 1
if not known and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[2]) then kind = ARGV[3] end
redis.call('HSETNX', KEYS[2], kind, ARGV[4])
return redis.call('HINCRBY', KEYS[1], kind, 1)
"""


class Failure(Message):
    """The first failure of one kind."""

    where: Where
    """The service on which it happened."""
    kind: str
    """The reason's first line, without what differs from one failure to the next."""
    reason: str
    """Description of what happened; the lines after the first, if any, are from a traceback."""
    rollout_id: str = ""
    """The sample it happened to."""
    time: float = 0.0
    """Unix time, seconds."""


def reason_kind(reason: str) -> str:
    """Return a reason without what differs from one sample to the next (numbers, ids)."""
    first_line = reason.strip().splitlines()[0] if reason.strip() else "no reason given"
    return re.sub(r"0x[0-9a-fA-F]+|\d+(\.\d+)?", "#", first_line)[:LONGEST_KIND]


def failure(where: Where, reason: str, rollout_id: str = "") -> Failure:
    """Return a failure that happened now."""
    return Failure(
        where=where,
        kind=reason_kind(reason),
        reason=reason.strip()[:LONGEST_REASON] or "no reason given",
        rollout_id=rollout_id,
        time=time.time(),
    )


def innermost_frames(exc: BaseException) -> str:
    """Return where an error was raised, as the last lines of its traceback."""
    return "".join(traceback.format_tb(exc.__traceback__)[-TRACEBACK_FRAMES:]).rstrip()


def place_of_failure(trajectory: Trajectory) -> Where:
    """Return the service that made a trajectory FAILED."""
    return "reward" if trajectory.reason.startswith(REWARD_ERROR) else "rollout"


def call_error(call: ToolCallRecord) -> str | None:
    """Return the error a tool answered a call with, in one line; None for any other call."""
    if call.status != "error":
        return None
    error = call.error
    if not error:
        texts = [part.text for part in call.parts if isinstance(part, TextPart)]
        lines = [line for text in texts for line in text.strip().splitlines() if line.strip()]
        error = lines[-1].strip() if lines else "error"
    return f"tool {call.tool} answered an error: {error}"


def call_failures(trajectory: Trajectory) -> list[Failure]:
    """Return the errors that tools answered in a trajectory.

    The model reads them and may learn from them: they fail nothing. Those that differ only in
    what is quoted (an argument of the model's) are one kind.
    """
    errors = [error for call in trajectory.calls() if (error := call_error(call)) is not None]
    found = [failure("tools", error, trajectory.rollout_id) for error in errors]
    return [one.model_copy(update={"kind": _QUOTED.sub("#", one.kind)}) for one in found]


class FailureBoard:
    """The board of one run.

    Counts that stood there before the first `read` are not new to this reader; `read` returns what
    was added since the one before.
    """

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
        self._redis: Any = connection.redis
        self._keys = (connection.keys.failure_counts, connection.keys.first_failures)
        self._note = self._redis.register_script(_NOTE)
        self._seen: Counter[str] | None = None

    async def note(self, where: Where, reason: str, rollout_id: str = "") -> None:
        """Count one failure, and keep it when it is the first of its kind."""
        one = failure(where, reason, rollout_id)
        arguments = [f"{where}: {one.kind}", MAX_KINDS, OTHER_KINDS, one.model_dump_json()]
        await self._connection.retrying(
            lambda: self._note(keys=self._keys, args=arguments), "note failure"
        )

    async def start(self) -> None:
        """Take what the board says now as known."""
        counts, _ = await self._read()
        self._seen = counts

    async def read(self) -> list[tuple[Failure, int]]:
        """Return the kinds that grew since the last call, each with how much it grew."""
        counts, first = await self._read()
        seen, self._seen = self._seen or Counter[str](), counts
        news: list[tuple[Failure, int]] = []
        for kind, count in counts.items():
            # A count that shrank begins anew: Redis lost its data.
            added = count - seen[kind] if count >= seen[kind] else count
            if added and kind in first:
                news.append((first[kind], added))
        return news

    async def _read(self) -> tuple[Counter[str], dict[str, Failure]]:
        counts, first = await self._connection.transact(
            lambda pipe: [pipe.hgetall(key) for key in self._keys], "read failures"
        )
        failures: dict[str, Failure] = {}
        for kind, value in first.items():
            try:
                failures[kind.decode()] = Failure.model_validate_json(value)
            except ValidationError:
                continue  # of a newer service
        return Counter({kind.decode(): int(count) for kind, count in counts.items()}), failures
