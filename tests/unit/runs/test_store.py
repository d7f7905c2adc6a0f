"""The store: what is written comes back whole, within a bound, of older versions too."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from agent_r1.runs.store import (
    FLAT,
    ROWS_AT_ONCE,
    TrajectoryStore,
    remove_evaluation,
    remove_steps_after,
    stored_files,
)
from agent_r1.runtime.files.run_folder import TRAJECTORIES_DIR
from agent_r1.runtime.memory import GIB
from agent_r1_proto.parts import TextPart
from agent_r1_proto.tasks import Task
from agent_r1_proto.trajectory import ToolCallRecord
from tests.support.builders import rollout_task, scored, stored, three_lineages, two_segments


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / TRAJECTORIES_DIR).mkdir()
    return tmp_path


def names(folder: Path) -> list[str]:
    return [file.path.name for file in stored_files(folder)]


def test_a_trajectory_comes_back_with_every_token(folder: Path):
    samples = [
        stored(scored(**two_segments()), staleness=3),
        stored(scored(**three_lineages())),
        stored(scored(status="FAILED", reason="tool_timeout: search"), trained=False),
    ]
    TrajectoryStore(folder, 1.0).write("step_000007", iter(samples))
    (file,) = stored_files(folder)
    assert (file.step, file.evaluation) == (7, None)
    assert list(file.records()) == [json.loads(json.dumps(one.record)) for one in samples]
    for number, (one, whole) in enumerate(zip(samples, file.trajectories(), strict=True)):
        assert one.tokens is not None
        for back in (whole.tokens, file.read(number).tokens):
            assert back is not None
            assert back.learner_logprobs is None
            assert back.entropies is None
            for name in ("token_ids", "action_mask", "rollout_logprobs", "advantages"):
                written, read = getattr(one.tokens, name), getattr(back, name)
                assert read.dtype == written.dtype
                np.testing.assert_array_equal(read, written)


def test_the_columns_say_what_trajectories_are_sorted_and_filtered_by(folder: Path):
    asked: list[tuple[str, Any]] = [("search", "ok"), ("search", "error"), ("", "malformed")]
    calls = [
        ToolCallRecord(end_token_index=4, tool=tool, status=status, parts=[TextPart(text="x")])
        for tool, status in asked
    ]
    task = Task(id="q", prompt="who?", metadata={"set": "near"})
    one = scored(rollout_task(group_id=4, task=task), calls=calls, policy_version=6, total=0.25)
    store = TrajectoryStore(folder, 1.0)
    store.write("eval_step_000010", [stored(one, step=10, advantage=None, trained=False)])
    (file,) = stored_files(folder)
    (row,) = file.rows()
    assert set(row) == {*FLAT, "components", "tools"}
    expected = {
        **{"evaluation": "step_000010", "set": "near", "step": 10, "task_id": "q", "group_id": 4},
        **{"trained": False, "reward": 0.25, "advantage": None, "first_version": 6},
        # 2 tokens of the prompt and 3 sampled; two of the calls gave no result.
        **{"num_tokens": 5, "num_sampled": 3, "num_turns": 1, "num_calls": 3, "failed_calls": 2},
        **{"components": {"em": 0.25}, "tools": ["search"]},
    }
    assert {name: row[name] for name in expected} == expected


def test_each_part_of_a_large_file_is_found(folder: Path):
    many = ROWS_AT_ONCE + 2
    samples = (stored(scored(rollout_task(group_id=i))) for i in range(many))
    TrajectoryStore(folder, 1.0).write("step_000001", samples)
    (file,) = stored_files(folder)
    asked = (0, ROWS_AT_ONCE - 1, ROWS_AT_ONCE, many - 1)
    assert [file.read(row).record["group_id"] for row in asked] == list(asked)
    with pytest.raises(ValueError, match=f"has no row {many}"):
        file.read(many)


def test_what_a_crash_leaves_half_written_is_no_file(folder: Path):
    def cut_off():
        yield stored()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        TrajectoryStore(folder, 1.0).write("step_000001", cut_off())
    (folder / TRAJECTORIES_DIR / ".step_000002.parquet.7.tmp").write_bytes(b"PAR1")
    assert stored_files(folder) == []


def test_a_damaged_file_is_named_and_the_others_are_read(folder: Path):
    store = TrajectoryStore(folder, 1.0)
    for step in (1, 2):
        store.write(f"step_{step:06d}", [stored()])
    damaged, whole = stored_files(folder)
    damaged.path.write_bytes(damaged.path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"step_000001\.parquet is damaged .* remove it"):
        list(damaged.records())
    assert len(list(whole.records())) == 1


@pytest.mark.parametrize("table", [{"x": ["{}"]}, {"record": [None]}, {"record": ["{"]}])
def test_a_file_of_another_shape_is_damaged(folder: Path, table: dict[str, list[str | None]]):
    path = folder / TRAJECTORIES_DIR / "step_000001.parquet"
    path.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(table), path)
    (file,) = stored_files(folder)
    for read in (file.records, file.rows, file.trajectories):
        with pytest.raises(ValueError, match=r"step_000001\.parquet is damaged"):
            list(read())


def test_no_file_is_written_for_no_trajectory(folder: Path):
    TrajectoryStore(folder, 1.0).write("step_000001", [])
    assert names(folder) == []


def total_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / TRAJECTORIES_DIR).iterdir())


def test_where_there_is_no_room_the_oldest_files_make_some(
    folder: Path, caplog: pytest.LogCaptureFixture
):
    unbounded = TrajectoryStore(folder, 1.0)
    for name in ("eval_before", "step_000001", "eval_step_000001", "step_000002"):
        unbounded.write(name, [stored()])
    # Room for four files of such a size, and no more.
    limit = 1.125 * total_size(folder) / GIB
    store = TrajectoryStore(folder, limit)
    left: list[set[str]] = []
    with caplog.at_level(logging.WARNING):
        for name in ("eval_step_000002", "step_000003", "step_000004", "eval_after"):
            store.write(name, [stored()])
            left.append({file.path.stem for file in stored_files(folder)})
            assert total_size(folder) <= limit * GIB
    assert left == [
        {"step_000001", "eval_step_000001", "step_000002", "eval_step_000002"},
        {"eval_step_000001", "step_000002", "eval_step_000002", "step_000003"},
        {"step_000002", "eval_step_000002", "step_000003", "step_000004"},
        {"eval_step_000002", "step_000003", "step_000004", "eval_after"},
    ]
    assert store.removed_steps == 2  # 1 and 2
    assert ["eval_before.parquet" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("last", ["step_000002", "eval_step_000002", "eval_after"])
def test_the_newest_step_alone_may_be_larger_than_the_bound(folder: Path, last: str):
    store = TrajectoryStore(folder, 1 / GIB)
    for name in ("eval_before", "step_000001", "step_000002", last):
        store.write(name, [stored()])
    assert names(folder) == ["step_000002.parquet"]


def test_what_a_crash_left_is_removed_and_other_files_count(folder: Path):
    store = TrajectoryStore(folder, 1.0)
    store.write("step_000001", [stored()])
    limit = 2.5 * total_size(folder) / GIB
    notes = folder / TRAJECTORIES_DIR / "notes.txt"
    left = folder / TRAJECTORIES_DIR / ".step_000002.parquet.7.tmp"
    left.write_bytes(bytes(int(limit * GIB)))
    store = TrajectoryStore(folder, limit)
    assert not left.exists()
    store.write("step_000002", [stored()])
    assert len(names(folder)) == 2
    notes.write_bytes(bytes(int(limit * GIB / 2)))
    store.write("step_000003", [stored()])
    assert names(folder) == ["step_000003.parquet"]
    assert notes.exists()


def test_a_step_that_is_written_again_counts_once(folder: Path):
    store = TrajectoryStore(folder, 1.0)
    store.write("step_000001", [stored()])
    size = (folder / TRAJECTORIES_DIR / "step_000001.parquet").stat().st_size
    store = TrajectoryStore(folder, 2.5 * size / GIB)
    for step in (1, 1, 2):
        store.write(f"step_{step:06d}", [stored()])
    assert len(names(folder)) == 2


def test_a_run_that_goes_on_forgets_later_steps_of_every_version(folder: Path):
    for name in ("step_000003.jsonl", "step_000002.jsonl", "eval_after.jsonl", "notes.txt"):
        (folder / TRAJECTORIES_DIR / name).write_text("")
    TrajectoryStore(folder, 1.0).write("step_000004", [stored()])
    remove_steps_after(folder, 2)
    assert names(folder) == ["step_000002.jsonl", "eval_after.jsonl"]
    remove_evaluation(folder, "after")
    assert names(folder) == ["step_000002.jsonl"]
