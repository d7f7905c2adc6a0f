"""The numbers that a rollout server gives to Prometheus."""

from __future__ import annotations

import re
from pathlib import Path

from agent_r1.attempts.tool_discovery import ToolDirectory
from agent_r1.rollout import agent_loop
from agent_r1.rollout import metrics as rollout_metrics
from agent_r1.rollout.metrics import FAILURE_KINDS, RolloutMetrics
from agent_r1.rollout.policy import EngineWork
from agent_r1.runtime.metrics import metrics_of
from agent_r1.text.control_tokens import SpelledOut
from agent_r1_proto.tools import ToolSpec
from agent_r1_proto.trajectory import ToolCallRecord
from agent_r1_proto.weights import LoadReply
from tests.support.builders import trajectory
from tests.support.fakes import FakePolicy


def spec() -> ToolSpec:
    schema = {"type": "object", "properties": {}}
    return ToolSpec(name="search", version="2", description="finds", parameters=schema)


def make_metrics() -> tuple[RolloutMetrics, ToolDirectory]:
    policy = FakePolicy([[1]], eos_token_ids=[1], policy_version=7)
    policy.work = EngineWork(steps=5, prompt_tokens=40, sampled_tokens=12, running=3, waiting=2)
    directory = ToolDirectory(clock=lambda: 0.0)
    directory.add_fixed("search", "http://one", spec())
    metrics = RolloutMetrics()
    spelled_out = SpelledOut()
    spelled_out.note("tools", ["<|im_end|>", "<|im_end|>"])
    metrics.watch(policy, directory, spelled_out, in_flight=lambda: 4, max_concurrent=32)
    return metrics, directory


def values(metrics: RolloutMetrics) -> dict[str, float]:
    lines = metrics.page.text().decode().splitlines()
    rows = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in rows}


def call(status: str, version: str = "", latency_ms: float = 0.0) -> ToolCallRecord:
    return ToolCallRecord.model_validate(
        {
            "end_token_index": 3,
            "tool": "search" if version else "no_such_tool_17",
            "status": status,
            "version": version,
            "latency_ms": latency_ms,
        }
    )


def test_control_tokens_that_were_spelled_out_are_counted_by_where_they_stood() -> None:
    found = values(make_metrics()[0])
    name = "agent_r1_rollout_spelled_out_tokens_total"
    counts = [found[f'{name}{{origin="{origin}"}}'] for origin in ("prompt", "tools", "reply")]
    assert counts == [0, 2, 0]


def test_a_trajectory_is_counted_with_its_tokens_and_calls() -> None:
    metrics, _ = make_metrics()
    calls = [call("ok", "2", 40.0), call("error", "2", 60.0), call("unknown_tool")]
    metrics.note_attempt(trajectory(prompt_length=2, num_sampled=3, calls=calls), published=True)
    found = values(metrics)
    assert found['agent_r1_rollout_trajectories_total{status="COMPLETED"}'] == 1
    assert found['agent_r1_rollout_tokens_total{origin="sampled"}'] == 3
    assert found['agent_r1_rollout_tokens_total{origin="given"}'] == 2
    total = "agent_r1_rollout_tool_calls_total"
    assert found[f'{total}{{status="ok",tool="search",version="2"}}'] == 1
    assert found[f'{total}{{status="error",tool="search",version="2"}}'] == 1
    # A name that the model has made up would be a series for ever.
    assert found[f'{total}{{status="unknown_tool",tool="",version=""}}'] == 1
    seconds = "agent_r1_rollout_tool_call_seconds"
    assert found[f'{seconds}_count{{tool="search",version="2"}}'] == 2
    assert found[f'{seconds}_sum{{tool="search",version="2"}}'] == 0.1  # 40 ms + 60 ms


def test_an_attempt_that_is_made_again_is_counted_by_the_kind_of_its_failure() -> None:
    metrics, _ = make_metrics()
    failed = trajectory(status="FAILED", reason="tool_timeout: search: nothing within 3 s")
    metrics.note_attempt(failed, published=False)
    found = values(metrics)
    assert found['agent_r1_rollout_failed_attempts_total{kind="tool_timeout"}'] == 1
    assert found['agent_r1_rollout_trajectories_total{status="FAILED"}'] == 0


def test_what_has_not_happened_yet_is_zero_so_that_the_first_time_is_a_change() -> None:
    metrics, _ = make_metrics()
    before = values(metrics)
    failed = "agent_r1_rollout_failed_attempts_total"
    assert before[f'{failed}{{kind="tool_timeout"}}'] == 0
    assert before['agent_r1_rollout_trajectories_total{status="TRUNCATED"}'] == 0
    metrics.note_attempt(trajectory(calls=[call("ok", "2")]), published=True)
    total = "agent_r1_rollout_tool_calls_total"
    found = values(metrics)
    assert found[f'{total}{{status="error",tool="search",version="2"}}'] == 0
    assert found[f'{total}{{status="failed",tool="search",version="2"}}'] == 0


def test_every_kind_of_failure_of_the_agent_loop_is_known() -> None:
    folder = Path(agent_loop.__file__).parent
    names = ("agent_loop.py", "turns.py", "decoding/*.py")
    source = "".join(file.read_text() for name in names for file in folder.glob(name))
    named = set(re.findall(r'(?:AttemptFailedError\(|failure =)\s*f?"(\w+): ', source))
    assert {"env_error", "policy_error", "trajectory_timeout", "decoding_refused"} <= named
    assert named <= set(FAILURE_KINDS)


def test_what_the_server_and_its_engine_do_is_read_when_it_is_asked_for() -> None:
    metrics, directory = make_metrics()
    metrics.note_load(LoadReply(policy_version=7, fetch_s=2.0, pause_s=0.5))
    found = values(metrics)
    assert found["agent_r1_rollout_samples_in_flight"] == 4
    assert found["agent_r1_rollout_samples_capacity"] == 32
    assert found["agent_r1_rollout_policy_version"] == 7
    assert found["agent_r1_rollout_engine_steps_total"] == 5
    assert found['agent_r1_rollout_engine_tokens_total{kind="prompt"}'] == 40
    assert found['agent_r1_rollout_engine_requests{state="waiting"}'] == 2
    assert found["agent_r1_rollout_weight_fetch_seconds_sum"] == 2.0
    assert found["agent_r1_rollout_weight_pause_seconds_sum"] == 0.5
    assert found['agent_r1_rollout_tool_instances{tool="search"}'] == 1
    directory.choose("search").failed(0.0, unreachable=True)
    assert values(metrics)['agent_r1_rollout_tool_instances{tool="search"}'] == 0


def test_every_metric_that_is_named_is_on_the_page() -> None:
    metrics, _ = make_metrics()
    metrics.note_attempt(
        trajectory(status="FAILED", reason="x", calls=[call("ok", "2")]), published=True
    )
    metrics.note_load(LoadReply(policy_version=7, fetch_s=0.0, pause_s=0.0))
    names = set(re.findall(r"^(agent_r1_\w+)", metrics.page.text().decode(), re.M))
    named = metrics_of(rollout_metrics)
    assert len(named) > 10
    assert {series for one in named for series in one.series()} <= names
