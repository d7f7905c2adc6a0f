"""The run folder: one line a step, cut back on resume, and the same numbers for TensorBoard."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_r1.learner.checkpoints.ledger import Ledger
from agent_r1.learner.reporting.loggers import open_loggers
from agent_r1.learner.reporting.loggers.base import RunFacts
from agent_r1.learner.reporting.run_folder import RunFolder
from agent_r1.runs.store import StoredTrajectory, stored_files
from agent_r1.runtime.files.writing import DiskFullError
from tests.support.builders import SEPARATORS, stored


def opened(path: Path, step: int = 0, *, resume: bool = False) -> RunFolder:
    folder = RunFolder(path)
    folder.prepare(resume=resume)
    facts = RunFacts("run", path)
    folder.open_at(step, lambda: None, lambda: open_loggers(["tensorboard"], facts, step))
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder / "tensorboard"))
    reader.Reload()
    tags = reader.Tags()["scalars"]
    return {
        tag: [(event.step, round(event.value, 6)) for event in reader.Scalars(tag)] for tag in tags
    }


def test_a_step_is_one_line_with_its_time_and_one_event(tmp_path: Path):
    before = time.time() - 0.001  # the file has milliseconds
    folder = opened(tmp_path / "run")
    folder.write_metrics(1, {"reward/mean": 0.5, "loss/kl": math.nan})
    folder.write_metrics(2, {"reward/mean": 0.75})
    folder.write_scalars(1, {"eval/s/em": 0.25})
    folder.close()
    steps = lines(tmp_path / "run" / "metrics.jsonl")
    assert before <= steps[0].pop("time/at") <= steps[1].pop("time/at") <= time.time() + 0.001
    assert steps == [
        {"step": 1, "reward/mean": 0.5, "loss/kl": None},
        {"step": 2, "reward/mean": 0.75},
    ]
    assert scalars(tmp_path / "run") == {
        "reward/mean": [(1, 0.5), (2, 0.75)],
        "eval/s/em": [(1, 0.25)],
    }


def test_a_ledger_that_only_says_which_numbers_are_taken_is_no_run(tmp_path: Path):
    ledger = Ledger(tmp_path)
    ledger.go_on_after(incarnation=3, policy_version=9)
    RunFolder(tmp_path).prepare(resume=False)
    ledger.next_incarnation()
    with pytest.raises(ValueError, match=r"it has ledger\.json"):
        RunFolder(tmp_path).prepare(resume=False)


def test_resume_forgets_what_came_after_the_checkpoint(tmp_path: Path):
    path = tmp_path / "run"
    folder = opened(path)
    (path / "ledger.json").write_text('{"incarnation": 1}')
    for step in (1, 2, 3):
        folder.write_metrics(step, {"reward/mean": float(step)})
        folder.write_evaluation(step, "during", {})
        folder.write_trajectories(f"step_{step:06d}", [stored()])
    folder.close()
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')  # cut off by a kill
    folder = opened(path, 2, resume=True)
    folder.write_metrics(3, {"reward/mean": 30.0})
    folder.close()
    assert [line["reward/mean"] for line in lines(path / "metrics.jsonl")] == [1.0, 2.0, 30.0]
    assert [line["step"] for line in lines(path / "evaluations.jsonl")] == [1, 2]
    names = sorted(file.name for file in (path / "trajectories").iterdir())
    assert names == ["step_000001.parquet", "step_000002.parquet"]
    assert scalars(path)["reward/mean"] == [(1, 1.0), (2, 2.0), (3, 30.0)]


@pytest.mark.parametrize("separator", SEPARATORS)
def test_resume_keeps_lines_whose_texts_hold_what_ends_a_line_elsewhere(
    tmp_path: Path, separator: str
):
    path = tmp_path / "run"
    folder = opened(path)
    (path / "ledger.json").write_text('{"incarnation": 1}')
    folder.write_evaluation(1, f"a{separator}b", {})
    folder.close()
    before = (path / "evaluations.jsonl").read_text(encoding="utf-8")
    assert separator in before
    opened(path, 1, resume=True).close()
    assert (path / "evaluations.jsonl").read_text(encoding="utf-8") == before


@pytest.mark.parametrize("name", ["ledger.json", "metrics.jsonl", "summary.json"])
def test_a_folder_with_a_run_is_refused_and_resume_is_named(tmp_path: Path, name: str):
    (tmp_path / name).write_text('{"incarnation": 1}')
    with pytest.raises(ValueError, match=rf"not empty \(it has {name}\).*--resume {tmp_path}"):
        RunFolder(tmp_path).prepare(resume=False)


def test_a_folder_with_only_config_and_logs_is_a_fresh_run(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "logs").mkdir()
    RunFolder(tmp_path).prepare(resume=False)
    RunFolder(tmp_path).prepare(resume=True)


def test_resuming_an_empty_folder_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="holds no run to resume"):
        RunFolder(tmp_path).prepare(resume=True)


def test_the_config_that_the_command_wrote_is_kept(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.write_config({"a": 1})
    folder.write_config({"a": 2})
    assert json.loads((tmp_path / "config.json").read_text()) == {"a": 1}


def test_a_summary_holds_no_value_json_cannot(tmp_path: Path):
    RunFolder(tmp_path).write_summary({"em": math.inf, "sets": {"s": [math.nan, 1]}})
    expected = {"em": None, "sets": {"s": [None, 1]}}
    assert json.loads((tmp_path / "summary.json").read_text()) == expected


def test_a_full_disk_is_said_to_be_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = opened(tmp_path / "run")

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", full)
        with pytest.raises(DiskFullError, match=r"the disk is full: metrics\.jsonl"):
            folder.write_metrics(1, {})
    folder.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_disk_that_fills_up_under_the_events_is_said_at_once_and_gives_the_lock_back(
    tmp_path: Path,
):
    others = set(threading.enumerate())
    folder = opened(tmp_path)
    (events,) = (tmp_path / "tensorboard").iterdir()
    events.unlink()
    events.symlink_to("/dev/full")
    message = "the disk is full: TensorBoard events "
    with pytest.raises(DiskFullError, match=message):
        folder.write_scalars(1, {"reward/mean": 1.0})
    with pytest.raises(DiskFullError, match=message):
        folder.close()
    RunFolder(tmp_path).prepare(resume=False)
    for thread in set(threading.enumerate()) - others:
        thread.join(timeout=10.0)  # what the writer's thread raised belongs to this test


def test_a_disk_that_is_full_of_trajectories_is_said_before_the_next_ones_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = opened(tmp_path / "run")
    with monkeypatch.context() as patched:

        def full(*args: object) -> None:
            raise OSError(28, "No space left on device")

        patched.setattr("agent_r1.runs.store.write_parquet", full)
        folder.write_trajectories("step_000001", [stored()])
        with pytest.raises(DiskFullError, match=r"the disk is full: step_000001\.parquet"):
            folder.write_trajectories("step_000002", [stored()])
    folder.write_trajectories("step_000002", [stored()])
    folder.finish_trajectories()
    folder.close()
    assert [file.step for file in stored_files(tmp_path / "run")] == [2]


def test_a_step_does_not_wait_for_its_trajectories_to_be_written(tmp_path: Path):
    folder, asked, go_on = opened(tmp_path / "run"), threading.Event(), threading.Event()

    def slow() -> Iterator[StoredTrajectory]:
        asked.set()
        assert go_on.wait(60)
        yield stored()

    folder.write_trajectories("step_000001", slow())
    assert asked.wait(60)
    assert stored_files(tmp_path / "run") == []
    go_on.set()
    folder.close()
    assert [file.step for file in stored_files(tmp_path / "run")] == [1]


def test_events_are_on_disk_when_the_call_returns(tmp_path: Path):
    folder = opened(tmp_path)
    folder.write_scalars(1, {"eval/two words/em": 0.5})
    assert scalars(tmp_path) == {"eval/two words/em": [(1, 0.5)]}
    folder.close()


def test_torch_is_imported_only_when_the_events_are_opened(tmp_path: Path):
    code = f"""
import sys
from pathlib import Path
from agent_r1.learner.reporting.loggers import open_loggers
from agent_r1.learner.reporting.loggers.base import RunFacts
from agent_r1.learner.reporting.run_folder import RunFolder
folder = RunFolder(Path({str(tmp_path / "run")!r}))
folder.prepare(resume=False)
assert "torch" not in sys.modules
facts = RunFacts("run", folder.path)
folder.open_at(0, lambda: None, lambda: open_loggers(["tensorboard"], facts, 0))
folder.write_metrics(1, {{"reward/mean": 1.0}})
folder.close()
assert "torch" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
