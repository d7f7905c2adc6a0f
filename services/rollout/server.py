"""Keeps a rollout server announced in the registry, where learner and other servers find it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Awaitable, Callable

from agent_r1.rollout.weight_versions import WeightVersions
from agent_r1_proto.registry import Registry, RolloutServer


async def announce_until_drained(
    registry: Registry,
    versions: WeightVersions,
    *,
    server_id: str,
    url: str,
    expiry_s: float,
    on_beat: Callable[[], Awaitable[None]],
) -> float:
    """Keep the server in the registry: renewed in time, and at once when its version changes.

    Args:
        registry: gets the announcement.
        versions: the version in use.
        server_id: name of the server.
        url: base URL of its routes.
        expiry_s: seconds after which an announcement disappears.
        on_beat: awaited at every renewal.

    Returns:
        when the server is told to drain: the seconds it gets to finish its samples.
    """
    started_at = time.time()
    while True:
        versions.changed.clear()
        server = RolloutServer(
            server_id=server_id,
            url=url,
            policy_version=versions.held,
            pid=os.getpid(),
            host=socket.gethostname(),
            started_at=started_at,
        )
        drain_s = await registry.announce_rollout_server(server, expiry_s)
        if drain_s is not None:
            return drain_s
        await on_beat()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(expiry_s / 3):
                await versions.changed.wait()
