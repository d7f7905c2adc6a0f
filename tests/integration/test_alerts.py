"""The alert rules in a real promtool: each fires when it should, and not before."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.prometheus import NO_PROMETHEUS, OBSERVE, program

RULES = OBSERVE / "alerts.yml"
LEARNER = 'job="learner",instance="l:1"'
ROLLOUT = 'job="rollout",instance="r:1"'


def learner(name: str, values: str, labels: str = "") -> dict[str, str]:
    return {"series": f"agent_r1_learner_{name}{{{LEARNER}{labels}}}", "values": values}


def rollout(name: str, values: str, labels: str = "") -> dict[str, str]:
    return {"series": f"agent_r1_{name}{{{ROLLOUT}{labels}}}", "values": values}


# One value a minute; each case is quiet at the first time, and fires at the second.
CASES: dict[str, tuple[list[dict[str, str]], str, str]] = {
    # The last step ended at 0, and took 60 s: 600 + 5 x 60 = 900 s are allowed.
    "RunStalled": (
        [
            learner("last_step_timestamp_seconds", "0x60"),
            learner("step_seconds", "60x60"),
            learner("steps_total", "3x60"),
            learner("planned_steps", "9x60"),
        ],
        "14m",
        "16m",
    ),
    # 2 nats for 100 minutes, then 0.5: 25 % of the hour before.
    "EntropyCollapsed": ([learner("entropy_nats", "2x100 0.5x40")], "100m", "110m"),
    # From 0.8 to 0.2: after 15 minutes, the mean is a quarter of the best.
    "RewardCollapsed": ([learner("reward_mean", "0.8x100 0.2x60")], "100m", "125m"),
    # 1 of 10 samples fails for good at first, then 5 of 10.
    "SamplesFail": (
        [
            learner("results_total", "0+1x30 30+5x40", ',outcome="failed"'),
            learner("results_total", "0+19x30 570+5x40", ',outcome="filled"'),
        ],
        "30m",
        "60m",
    ),
    "ToolDown": ([rollout("rollout_tool_instances", "1x10 0x10", ',tool="search"')], "10m", "14m"),
    # The second is no service of ours, in a Prometheus that watches others too.
    "ServiceDown": (
        [
            {"series": f"up{{{ROLLOUT}}}", "values": "1x10 0x10"},
            {"series": 'up{job="node",instance="n:1"}', "values": "0x20"},
        ],
        "10m",
        "15m",
    ),
    "ServiceRestarts": (
        [rollout("launcher_service_starts_total", "1x20 2 4x20", ',service="reward"')],
        "20m",
        "24m",
    ),
    "DeadLetters": ([learner("dead_letters_total", "0x20 1x20")], "20m", "23m"),
    "CanaryWarning": ([learner("canary_warnings_total", "0x20 1x20")], "20m", "23m"),
    # 10 % of 1 TB is enough; 1 % is not.
    "DiskNearlyFull": (
        [
            rollout("disk_bytes", "1e12x30", ',folder="run.dir"'),
            rollout("disk_free_bytes", "1e11x10 1e10x20", ',folder="run.dir"'),
        ],
        "10m",
        "14m",
    ),
    "MemoryNearlyFull": (
        [
            rollout("machine_memory_bytes", "1e10x30"),
            rollout("machine_memory_available_bytes", "1e9x10 1e8x20"),
        ],
        "10m",
        "14m",
    ),
    "RedisNearlyFull": (
        [
            rollout("redis_memory_used_bytes", "5e8x10 9e8x20"),
            rollout("redis_memory_limit_bytes", "1e9x30"),
        ],
        "10m",
        "14m",
    ),
}


def rules() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def test_every_rule_has_a_case() -> None:
    assert CASES.keys() == rules().keys()


def run_promtool(file: Path) -> subprocess.CompletedProcess[str]:
    promtool = program("promtool")
    if promtool is None:
        pytest.skip(NO_PROMETHEUS)
    return subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True)


def expect(alert: str, when: str, *, firing: int) -> dict[str, Any]:
    return {
        "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})',
        "eval_time": when,
        "exp_samples": [{"labels": "{}", "value": firing}] if firing else [],
    }


def test_each_alert_fires_when_it_should_and_not_before(tmp_path: Path) -> None:
    tests = [
        {
            "interval": "1m",
            "input_series": series,
            "promql_expr_test": [
                expect(alert, quiet, firing=0),
                expect(alert, fires, firing=1),
            ],
        }
        for alert, (series, quiet, fires) in CASES.items()
    ]
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": tests}))
    done = run_promtool(file)
    assert done.returncode == 0, done.stdout + done.stderr
