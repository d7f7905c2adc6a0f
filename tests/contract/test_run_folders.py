"""Stored trajectories of every released form: JSON lines of older versions, and Parquet.

`stored.parquet` was written by the first version that writes Parquet, and is never written again.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from agent_r1.runs.index import Query, RunIndex
from agent_r1.runs.store import FLAT, TrajectoryStore, stored_files
from tests.support.builders import scored, stored, three_lineages, two_segments

HERE = Path(__file__).parent
GOLDEN = HERE / "stored.parquet"
EXAMPLES = [
    stored(scored(**two_segments()), staleness=1),
    stored(scored(**three_lineages())),
    stored(scored(status="FAILED", reason="tool_timeout: search"), advantage=None, trained=False),
]


@pytest.mark.parametrize("run", sorted(HERE.glob("run_*/run")), ids=lambda run: run.parent.name)
def test_a_run_folder_of_an_older_version_is_read_as_one_of_today(run: Path, tmp_path: Path):
    (file,) = stored_files(run)
    lines = [json.loads(line) for line in file.path.read_text(encoding="utf-8").splitlines()]
    assert (file.path.suffix, file.step) == (".jsonl", 4)
    assert list(file.records()) == lines
    rows = list(file.rows())
    assert [set(row) for row in rows] == [{*FLAT, "components", "tools"}] * len(lines)
    assert [row["reward"] for row in rows] == [line["reward"]["total"] for line in lines]
    assert [row["num_turns"] for row in rows] == [len(line["turns"]) for line in lines]
    assert all(one.tokens is None for one in file.trajectories())
    with RunIndex(run, tmp_path) as index:
        index.refresh()
        assert len(index.rows(Query(equal={"status": rows[0]["status"]}))) >= 1


def test_parquet_of_a_released_version_holds_what_was_written(tmp_path: Path):
    (tmp_path / "trajectories").mkdir()
    shutil.copy(GOLDEN, tmp_path / "trajectories" / "step_000001.parquet")
    (file,) = stored_files(tmp_path)
    found = list(file.trajectories())
    assert len(found) == len(EXAMPLES)
    for one, example in zip(found, EXAMPLES, strict=True):
        written = json.loads(json.dumps(example.record))
        del written["system_prompt"]  # not stored then
        assert one.record == written
        assert one.tokens is not None
        assert example.tokens is not None
        for name in ("token_ids", "action_mask", "rollout_logprobs", "advantages"):
            np.testing.assert_array_equal(getattr(one.tokens, name), getattr(example.tokens, name))
    assert [row["staleness"] for row in file.rows()] == [1, None, None]


if __name__ == "__main__":
    (HERE / "trajectories").mkdir()
    TrajectoryStore(HERE, 1.0).write("step_000001", EXAMPLES)
    (HERE / "trajectories" / "step_000001.parquet").rename(GOLDEN)
    (HERE / "trajectories").rmdir()
