"""Falls that were planted are found: in a run through every service, and in frames of that run.

`make bench CASE=falls` is the long form: every cause in runs of its own, ten seeds each.
"""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_r1.runs.falls import Case, explain
from agent_r1.runs.store import stored_files

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS, AT = 20, 11
TIMEOUT_S = 300.0
FLATTERY = "bench_falls:flattery"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose weights are damaged on their way from step 11 on."""
    folder = tmp_path_factory.mktemp("falls")
    options = ["--seeds", "0", "--causes", "bad push", f"--steps={STEPS}", f"--at={AT}"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.falls", *options],
        cwd=REPOSITORY,
        env={**os.environ, "BENCH_OUT": str(folder)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_a_bad_push_is_named_in_a_run_through_every_service(bench: Path):
    report = json.loads((bench / "falls.json").read_text())
    (run,) = report["runs"]
    assert run["fell"]
    assert run["named"][0] == "weights: weights"
    assert abs(run["after"][0] - AT) <= 1
    assert report["rows"][0]["right"] == 1
    summary = json.loads((bench / "falls" / "bad_push_0" / "run" / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["steps"] == STEPS


def break_tool(record: dict[str, Any], chance: random.Random) -> None:
    """Let the calls of most trajectories fail, and with them the answers."""
    if chance.random() < 0.7:
        for call in (call for turn in record["turns"] for call in turn["calls"]):
            call.update(status="error", text="no shard of the index")
            _score(record, 0.0)


def hack(record: dict[str, Any], chance: random.Random) -> None:
    """Let most answers please the component, and be wrong."""
    if chance.random() < 0.6:
        _score(record, 0.0)
        record["reward"]["components"][FLATTERY] = 1.0


def harden(record: dict[str, Any], chance: random.Random) -> None:
    """Put half of the groups into a set that is hard."""
    if record["group_id"] % 2:
        record["metadata"]["set"] = "hard"
        if chance.random() < 0.8:
            _score(record, 0.0)


def leave(record: dict[str, Any], chance: random.Random) -> None:
    """Change nothing."""


def _score(record: dict[str, Any], value: float) -> None:
    record["reward"]["components"]["exact_match"] = value


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (break_tool, "lookup: result"),
        (hack, FLATTERY),
        (harden, "set"),
        (leave, None),
    ],
)
def test_what_is_planted_in_the_frames_of_a_real_run_comes_first(
    bench: Path, plant: Callable[[dict[str, Any], random.Random], None], named: str | None
):
    chance = random.Random(0)
    cases: list[Case] = []
    for file in stored_files(bench / "falls" / "bad_push_0" / "run")[: AT - 1]:
        for row, record in enumerate(file.records()):
            changed = copy.deepcopy(record)
            is_after = record["step"] >= AT // 2 + 1
            if is_after:
                plant(changed, chance)
            cases.append(Case(changed, is_after, (file.path.name, row)))
    found = explain(cases, "exact_match")
    assert found is not None
    assert sum(part.mean for part in found.parts) + found.rest == pytest.approx(found.fall)
    if named is None:
        assert abs(found.fall) < 0.15
        return
    assert found.parts[0].name == named
    assert found.parts[0].is_named
