"""Which instance gets a call: versions by weight, pins, draining, breakers, changed schemas."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from agent_r1.attempts.tool_discovery import ToolDirectory
from agent_r1.attempts.tool_transport import BREAKER_FAILURES, BREAKER_OPEN_S, RequestError
from agent_r1_proto.tool_pool import Pin, ToolInstance, ToolState
from agent_r1_proto.tools import ToolSpec

SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}}


def instance(name: str, version: str = "1", **changes: object) -> ToolInstance:
    """One announced instance of the tool `search`."""
    spec = ToolSpec(name="search", version=version, description="Looks.", parameters=SCHEMA)
    given = {"instance": name, "url": f"http://{name}", "spec": spec, "capacity": 10} | changes
    return ToolInstance.model_validate(given)


def state(*instances: ToolInstance, **weights: float) -> ToolState:
    """The tool's state; versions in the order of the instances, weights as v1=0.5."""
    versions = list(dict.fromkeys(one.version for one in instances))
    return ToolState(instances, versions, {name.lstrip("v"): w for name, w in weights.items()})


class Clock:
    """Monotonic seconds that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def directory(first: ToolState, **options: object) -> ToolDirectory:
    made = ToolDirectory(random_=random.Random(0), **options)  # pyright: ignore
    assert made.update("search", first)
    return made


def test_new_trajectories_get_the_newest_version_without_weights():
    tools = directory(state(instance("a", "1"), instance("b", "2")))
    assert {tools.pin(["search"])["search"] for _ in range(20)} == {"2"}


def test_weights_share_out_new_trajectories():
    tools = directory(state(instance("a", "1"), instance("b", "2"), v1=0.75, v2=0.25))
    counts = Counter(tools.pin(["search"])["search"] for _ in range(4000))
    assert counts["2"] / 4000 == pytest.approx(0.25, abs=0.03)


def test_weights_of_dead_versions_leave_the_newest():
    tools = directory(state(instance("a", "1"), instance("b", "2"), v9=1.0))
    assert tools.pin(["search"]) == {"search": "2"}


def test_a_pinned_version_is_kept_while_new_work_goes_elsewhere():
    tools = directory(state(instance("a", "1")))
    pins = tools.pin(["search"])
    tools.update("search", state(instance("a", "1", draining=True), instance("b", "2")))
    assert tools.choose("search", pins["search"]).instance == "a"
    assert tools.pin(["search"]) == {"search": "2"}
    assert tools.choose("search").instance == "b"  # a call without a pin takes no draining one


def test_a_pinned_version_without_an_instance_is_gone():
    tools = directory(state(instance("a", "1")))
    tools.update("search", state(instance("b", "2")))
    with pytest.raises(RequestError, match="no instance of version 1 is left; there are 2") as gone:
        tools.choose("search", "1")
    assert gone.value.kind == "tool_version_gone"


def test_a_tool_without_any_instance_is_waited_for():
    tools = directory(state(instance("a", "1")))
    tools.update("search", ToolState())
    with pytest.raises(RequestError) as absent:
        tools.choose("search", "1")
    assert absent.value.kind == "tool_absent"
    tools.update("search", state(instance("c", "1")))
    assert tools.choose("search", "1").instance == "c"


def test_the_least_loaded_instance_is_taken_relative_to_its_capacity():
    tools = directory(state(instance("a", capacity=2), instance("b", capacity=8)))
    chosen: Counter[str] = Counter()
    for _ in range(10):
        endpoint = tools.choose("search", "1")
        endpoint.in_flight += 1
        chosen[endpoint.instance] += 1
    assert chosen == {"a": 2, "b": 8}


def test_an_open_breaker_keeps_calls_away_and_then_lets_one_try():
    clock = Clock()
    tools = directory(state(instance("a"), instance("b")), clock=clock)
    bad = next(e for e in (tools.choose("search", "1") for _ in range(50)) if e.instance == "a")
    for _ in range(BREAKER_FAILURES):
        bad.failed(clock.now, unreachable=False)
    assert {tools.choose("search", "1").instance for _ in range(50)} == {"b"}
    clock.now += BREAKER_OPEN_S
    tried = [tools.choose("search", "1").instance for _ in range(50)]
    assert tried.count("a") == 1  # half open: one call, the others wait for what becomes of it
    bad.succeeded()
    assert {tools.choose("search", "1").instance for _ in range(50)} == {"a", "b"}


def test_the_only_instance_is_tried_though_its_breaker_is_open():
    clock = Clock()
    tools = directory(state(instance("a")), clock=clock)
    tools.choose("search", "1").failed(clock.now, unreachable=True)
    assert tools.choose("search", "1").instance == "a"


def test_a_version_that_would_change_the_prompt_is_not_taken_up(caplog: pytest.LogCaptureFixture):
    other = ToolSpec(name="search", version="2", description="Looks deeper.", parameters=SCHEMA)
    tools = directory(state(instance("a", "1")))
    for _ in range(3):
        tools.update("search", state(instance("a", "1"), instance("b", "2", spec=other)))
    assert tools.pin(["search"]) == {"search": "1"}
    assert tools.specs["search"].description == "Looks."
    assert caplog.text.count("env.follow_tool_schemas = true") == 1  # said once
    following = directory(state(instance("a", "1")), follow_schemas=True)
    pins = following.pin(["search"])
    following.update("search", state(instance("a", "1"), instance("b", "2", spec=other)))
    assert following.pin(["search"]) == {"search": "2"}
    assert following.spec("search", "2").description == "Looks deeper."
    assert following.spec("search", pins["search"]).description == "Looks."  # a running one's own


def test_two_instances_of_a_version_with_different_schemas(caplog: pytest.LogCaptureFixture):
    other = ToolSpec(name="search", version="1", description="Something else.", parameters=SCHEMA)
    tools = directory(state(instance("a", "1")))
    tools.update("search", state(instance("a", "1"), instance("b", "1", spec=other)))
    assert {tools.choose("search", "1").instance for _ in range(20)} == {"a"}
    assert "instance=b" in caplog.text
    assert "its own version" in caplog.text


def test_pins_are_counted_until_they_are_given_back():
    tools = directory(state(instance("a", "1")))
    pins = [tools.pin(["search"]) for _ in range(3)]
    assert tools.report(["search"]).pins == [Pin(tool="search", version="1", count=3)]
    for left in (2, 1):
        tools.unpin(pins.pop())
        assert tools.report(["search"]).pins == [Pin(tool="search", version="1", count=left)]
    tools.unpin(pins.pop())
    assert tools.report(["search"]).pins == []


def test_shares_sum_to_one_and_leave_draining_versions_out():
    both = [instance("a", "1", draining=True), instance("b", "2"), instance("c", "3")]
    assert state(*both, v1=5, v2=1, v3=3).shares() == {"2": 0.25, "3": 0.75}
    assert state(*both).shares() == {"3": 1.0}
    assert ToolState().shares() == {}


def test_the_report_says_what_new_trajectories_really_get():
    changed = ToolSpec(name="search", version="2", description="New.", parameters=SCHEMA)
    both = state(instance("a", "1"), instance("b", "2", spec=changed), v1=0.0, v2=1.0)
    tools = directory(state(instance("a", "1")))
    tools.update("search", both)
    (pins, (use,)) = (tools.pin(["search"]), tools.report(["search"]).tools)
    assert (pins, use.tool, use.shares) == ({"search": "1"}, "search", {"1": 1.0})
    assert use.refused.keys() == {"2"}
    assert "set env.follow_tool_schemas = true" in use.refused["2"]
    assert [(pin.version, pin.count) for pin in tools.report(["search"]).pins] == [("1", 1)]
    tools.update("search", state(instance("a", "1")))
    assert tools.report(["search"]).tools[0].refused == {}


def test_weights_however_large_or_small_are_shares():
    large = state(instance("a", "1"), instance("b", "2"), v1=1e308, v2=1e308)
    assert large.shares() == {"1": 0.5, "2": 0.5}
    small = state(instance("a", "1"), instance("b", "2"), v1=5e-324, v2=0.0)
    assert small.shares() == {"1": 1.0}
