"""What the terminal shows at the end of a run."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from agent_r1.evaluation.score_names import ScoreNames
from agent_r1.launch.local import claim_run_folder
from agent_r1.launch.local_result import note_failure, print_result, print_stopped
from agent_r1.learner.reporting.run_folder import RunFolder

NAMES = ScoreNames(components=("desk:brief",), tools=("search",))


def append(path: Path, *records: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def scores_of(reward: float, *, calls: float, failed: int = 0) -> dict[str, Any]:
    components = {"desk:brief": reward, "exact_match": 0.77}
    return {
        "reward": reward,
        "components": components,
        "calls": {"search": calls},
        "n": 200,
        "failed": failed,
    }


def answer(task_id: str, reward: float, text: str) -> dict[str, Any]:
    return {
        "step": 0,
        "group_id": 0,
        "sample_index": 0,
        "task_id": task_id,
        "prompt": [{"role": "user", "content": f"question {task_id}"}],
        "payload": {"answers": ["Oslo"]},
        "status": "COMPLETED",
        "reason": "answer",
        "turns": [{"text": text, "calls": []}],
        "reward": {"total": reward, "components": {}},
        "advantage": None,
        "policy_versions": [0],
        "num_tokens": 5,
        "latency_ms": 1.0,
    }


def test_the_result_shows_an_answer_that_training_changed(tmp_path: Path):
    folder = tmp_path / "run"
    (folder / "trajectories").mkdir(parents=True)
    append(
        folder / "trajectories" / "eval_before.jsonl",
        answer("right", 1.0, "<answer>Oslo</answer>"),
        answer("wrong", 0.0, "<answer>Rome</answer>"),
    )
    append(
        folder / "trajectories" / "eval_after.jsonl",
        answer("right", 1.0, "<answer>Oslo</answer>"),
        answer("wrong", 1.0, "<answer>Oslo</answer>"),
    )
    scores = scores_of(0.4, calls=1.0)
    after = scores_of(0.9, calls=1.9, failed=3)
    summary = {
        "steps": 30,
        "trajectories_trained": 240,
        "sampled_tokens": 1000,
        "wall_s": 61.0,
        **{f"{key}_before": value for key, value in scores_of(0.41, calls=1.0).items()},
        **{f"{key}_after": value for key, value in scores_of(0.91, calls=1.8).items()},
        "sets": {
            "held_out": {"in_domain": True, "before": scores, "after": after},
            "near": {"in_domain": True, "before": scores, "after": after},
            "far": {"in_domain": False, "before": scores, "after": None},
        },
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    output = io.StringIO()
    print_result(folder, NAMES, output)
    text = output.getvalue()
    assert "question wrong" in text
    assert "question right" not in text
    assert text.index("Rome") < text.index("after training") < text.index("<answer>Oslo")
    rows = [line.replace("│", " ").split() for line in text.splitlines()]
    assert ["held_out", "reward", "0.400", "0.900"] in rows
    assert ["brief", "0.400", "0.900"] in rows
    assert ["search", "1.00", "1.90"] in rows
    assert ["questions", "200", "200", "(3", "failed)"] in rows
    assert ["mean", "of", "the", "trained", "sets", "reward", "0.410", "0.910"] in rows
    assert "EM" not in text
    assert "untrained" in text
    assert "30 steps, 240 trajectories" in text
    assert "in 1m01s" in text
    assert f"agent-r1 show {folder}" in text


def test_a_run_without_a_summary_points_to_the_logs(tmp_path: Path):
    output = io.StringIO()
    print_result(tmp_path, NAMES, output)
    assert "summary.json is missing" in output.getvalue().replace("\n", "")


def test_losses_are_said_with_their_reasons(tmp_path: Path):
    reason = (
        "7 of the 48 training samples failed for good (15%); learner.max_lost_share allows 5%. "
        "Most frequent reasons: 7 x tool_timeout: search."
    )
    summary = {"status": "finished_with_losses", "steps": 3, "reason": reason, "dead_letters": 2}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    output = io.StringIO()
    print_result(tmp_path, NAMES, output)
    text = output.getvalue()
    assert f"!! {reason}" in text
    assert "show" in text
    assert "--failed" in text
    assert "2 dead letters" in text


# --- A run that stopped --------------------------------------------------------------------------


@pytest.mark.parametrize("error", [None, "the corpus has no passages"])
def test_a_run_that_never_began_is_started_again_not_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: str | None
):
    (tmp_path / "logs").mkdir()
    RunFolder(tmp_path).prepare(resume=False)  # as far as the learner came
    (tmp_path / "config.json").write_text("{}")
    print_stopped(tmp_path, error)
    shown = "".join(capsys.readouterr())
    assert "--resume" not in shown
    assert "start again with the same command" in shown
    assert ("correct the problem above" in shown) == (error is not None)
    claim_run_folder(tmp_path, resume=False)  # which then works


def test_a_run_that_began_goes_on_once_the_cause_is_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "ledger.json").write_text("{}")
    print_stopped(tmp_path, None)
    assert capsys.readouterr().out.startswith("Stopped. To continue: ")
    print_stopped(tmp_path, "7 of the last 8 samples failed")
    error = capsys.readouterr().err
    assert error.startswith("agent-r1: error: 7 of the last 8 samples failed\n")
    assert "Remove the cause before you continue" in error
    assert "--set KEY=VALUE" in error
    assert f"train --resume {tmp_path}" in error


@pytest.mark.parametrize(
    ("status", "after"),
    [
        ("interrupted", ("failed", "reward died (4 times)")),
        ("failed", ("failed", "SIGTERM")),  # the learner knows better
        ("finished", ("finished", "SIGTERM")),
    ],
)
def test_a_run_that_the_launcher_stopped_says_why(
    tmp_path: Path, status: str, after: tuple[str, str]
):
    note_failure(tmp_path, "reward died (4 times)")  # a run without a summary
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / "summary.json"
    file.write_text(json.dumps({"status": status, "reason": "SIGTERM", "steps": 3}))
    note_failure(tmp_path, "reward died (4 times)")
    summary = json.loads(file.read_text())
    assert (summary["status"], summary["reason"]) == after
    assert summary["steps"] == 3


@pytest.mark.parametrize("error", [None, "the corpus has no passages"])
def test_nobody_is_sent_to_a_folder_that_is_deleted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: str | None
):
    (tmp_path / "ledger.json").write_text("{}")
    print_stopped(tmp_path, error, temporary=True)
    shown = "".join(capsys.readouterr())
    assert str(tmp_path) not in shown
    assert "start again with the same command" in shown


def test_the_next_commands_can_be_pasted_whatever_is_in_the_path(tmp_path: Path):
    folder = tmp_path / "my run"
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps({"steps": 1}))
    output = io.StringIO()
    print_result(folder, NAMES, output)
    for words in ([f"show '{folder}'"], [f"chat '{folder}'"], [f"--logdir '{folder}/tensorboard'"]):
        assert words[0] in output.getvalue()


def test_the_command_that_continues_a_run_can_be_pasted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "my run"
    folder.mkdir()
    (folder / "ledger.json").write_text("{}")
    print_stopped(folder, None)
    assert f"train --resume '{folder}'" in capsys.readouterr().out
    (folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=f"--resume '{folder}'"):
        claim_run_folder(folder, resume=False)
