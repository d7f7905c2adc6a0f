"""`agent-r1 table` where every run is finished: what it gathers and writes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agent_r1.cli import main as cli
from agent_r1.cli.evaluation.asking import questioning
from agent_r1.cli.evaluation.settings import component_differences, evaluation_facts
from agent_r1.cli.evaluation.table import results_of
from agent_r1.cli.evaluation.table_plan import PlannedRun, read_plan
from agent_r1.config.run import write_config
from agent_r1.evaluation.answer_file import make_answer
from agent_r1.evaluation.main import EvaluationRun
from agent_r1.launch import local_table
from agent_r1.launch.local_table import TableRun
from agent_r1.launch.supervisor import ServiceError
from agent_r1.reward.config import RewardConfig
from agent_r1.runtime.evaluation_client import EvalResult
from agent_r1.runtime.exit_status import EXIT_INTERRUPTED
from tests.support.config_scene import load_nothing, write_scene

TABLE_TOML = """
config = "run.toml"
results = "small"
seeds = [0, 1]
baselines = ["base_tool_call"]
methods = [
    { name = "grpo", title = "GRPO" },
    { name = "rloo", title = "RLOO", set = { "learner.algorithm" = "rloo" } },
]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    load_nothing(monkeypatch)
    folder = write_scene(tmp_path / "example").parent
    (folder / "table.toml").write_text(TABLE_TOML)
    return folder


