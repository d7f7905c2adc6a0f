"""Metrics, dashboards and alerts agree: nothing is shown or watched that no service exports."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_r1.runtime.metrics import Metric, metrics_of
from tests.support.prometheus import JOBS

REPOSITORY = Path(__file__).resolve().parents[2]
OBSERVE = REPOSITORY / "deploy" / "observe"
MODULES = (
    "agent_r1.runtime.metrics",
    "agent_r1.learner.reporting.prometheus",
    "agent_r1.rollout.metrics",
    "agent_r1.reward.metrics",
    "agent_r1.tools.metrics",
    "agent_r1.launch.local_metrics",
)
METRICS = [one for name in MODULES for one in metrics_of(importlib.import_module(name))]
BASE_UNITS = {"seconds", "bytes", "tokens", "nats", "ratio", "steps"}
OTHER_UNITS = {"ms", "milliseconds", "minutes", "mb", "gb", "percent", "share", "s"}
QUERY_METRIC = re.compile(r"\b(?:agent_r1|process)_\w+")
OF_EVERY_PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes"}


def dashboards() -> list[Path]:
    return sorted(OBSERVE.glob("grafana/dashboards/*.json"))


def queries(board: dict[str, Any]) -> Iterator[str]:
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for variable in board["templating"]["list"]:
        yield variable["query"]


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((OBSERVE / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.mark.parametrize("metric", METRICS, ids=lambda one: one.name)
def test_a_metric_is_named_as_prometheus_asks(metric: Metric) -> None:
    assert re.fullmatch(r"agent_r1(_[a-z0-9]+)+", metric.name)
    assert (metric.kind == "counter") == metric.name.endswith("_total")
    words = metric.name.removesuffix("_total").split("_")
    assert not OTHER_UNITS & set(words)
    assert not BASE_UNITS & set(words[3:-1]) or words[-1] in BASE_UNITS
    assert metric.kind != "histogram" or words[-1] == "seconds"
    assert not {"le", "instance", "job", "run"} & set(metric.labels)  # Prometheus sets them
    assert metric.text.endswith(".")


def test_no_two_metrics_share_a_name() -> None:
    names = [one.name for one in METRICS]
    assert len(names) > 50
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("script", ["metrics", "dashboards"])
def test_what_is_generated_is_up_to_date(script: str) -> None:
    command = [sys.executable, str(REPOSITORY / "scripts" / script), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert (done.returncode, done.stderr) == (0, "")


def test_there_is_a_dashboard_for_each_question() -> None:
    names = {file.stem for file in dashboards()}
    assert names >= {"learning", "flow", "speed", "machines"}


def exported() -> set[str]:
    return {series for one in METRICS for series in one.series()} | OF_EVERY_PROCESS


@pytest.mark.parametrize("file", dashboards(), ids=lambda file: file.stem)
def test_a_dashboard_shows_only_metrics_that_services_export(file: Path) -> None:
    board = json.loads(file.read_text())
    for query in queries(board):
        named = set(QUERY_METRIC.findall(query))
        assert named, query
        assert named <= exported(), query
        assert "$R" not in query
    sources = yaml.safe_load((OBSERVE / "grafana" / "datasources" / "prometheus.yml").read_text())
    uids = set(re.findall(r'"type": "prometheus",\s+"uid": "(\w+)"', file.read_text()))
    assert uids == {source["uid"] for source in sources["datasources"]}
    assert sources["datasources"][0]["url"] == "http://prometheus:9090"


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_watches_only_metrics_that_services_export(rule: dict[str, Any]) -> None:
    named = set(QUERY_METRIC.findall(rule["expr"]))
    assert named <= exported(), rule["expr"]
    assert named or set(re.findall(r"\w+", rule["expr"])) == {"up", "job", "0", *JOBS}
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["alert"] in (REPOSITORY / "docs" / "observability.md").read_text()


@pytest.mark.parametrize("name", ["agent_r1_learner_reward", "agent_r1_rollout_tool_call_seconds"])
def test_a_name_that_is_no_series_is_noticed(name: str) -> None:
    # The first lacks its end; of the second, a histogram, only the parts are stored.
    assert name not in exported()


@pytest.mark.parametrize(
    "alert",
    [
        "RunStalled",
        "EntropyCollapsed",
        "RewardCollapsed",
        "SamplesFail",
        "ToolDown",
        "DiskNearlyFull",
        "RedisNearlyFull",
        "CanaryWarning",
    ],
)
def test_there_is_an_alert_for(alert: str) -> None:
    assert alert in {rule["alert"] for rule in alerts()}
