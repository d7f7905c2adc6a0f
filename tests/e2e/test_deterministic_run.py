"""`run.deterministic`: one configuration gives the same tokens and numbers, whatever happens.

One run was left alone; of the other one, a server and then the launcher were killed, and it was
resumed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.runs.store import stored_files
from tests.e2e.conftest import STEPS, FailedRun, ResumedRun
from tests.support.runs import steps

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
TOLERANCE = 1e-5
# What a clock or a queue says differs between any two runs.
OF_TIME = ("time/", "throughput/", "push/", "queue/", "learn/tokens_per_s", "tools/latency")
# A run that was disturbed has asked again, and pushed again when it was resumed; the step that was
# being pushed when it was killed has the version before, and no canary. Only one of the runs
# evaluates.
OF_DISTURBANCE = ("results/", "policy/version", "canary/", "eval/")


def numbers(folder: Path) -> list[dict[str, float]]:
    return [
        {
            name: value
            for name, value in line.items()
            if not name.startswith((*OF_TIME, *OF_DISTURBANCE)) and "latency" not in name
        }
        for line in steps(folder)[:STEPS]
    ]


def tokens(folder: Path) -> dict[tuple[int, int, int], str]:
    """Digest of the tokens of every trajectory, by group, sample and attempt."""
    files = [file for file in stored_files(folder) if file.step in range(1, STEPS + 1)]
    assert len(files) == STEPS
    lines = [record for file in files for record in file.records()]
    return {
        (line["group_id"], line["sample_index"], line["attempt"]): line["token_digest"]
        for line in lines
    }


def test_a_disturbed_run_is_the_same_as_one_left_alone(
    resumed_run: ResumedRun, failed_run: FailedRun
):
    disturbed, left_alone = (tokens(run.folder) for run in (resumed_run, failed_run))
    assert len(left_alone) == STEPS * 8
    assert disturbed == left_alone
    pairs = zip(*(numbers(run.folder) for run in (resumed_run, failed_run)), strict=True)
    for one, other in pairs:
        assert one == pytest.approx(other, abs=TOLERANCE, rel=TOLERANCE)
        assert one["value/mean"] != 0.0 or one["step"] == 1
    assert len(numbers(failed_run.folder)) == STEPS
