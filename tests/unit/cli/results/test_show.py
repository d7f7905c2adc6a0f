"""`agent-r1 show`: which of the stored trajectories are printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.cli import main as cli
from agent_r1.runs.store import TrajectoryStore
from tests.support.builders import scored, stored


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "trajectories").mkdir()
    store = TrajectoryStore(tmp_path, 1.0)
    for step in (1, 2):
        store.write(f"step_{step:06d}", [stored(scored(answer=f"of step {step}"), step=step)])
    for name in ("before", "step_000010"):
        store.write(f"eval_{name}", [stored(scored(answer=f"evaluated {name}"), trained=False)])
    return tmp_path


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ([], ["of step 2", "of step 1"]),
        (["--step", "1"], ["of step 1"]),
        (["--eval", "before"], ["evaluated before"]),
        (["--eval", "10"], ["evaluated step_000010"]),
        (["--eval", "step_000010"], ["evaluated step_000010"]),
        (["--limit", "1"], ["of step 2"]),
    ],
)
def test_what_is_asked_for_is_shown_the_newest_first(
    run: Path, capsys: pytest.CaptureFixture[str], options: list[str], shown: list[str]
):
    assert cli.main(["show", str(run), *options]) == 0
    text = capsys.readouterr().out
    found = [line.partition("<answer>")[2] for line in text.splitlines() if "<answer>" in line]
    assert [line.partition("</answer>")[0] for line in found] == shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--step", "7"], "the stored steps are 1 to 2"),
        (["--eval", "7"], "the stored ones are ['before', 'step_000010']"),
    ],
)
def test_what_is_not_stored_is_said_with_what_is(
    run: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
):
    assert cli.main(["show", str(run), *options]) == 2
    assert message in capsys.readouterr().err
