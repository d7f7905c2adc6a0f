"""What a run folder says before a start: a ledger that is missing, steps that come again."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from agent_r1.launch.local_result import summary_of
from agent_r1.learner.checkpoints.ledger import Ledger
from agent_r1.learner.checkpoints.ownership import FolderLock, writer_of
from agent_r1.learner.checkpoints.run_checkpoint import LearnerState, sealed_state
from agent_r1.learner.checkpoints.standing import (
    last_step,
    ledger_problem,
    resume_notes,
    state_problem,
)
from agent_r1.learner.outcome import finished_status
from agent_r1.learner.reporting.run_folder import RunFolder
from agent_r1.runtime.files.run_folder import running_launcher
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
    tmp_path = tmp_path / "it's mine"
    tmp_path.mkdir()
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


DAMAGES = {
    "empty": "",
    "zero bytes": "\0" * 64,
    "torn": '{"step": 3, "sta',
    "list": "[1, 2]",
    "number": "-3",
    "null": "null",
    "infinity": "Infinity",
    "no JSON": "\u001f\ufffd",
    "deep": "[" * 100_000,
}
SHAPES = {
    "ledger.json": [
        "{}",
        '{"incarnation": 0, "last_policy_version": 9}',
        '{"incarnation": -3, "last_policy_version": 9}',
        '{"incarnation": "one", "last_policy_version": 9}',
        '{"incarnation": 1.5, "last_policy_version": 9}',
        '{"incarnation": 1, "last_policy_version": -1}',
        '{"incarnation": 1, "last_policy_version": 9, "incarnations_elsewhere": 2}',
        '{"incarnation": [1], "last_policy_version": 9}',
    ],
    "checkpoints/step_000003/learner.json": [
        '{"step": -1}',
        '{"step": 2}',  # of another checkpoint
        '{"step": 3, "policy_version": null}',
        '{"step": 3, "outstanding_groups": {"a": 1}}',
        '{"step": 3, "of": "a later release"}',
        '{"step": 3, "sha256": "0"}',
    ],
    "checkpoints/scores.json": ['{"3": "high"}', '{"three": 1.0}', '{"3": {"em": 1.0}}'],
}


@pytest.mark.parametrize("damage", [*DAMAGES, "shape"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_damaged_state_file_is_named_in_one_line_before_anything_starts(
    tmp_path: Path, name: str, damage: str
):
    write_run(tmp_path, steps=3, checkpoints=(2, 3))
    assert state_problem(tmp_path) is None
    for text in [DAMAGES[damage]] if damage in DAMAGES else SHAPES[name]:
        (tmp_path / name).write_text(text)
        problem = state_problem(tmp_path)
        assert problem is not None, text
        assert str(tmp_path / name) in problem
        assert "\n" not in problem
        with pytest.raises(ValueError, match=re.escape(problem)):
            RunFolder(tmp_path).prepare(resume=True)


def test_a_damaged_checkpoint_is_refused_with_the_way_to_an_older_one(tmp_path: Path):
    write_run(tmp_path, steps=3, checkpoints=(2, 3))
    (tmp_path / "checkpoints" / "step_000003" / "learner.json").write_text("")
    assert "it is empty; to continue from step 2 instead, delete that folder" in str(
        state_problem(tmp_path)
    )


def test_a_sealed_state_is_read_without_the_files_beside_it(tmp_path: Path):
    write_run(tmp_path, steps=3, checkpoints=(3,))
    file = tmp_path / "checkpoints" / "step_000003" / "learner.json"
    file.write_text(sealed_state(LearnerState(step=3, policy_version=4)))
    assert state_problem(tmp_path) is None
    file.write_text(file.read_text().replace('"policy_version": 4', '"policy_version": 5'))
    assert "its checksum differs" in str(state_problem(tmp_path))


SUMMARIES = [
    *DAMAGES.values(),
    '{"steps": 3}',
    '{"status": "finished", "steps": "3"}',
    '{"status": "finished", "steps": -3}',
    '{"status": "finished", "steps": 3, "starts": []}',
    '{"status": ["finished"], "steps": 3}',
]


@pytest.mark.parametrize("text", SUMMARIES)
def test_a_damaged_summary_hinders_no_start_and_is_named(tmp_path: Path, text: str):
    write_run(tmp_path, steps=3, checkpoints=(3,))
    (tmp_path / "summary.json").write_text(text)
    assert finished_status(tmp_path, total_steps=3, patience=1) is None
    assert summary_of(tmp_path).get("status") != "interrupted"
    assert state_problem(tmp_path) is None
    damaged, note = resume_notes(tmp_path)
    assert damaged.startswith(f"!! {tmp_path / 'summary.json'} cannot be read (")
    assert note == "continuing from the checkpoint of step 3"


@pytest.mark.parametrize("text", [*DAMAGES.values(), "{}", '{"pid": null}', '{"pid": Infinity}'])
def test_what_a_launcher_left_damaged_is_no_launcher(tmp_path: Path, text: str):
    (tmp_path / "launcher.json").write_text(text)
    assert running_launcher(tmp_path) is None


def test_damaged_lines_are_left_out_of_what_a_start_keeps_and_counts(tmp_path: Path):
    write_run(tmp_path, steps=2, checkpoints=(2,))
    with (tmp_path / "metrics.jsonl").open("ab") as metrics:
        metrics.write(b'[1]\n{"of": 1}\n{"step": "x"}\n\n\xff\xfe\0\n{"step": 3, "a')
    (tmp_path / "conditions.jsonl").write_bytes(b"\xff\xfe\n[]\n")
    assert list(resume_notes(tmp_path)) == ["continuing from the checkpoint of step 2"]
    folder = RunFolder(tmp_path)
    folder.prepare(resume=True)
    folder.open_at(2, lambda: None)
    folder.close()
    kept = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in kept] == [1, 2]
