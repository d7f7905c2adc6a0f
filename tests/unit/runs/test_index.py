"""The index: rows by filter, order and text, found through SQLite's indexes; it may be lost."""

from __future__ import annotations

import errno
import json
import shutil
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agent_r1.runs.index import EQUAL, MAX_ROWS, SORTED, Query, RunIndex
from agent_r1.runs.store import StoredTrajectory, TrajectoryStore
from agent_r1.runtime.imports import MissingPackageError
from agent_r1_proto.parts import TextPart
from agent_r1_proto.tasks import Task
from agent_r1_proto.trajectory import ToolCallRecord
from tests.support.builders import rollout_task, scored, stored
from tests.support.query_plans import table_scans


def sample(
    group: int, index: int, reward: float, *, name: str = "near", **facts: Any
) -> StoredTrajectory:
    """One sample of the question q{group} of a set."""
    task = Task(id=f"q{group}", prompt=f"Who is number {group}?", metadata={"set": name})
    rollout = rollout_task(group_id=group, sample_index=index, task=task)
    changes = {key: facts.pop(key) for key in ("answer", "calls", "status") if key in facts}
    return stored(scored(rollout, total=reward, **changes), **facts)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of two groups, and the same three questions before and after."""
    folder = tmp_path_factory.mktemp("written")
    (folder / "trajectories").mkdir()
    store = TrajectoryStore(folder, 1.0)
    call = ToolCallRecord(
        end_token_index=4, tool="search", status="error", parts=[TextPart(text="no such page")]
    )
    for step in (1, 2):
        store.write(
            f"step_{step:06d}",
            [
                sample(1, 0, 0.0, step=step, answer="Ada Lovelace"),
                sample(1, 1, 1.0, step=step, answer="你好世界", calls=[call]),
                sample(step + 5, 0, 0.5, step=step, name="far"),
                sample(step + 5, 1, 0, step=step, name="far", status="FAILED", trained=False),
            ],
        )
    for name, rewards in (("before", (0.0, 1.0, 1.0)), ("after", (1.0, 0.0, 1.0))):
        answers = [sample(g, 0, r, step=0, trained=False) for g, r in enumerate(rewards)]
        store.write(f"eval_{name}", answers)
    return folder


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    """A copy that the test may change."""
    return shutil.copytree(written, tmp_path, dirs_exist_ok=True)


@pytest.fixture
def index(run: Path, tmp_path: Path) -> Iterator[RunIndex]:
    with RunIndex(run, tmp_path / "cache") as opened:
        assert opened.refresh() == 0
        yield opened


def found(index: RunIndex, **query: Any) -> list[tuple[int, str, int]]:
    rows = index.rows(Query(**query))
    return [(row["step"], row["task_id"], row["sample_index"]) for row in rows]


def test_rows_are_filtered(index: RunIndex):
    asked = {"evaluation": None, "task_id": "q1", "step": 2}
    assert found(index, equal=asked) == [(2, "q1", 1), (2, "q1", 0)]
    assert found(index, equal={"tool": "search", "step": 1}) == [(1, "q1", 1)]
    assert found(index, equal={"status": "FAILED"}) == [(2, "q7", 1), (1, "q6", 1)]
    assert found(index, equal={"set": "far", "trained": True}) == [(2, "q7", 0), (1, "q6", 0)]
    half = {"reward/em": (0.25, 0.75)}
    assert found(index, between=half) == [(2, "q7", 0), (1, "q6", 0)]
    assert found(index, between=half | {"step": (2, None)}) == [(2, "q7", 0)]
    assert found(index, between={"failed_calls": (1, None), "step": (None, 1)}) == [(1, "q1", 1)]


def test_rows_are_sorted_and_come_in_pages(index: RunIndex):
    steps = {"step": (1, 2)}
    by_reward = found(index, between=steps, sort="reward/em", descending=False)
    # Those of reward 0, 0.5 and 1 in each step; FAILED ones have no components.
    rewards = {("q1", 0): 0.0, ("q6", 0): 0.5, ("q7", 0): 0.5, ("q1", 1): 1.0}
    assert [rewards[task, number] for _, task, number in by_reward] == [0, 0, 0.5, 0.5, 1, 1]
    first = found(index, sort="step", descending=False, limit=2)
    assert first + found(index, sort="step", descending=False, limit=2, offset=2) == found(
        index, sort="step", descending=False, limit=4
    )


def test_text_is_looked_for_in_turns_calls_and_results(index: RunIndex):
    rows = {
        "lovelace ada": 2,
        '"Ada Lovelace"': 2,
        '"Lovelace Ada"': 0,
        "好世": 2,
        "世好": 0,
        "such search": 2,  # the name of the tool, and its result
        'AND OR ( " * -': 0,
        "nul\0 byte": 0,
    }
    assert {text: len(index.rows(Query(text=text))) for text in rows} == rows


def test_the_system_prompt_is_found(run: Path, index: RunIndex):
    told = sample(3, 0, 1.0, step=3, system_prompt="Use the tools.")
    TrajectoryStore(run, 1.0).write("step_000003", [told])
    assert index.refresh() == 0
    assert found(index, text='"use the tools"') == [(3, "q3", 0)]


def test_groups_and_flipped_answers_are_paired(run: Path, index: RunIndex):
    newest, second, *_ = index.groups((2, 2))
    assert (newest["group_id"], newest["size"], newest["set"]) == (7, 2, "far")
    assert (second["mean"], second["lowest"], second["highest"]) == (0.5, 0.0, 1.0)
    pairs = index.flipped("before", "after")
    assert [(a["task_id"], a["reward"], b["reward"]) for a, b in pairs] == [
        ("q1", 1.0, 0.0),
        ("q0", 0.0, 1.0),
    ]
    # A question of the same name in another set is another question.
    TrajectoryStore(run, 1.0).write("eval_step_000002", [sample(0, 0, 1.0, name="far")])
    assert index.refresh() == 0
    assert index.flipped("before", "step_000002") == []


def test_a_row_leads_to_its_whole_trajectory(index: RunIndex):
    (row,) = index.rows(Query(equal={"tool": "search", "step": 2}))
    assert (row["components"], row["tools"], row["trained"]) == ({"em": 1.0}, ["search"], True)
    whole = index.read(row)
    assert "你好世界" in whole.record["turns"][0]["text"]
    assert whole.tokens is not None


def test_values_of_a_column_are_listed(index: RunIndex):
    assert index.values("set") == ["far", "near"]
    assert index.values("evaluation") == ["after", "before"]
    assert (index.values("tool"), index.values("component")) == (["search"], ["em"])


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"sort": "reason; DROP"}, "'reason; DROP' is no column"),
        ({"equal": {"x": 1}}, "'x' is no column"),
        ({"between": {"set": (1, 2)}}, "'set' is no column"),
        ({"limit": MAX_ROWS + 1}, "a page of 101 rows"),
        ({"offset": -1}, "from row -1"),
    ],
)
def test_what_cannot_be_asked_is_named(index: RunIndex, query: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        index.rows(Query(**query))


def test_files_that_are_new_changed_or_gone_are_read_again(run: Path, index: RunIndex):
    (run / "trajectories" / "step_000001.parquet").unlink()
    store = TrajectoryStore(run, 1.0)
    store.write("step_000002", [sample(9, 0, 0.75, step=2)])
    store.write("step_000003", [sample(9, 1, 0.25, step=3)])
    assert index.refresh() == 0
    assert found(index, between={"step": (1, None)}) == [(3, "q9", 1), (2, "q9", 0)]
    assert index.rows(Query(text="lovelace")) == []
    assert index.values("tool") == []


def test_a_damaged_file_is_said_once_and_the_others_are_found(
    run: Path, index: RunIndex, caplog: pytest.LogCaptureFixture
):
    (run / "trajectories" / "step_000001.parquet").write_bytes(b"PAR1" * 10)
    with caplog.at_level("WARNING"):
        assert [index.refresh(), index.refresh()] == [0, 0]
    assert [("step_000001" in one.message) for one in caplog.records] == [True]
    assert [("step_000001.parquet is damaged" in one) for one in index.damaged()] == [True]
    assert {row["step"] for row in index.rows(Query(equal={"evaluation": None}))} == {2}


def test_a_file_that_cannot_be_read_now_is_read_the_next_time(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def no_descriptor(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with RunIndex(run, tmp_path / "other") as index:
        with monkeypatch.context() as patch:
            patch.setattr("pyarrow.parquet.ParquetFile", no_descriptor)
            assert index.refresh() == 0
        assert index.rows(Query()) == []
        assert ["cannot be read" in one for one in index.damaged()] == [True] * 4
        index.refresh()
        assert index.damaged() == []
        assert len(index.rows(Query())) == 14


def test_without_the_package_that_reads_files_the_index_says_so(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with RunIndex(run, tmp_path / "other") as index:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "pyarrow.parquet", None)
            with pytest.raises(MissingPackageError, match=r"agent-r1\[console\]"):
                index.refresh()
        index.refresh()
        assert len(index.rows(Query())) == 14


def test_a_file_that_the_run_has_removed_is_named(run: Path, index: RunIndex):
    (row,) = index.rows(Query(equal={"tool": "search", "step": 1}))
    (run / "trajectories" / "step_000001.parquet").unlink()
    with pytest.raises(ValueError, match=r"step_000001\.parquet is no longer in"):
        index.read(row)


def test_a_look_of_limited_time_goes_on_the_next_time(run: Path, tmp_path: Path):
    with RunIndex(run, tmp_path / "other") as index:
        left = [index.refresh(limit_s=-1), index.refresh()]
        assert left == [4, 0]


def test_several_readers_build_one_index(run: Path, tmp_path: Path):
    errors: list[BaseException] = []

    def build(folder: Path) -> None:
        try:
            with RunIndex(run, folder) as index:
                index.refresh()
        except BaseException as exc:  # noqa: BLE001 - shown below
            errors.append(exc)

    for folder in (tmp_path / str(number) for number in range(10)):
        threads = [threading.Thread(target=build, args=(folder,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert errors == []
        with RunIndex(run, folder) as index:
            assert index.refresh() == 0
            assert len(index.rows(Query())) == 14  # 2 steps of 4, and 2 evaluations of 3


@pytest.mark.parametrize("damage", ["removed", "overwritten", "of another schema"])
def test_a_lost_index_is_built_again(run: Path, tmp_path: Path, damage: str):
    with RunIndex(run, tmp_path / "cache") as index:
        index.refresh()
    if damage == "removed":
        index.path.unlink()
    elif damage == "overwritten":
        index.path.write_bytes(b"no database" * 1000)
    else:
        with sqlite3.connect(index.path) as database:
            database.execute("PRAGMA user_version = 0")
        database.close()
    with RunIndex(run, tmp_path / "cache") as index:
        index.refresh()
        assert len(index.rows(Query())) == 14


def spoil(path: Path, *spared: str) -> None:
    """Overwrite the pages at which tables and indexes begin; opening a database reads none."""
    with closing(sqlite3.connect(path)) as database:
        (size,) = database.execute("PRAGMA page_size").fetchone()
        roots = database.execute("SELECT name, rootpage FROM sqlite_master").fetchall()
    with path.open("r+b") as file:
        for name, root in roots:
            if root and name not in spared:
                file.seek((root - 1) * size)
                file.write(bytes(size))


QUESTIONS: dict[str, Callable[[RunIndex], object]] = {
    "refresh": lambda index: index.refresh(),
    "rows": lambda index: index.rows(Query(text="lovelace")),
    "groups": lambda index: index.groups((1, 2)),
    "flipped": lambda index: index.flipped("before", "after"),
    "values": lambda index: index.values("set"),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_damage_that_only_a_question_meets_is_mended(
    run: Path, tmp_path: Path, question: str, caplog: pytest.LogCaptureFixture
):
    with RunIndex(run, tmp_path / "cache") as index:
        index.refresh()
        wanted = [QUESTIONS[question](index), len(index.rows(Query()))]
    # The pages refresh first, and find no file that is new.
    spoil(index.path, *(() if question == "refresh" else ("files", "sqlite_autoindex_files_1")))
    with RunIndex(run, tmp_path / "cache") as index:
        index.refresh()
        assert [QUESTIONS[question](index), len(index.rows(Query()))] == wanted
    assert [one for one in caplog.messages if "damaged and built anew" in one]


def test_an_index_without_a_place_says_what_to_do(run: Path, tmp_path: Path):
    (tmp_path / "taken").write_text("")
    remedy = "cannot be used .*; free space there, or set XDG_CACHE_HOME"
    with pytest.raises(ValueError, match=remedy):
        RunIndex(run, tmp_path / "taken" / "cache")
    with RunIndex(run, tmp_path / "cache") as index:
        pages = index._db.execute("PRAGMA page_count").fetchone()[0]
        index._db.execute(f"PRAGMA max_page_count = {pages}")  # as on a full disk
        TrajectoryStore(run, 1.0).write("step_000003", [sample(1, n, 0.0) for n in range(100)])
        with pytest.raises(ValueError, match=rf"{index.path} {remedy}"):
            index.refresh()
        assert index.path.exists()
    with RunIndex(run, tmp_path / "cache") as index:
        index._db.execute("PRAGMA query_only = 1")  # as where the file cannot be written
        with pytest.raises(ValueError, match=r"readonly database\); free space there"):
            index.refresh()


def test_an_index_is_for_its_owner_and_not_in_the_run_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    link = tmp_path / "link"
    link.symlink_to(run)
    with RunIndex(run) as index, RunIndex(link) as same:
        assert index.path == same.path
        assert index.path.is_relative_to(tmp_path / "home")
        assert index.path.parent.stat().st_mode & 0o077 == 0


def test_no_question_scans_the_table(index: RunIndex):
    statements: list[str] = []
    index._db.set_trace_callback(statements.append)
    everything: dict[str, Any] = {"task_id": "q1", "tool": "search", "evaluation": None}
    ranges = {"reward": (0.0, 1.0), "reward/em": (0.0, 1.0), "step": (1, 2)}
    for sort in (*SORTED, "reward/em"):
        for descending in (True, False):
            index.rows(Query(sort=sort, descending=descending))
            index.rows(Query(sort=sort, descending=descending, text="ada", equal=everything))
            index.rows(Query(sort=sort, descending=descending, between=ranges))
    for column in (*EQUAL, *SORTED):
        index.rows(Query(equal={column: 1}))
    for column in (*EQUAL, "tool", "component"):
        index.values(column)
    index.groups((1, 2))
    index.flipped("before", "after")
    index._db.set_trace_callback(None)
    assert table_scans(index._db, statements) == []
    assert table_scans(index._db, [*statements, "SELECT id FROM trajectories WHERE attempt = 1"])


def test_files_that_are_asked_for_are_read_before_all_others(run: Path, tmp_path: Path):
    with RunIndex(run, tmp_path / "other") as index:
        taken: list[str] = []
        take = index._take

        def note(name: str, stamp: tuple[int, int] | None) -> None:
            taken.append(name)
            take(name, stamp)

        index._take = note
        (run / "trajectories" / "step_000001.parquet").touch()
        assert index.refresh(is_first=lambda file: file.step == 1) == 0
        assert taken[0] == "step_000001.parquet"
        assert len(taken) == 4


@pytest.mark.parametrize(
    "record",
    [
        {"x": 1},
        [1],
        {"reward": {"total": [1]}},
        {"num_tokens": 10**30},
        {"metadata": None},
        {"reward": {"components": {"em": {}}}},
    ],
)
def test_a_record_of_another_shape_leaves_its_file_out(
    run: Path, tmp_path: Path, record: Any, caplog: pytest.LogCaptureFixture
):
    good = sample(1, 0, 0.0, step=9).record
    whole = good | record if isinstance(record, dict) and "x" not in record else record
    lines = "".join(json.dumps(one) + "\n" for one in (good, whole))
    (run / "trajectories" / "step_000009.jsonl").write_text(lines)
    with RunIndex(run, tmp_path / "other") as index, caplog.at_level("WARNING"):
        assert [index.refresh(), index.refresh()] == [0, 0]
        assert len(index.rows(Query())) == 14
    assert ["step_000009" in one.message for one in caplog.records] == [True]
