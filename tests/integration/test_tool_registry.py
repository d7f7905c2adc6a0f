"""The tool registry on a real Redis: announcements, expiry, versions, weights, pins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agent_r1.cli.main import main
from agent_r1_proto.connection import RedisConnection
from agent_r1_proto.registry import KEPT_S, ToolRegistry
from agent_r1_proto.tool_pool import Pin, PinReport
from tests.unit.attempts.test_tool_discovery import instance

pytestmark = pytest.mark.redis


@pytest.fixture
async def registry(redis_url: str, run_id: str) -> AsyncIterator[ToolRegistry]:
    async with await RedisConnection.connect(redis_url, run_id) as connection:
        yield ToolRegistry(connection, run_id)


async def test_an_announcement_is_seen_renewed_and_expires(registry: ToolRegistry):
    await registry.announce(instance("a"), 0.2)
    await registry.announce(instance("b"), 30.0)
    assert [one.instance for one in (await registry.read())["search"].instances] == ["a", "b"]
    async with asyncio.timeout(5):
        while len((await registry.read(["search"]))["search"].instances) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    (left,) = (await registry.read(["search"]))["search"].instances
    assert left == instance("b")
    await registry.withdraw("b")
    assert await registry.read() == {}
    assert (await registry.read(["search"]))["search"].instances == []


async def test_versions_are_kept_in_the_order_they_came(registry: ToolRegistry):
    for name, version in (("a", "2.0"), ("b", "10.0"), ("c", "1.5"), ("d", "2.0")):
        await registry.announce(instance(name, version), 30.0)
    state = (await registry.read())["search"]
    assert state.versions == ["2.0", "10.0", "1.5"]
    assert state.shares() == {"1.5": 1.0}  # the newest is the last to come, whatever its name


async def test_an_instance_told_to_drain_learns_it_with_its_next_announcement(
    registry: ToolRegistry,
):
    assert await registry.announce(instance("a"), 30.0) is False
    await registry.drain(["a"])
    assert (await registry.read())["search"].instances[0].draining
    assert await registry.announce(instance("a"), 30.0) is True
    await registry.withdraw("a")
    assert await registry.announce(instance("a"), 30.0) is False  # a name that starts again


async def test_weights_are_replaced_as_a_whole(registry: ToolRegistry):
    await registry.announce(instance("a", "1"), 30.0)
    await registry.announce(instance("b", "2"), 30.0)
    await registry.set_weights("search", {"1": 3.0, "2": 1.0})
    assert (await registry.read())["search"].shares() == {"1": 0.75, "2": 0.25}
    await registry.set_weights("search", {"1": 1.0})
    assert (await registry.read())["search"].shares() == {"1": 1.0}
    await registry.set_weights("search", {})
    assert (await registry.read())["search"].shares() == {"2": 1.0}
    with pytest.raises(ValueError, match="give no version any traffic"):
        await registry.set_weights("search", {"1": 0.0})


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"1": -1.0, "2": 2.0}, r"weight of version 1 \(-1.0\) must be a number >= 0"),
        ({"1": float("nan")}, "must be a number >= 0"),
        ({"1": float("inf")}, "must be a number >= 0"),
        ({"": 1.0}, "must be a name without blanks"),
        ({"1 2": 1.0}, "must be a name without blanks"),
    ],
)
async def test_weights_that_mean_nothing_are_refused(
    registry: ToolRegistry, weights: dict[str, float], message: str
):
    with pytest.raises(ValueError, match=message):
        await registry.set_weights("search", weights)


async def test_a_stored_weight_that_means_nothing_counts_as_none(
    registry: ToolRegistry, redis_url: str, run_id: str, caplog: pytest.LogCaptureFixture
):
    await registry.announce(instance("a", "1"), 30.0)
    await registry.announce(instance("b", "2"), 30.0)
    await registry.set_weights("search", {"1": 1.0})
    async with await RedisConnection.connect(redis_url, run_id) as connection:
        (key,) = [key async for key in connection.redis.scan_iter(f"*@{run_id}:*weights*")]
        await connection.redis.hset(key, "2", "nan")
        await connection.redis.hset(key, "3", "lots")
    assert (await registry.read())["search"].shares() == {"1": 1.0}
    assert caplog.text.count("stored tool weight left out tool=search") == 2


@pytest.mark.parametrize(
    ("rule", "shares"),
    [("all", {"2": 1.0}), ("none", {"1": 1.0}), (0.1, {"1": 0.9, "2": 0.1})],
)
async def test_a_version_never_seen_before_gets_what_its_rule_says(
    registry: ToolRegistry, rule: Any, shares: dict[str, float]
):
    await registry.announce(instance("a", "1"), 30.0, rule)
    assert (await registry.read())["search"].shares() == {"1": 1.0}  # the first gets everything
    await registry.announce(instance("b", "2"), 30.0, rule)
    assert (await registry.read())["search"].shares() == pytest.approx(shares)
    await registry.set_weights("search", {"1": 1.0, "2": 1.0})
    await registry.announce(instance("c", "2"), 30.0, rule)  # known now: weights stay
    assert (await registry.read())["search"].shares() == {"1": 0.5, "2": 0.5}


async def test_a_share_for_a_third_version_comes_from_the_others_in_proportion(
    registry: ToolRegistry,
):
    await registry.announce(instance("a", "1"), 30.0)
    await registry.announce(instance("b", "2"), 30.0)
    await registry.set_weights("search", {"1": 3.0, "2": 1.0})
    await registry.announce(instance("c", "3"), 30.0, 0.2)
    # By hand: 0.8 x 3/4, 0.8 x 1/4, and 0.2.
    assert (await registry.read())["search"].shares() == pytest.approx(
        {"1": 0.6, "2": 0.2, "3": 0.2}
    )


async def test_weights_may_name_a_version_before_it_is_announced(registry: ToolRegistry):
    await registry.announce(instance("a", "1"), 30.0)
    await registry.set_weights("search", {"1": 9.0, "2": 1.0})
    assert (await registry.read())["search"].shares() == {"1": 1.0}
    await registry.announce(instance("b", "2"), 30.0, "none")
    assert (await registry.read())["search"].shares() == pytest.approx({"1": 0.9, "2": 0.1})


async def test_a_drained_instance_can_be_put_back(registry: ToolRegistry):
    await registry.announce(instance("a"), 30.0)
    await registry.drain(["a"])
    await registry.undrain(["a"])
    assert not (await registry.read())["search"].instances[0].draining
    assert await registry.announce(instance("a"), 30.0) is False


async def test_a_rollback_prefers_what_takes_calls_and_puts_a_drained_version_back_otherwise(
    registry: ToolRegistry, redis_url: str, run_id: str, capsys: pytest.CaptureFixture[str]
):
    async def rollback() -> str:
        words = ["tools", "rollback", "search", "--redis", redis_url, "--pool", run_id]
        assert await asyncio.to_thread(main, words) == 0
        return capsys.readouterr().out

    for name, version in (("a", "1"), ("b", "2"), ("c", "3")):
        await registry.announce(instance(name, version), 60.0)
    await registry.drain(["b"])
    assert "search is back at version 1" in await rollback()
    await registry.set_weights("search", {})
    await registry.drain(["a"])
    assert "search is back at version 2" in await rollback()
    state = (await registry.read())["search"]
    assert {one.instance for one in state.instances if one.draining} == {"a"}
    assert state.shares() == {"2": 1.0}


def report(pins: dict[str, int]) -> PinReport:
    return PinReport(pins=[Pin(tool="search", version=v, count=n) for v, n in pins.items()])


async def test_pins_of_all_rollout_servers_are_summed_and_expire(registry: ToolRegistry):
    await registry.report("r1", report({"1": 3, "2": 1}), 30.0)
    await registry.report("r2", report({"1": 4}), 0.1)
    assert await registry.pinned("search", "2") == 1
    async with asyncio.timeout(5):
        while await registry.pinned("search", "1") != 3:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_report_of_an_older_rollout_server_is_read(
    registry: ToolRegistry, redis_url: str, run_id: str
):
    await registry.report("r1", report({"1": 3}), 30.0)
    async with await RedisConnection.connect(redis_url, run_id) as connection:
        (key,) = [key async for key in connection.redis.scan_iter(f"*@{run_id}:*r1")]
        await connection.redis.set(
            key, '{"pins": [{"tool": "search", "version": "1", "count": 3}]}'
        )
    assert (await registry.reports())["r1"] == report({"1": 3})


async def test_what_a_pool_knows_of_a_tool_expires_when_nothing_serves_it(
    registry: ToolRegistry, redis_url: str, run_id: str
):
    await registry.announce(instance("a"), 30.0)
    await registry.set_weights("search", {"1": 1.0})
    await registry.drain(["a"])
    await registry.announce(instance("a"), 30.0)
    await registry.report("r1", report({"1": 3}), 30.0)
    async with await RedisConnection.connect(redis_url, run_id) as connection:
        keys = [key async for key in connection.redis.scan_iter(f"agent_r1:@{run_id}:*")]
        lives = {key.decode(): await connection.redis.ttl(key) for key in keys}
    assert len(lives) == 7  # versions, weights, ids, draining ids, reporters, instance, report
    assert all(0 < life_s <= KEPT_S for life_s in lives.values()), lives


async def test_pools_and_runs_do_not_touch_each_other(redis_url: str, run_id: str):
    async with await RedisConnection.connect(redis_url, run_id) as connection:
        ours, theirs = (ToolRegistry(connection, f"{run_id}-{name}") for name in "ab")
        await ours.announce(instance("a"), 30.0)
        assert await theirs.read() == {}
        keys = [key.decode() async for key in connection.redis.scan_iter(f"*{run_id}-a*")]
        assert keys
        assert all(key.startswith(f"agent_r1:@{run_id}-a:") for key in keys)
        await ours.withdraw("a")
