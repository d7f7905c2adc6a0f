"""The Redis server that a configuration names, or a program to start one: what it is and lacks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from agent_r1.config.look import Look
from agent_r1.config.run import Config
from agent_r1.config.sources import ConfigError
from agent_r1.learner.redis_memory import SERVER_MAXMEMORY, redis_memory_problem
from agent_r1.runtime.config import hide_password
from agent_r1.runtime.memory import MIB

ANSWER_TIMEOUT_S = 3.0
"""Longest a server may take to answer a check."""
CLOCK_LIMIT_S = 5.0
"""Clocks that differ by more are worth a note: times of two machines are compared for metrics."""


def look_at_redis(config: Config, *, trains: bool) -> list[Look]:
    """Return what there is to say of the run's Redis, and of this machine's clock against it."""
    if config.redis.url is None:
        return [look_at_own_redis()]
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
        return [Look("Redis", shown, [problem])]
    problems = list(_problems(config, shown, info, trains=trains))
    return [
        Look("Redis", f"{shown}: {_describe(info)}", problems, list(_notes(info))),
        _look_at_clock(seconds + microseconds / 1e6 - time.time()),
    ]


def look_at_own_redis() -> Look:
    """Return the program that a run without `redis.url` starts."""
    from agent_r1_deploy.local_redis import find_redis_server

    try:
        return Look("Redis", f"the run starts {find_redis_server()}")
    except ConfigError as exc:
        return Look("Redis", "none", [str(exc)])


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
    from agent_r1_deploy.local_redis import OLDEST_VERSION

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


def _look_at_clock(ahead_s: float) -> Look:
    note = (
        f"the clocks of Redis and of this machine differ by {abs(ahead_s):.0f} s, and so do times "
        "in metrics; synchronize both (`timedatectl set-ntp true`)"
    )
    notes = [note] if abs(ahead_s) > CLOCK_LIMIT_S else []
    return Look("clock", f"{abs(ahead_s):.3f} s from that of Redis", notes=notes)
