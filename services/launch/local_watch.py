"""The watch over a run's Redis and services: what does not answer is said while it lasts.

local.py, local_client.py --the services--> here --`Condition`--> the terminal, `conditions.jsonl`.
The supervisor sees processes that end; this sees those that stand still.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import httpx

from agent_r1.launch.local_services import LocalServices
from agent_r1.runtime.files.conditions import Condition, Conditions
from agent_r1_proto.addresses import hide_password
from agent_r1_proto.connection import Keys
from agent_r1_proto.redis_trouble import find_trouble

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
PATIENCE_S = 3.0
"""A condition that is over sooner is not worth a line: a process that was busy for a moment."""
Found = dict[str, tuple[str, str]]
"""Troubles by kind: what is wrong, and what can be done."""


class Watch:
    """Looks at Redis and at every service that is up, once a second.

    Args:
        services: of one run.
        run_id: whose keys Redis must take.
        note: gets each condition when it begins and when it is over.
    """

    def __init__(
        self, services: LocalServices, run_id: str, note: Callable[[Condition], None]
    ) -> None:
        self._services = services
        self._key = Keys(run_id).probe
        self._conditions = Conditions("launcher", note)
        self._since: dict[str, float] = {}
        """Time when each kind was found first, of those that are found now."""

    async def watch_forever(self) -> None:
        """Look until cancelled."""
        # One for all looks: to make a client takes as long as many requests.
        async with httpx.AsyncClient(trust_env=False) as client:
            while True:
                try:
                    await self._look(client)
                except Exception:
                    logger.exception("the watch could not look")
                await asyncio.sleep(PERIOD_S)

    async def _look(self, client: httpx.AsyncClient) -> None:
        redis, silent = await asyncio.gather(self._redis(), self._silent(client))
        found, now = {**redis, **silent}, time.monotonic()
        self._since = {kind: self._since.get(kind, now) for kind in found}
        ago_s = {kind: now - since for kind, since in self._since.items()}
        lasting = {kind: one for kind, one in found.items() if ago_s[kind] >= PATIENCE_S}
        self._conditions.update(lasting, ago_s)

    async def _redis(self) -> Found:
        url, supervisor = self._services.redis_url, self._services.supervisor
        if not url or "redis" in supervisor.starting():
            return {}  # not yet, or the supervisor says it
        trouble = await find_trouble(url, self._key)
        if trouble is None:
            return {}
        what = f"Redis ({hide_password(url)}) {trouble.what}"
        return {f"redis:{trouble.kind}": (what, trouble.remedy)}

    async def _silent(self, client: httpx.AsyncClient) -> Found:
        return {
            f"silent:{name}": (
                f"{name} does not answer (process {pid})",
                "see whether it was stopped (`kill -CONT` continues it) or its code blocks; its "
                "log says more",
            )
            for name, pid in (await self._services.supervisor.silent(client)).items()
        }
