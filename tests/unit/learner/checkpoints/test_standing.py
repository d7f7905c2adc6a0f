"""What a run folder says before a start: a ledger that is missing, steps that come again."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from agent_r1.learner.checkpoints.ledger import Ledger
from agent_r1.learner.checkpoints.ownership import FolderLock, writer_of
from agent_r1.learner.checkpoints.standing import last_step, ledger_problem, resume_notes
from agent_r1.learner.reporting.run_folder import RunFolder
from tests.support.builders import SEPARATORS


def write_run(folder: Path, *, steps: int, checkpoints: tuple[int, ...]) -> None:
    """A run that has trained so many steps, its version two ahead of its step."""
    (folder / "config.json").write_text("{}")
    lines = [{"step": step, "policy/version": step + 2} for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in checkpoints:
        path = folder / "checkpoints" / f"step_{step:06d}"
        path.mkdir(parents=True)
        (path / "learner.json").write_text(json.dumps({"step": step, "policy_version": step + 2}))
    numbers = {"incarnation": 1, "last_policy_version": steps + 2}
    (folder / "ledger.json").write_text(json.dumps(numbers))


def test_a_whole_ledger_is_no_problem(tmp_path: Path):
    write_run(tmp_path, steps=3, checkpoints=(2,))
    assert ledger_problem(tmp_path) is None


@pytest.mark.parametrize("separator", SEPARATORS)
def test_a_line_separator_in_a_name_hides_no_step(tmp_path: Path, separator: str):
    line = json.dumps({"step": 3, f"eval/a{separator}b/reward": 1.0}, ensure_ascii=False)
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n' + line + "\n", encoding="utf-8")
    assert last_step(tmp_path) == 3


def test_a_run_that_has_not_trained_needs_no_ledger(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    assert ledger_problem(tmp_path) is None


@pytest.mark.parametrize(
    ("ledger", "says"),
    [
        (None, r"ledger\.json is missing"),
        ("", r"ledger\.json cannot be read"),
        ('{"incarnation": 1, "last_pol', r"ledger\.json cannot be read"),
        ('{"incarnation": 1, "last_policy_version": 2}', r"ledger\.json is older than"),
    ],
)
def test_a_ledger_that_is_gone_torn_or_old_is_named_with_a_command_that_helps(
    tmp_path: Path, ledger: str | None, says: str
):
    write_run(tmp_path, steps=3, checkpoints=(2,))
    (tmp_path / "ledger.json").unlink()
    if ledger is not None:
        (tmp_path / "ledger.json").write_text(ledger)
    # The learner says the same, however it is started: nothing sends the user back and forth.
    with pytest.raises(ValueError, match=says) as refusal:
        RunFolder(tmp_path).prepare(resume=True)
    problem = ledger_problem(tmp_path)
    assert problem is not None
    assert problem == str(refusal.value)
    assert "--resume" not in problem
    (command,) = re.findall("`(.*)`", problem)
    subprocess.run(["sh", "-c", command], check=True)
    assert shlex.split(command)[0] == "echo"
    assert ledger_problem(tmp_path) is None
    # Step 3 is version 5, and a thousand numbers are left out.
    assert Ledger(tmp_path).next_policy_version() == 1006


def test_where_the_run_store_has_the_numbers_a_missing_ledger_is_no_harm(tmp_path: Path):
    write_run(tmp_path, steps=3, checkpoints=(2,))
    (tmp_path / "ledger.json").unlink()
    assert ledger_problem(tmp_path, stored=True) is None
    (tmp_path / "ledger.json").write_text("{")
    assert "delete" in (ledger_problem(tmp_path, stored=True) or "")


def test_the_steps_that_are_trained_again_are_said(tmp_path: Path):
    write_run(tmp_path, steps=5, checkpoints=(2, 4))
    assert list(resume_notes(tmp_path)) == [
        "!! continuing from the checkpoint of step 4; step 5 is trained again"
    ]
    (tmp_path / "checkpoints" / "step_000004" / "learner.json").unlink()
    first, second = resume_notes(tmp_path)
    assert first.startswith("!! ")
    assert "step_000004 has no learner.json, so training cannot continue from it" in first
    assert second == "!! continuing from the checkpoint of step 2; steps 3 to 5 are trained again"


def test_training_that_begins_anew_says_so(tmp_path: Path):
    write_run(tmp_path, steps=2, checkpoints=())
    (note,) = resume_notes(tmp_path)
    assert note.endswith("no checkpoint: training begins anew; steps 1 to 2 are trained again")


def test_a_resume_that_repeats_nothing_is_not_loud(tmp_path: Path):
    write_run(tmp_path, steps=2, checkpoints=(2,))
    assert list(resume_notes(tmp_path)) == ["continuing from the checkpoint of step 2"]


def test_a_run_that_never_trained_has_nothing_to_say(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    assert list(resume_notes(tmp_path)) == []


def test_the_learner_that_holds_a_folder_is_found_without_touching_its_lock(tmp_path: Path):
    assert writer_of(tmp_path) is None
    lock = FolderLock(tmp_path)
    lock.acquire()
    assert (writer_of(tmp_path) or "").startswith("process ")
    lock.release()
    assert writer_of(tmp_path) is None
