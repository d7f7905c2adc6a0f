"""The heartbeat of the learner that trains a run, in Redis: a second one is refused while it beats.

train.py lets a start beat from before it takes the run folder's next number to its end. The lock of
ownership.py reaches one folder on one machine; this reaches a copy of the folder, and a run store.
Where somebody asks for the take-over, the later start wins as ever: the earlier one ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import time
from datetime import datetime
from pathlib import Path

from agent_r1_proto.registry import LearnerHeartbeat, Registry

logger = logging.getLogger(__name__)

POLL_S = 0.1
BEATS_PER_LEASE = 4
WITHDRAW_TIMEOUT_S = 2.0


class Heartbeat:
    """Says that this start of the learner lives, until it is withdrawn."""

    def __init__(self, registry: Registry, folder: Path, lease_s: float) -> None:
        self._registry = registry
        self._lease_s = lease_s
        host, path = _place(folder)
        self._own = LearnerHeartbeat(
            pid=os.getpid(), host=host, folder=path, started_at=time.time()
        )

    async def beat(self, number: int = 0) -> None:
        """Beat once; the beat counts for one lease."""
        own = self._own.model_copy(update={"beats": number})
        await self._registry.set_heartbeat(own, self._lease_s)

    async def beat_forever(self) -> None:
        """Beat until cancelled."""
        for number in itertools.count(1):
            await self.beat(number)
            await asyncio.sleep(self._lease_s / BEATS_PER_LEASE)

    async def withdraw(self) -> None:
        """Let the next start begin at once; the heartbeat of another one stays."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                found = await self._registry.heartbeat()
                if found is not None and found.is_of(self._own):
                    await self._registry.withdraw_heartbeat()


async def refuse_a_second(registry: Registry, run_id: str, folder: Path) -> None:
    """Make sure that no other learner trains the run.

    A heartbeat that does not go on is of a learner that was killed. It is waited for until it has
    expired: one lease.

    Args:
        registry: of the run.
        run_id: names the run.
        folder: run folder of the start that asks. A heartbeat from there is of a learner that has
            ended, because this start has the folder's lock.

    Raises:
        ValueError: another learner lives; the message names it.
    """
    first = await registry.heartbeat()
    if first is None or (first.host, first.folder) == _place(folder):
        return
    logger.info(
        "looking whether another learner lives process=%d host=%s folder=%s",
        first.pid,
        first.host,
        first.folder,
    )
    while (seen := await registry.heartbeat()) == first:  # noqa: ASYNC110 - Redis has it
        await asyncio.sleep(POLL_S)
    if seen is not None:
        since = datetime.fromtimestamp(seen.started_at).astimezone()
        raise ValueError(
            f"run {run_id!r} is trained by another learner: process {seen.pid} on "
            f"{seen.host}, in {seen.folder}, since {since:%Y-%m-%d %H:%M:%S %z}; wait for its end "
            "or stop it, give this run another run.id, or end that learner and go on here with "
            "`agent-r1 serve learner CONFIG --resume --take-over`"
        )


def _place(folder: Path) -> tuple[str, str]:
    return socket.gethostname(), str(folder.resolve())
