"""A Redis server of the run's own, for runs that configure none.

config/redis_server.py finds the program. The server listens on a free port of 127.0.0.1, asks for a
password that only this run's services know, keeps nothing on disk, and refuses writes when full
(eviction would lose messages).
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError

from agent_r1.config.redis_server import find_redis_server
from agent_r1.config.sources import ConfigError
from agent_r1.launch.service import ServiceSpec
from agent_r1.runtime.files.private import write_private
from agent_r1_proto.addresses import hide_password
from agent_r1_proto.connection import Keys
from agent_r1_proto.redis_trouble import close_client, find_trouble

PING_TIMEOUT_S = 2.0
WAIT_S = 10.0
"""Time for which a configured Redis may stay silent when a run starts."""
POLL_S = 0.2
STOP_RANK = 9


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def answers(url: str, timeout_s: float = PING_TIMEOUT_S) -> bool:
    """Say whether a Redis server answers PING at `url`, in time."""
    client = Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
    try:
        return bool(await client.ping())  # pyright: ignore[reportGeneralTypeIssues]
    except (RedisError, OSError):
        return False
    finally:
        await close_client(client)


async def wait_for_redis(url: str, run_id: str, report: Callable[[str], None]) -> None:
    """Wait a moment for a configured Redis; report what is wrong with it when that is not over.

    Raises:
        ConfigError: it cannot be used.
    """
    deadline = time.monotonic() + WAIT_S
    waiting = False
    while (trouble := await find_trouble(url, Keys(run_id).probe)) is not None:
        text = trouble.of(f"redis.url ({hide_password(url)})")
        if time.monotonic() >= deadline:
            raise ConfigError(f"{text}; or remove redis.url for a server of this run's own")
        if not waiting:
            report(f"waiting for Redis: {text}")
        waiting = True
        await asyncio.sleep(POLL_S)


def local_redis(state_dir: Path, maxmemory_mb: int) -> tuple[ServiceSpec, str]:
    """Describe a Redis server for this run; its configuration goes into the private `state_dir`.

    Returns:
        The service and its URL (a secret: it holds the password).

    Raises:
        ConfigError: no Redis server program was found.
    """
    program = find_redis_server()
    port = free_port()
    password = secrets.token_urlsafe(24)
    settings = {
        "bind": "127.0.0.1",
        "port": str(port),
        "requirepass": password,
        "save": '""',
        "appendonly": "no",
        "maxmemory": f"{maxmemory_mb}mb",
        "maxmemory-policy": "noeviction",
        "dir": str(state_dir),
        "daemonize": "no",
    }
    # A file, not arguments: anyone on the machine can list the arguments of a process.
    config = state_dir / "redis.conf"
    write_private(config, "".join(f"{name} {value}\n" for name, value in settings.items()))
    url = f"redis://:{password}@127.0.0.1:{port}/0"

    async def is_up(_: str) -> bool:
        return await answers(url)

    spec = ServiceSpec(
        name="redis",
        command=[str(program), str(config)],
        probe=is_up,
        stop_rank=STOP_RANK,
        start_timeout_s=30.0,
        stop_timeout_s=10.0,
    )
    return spec, url
