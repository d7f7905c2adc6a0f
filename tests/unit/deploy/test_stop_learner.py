"""The hook of the chart that stops the learner before an upgrade."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FILE = Path(__file__).resolve().parents[3] / "deploy/k8s/chart/files/stop_learner.py"
JOBS = "/apis/batch/v1/namespaces/there/jobs"


class Cluster:
    """An API server with Jobs, whose pods end a while after they were asked to."""

    def __init__(self, *jobs: str, looks: int) -> None:
        self.jobs = jobs
        self.asked: list[str] = []
        self._looks = dict.fromkeys(jobs, looks)

    def ask(
        self, path: str, *, patch: dict[str, Any] | None = None, **query: str
    ) -> dict[str, Any]:
        if patch is not None:
            assert patch == {"spec": {"suspend": True}}
            self.asked.append(f"suspend {path.removeprefix(JOBS + '/')}")
            return {}
        if path == JOBS:
            selector = "app.kubernetes.io/instance=mine,app.kubernetes.io/component=learner"
            assert query == {"labelSelector": selector}
            return {"items": [{"metadata": {"name": job}} for job in self.jobs]}
        job = query["labelSelector"].removeprefix("batch.kubernetes.io/job-name=")
        self._looks[job] -= 1
        self.asked.append(f"look at {job}")
        phases = ("Failed", "Running" if self._looks[job] else "Succeeded")
        return {"items": [{"status": {"phase": phase}} for phase in phases]}


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("stop_learner", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    return module


def test_a_learner_that_does_not_change_is_left_alone(
    hook: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    cluster = Cluster("mine-learner-1", looks=1)
    monkeypatch.setattr(hook, "ask", cluster.ask)
    hook.main("there", "mine", "mine-learner-1")
    assert cluster.asked == []


def test_another_learner_is_suspended_and_waited_for(
    hook: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    cluster = Cluster("mine-learner-1", "mine-learner-2", looks=3)
    monkeypatch.setattr(hook, "ask", cluster.ask)
    hook.main("there", "mine", "mine-learner-2")
    looks = ["look at mine-learner-1"] * 3  # while a pod runs, and once when none does
    assert cluster.asked == ["suspend mine-learner-1", *looks]
