"""Serves the rollout server's HTTP application and keeps it announced in the registry.

main.py gives it the application; the learner finds the server in the registry, where
`announce_forever` keeps it with its version.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from fastapi import FastAPI

from agent_r1.rollout.weights import WeightVersions
from agent_r1_proto.registry import Registry, RolloutServer
from agent_r1_service.config import ListenConfig
from agent_r1_service.run_token import RunToken
from agent_r1_service.serving import Server, http_config


@contextlib.asynccontextmanager
async def serving(
    app: FastAPI, listener: socket.socket, listen: ListenConfig, token: RunToken | None
) -> AsyncIterator[asyncio.Task[None]]:
    """Serve an application on a socket bound for `listen` while the context lasts.

    Yields:
        The serving task, once it answers; it ends early only by an error.
    """
    is_up = asyncio.Event()
    server = Server(http_config(app, listen, token, lifespan="off"), on_up=is_up.set)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    up = asyncio.create_task(is_up.wait())
    try:
        await asyncio.wait([task, up], return_when=asyncio.FIRST_COMPLETED)
        yield task
    finally:
        up.cancel()
        server.should_exit = True
        await task


async def announce_forever(
    registry: Registry,
    versions: WeightVersions,
    *,
    server_id: str,
    url: str,
    expiry_s: float,
    on_beat: Callable[[], Awaitable[None]],
) -> None:
    """Keep the server in the registry: renewed in time, and at once when its version changes.

    Args:
        registry: gets the announcement.
        versions: the version in use.
        server_id: name of the server.
        url: base URL of its routes.
        expiry_s: seconds after which an announcement disappears.
        on_beat: awaited at every renewal.
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
        await registry.announce_rollout_server(server, expiry_s)
        await on_beat()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(expiry_s / 3):
                await versions.changed.wait()
