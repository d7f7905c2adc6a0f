"""What `agent-r1 check` says of a real Redis."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis import Redis

from agent_r1.config.redis_server import check_run_redis
from agent_r1.config.run import load_config
from tests.conftest import RedisServer
from tests.support.config_scene import write_scene

pytestmark = pytest.mark.redis


def test_version_persistence_policy_and_memory_are_said(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    options = [f"redis.url={redis_server.url}"]
    config = load_config(write_scene(tmp_path / "example"), options, {}).config
    redis, clock = check_run_redis(config, trains=True)
    assert ", append-only file, noeviction, " in redis.found
    assert redis.problems == []
    (note,) = redis.notes
    assert "no maxmemory" in note
    assert clock.name == "clock"
    assert clock.notes == []  # of one machine
    with Redis.from_url(redis_server.url) as client:
        client.config_set("appendonly", "no")
        client.config_set("maxmemory", 1024 * 1024)
        client.config_set("maxmemory-policy", "allkeys-lru")
    redis, _ = check_run_redis(config, trains=True)
    assert "of 1 MiB" in redis.found
    assert [note for note in redis.notes if "no append-only file" in note]
    evicts, too_small = redis.problems
    assert "set `maxmemory-policy noeviction` there" in evicts
    assert "must hold the worst case in flight" in too_small
