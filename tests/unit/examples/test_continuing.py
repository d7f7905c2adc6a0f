"""Scripts that are started again: what is unfinished goes on, whatever its folder holds."""

import json
import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
RUNS = {
    **{
        f"guided_search.sh {name}": [f"runs/{name}/decoding/ppo_seed{seed}" for seed in range(3)]
        for name in ("lookahead", "deep_world")
    },
    "deep_world/unlabelled.sh": [
        *(f"runs/deep_world/labelled_seed{seed}" for seed in (100, 101, 102)),
        "runs/deep_world/judged_seed103",
    ],
}
FAKE = """#!/bin/sh
echo "$@" >> calls
[ "$1" != train ] || exit {status}
"""


def start_again(tmp_path: Path, script: str, status: int) -> tuple[int, list[str]]:
    """Start a script whose runs were all interrupted; return its status, and what it called."""
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("agent-r1", "python"):
        program = tmp_path / ".venv" / "bin" / name
        program.write_text(FAKE.format(status=status))
        program.chmod(0o755)
    for run in RUNS[script]:
        folder = tmp_path / run
        (folder / "checkpoints" / "step_000001" / "model").mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "summary.json").write_text('{"status": "interrupted"}')
    done = subprocess.run(["sh", *f"examples/{script}".split()], cwd=tmp_path, check=False)
    return done.returncode, (tmp_path / "calls").read_text().splitlines()


@pytest.mark.parametrize("script", RUNS)
@pytest.mark.parametrize("status", [0, 3])  # 3: finished, with losses; training again is no help
def test_a_script_continues_runs_that_were_interrupted(tmp_path: Path, script: str, status: int):
    ended, calls = start_again(tmp_path, script, status)
    assert ended == 0
    trained = [call for call in calls if call.startswith("train ")]
    assert trained == [f"train --resume {run}" for run in RUNS[script]]


@pytest.mark.parametrize("script", RUNS)
@pytest.mark.parametrize("status", [1, 130])
def test_a_script_stops_where_training_does(tmp_path: Path, script: str, status: int):
    ended, calls = start_again(tmp_path, script, status)
    assert ended != 0
    made = [call for call in calls if not call.startswith("examples/")]  # but for the data
    assert made == [f"train --resume {RUNS[script][0]}"]


@pytest.mark.parametrize(("status", "unfinished"), [("interrupted", True), ("finished", False)])
def test_the_demo_says_that_an_interrupted_run_can_be_continued(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: str,
    *,
    unfinished: bool,
):
    demo = runpy.run_path(str(REPOSITORY / "scripts" / "demo"))
    run = tmp_path / "runs" / "demo"
    run.mkdir(parents=True)
    (run / "summary.json").write_text(json.dumps({"status": status}))
    monkeypatch.chdir(tmp_path)
    stays_here = SimpleNamespace(chdir=lambda _: None, execv=lambda *_: None)
    monkeypatch.setitem(demo["main"].__globals__, "os", stays_here)
    monkeypatch.setitem(demo["main"].__globals__, "write_world", lambda: None)
    monkeypatch.setitem(demo["main"].__globals__, "RUN_FOLDER", run)
    monkeypatch.setitem(demo["main"].__globals__, "REPOSITORY", tmp_path)
    monkeypatch.setitem(demo["main"].__globals__, "CONFIG", tmp_path / "run.toml")
    monkeypatch.setattr("sys.argv", ["demo"])
    demo["main"]()
    said = capsys.readouterr().out
    assert ("train --resume runs/demo-1" in said) == unfinished
