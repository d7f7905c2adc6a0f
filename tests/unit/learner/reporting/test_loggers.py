"""Loggers besides TensorBoard: what they are told, and that training survives them."""

from __future__ import annotations

import json
import logging
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_r1.learner.config import LearnerConfig
from agent_r1.learner.reporting.loggers import MetricLogger, open_loggers
from agent_r1.learner.reporting.loggers.base import RunFacts
from agent_r1.learner.reporting.loggers.completions import COLUMNS, completion_of
from agent_r1.learner.reporting.run_folder import RunFolder
from agent_r1.runs.store import stored_files
from agent_r1.runtime.imports import MissingPackageError
from agent_r1_proto.parts import TextPart
from agent_r1_proto.trajectory import ToolCallRecord
from tests.support.builders import scored, stored


def facts(folder: Path) -> RunFacts:
    return RunFacts("demo", folder, {"engine": {"lr": 0.5}, "tools": {}})


class FakeWandb:
    """Stands in for the package: one run, which may refuse what it gets."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self.steps: list[tuple[str, str | None]] = []
        self.summary: dict[str, Any] = {}
        self.away = False
        self.finished = False

    def Settings(self) -> SimpleNamespace:  # noqa: N802 - its name
        return SimpleNamespace(project=None)

    def init(self, **settings: Any) -> FakeWandb:
        self.settings = settings
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.steps.append((name, step_metric))

    def Table(self, columns: list[str], data: list[Any]) -> list[dict[str, Any]]:  # noqa: N802
        return [dict(zip(columns, row, strict=True)) for row in data]

    def log(self, row: dict[str, Any]) -> None:
        if self.away:
            raise ConnectionError("no network")
        self.rows.append(row)
        self.summary.update(row)

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_gets_the_run_and_its_numbers_at_their_steps(wandb: FakeWandb, tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.prepare(resume=False)
    folder.open_at(0, lambda: None, lambda: open_loggers(["wandb"], facts(tmp_path), 0))
    folder.write_metrics(1, {"reward/mean": 0.5, "loss/kl": math.nan})
    folder.close()
    assert wandb.rows == [{"step": 1, "reward/mean": 0.5}]
    assert wandb.steps == [("step", None), ("*", "step")]
    assert (wandb.settings["name"], wandb.settings["project"]) == ("demo", "agent-r1")
    assert wandb.settings["config"] == {"engine": {"lr": 0.5}, "tools": {}}
    assert wandb.settings["resume"] == "allow"
    assert wandb.finished


def test_a_resumed_run_is_the_same_run_and_another_folder_another(tmp_path: Path):
    names = {facts(tmp_path / name).unique_id for name in ("a", "a", "b")}
    assert len(names) == 2
    assert all(name.startswith("demo-") for name in names)


def test_training_goes_on_when_a_logger_fails(
    wandb: FakeWandb, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (metric_logger,) = open_loggers(["wandb"], facts(tmp_path), 0)
    wandb.away = True
    with caplog.at_level(logging.WARNING):
        metric_logger.log(3, {"reward/mean": 0.5})
    assert "metrics not logged logger=wandb step=3" in caplog.text
    wandb.away = False
    metric_logger.log(4, {"reward/mean": 0.5})
    assert [row["step"] for row in wandb.rows] == [4]


class FakeMlflow:
    """Stands in for the package and its client: a server with runs by id."""

    def __init__(self) -> None:
        self.entities = SimpleNamespace(Metric=lambda *values: values)
        self.uris: list[str] = []
        self.experiments: dict[str, str | None] = {}
        self.runs: dict[str, dict[str, Any]] = {}

    def MlflowClient(self, tracking_uri: str) -> FakeMlflow:  # noqa: N802 - its name
        self.uris.append(tracking_uri)
        return self

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(experiment_id=name) if name in self.experiments else None

    def create_experiment(self, name: str, artifact_location: str | None) -> str:
        self.experiments[name] = artifact_location
        return name

    def search_runs(self, experiments: list[str], filter_string: str) -> list[SimpleNamespace]:
        wanted = filter_string.split("'")[1]
        found = [key for key, run in self.runs.items() if wanted in run["tags"].values()]
        return [SimpleNamespace(info=SimpleNamespace(run_id=key)) for key in found]

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> SimpleNamespace:
        self.runs["r1"] = {"name": run_name, "tags": tags, "params": {}, "metrics": []}
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

    def log_param(self, run_id: str, key: str, value: str) -> None:
        self.runs[run_id]["params"][key] = value

    def get_run(self, run_id: str) -> SimpleNamespace:
        metrics = {name: value for name, value, _ in self.runs[run_id]["metrics"]}
        return SimpleNamespace(data=SimpleNamespace(metrics=metrics))

    def get_metric_history(self, run_id: str, name: str) -> list[SimpleNamespace]:
        kept = self.runs[run_id]["metrics"]
        return [SimpleNamespace(step=step) for key, _, step in kept if key == name]

    def log_batch(self, run_id: str, metrics: list[tuple[Any, ...]]) -> None:
        self.runs[run_id]["metrics"] += [(name, value, step) for name, value, _, step in metrics]

    def log_dict(self, run_id: str, values: dict[str, Any], file: str) -> None:
        self.runs[run_id].setdefault("files", {})[file] = values

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self.runs[run_id]["tags"][key] = value

    def set_terminated(self, run_id: str) -> None:
        self.runs[run_id]["ended"] = True


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMlflow:
    fake = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return fake


def test_mlflow_keeps_one_run_however_often_it_is_resumed(mlflow: FakeMlflow, tmp_path: Path):
    for step, tag in ((1, "reward/mean"), (2, "reward/my_rewards:brevity")):
        (metric_logger,) = open_loggers(["mlflow"], facts(tmp_path), step - 1)
        metric_logger.log(step, {tag: 0.5})
        metric_logger.close()
    assert mlflow.uris == [f"sqlite:///{tmp_path}/mlflow.db"] * 2
    (run,) = mlflow.runs.values()
    assert (run["name"], run["params"]) == ("demo", {"engine.lr": "0.5"})
    # MLflow allows no colon in a name.
    assert run["metrics"] == [("reward/mean", 0.5, 1), ("reward/my_rewards_brevity", 0.5, 2)]
    assert run["ended"]


def log_twice(name: str, folder: Path) -> None:
    """Log three steps, and again those after a checkpoint of the first."""
    for first in (1, 2):
        (metric_logger,) = open_loggers([name], facts(folder), first - 1)
        for step in range(first, 5 if first == 2 else 4):
            metric_logger.log(step, {"reward/mean": step / 8})
        metric_logger.close()


def test_no_step_is_in_mlflow_twice(mlflow: FakeMlflow, tmp_path: Path):
    log_twice("mlflow", tmp_path)
    (run,) = mlflow.runs.values()
    assert [step for _, _, step in run["metrics"]] == [1, 2, 3, 4]


def test_no_step_is_in_wandb_twice(wandb: FakeWandb, tmp_path: Path):
    log_twice("wandb", tmp_path)
    assert [row["step"] for row in wandb.rows] == [1, 2, 3, 4]


def store_steps(names: list[str], folder: Path, steps: range, samples: int) -> None:
    """Store the samples of steps, and an evaluation, in a run folder with loggers."""
    run = RunFolder(folder)
    run.prepare(resume=False)
    first = steps.start - 1
    run.open_at(first, lambda: None, lambda: open_loggers(names, facts(folder), first))
    for step in steps:
        run.write_metrics(step, {"reward/mean": 0.5})
        some = [stored(scored(answer="x" * 5000), step=step, trained=n > 0) for n in range(samples)]
        run.write_trajectories(f"step_{step:06d}", some)
    run.write_trajectories("eval_after", [stored(step=steps.stop, trained=False)])
    run.close()


def test_wandb_gets_a_table_of_the_first_samples_that_were_trained(
    wandb: FakeWandb, tmp_path: Path
):
    store_steps(["wandb"], tmp_path / "run", range(1, 3), samples=20)
    store_steps(["wandb"], tmp_path / "resumed", range(2, 4), samples=3)  # step 2 is there
    tables = {row["step"]: row["completions"] for row in wandb.rows if "completions" in row}
    assert {step: len(rows) for step, rows in tables.items()} == {1: 16, 2: 16, 3: 2}
    row = tables[3][0]
    assert (len(row["completion"]), row.pop("completion")[-3:]) == (4000, "xxx")
    assert row == {
        "step": 3,
        "task_id": "q0",
        "group_id": 0,
        "sample_index": 0,
        "status": "COMPLETED",
        "prompt": "who?",
        "reward": 1.0,
        "components": '{"em": 1.0}',
        "advantage": 0.5,
    }
    assert wandb.finished


def test_mlflow_keeps_a_table_for_each_step_and_shows_the_newest(
    mlflow: FakeMlflow, tmp_path: Path
):
    store_steps(["mlflow"], tmp_path, range(1, 3), samples=3)
    (run,) = mlflow.runs.values()
    files = [f"completions/step_00000{step}.json" for step in (1, 2)]
    assert list(run["files"]) == files
    assert [len(one["data"]) for one in run["files"].values()] == [2, 2]
    assert run["files"][files[0]]["columns"][:2] == ["step", "task_id"]
    assert json.loads(run["tags"]["mlflow.loggedArtifacts"]) == [
        {"path": files[1], "type": "table"}
    ]
    assert mlflow.experiments == {"agent-r1": str(tmp_path / "mlflow_files")}


def test_a_server_of_mlflow_says_where_its_files_are(
    mlflow: FakeMlflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow")
    open_loggers(["mlflow"], facts(tmp_path), 0)
    assert (mlflow.uris, mlflow.experiments) == (["http://mlflow"], {"agent-r1": None})


def test_a_table_that_is_refused_leaves_the_trajectories_whole(
    wandb: FakeWandb, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    wandb.away = True
    with caplog.at_level(logging.WARNING):
        store_steps(["wandb"], tmp_path, range(1, 2), samples=2)
    assert "table not logged logger=wandb step=1" in caplog.text
    assert len(list(stored_files(tmp_path)[0].rows())) == 2


def test_a_completion_has_what_tools_returned(tmp_path: Path):
    part = TextPart(text="a page, \ud800")
    call = ToolCallRecord(end_token_index=4, tool="search", status="ok", parts=[part])
    record = stored(scored(answer="keeper", calls=[call])).record
    row = dict(zip(COLUMNS, completion_of(record), strict=True))
    assert str(row["completion"]).endswith("a page, \ufffd")
    failed = stored(scored(status="FAILED"), trained=False).record
    row = dict(zip(COLUMNS, completion_of(failed), strict=True))
    assert (row["reward"], row["components"]) == (None, "{}")


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_logger_without_its_package_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingPackageError, match=rf"pip install 'agent-r1\[{name}\]'"):
        open_loggers([name], facts(tmp_path), 0)


def test_no_logger_is_an_answer_too():
    none: list[MetricLogger] = open_loggers([], RunFacts("demo", Path()), 0)
    assert none == []
    assert LearnerConfig(loggers=[]).loggers == []
    assert LearnerConfig().loggers == ["tensorboard"]
