"""What the terminal shows of a table."""

from __future__ import annotations

import io
import json
from pathlib import Path

from agent_r1.config.run import load_config
from agent_r1.launch.local_table import TableRun, TableView
from tests.support.config_scene import write_scene


def run_of(folder: Path, name: str, steps: int) -> TableRun:
    file = folder / "example" / "run.toml"
    config = load_config(file, [f"learner.steps={steps}"], {}).config
    (folder / name).mkdir()
    return TableRun(name, folder / name, config)


def write_step(run: TableRun, step: int) -> None:
    line = {
        "step": step,
        "reward/mean": 0.25,
        "reward/exact_match": 0.5,
        "calls/search": 1.5,
        "time/step_s": 2.0,
    }
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def test_a_log_shows_some_steps_and_what_is_left_of_the_table(tmp_path: Path):
    write_scene(tmp_path / "example")
    runs = [run_of(tmp_path, "first", 12), run_of(tmp_path, "second", 8)]
    output = io.StringIO()
    view = TableView(3, runs, output)
    view.begin(runs[0])
    for step in range(1, 13):
        write_step(runs[0], step)
    view.update()
    after = {
        "reward": 0.7,
        "components": {"exact_match": 0.75},
        "calls": {"search": 2.0},
        "n": 8,
        "failed": 1,
    }
    (runs[0].folder / "summary.json").write_text(
        json.dumps(
            {
                "status": "finished_with_losses",
                "reason": "7 of the 96 training samples failed for good (7%)",
                "wall_s": 30.0,
                "sets": {"near": {"after": after}},
            }
        )
    )
    view.end()
    scores = "reward 0.250  EM 0.500  search 1.50"
    lines = output.getvalue().splitlines()
    assert lines[:5] == [
        f"row 4 of 5: first, {runs[0].folder}",
        # 2 + 8 steps of 2 s, then 0 + 8.
        f"row 4 of 5  first  step 10/12  {scores}  left 20s",
        f"row 4 of 5  first  step 12/12  {scores}  left 16s",
        "row 4 of 5: first finished_with_losses after 30s; "
        "near reward 0.700  EM 0.750  search 2.00 (n 8, failed 1)",
        "!! 7 of the 96 training samples failed for good (7%)",
    ]
