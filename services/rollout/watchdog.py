"""Notices an engine that lives and does no work, so that its samples go to other servers.

main.py runs `watch` beside the stream worker, once the policy has started: what an engine compiles
and captures at its start, and its first steps, are over then. It asks the policy for a sign of work
(`probe`) and ends an engine that gives none (`kill`); the server then ends, and whoever started it
starts it again. A process that exists, or a server that answers /healthz, proves nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import NoReturn

from agent_r1.rollout.policy import Policy
from agent_r1.text.tokens import EngineDeadError, PolicyError

logger = logging.getLogger(__name__)

CHECKS = 30
"""Number of times, within the limit, that a probe is checked."""
PROBES = 6
"""Number of probes that an engine which answers at once gets within the limit."""


class Silence:
    """The time for which an engine that should answer has not. Pure: the clock is an argument.

    Args:
        limit_s: silence after which the engine counts as wedged, in seconds.
        longest_gap_s: what the time between two checks counts at most. Where it was longer, this
            process stood still, and says nothing about the engine.
    """

    def __init__(self, limit_s: float, longest_gap_s: float) -> None:
        self._limit_s = limit_s
        self._longest_gap_s = longest_gap_s
        self._silent_s = 0.0
        self._checked_at: float | None = None

    def check(self, now: float, *, answered: bool, excused: bool) -> bool:
        """Check once; return whether the engine is wedged.

        Args:
            now: of a clock that does not go back, in seconds.
            answered: the engine has given a sign of work since the last check.
            excused: it need not: its weights are being replaced, which has a limit of its own.
        """
        since = 0.0 if self._checked_at is None else now - self._checked_at
        self._checked_at = now
        if answered or excused:
            self._silent_s = 0.0
        else:
            self._silent_s += min(since, self._longest_gap_s)
        return self._silent_s >= self._limit_s


async def watch(policy: Policy, stall_timeout_s: float) -> NoReturn:
    """Watch a started policy until its engine is dead.

    Args:
        policy: is probed, and killed when it is wedged.
        stall_timeout_s: silence after which it is wedged, in seconds.

    Raises:
        EngineDeadError: the engine died, or was wedged and has been killed.
    """
    interval_s = stall_timeout_s / CHECKS
    silence = Silence(stall_timeout_s, longest_gap_s=2 * interval_s)
    while True:
        # A probe of an idle engine is a request like others: it may queue behind work that came
        # later, so that another kind must be asked then.
        was_busy = policy.num_in_flight > 0
        probe = asyncio.create_task(policy.probe())
        try:
            while not probe.done() and (was_busy or policy.num_in_flight == 0):
                await asyncio.wait([probe], timeout=interval_s)
                wedged = silence.check(
                    time.monotonic(), answered=probe.done(), excused=policy.is_loading
                )
                if wedged:
                    _kill(policy, stall_timeout_s)
            if not probe.done():
                continue
            probe.result()
        except EngineDeadError:
            raise
        except PolicyError as exc:  # the engine answered, with an error
            logger.warning("engine probe failed error=%s", exc)
        finally:
            probe.cancel()
            probe.add_done_callback(_forget)
        await asyncio.sleep(stall_timeout_s / PROBES)
        silence.check(time.monotonic(), answered=True, excused=False)


def _forget(probe: asyncio.Task[None]) -> None:
    """Take note of how a probe ended that nobody waits for, or asyncio would complain."""
    if not probe.cancelled():
        probe.exception()


def _kill(policy: Policy, stall_timeout_s: float) -> NoReturn:
    work = f"with {policy.num_in_flight} requests" if policy.num_in_flight else "without requests"
    reason = (
        f"the engine {work} gave no sign of work for {stall_timeout_s:g} s and was killed; if its "
        "steps take that long, raise rollout.engine_stall_timeout_s"
    )
    logger.error("engine is wedged in_flight=%d reason=%s", policy.num_in_flight, reason)
    policy.kill(reason)
    raise EngineDeadError(reason)