def finish(run: PlannedRun, em: list[float | None]) -> None:
    """Write what a finished run leaves."""
    run.folder.mkdir(parents=True)
    write_config(run.config, run.folder / "config.json")
    summary = {"status": "finished", "wall_s": 60.0, "sets": {"held_out": {"in_domain": True}}}
    (run.folder / "summary.json").write_text(json.dumps(summary))
    lines = [
        {
            "id": str(i),
            "set": "held_out",
            "em": em[i],
            "f1": em[i],
            "calls": {"search": i, "read": 1},
        }
        for i in range(len(em))
    ]
    answers = "".join(json.dumps(line) + "\n" for line in lines)
    (run.folder / "evaluation_after.jsonl").write_text(answers)
    # 1,200 tokens, a quarter of them sampled.
    metrics = {"step": 1, "reward/exact_match": 0.25, "batch/tokens": 1200.0, "mask/share": 0.25}
    (run.folder / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")


def table(folder: Path, *options: str) -> int:
    return cli.main(["table", str(folder / "table.toml"), "--out", str(folder / "out"), *options])


def written(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out" / "small.json").read_text())


def test_finished_runs_are_reported_without_starting_anything(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    grpo = read_plan(folder / "table.toml", out=folder / "out").methods[0]
    finish(grpo.runs[0], [1.0, 0.0])
    finish(grpo.runs[1], [1.0, None])  # a question that failed counts in no mean
    assert table(folder, "--only", "grpo") == 0
    numbers = written(folder)
    assert [(row["seed"], row["score"], row["n"]) for row in numbers["rows"]] == [
        (0, 0.5, 2),
        (1, 1.0, 1),
    ]
    # Seeds weigh the same: (1/2 + 1) / 2.
    averages = {row["method"]: row["average"] for row in numbers["estimates"]}
    assert averages["grpo"]["mean"] == 0.75
    assert averages["rloo"] is None
    assert numbers["command"].endswith(f"table.toml --out {folder / 'out'}")
    assert numbers["settings"]["rloo"]["advantage"] == "rloo"
    assert [row["failed"] for row in numbers["rows"]] == [0, 1]
    text = (folder / "out" / "small.md").read_text()
    assert "count in no mean: GRPO seed 1: 1 of held_out." in text
    assert "| RLOO | not run | not run |" in text
    assert "| Base Tool Call | not run | not run |" in text
    assert "2 of 2 rows are finished and kept" in capsys.readouterr().out


def test_the_report_says_which_rows_spend_something_else(folder: Path):
    size = "of 2 questions x 4 trajectories"

    def budget(*options: str) -> str:
        return results_of(read_plan(folder / "table.toml", options), "").budget

    assert budget() == f"Every trained row spends 3 steps {size}."
    assert budget("learner.steps=0") == "Every trained row spends no step of the learner."
    text = TABLE_TOML.replace('"learner.algorithm"', '"learner.steps" = 9, "learner.algorithm"')
    (folder / "table.toml").write_text(text)
    several = f"Every other trained row spends 3 steps {size}; RLOO spends 9 steps {size}."
    assert budget() == several


def test_a_run_of_no_steps_has_scores_and_no_curve(folder: Path):
    grpo = read_plan(folder / "table.toml", out=folder / "out").methods[0]
    for run in grpo.runs:
        finish(run, [1.0, 0.0])
        (run.folder / "metrics.jsonl").unlink()
    assert table(folder, "--only", "grpo") == 0
    [row] = [row for row in written(folder)["estimates"] if row["method"] == "grpo"]
    assert (row["average"]["mean"], row["progress"]) == (0.5, None)


def test_a_run_that_lost_too_much_is_kept_and_has_an_exit_status_of_its_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    grpo = read_plan(folder / "table.toml", out=folder / "out").methods[0]
    for run in grpo.runs:
        finish(run, [1.0, 0.0])
    (grpo.runs[1].folder / "summary.json").write_text('{"status": "finished_with_losses"}')
    assert table(folder, "--only", "grpo") == 3
    text = capsys.readouterr().out
    assert "2 of 2 rows are finished and kept" in text
    assert f"lost more than learner.max_lost_share allows; see {grpo.runs[1].folder}" in text
    assert str(grpo.runs[0].folder) not in text


def test_a_run_with_other_settings_is_in_no_report(folder: Path):
    changed = read_plan(folder / "table.toml", ["engine.lr=0.5"], folder / "out")
    finish(changed.methods[1].runs[0], [1.0])
    for run in read_plan(folder / "table.toml", out=folder / "out").methods[0].runs:
        finish(run, [0.0])
    assert table(folder, "--only", "grpo") == 0
    assert {row["method"] for row in written(folder)["rows"]} == {"grpo"}


def test_a_run_that_has_a_cell_is_finished_without_its_folder(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    (folder / "table.toml").write_text('cells = "cells"\n' + TABLE_TOML)
    grpo = read_plan(folder / "table.toml", out=folder / "out").methods[0]
    finish(grpo.runs[0], [1 / 3, 0.0])  # a third has more digits than a cell keeps
    finish(grpo.runs[1], [1.0, None])
    assert table(folder, "--only", "grpo") == 0
    before = written(folder)
    assert sorted(path.name for path in (folder / "out" / "cells").iterdir()) == [
        "grpo_seed0.json",
        "grpo_seed1.json",
    ]
    for run in grpo.runs:
        shutil.rmtree(run.folder)
    capsys.readouterr()
    assert table(folder, "--only", "grpo") == 0
    assert "2 of 2 rows are finished and kept" in capsys.readouterr().out
    assert written(folder) == before


@pytest.mark.parametrize("ending", ["stopped", "failed"])
def test_what_finished_before_a_table_ended_early_has_its_cell(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ending: str
):
    (folder / "table.toml").write_text('cells = "cells"\n' + TABLE_TOML)
    grpo = read_plan(folder / "table.toml", out=folder / "out").methods[0]

    def run_table(*_: object, **__: object) -> bool:
        finish(grpo.runs[0], [1.0, 0.0])
        if ending == "failed":
            raise ServiceError("the rollout server ended")
        return True

    monkeypatch.setattr(local_table, "run_table", run_table)
    assert table(folder, "--only", "grpo") != 0
    assert "1 of 2 rows are finished and kept" in capsys.readouterr().err
    assert [path.name for path in (folder / "out" / "cells").iterdir()] == ["grpo_seed0.json"]


def test_a_table_is_reported_from_its_cells_where_its_data_and_models_are_not(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    (folder / "table.toml").write_text('cells = "cells"\n' + TABLE_TOML)
    for run in read_plan(folder / "table.toml", out=folder / "out").methods[0].runs:
        finish(run, [1.0])
    answer_baseline(folder, 1.0)
    rows = ("--only", "grpo,base_tool_call")
    assert table(folder, *rows) == 0
    before = written(folder)
    for name in ("model", "out/runs", "out/baselines"):
        shutil.rmtree(folder / name)
    for file in folder.glob("*.jsonl"):
        file.unlink()
    assert table(folder, *rows) == 0
    assert written(folder) == before
    # A row that is to run needs them, and says so before anything is discarded.
    for options in (("--only", "rloo"), (*rows, "--overwrite")):
        assert table(folder, *options) == 2
        assert "model.path" in capsys.readouterr().err
    assert [file.name for file in sorted((folder / "out" / "cells").iterdir())] == [
        "grpo_seed0.json",
        "grpo_seed1.json",
        "small_base_tool_call.json",
    ]


def test_runs_may_differ_in_what_is_measured_only(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "table.toml").write_text('cells = "cells"\n' + TABLE_TOML)
    finish(read_plan(folder / "table.toml", out=folder / "out").methods[0].runs[0], [1.0, 0.0])
    command = ("--only", "grpo", "--seeds", "0")
    assert table(folder, *command) == 0
    more = ("--set", "reward.components.exact_match=1.0", "--set", "reward.components.f1=0.0")
    assert table(folder, *command, *more) == 0  # of the folder
    shutil.rmtree(folder / "out" / "runs")
    assert table(folder, *command, *more) == 0  # of the cell
    assert "1 of 1 rows are finished and kept" in capsys.readouterr().out
    assert table(folder, *command, *more, "--set", "reward.components.f1=0.5") == 2
    assert "reward.components.f1 is not set there and 0.5 here" in capsys.readouterr().err


def test_runs_that_did_not_measure_what_is_compared_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    others = ["reward.components={answered = 1.0}"]
    (folder / "table.toml").write_text(f'measure = "answered"\n{TABLE_TOML}')
    finish(read_plan(folder / "table.toml", others, folder / "out").methods[0].runs[0], [1.0])
    (folder / "table.toml").write_text(TABLE_TOML)
    both = "reward.components={answered = 1.0, exact_match = 0.0}"
    assert table(folder, "--only", "grpo", "--set", both) == 2
    assert "reward.components.exact_match is not set there" in capsys.readouterr().err


def test_a_cell_of_an_older_version_is_read(folder: Path):
    (folder / "table.toml").write_text('cells = "cells"\n' + TABLE_TOML)
    (run, _) = read_plan(folder / "table.toml", out=folder / "out").methods[0].runs
    finish(run, [1.0, 0.0])
    command = ("--only", "grpo", "--seeds", "0")
    assert table(folder, *command) == 0
    before = written(folder)
    shutil.rmtree(folder / "out" / "runs")
    file = folder / "out" / "cells" / "grpo_seed0.json"
    cell = json.loads(file.read_text())
    cell["em"] = cell.pop("scores")
    assert cell.pop("measure") == "exact_match"
    file.write_text(json.dumps(cell))
    assert table(folder, *command) == 0
    assert written(folder) == before


OTHER_MEASURE = """
config = "run.toml"
results = "small"
cells = "cells"
measure = "own:passed"
seeds = [0, 1]
baselines = ["base_tool_call"]
threshold = 0.5
defaults = { "reward.components" = { "own:passed" = 1.0, "exact_match" = 0.0 } }
methods = [{ name = "grpo", title = "GRPO" }]
"""


def finish_passing(run: PlannedRun, passed: list[float | None]) -> None:
    """Write what a finished run leaves whose questions have no gold answers."""
    finish(run, [])
    lines = [
        {
            "id": str(i),
            "set": "held_out",
            "failed": value is None,
            "components": {} if value is None else {"own:passed": value},
            "calls": {},
            "em": None,
            "f1": None,
        }
        for i, value in enumerate(passed)
    ]
    answers = "".join(json.dumps(line) + "\n" for line in lines)
    (run.folder / "evaluation_after.jsonl").write_text(answers)
    metrics = {"reward/own:passed": 0.75, "batch/tokens": 1000.0, "mask/share": 0.5}
    steps = [json.dumps({"step": step, "reward/exact_match": 0.0, **metrics}) for step in range(10)]
    (run.folder / "metrics.jsonl").write_text("\n".join(steps))


def test_a_table_compares_the_measure_that_it_names(folder: Path):
    (folder / "table.toml").write_text(OTHER_MEASURE)
    for run in read_plan(folder / "table.toml", out=folder / "out").methods[0].runs:
        finish_passing(run, [1.0, 0.0, None])
    assert table(folder, "--only", "grpo") == 0
    numbers = written(folder)
    assert numbers["measure"] == "own:passed"
    rows = [(row["score"], row["f1"], row["n"], row["failed"]) for row in numbers["rows"]]
    assert rows == [(0.5, None, 2, 1)] * 2
    # Ten steps of 1,000 tokens, half of them sampled, at .75.
    (grpo,) = [row for row in numbers["estimates"] if row["method"] == "grpo"]
    assert (grpo["f1"], grpo["progress"]["area"]) == (None, 0.75)
    assert grpo["progress"]["tokens"] == [5000, 5000]
    cell = json.loads((folder / "out" / "cells" / "grpo_seed0.json").read_text())
    assert (cell["curve"], cell["components"]) == ([0.75] * 10, {"exact_match": [0.0] * 10})


def test_a_baseline_is_compared_by_the_measure_too(folder: Path):
    (folder / "table.toml").write_text(OTHER_MEASURE)
    answer_baseline(folder, 0.0, {"own:passed": 1.0})
    assert table(folder, "--only", "base_tool_call") == 0
    assert [row["score"] for row in written(folder)["rows"]] == [1.0]


def test_a_cell_of_another_measure_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "table.toml").write_text(OTHER_MEASURE)
    for run in read_plan(folder / "table.toml", out=folder / "out").methods[0].runs:
        finish_passing(run, [1.0])
    assert table(folder, "--only", "grpo") == 0
    shutil.rmtree(folder / "out" / "runs")
    (folder / "table.toml").write_text(OTHER_MEASURE.replace('measure = "own:passed"', ""))
    assert table(folder, "--only", "grpo") == 2
    error = capsys.readouterr().err
    assert 'other settings: measure is "own:passed" there and "exact_match" here' in error


def answer_baseline(folder: Path, em: float, components: Mapping[str, float] | None = None) -> None:
    """Write what a baseline leaves when it has been asked everything."""
    plan = read_plan(folder / "table.toml", out=folder / "out")
    evaluation = EvaluationRun(
        sets=plan.base.evaluation.sets,
        questioning=questioning(plan.base, "base_tool_call"),
        out=plan.answers("base_tool_call"),
        facts=evaluation_facts(plan.base),
    )
    for task in evaluation.questions:
        answer = make_answer(task, EvalResult(task, None), "base_tool_call")
        scores = {"em": em, "f1": em, "components": components or {}}
        evaluation.file.append(answer.model_copy(update={"failed": False, **scores}))


def test_scores_are_in_the_order_of_the_questions_and_say_which_failed(folder: Path):
    (folder / "table.toml").write_text('cells = "cells"\n' + TABLE_TOML)
    plan = read_plan(folder / "table.toml", out=folder / "out")
    finish(plan.methods[0].runs[0], [1.0, None, 0.0])
    tasks = [{"id": str(i), "prompt": "Who?", "payload": {"answers": ["a"]}} for i in (10, 9, 8)]
    held_out = Path(str(plan.base.evaluation.sets["held_out"].source))
    held_out.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    evaluation = EvaluationRun(
        sets=plan.base.evaluation.sets,
        questioning=questioning(plan.base, "base_tool_call"),
        out=plan.answers("base_tool_call"),
        facts=evaluation_facts(plan.base),
    )
    # Answers come in any order.
    for task, em in zip(reversed(evaluation.questions), (0.0, 0.5, 1.0), strict=True):
        answer = make_answer(task, EvalResult(task, None), "base_tool_call")
        evaluation.file.append(answer.model_copy(update={"failed": False, "em": em, "f1": em}))
    assert table(folder, "--only", "grpo,base_tool_call", "--seeds", "0") == 0
    cells = folder / "out" / "cells"
    assert json.loads((cells / "grpo_seed0.json").read_text())["scores"] == {
        "held_out": [1.0, None, 0.0]
    }
    assert json.loads((cells / "small_base_tool_call.json").read_text())["scores"] == {
        "held_out": [1.0, 0.5, 0.0]
    }


def test_a_baseline_that_was_asked_everything_is_kept_if_more_is_measured(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    finish(read_plan(folder / "table.toml", out=folder / "out").methods[0].runs[0], [1.0])
    answer_baseline(folder, 1.0)
    command = ("--only", "grpo,base_tool_call", "--seeds", "0")
    more = ("--set", "reward.components.exact_match=1.0", "--set", "reward.components.f1=0.0")
    assert table(folder, *command, *more) == 0
    shutil.rmtree(folder / "out" / "runs")
    assert table(folder, *command, "--set", "reward.components.exact_match=0.5") == 2
    assert "reward.components is" in capsys.readouterr().err


def test_a_baseline_that_is_half_asked_is_not_mixed(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    finish(read_plan(folder / "table.toml", out=folder / "out").methods[0].runs[0], [1.0])
    answer_baseline(folder, 1.0)
    file = read_plan(folder / "table.toml", out=folder / "out").answers("base_tool_call")
    file.write_text("")
    more = ("--set", "reward.components.exact_match=1.0", "--set", "reward.components.f1=0.0")
    assert table(folder, "--only", "grpo,base_tool_call", "--seeds", "0", *more) == 2
    assert "reward.components is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("there", "here"), [("{ exact_match = 1.0 }", "{}"), ("{}", "{ exact_match = 0.0 }")]
)
def test_a_baseline_that_is_half_asked_goes_on_where_the_same_is_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, there: str, here: str
):
    def use(components: str) -> None:
        reward = f'defaults = {{ reward = {{ rule = "paper", components = {components} }} }}'
        (folder / "table.toml").write_text(f"{reward}\n{TABLE_TOML}")

    use(there)
    answer_baseline(folder, 1.0)
    plan = read_plan(folder / "table.toml", out=folder / "out")
    plan.answers("base_tool_call").write_text("")
    monkeypatch.setattr(local_table, "run_table", lambda *_, **__: True)  # stopped by Ctrl-C
    use(here)
    assert table(folder, "--only", "base_tool_call") == EXIT_INTERRUPTED
    use("{ f1 = 0.0 }")
    assert table(folder, "--only", "base_tool_call") == 2


@pytest.mark.parametrize(
    ("there", "here", "measure", "differs"),
    [
        ({"exact_match": 1.0}, {"exact_match": 1.0, "f1": 0.0}, "exact_match", False),
        ({"exact_match": 1.0}, {"f1": 1.0, "exact_match": 1.0}, "exact_match", True),
        ({"answered": 1.0}, {"answered": 1.0, "exact_match": 0.0}, "exact_match", True),
    ],
)
def test_components_that_are_measured_only_make_no_difference(
    there: dict[str, float], here: dict[str, float], measure: str, differs: bool
):
    reward = RewardConfig(components=here)
    assert bool(component_differences(there, reward, measure)) == differs
    # The paper's rule weighs none of them, and measures its own two always.
    paper = RewardConfig(rule="paper", components=dict.fromkeys(here, 0.0))
    assert not component_differences(there, paper, measure)
    assert not component_differences({}, paper, measure)


def test_a_baseline_that_has_a_cell_is_not_asked_again(folder: Path):
    (folder / "table.toml").write_text('cells = "cells"\n' + TABLE_TOML)
    answer_baseline(folder, 1.0)
    assert table(folder, "--only", "base_tool_call") == 0
    before = written(folder)
    assert [row["score"] for row in before["rows"]] == [1.0]
    shutil.rmtree(folder / "out" / "baselines")
    # What only training depends on is nothing to it.
    options = ("--only", "base_tool_call", "--set", "engine.lr=0.5", "--set", "run.seed=5")
    assert table(folder, *options) == 0
    assert written(folder)["rows"] == before["rows"]
    # Another table in the same folder of cells has a baseline of its own.
    assert [file.name for file in (folder / "out" / "cells").iterdir()] == [
        "small_base_tool_call.json"
    ]


def test_overwriting_discards_cells_too(folder: Path, monkeypatch: pytest.MonkeyPatch):
    (folder / "table.toml").write_text('cells = "cells"\n' + TABLE_TOML)
    answer_baseline(folder, 1.0)
    for run in read_plan(folder / "table.toml", out=folder / "out").methods[0].runs:
        finish(run, [1.0])
    rows = ("--only", "grpo,base_tool_call")
    assert table(folder, *rows) == 0
    started: list[str] = []

    def run_table(*_: object, runs: list[TableRun], baselines: object, **__: object) -> bool:
        started.extend(run.label for run in runs)
        assert baselines is not None
        return True

    monkeypatch.setattr(local_table, "run_table", run_table)
    assert table(folder, *rows, "--seeds", "0", "--overwrite") == 130
    assert started == ["GRPO seed 0"]
    assert [file.name for file in (folder / "out" / "cells").iterdir()] == ["grpo_seed1.json"]


def test_a_table_of_its_own_leaves_the_committed_cells_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    (folder / "table.toml").write_text('cells = "cells"\n' + TABLE_TOML)
    monkeypatch.chdir(folder)
    for out in (None, folder / "out"):
        plan = read_plan(folder / "table.toml", out=out)
        finish(plan.methods[0].runs[0], [1.0] if out is None else [0.0])
        options = () if out is None else ("--out", str(out))
        command = ["table", str(folder / "table.toml"), "--only", "grpo", "--seeds", "0"]
        assert cli.main([*command, *options]) == 0
    committed, own = (folder / "cells" / "grpo_seed0.json", folder / "out/cells/grpo_seed0.json")
    assert json.loads(committed.read_text())["scores"] == {"held_out": [1.0]}
    assert json.loads(own.read_text())["scores"] == {"held_out": [0.0]}


@pytest.mark.parametrize(
    ("key", "there", "here"),
    [("engine.lr", "1e-06", "0.5"), ("env.max_turns", "5", "2")],
)
def test_a_cell_of_other_settings_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], key: str, there: str, here: str
):
    (folder / "table.toml").write_text('cells = "cells"\n' + TABLE_TOML)
    for run in read_plan(folder / "table.toml", out=folder / "out").methods[0].runs:
        finish(run, [1.0])
    assert table(folder, "--only", "grpo") == 0
    shutil.rmtree(folder / "out" / "runs")
    assert table(folder, "--only", "grpo", "--set", f"{key}={here}") == 2
    error = capsys.readouterr().err
    assert f"was made with other settings: {key} is {there} there and {here} here" in error


JUDGED = """
[defaults]
"reward.components" = { judge = 1.0, exact_match = 0.0 }
"reward.servers.judge.url" = "http://127.0.0.1:1/v1"
"reward.servers.judge.model" = "strict"
"reward.servers.judge.prompt" = "Is $answer right?"
"""


def test_a_cell_says_which_model_scored_and_not_where_it_was_served(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    key = "reward.servers.judge.api_key=secret"
    (folder / "table.toml").write_text('cells = "cells"\n' + TABLE_TOML + JUDGED)
    for run in read_plan(folder / "table.toml", [key], folder / "out").methods[0].runs:
        finish(run, [1.0])
    assert table(folder, "--only", "grpo", "--set", key) == 0
    assert "api_key" not in (folder / "out" / "cells" / "grpo_seed0.json").read_text()
    shutil.rmtree(folder / "out" / "runs")
    elsewhere = ("--set", "reward.servers.judge.url=http://127.0.0.1:2/v1")
    assert table(folder, "--only", "grpo", *elsewhere) == 0
    assert (
        table(folder, "--only", "grpo", *elsewhere, "--set", "reward.servers.judge.model=mild") == 2
    )
    error = capsys.readouterr().err
    assert 'other settings: reward.servers.judge.model is "strict" there and "mild" here' in error


def test_a_run_that_is_older_than_a_key_was_made_with_its_default(folder: Path):
    run = read_plan(folder / "table.toml", out=folder / "out").methods[0].runs[0]
    finish(run, [1.0])
    file = run.folder / "config.json"
    written_then = json.loads(file.read_text())
    assert written_then["learner"].pop("push") == "dense"
    file.write_text(json.dumps(written_then))
    assert table(folder, "--only", "grpo", "--seeds", "0") == 0
    assert [row["score"] for row in written(folder)["rows"]] == [1.0]


def test_a_cell_that_is_older_than_a_key_was_made_with_its_default(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    (folder / "table.toml").write_text('cells = "cells"\n' + TABLE_TOML)
    (run, _) = read_plan(folder / "table.toml", out=folder / "out").methods[0].runs
    finish(run, [1.0])
    command = ("--only", "grpo", "--seeds", "0")
    assert table(folder, *command) == 0
    shutil.rmtree(folder / "out" / "runs")
    file = folder / "out" / "cells" / "grpo_seed0.json"
    cell = json.loads(file.read_text())
    assert cell["settings"].pop("learner.push") == "dense"
    file.write_text(json.dumps(cell))
    assert table(folder, *command) == 0
    options = ("--set", "learner.transport=http", "--set", "learner.push=delta")
    assert table(folder, *command, *options) == 2
    assert 'learner.push is not set there and "delta" here' in capsys.readouterr().err


def test_a_cell_holds_means_and_the_tokens_of_every_step(folder: Path):
    (folder / "table.toml").write_text('cells = "cells"\n' + TABLE_TOML)
    finish(
        read_plan(folder / "table.toml", out=folder / "out").methods[0].runs[0], [1.0, 0.0, None]
    )
    assert table(folder, "--only", "grpo", "--seeds", "0") == 0
    cell = json.loads((folder / "out" / "cells" / "grpo_seed0.json").read_text())
    # Of the questions that did not fail: (1 + 0) / 2, and (0 + 1) and (1 + 1) calls.
    assert (cell["f1"], cell["calls"]) == ({"held_out": 0.5}, {"held_out": 1.5})
    assert (cell["curve"], cell["tokens"]) == ([0.25], [300])
    # The folder of the files differs between machines.
    assert str(folder) not in json.dumps(cell)
    assert cell["settings"]["evaluation.sets.held_out"] == "held_out.jsonl"


def test_only_some_seeds_are_run(folder: Path, capsys: pytest.CaptureFixture[str]):
    grpo = read_plan(folder / "table.toml", out=folder / "out").methods[0]
    finish(grpo.runs[1], [1.0])
    assert table(folder, "--only", "grpo", "--seeds", "1") == 0
    assert "1 of 1 rows are finished and kept" in capsys.readouterr().out
    assert table(folder, "--only", "grpo", "--seeds", "7") == 2
    assert "--seeds names '7'; the table has 0, 1" in capsys.readouterr().err


def test_contrasts_are_tested_over_the_seeds_that_both_methods_have(folder: Path):
    remarks = 'remarks = "Both compare a group."\n'
    more = '[[contrasts]]\nfirst = "grpo"\nsecond = "rloo"\nset = "held_out"\n'
    (folder / "table.toml").write_text(remarks + TABLE_TOML + more)
    plan = read_plan(folder / "table.toml", out=folder / "out")
    for run in plan.methods[0].runs:
        finish(run, [0.0, 0.0])
    finish(plan.methods[1].runs[0], [1.0, 0.0])
    finish(plan.methods[1].runs[1], [1.0, 1.0])
    assert table(folder, "--only", "grpo,rloo") == 0
    (contrast,) = written(folder)["contrasts"]
    assert contrast["differences"] == [0.5, 1.0]
    # Both differences have one sign: 2 of 4 patterns are as far from 0.
    assert (contrast["mean"], contrast["p"], contrast["p_holm"]) == (0.75, 0.5, 0.5)
    text = (folder / "out" / "small.md").read_text()
    assert "| grpo | rloo | held_out | 2 | +0.750 | 0.5000 | 0.5000 |" in text
    assert "not told apart at the level 0.05: grpo and rloo (held_out)." in text
    assert "\n## Remarks\n\nBoth compare a group.\n" in text
