"""What a real run exports is what dashboards and alerts ask for; a real Prometheus reads it all."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import STEPS, FailedRun
from tests.support.prometheus import JOBS, NO_PROMETHEUS, OBSERVE, queries, series_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
METRIC = re.compile(r"\bagent_r1_\w+")


def watched() -> set[str]:
    rules = yaml.safe_load((OBSERVE / "alerts.yml").read_text())["groups"][0]["rules"]
    return {
        name
        for text in [*queries(), *(rule["expr"] for rule in rules)]
        for name in METRIC.findall(text)
    }


def value(page: str, series: str) -> float:
    (found,) = re.findall(rf"^{re.escape(series)} (\S+)$", page, re.MULTILINE)
    return float(found)


def test_every_service_exports_metrics(failed_run: FailedRun) -> None:
    assert failed_run.metrics.keys() == JOBS
    for page in failed_run.metrics.values():
        assert "agent_r1_service_info" in page
        assert value(page, "process_resident_memory_bytes") > 1e7


def test_dashboards_and_alerts_name_only_what_is_exported(failed_run: FailedRun) -> None:
    exported = {name for page in failed_run.metrics.values() for name in series_of(page)}
    assert len(watched()) > 40
    assert watched() - exported == set()


def test_the_numbers_are_those_of_the_run(failed_run: FailedRun) -> None:
    learner, rollout = failed_run.metrics["learner"], failed_run.metrics["rollout"]
    assert value(learner, "agent_r1_learner_steps_total") >= STEPS
    assert value(learner, "agent_r1_learner_planned_steps") == 1000
    # A step has 4 groups of 2 samples.
    assert value(learner, 'agent_r1_learner_results_total{outcome="filled"}') >= STEPS * 8
    assert value(learner, 'agent_r1_learner_results_total{outcome="failed"}') == 0
    assert value(learner, "agent_r1_learner_sampled_tokens_total") > 0
    assert value(learner, "agent_r1_redis_memory_limit_bytes") == 512 * 2**20
    assert value(rollout, "agent_r1_rollout_policy_version") >= 1
    assert value(rollout, "agent_r1_rollout_engine_steps_total") > 10
    assert value(rollout, 'agent_r1_rollout_engine_tokens_total{kind="sampled"}') > 10
    assert value(rollout, 'agent_r1_rollout_trajectories_total{status="COMPLETED"}') >= 1
    reward = failed_run.metrics["reward"]
    assert value(reward, 'agent_r1_reward_trajectories_total{outcome="scored"}') >= STEPS * 8
    launcher = failed_run.metrics["launcher"]
    assert value(launcher, 'agent_r1_launcher_service_starts_total{service="rollout"}') == 1
    assert value(launcher, 'agent_r1_launcher_service_up{service="learner"}') == 1


def test_a_trained_sample_is_one_trace_across_all_services(failed_run: FailedRun) -> None:
    learned = [one for one in failed_run.spans if one.name == "learn"]
    assert len(learned) >= STEPS * 8
    assert len({one.trace_id for one in learned}) == len(learned)
    called = {one.trace_id for one in failed_run.spans if one.name == "tool"}
    trace_id = next(one.trace_id for one in learned if one.trace_id in called)
    trace = [one for one in failed_run.spans if one.trace_id == trace_id]
    assert {(one.service, one.name) for one in trace} == {
        ("learner", "sample"),
        ("rollout", "rollout"),
        ("rollout", "turn"),
        ("rollout", "generate"),
        ("rollout", "tool call"),
        ("search", "tool"),
        ("reward", "reward"),
        ("learner", "learn"),
    }
    ids = {one.span_id for one in trace}
    assert [one.name for one in trace if one.parent_id not in ids] == ["sample"]


@pytest.fixture
def prometheus(failed_run: FailedRun) -> dict[str, Any]:
    if failed_run.prometheus is None:
        pytest.skip(NO_PROMETHEUS)
    return failed_run.prometheus


def test_prometheus_knows_all_that_dashboards_and_alerts_name(prometheus: dict[str, Any]) -> None:
    known = set(prometheus["metadata"])
    parts = {name + part for name in known for part in ("_bucket", "_count", "_sum")}
    assert watched() - known - parts == set()


def test_prometheus_evaluates_every_alert_rule(prometheus: dict[str, Any]) -> None:
    assert len(prometheus["rules"]) >= 8
    assert {rule["health"] for rule in prometheus["rules"]} <= {"ok", "unknown"}
    assert [rule.get("lastError") for rule in prometheus["rules"] if rule.get("lastError")] == []


def test_dashboards_show_the_run(prometheus: dict[str, Any]) -> None:
    results = prometheus["queries"]
    shown = [query for query, result in results.items() if result]
    assert any("agent_r1_learner_reward_mean" in query for query in shown)
    assert any("agent_r1_rollout_samples_in_flight" in query for query in shown)
    assert len(shown) > len(results) / 2  # rates need two scrapes, and not every run has KL
