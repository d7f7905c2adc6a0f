"""Tasks from other files than JSON lines of tasks: mapped columns, Parquet, the hub."""

from __future__ import annotations

import importlib
import json
import math
import sys
from datetime import UTC, date, datetime, timedelta
from datetime import time as clock
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from agent_r1.runtime.files.task_source import DataSource
from agent_r1.runtime.files.tasks import TaskFileError, read_task_file, source_digest
from agent_r1.runtime.imports import MissingPackageError
from agent_r1_proto.tasks import Task

QA = {"prompt": "question", "answers": "answer", "id": "key", "metadata.type": "info.level"}


def source(path: Path | str, **keys: Any) -> DataSource:
    return DataSource.model_validate({"source": path, **keys})


def write_lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow = importlib.import_module("pyarrow")
    table = pyarrow.Table.from_pylist(rows)
    importlib.import_module("pyarrow.parquet").write_table(table, path)
    return path


def verl_row(number: int) -> dict[str, Any]:
    """Return a row as verl's example scripts write it."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"What is {number} + 1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"split": "train", "index": number},
    }


# --- Columns -------------------------------------------------------------------------------------


def test_columns_of_json_lines_are_mapped(tmp_path: Path):
    row = {"key": 7, "question": "Where?", "answer": "there", "info": {"level": "hard"}, "x": 1}
    (task,) = read_task_file(source(write_lines(tmp_path / "d.jsonl", row), columns=QA))
    assert task == Task(
        id="7", prompt="Where?", payload={"answers": ["there"]}, metadata={"type": "hard"}
    )


@pytest.mark.parametrize(
    ("value", "answers"),
    [
        ("a", ["a"]),
        (3, ["3"]),
        (["a", "b"], ["a", "b"]),
        ({"target": ["a", "b"]}, ["a", "b"]),  # Search-R1's
        # A column of floats has 72 as 72.0; `str` would make 1e+16 and 1e-07 of the last two.
        (72.0, ["72"]),
        (-0.0, ["0"]),
        ([3.0, 0.5], ["3", "0.5"]),
        (1e16, ["10000000000000000"]),
        (1e-7, ["0.0000001"]),
        (True, ["true"]),  # as JSON writes it
    ],
)
def test_answers_are_texts_however_they_are_kept(tmp_path: Path, value: Any, answers: list[str]):
    file = write_lines(tmp_path / "d.jsonl", {"q": "?", "a": value})
    (task,) = read_task_file(source(file, columns={"prompt": "q", "answers": "a"}))
    assert task.payload == {"answers": answers}
    assert task.id == "row-1"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"q": "?"}, "there is no column 'a'; the columns are q"),
        ({"q": "?", "a": []}, "must hold the accepted answers"),
        ({"q": "?", "a": {"b": 1}}, "must hold the accepted answers"),
        ({"q": "?", "a": None}, "(None) must hold the accepted answers"),
        ({"q": "?", "a": math.nan}, "(nan) must hold the accepted answers"),
        ({"q": "?", "a": ["x", None]}, "fill them in, or remove the row"),
        ({"q": "?", "a": [[1]]}, "must hold the accepted answers"),
        ({"q": 5, "a": "x"}, "prompt"),
        ([1], "not an object with columns"),
    ],
)
def test_a_row_that_does_not_fit_the_columns_is_named_by_its_line(
    tmp_path: Path, row: Any, said: str
):
    file = write_lines(tmp_path / "d.jsonl", {"q": "?", "a": "x"}, row)
    with pytest.raises(TaskFileError) as caught:
        read_task_file(source(file, columns={"prompt": "q", "answers": "a"}))
    assert str(caught.value).startswith(f"{file}:2: ")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"columns": {"answer": "a", "prompt": "q"}}, "'answer', which is no part of a task"),
        ({"columns": {"answers": "a"}}, "does not say which column is the prompt"),
        ({"source": "hf:gsm8k"}, "write hf:owner/name:split"),
        ({"weight": 0}, "greater than 0"),
    ],
)
def test_a_source_that_cannot_be_meant_is_refused(keys: dict[str, Any], said: str):
    with pytest.raises(ValidationError, match=said):
        DataSource.model_validate({"source": "d.jsonl", **keys})


def test_a_source_is_written_as_it_may_be_read():
    for written in ("d.jsonl", {"source": "d.jsonl", "weight": 2.0}):
        read = DataSource.model_validate(written)
        assert DataSource.model_validate(read.model_dump(mode="json")) == read
    assert DataSource.model_validate("d.jsonl").model_dump(mode="json") == "d.jsonl"


def test_at_most_max_items_are_taken_from_the_beginning(tmp_path: Path):
    rows = [{"id": str(i), "prompt": "?"} for i in range(5)]
    file = write_lines(tmp_path / "d.jsonl", *rows)
    first = source(file, max_items=2)
    assert [task.id for task in read_task_file(first)] == ["0", "1"]
    assert source_digest(first) != source_digest(source(file))
    assert source_digest(first) == source_digest(source(file, max_items=2))


# --- Parquet -------------------------------------------------------------------------------------


def test_the_parquet_files_of_verl_are_read_as_they_are(tmp_path: Path):
    file = write_parquet(tmp_path / "train.parquet", [verl_row(0), verl_row(1)])
    tasks = read_task_file(source(file))
    assert [task.id for task in tasks] == ["row-1", "row-2"]
    assert tasks[1].messages()[0].content == "What is 1 + 1?"
    assert tasks[1].payload == {
        "answers": ["2"],
        "ground_truth": "2",
        "data_source": "openai/gsm8k",
        "extra_info": {"split": "train", "index": 1},
    }
    assert tasks[1].metadata == {"type": "openai/gsm8k"}


def test_a_parquet_file_may_have_the_fields_of_a_task(tmp_path: Path):
    rows: list[dict[str, Any]] = [
        {"id": "a", "prompt": "Where?", "payload": {"answers": ["there"]}, "tools": ["search"]},
        {"id": "b", "prompt": "When?", "payload": {"answers": ["then"]}, "tools": None},
    ]
    file = write_parquet(tmp_path / "d.parquet", rows)
    assert [task.tools for task in read_task_file(file)] == [["search"], None]


PADDED: list[dict[str, Any]] = [
    {
        "id": "tests",
        "prompt": "Double x.",
        "payload": {"answers": ["x"], "steps": [{"do": "a"}, {"say": "b"}]},
        "tool_context": {"tests": ["assert double(2) == 4"], "limits": {"calc": {"calls": 1}}},
        "metadata": {"type": "code", "from": {"book": 1}},
    },
    {
        "id": "check",
        "prompt": [{"role": "user", "content": "Triple x."}],
        "payload": {"level": 3},
        "tool_context": {"check": "def check(f): ...", "limits": {"search": {"index": "wiki"}}},
        "metadata": {"type": "code", "from": {}},
    },
    {"id": "none", "prompt": "Halve x.", "payload": {"answers": ["a"], "steps": []}},
]
"""Rows of which no two have the same fields: Arrow fills each struct with nulls."""


def padded_rows() -> list[dict[str, Any]]:
    # One kind of prompt a column, as Arrow has it.
    return [row | {"prompt": [{"role": "user", "content": row["id"]}]} for row in PADDED]


def test_the_same_rows_are_the_same_tasks_from_json_lines_and_from_parquet(tmp_path: Path):
    lines = read_task_file(write_lines(tmp_path / "d.jsonl", *padded_rows()))
    assert read_task_file(write_parquet(tmp_path / "d.parquet", padded_rows())) == lines
    assert lines[1].tool_context == PADDED[1]["tool_context"]
    assert lines[2].tool_context is None


def test_mapped_columns_are_padded_no_more_than_a_tasks_own(tmp_path: Path):
    columns = {
        "prompt": "prompt",
        "payload": "payload",
        "tool_context": "tool_context",
        "metadata.limits": "tool_context.limits",
    }
    file = write_parquet(tmp_path / "d.parquet", padded_rows())
    tasks = read_task_file(source(file, columns=columns))
    assert [task.payload for task in tasks] == [row["payload"] for row in PADDED]
    assert [task.metadata for task in tasks] == [
        {"limits": {"calc": {"calls": 1}}},
        {"limits": {"search": {"index": "wiki"}}},
        {},
    ]


def test_verls_settings_of_one_tool_are_not_padded_with_anothers(tmp_path: Path):
    kwargs = [{"calc": {"create_kwargs": {"n": "4"}}}, {"search": {"create_kwargs": {"k": 3}}}]
    rows = [
        {**verl_row(i), "extra_info": {"index": i, "tools_kwargs": one}}
        for i, one in enumerate(kwargs)
    ]
    tasks = read_task_file(write_parquet(tmp_path / "d.parquet", rows))
    expected = [{"index": i, "tools_kwargs": one} for i, one in enumerate(kwargs)]
    assert [task.payload["extra_info"] for task in tasks] == expected


def test_a_null_that_somebody_wrote_stays(tmp_path: Path):
    # In JSON lines every null; in Parquet those in lists, where Arrow pads nothing.
    row: dict[str, Any] = {"id": "1", "prompt": "?", "payload": {"a": [1, None], "b": None}}
    (line,) = read_task_file(write_lines(tmp_path / "d.jsonl", row))
    assert line.payload == {"a": [1, None], "b": None}
    (task,) = read_task_file(write_parquet(tmp_path / "d.parquet", [row]))
    assert task.payload == {"a": [1, None]}


def test_a_map_of_parquet_is_an_object(tmp_path: Path):
    pyarrow = importlib.import_module("pyarrow")
    kind = pyarrow.map_(pyarrow.string(), pyarrow.int64())
    table = pyarrow.table(
        {"id": ["1"], "prompt": ["?"], "payload": pyarrow.array([[("a", 1)]], kind)}
    )
    file = tmp_path / "d.parquet"
    importlib.import_module("pyarrow.parquet").write_table(table, file)
    assert read_task_file(file)[0].payload == {"a": 1}


def write_columns(path: Path, **columns: Any) -> Path:
    table = importlib.import_module("pyarrow").table(columns)
    importlib.import_module("pyarrow.parquet").write_table(table, path)
    return path


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"x", "the column payload.goal.image holds bytes, .* convert it to text, such as base64"),
        (timedelta(seconds=3), "the column payload.goal.image holds a duration, .* of seconds"),
    ],
)
def test_what_json_cannot_hold_is_named_by_its_column(tmp_path: Path, value: Any, message: str):
    row = {"id": "1", "prompt": "?", "payload": {"goal": {"image": value}}}
    file = write_parquet(tmp_path / "d.parquet", [row])
    with pytest.raises(TaskFileError, match=message):
        read_task_file(file)
    columns = {"prompt": "prompt", "payload.goal": "payload.goal"}
    with pytest.raises(TaskFileError, match=message):
        read_task_file(DataSource(source=file, columns=columns))
    others = DataSource(source=file, columns={"prompt": "prompt"})
    assert read_task_file(others)[0].payload == {}


def test_a_null_in_a_map_of_parquet_stays(tmp_path: Path):
    # Unlike a struct, a map has only the keys that were written.
    pyarrow = importlib.import_module("pyarrow")
    kind = pyarrow.map_(pyarrow.string(), pyarrow.struct([("x", pyarrow.int64())]))
    payload = pyarrow.array([[("a", None), ("b", {"x": None})]], kind)
    file = write_columns(tmp_path / "d.parquet", id=["1"], prompt=["?"], payload=payload)
    for columns in ({}, {"prompt": "prompt", "payload": "payload"}):
        (task,) = read_task_file(source(file, columns=columns))
        assert task.payload == {"a": None, "b": {}}
    (task,) = read_task_file(source(file, columns={"prompt": "prompt", "metadata.m": "payload"}))
    assert task.metadata == {"m": {"a": None, "b": {}}}


def test_decimals_are_numbers_and_dates_are_texts(tmp_path: Path):
    held = {
        "whole": Decimal("3.00"),
        "part": Decimal("0.10"),
        "day": date(2024, 2, 29),
        "at": datetime(2024, 2, 29, 12, 30, tzinfo=UTC),
        "clock": clock(12, 30),
        "days": [date(2024, 2, 29)],
    }
    written = {
        "whole": 3,
        "part": 0.1,
        "day": "2024-02-29",
        "at": "2024-02-29T12:30:00+00:00",
        "clock": "12:30:00",
        "days": ["2024-02-29"],
    }
    row = {"id": "1", "prompt": "?", "payload": held, "metadata": held, "a": held["day"]}
    file = write_parquet(tmp_path / "d.parquet", [row])
    columns = {"prompt": "prompt", "payload": "payload", "metadata": "metadata"}
    (task,) = read_task_file(source(file, columns=columns))
    assert (task.payload, task.metadata) == (written, written)
    (task,) = read_task_file(source(file, columns={"prompt": "prompt", "answers": "a"}))
    assert task.payload == {"answers": ["2024-02-29"]}


def test_numbers_in_columns_of_floats_are_written_as_people_write_them(tmp_path: Path):
    # pandas makes floats of whole numbers as soon as one of them is missing.
    rows = [{"q": "6 * 12?", "a": 72.0, "n": 1.0}, {"q": "2 / 4?", "a": 0.5, "n": 2.0}]
    file = write_parquet(tmp_path / "d.parquet", rows)
    tasks = read_task_file(source(file, columns={"prompt": "q", "answers": "a", "id": "n"}))
    assert [(task.id, task.payload["answers"]) for task in tasks] == [("1", ["72"]), ("2", ["0.5"])]


def test_floats_of_32_bits_mean_what_was_written(tmp_path: Path):
    # As a float of 64 bits, the 0.1 of 32 bits is 0.10000000149011612.
    pyarrow = importlib.import_module("pyarrow")
    single = pyarrow.float32()
    inner = pyarrow.struct([("x", single), ("more", pyarrow.list_(single)), ("n", pyarrow.int8())])
    values = [{"x": 0.1, "more": [72.1, None], "n": 1}, None]
    columns = {
        "q": ["a?", "b?"],
        "a": pyarrow.array([0.1, 72.0], single),
        "s": pyarrow.array(values, inner),
    }
    file = tmp_path / "d.parquet"
    importlib.import_module("pyarrow.parquet").write_table(pyarrow.table(columns), file)
    names = {"prompt": "q", "answers": "a", "payload.s": "s"}
    first, second = read_task_file(source(file, columns=names))
    assert first.payload == {"answers": ["0.1"], "s": values[0]}
    assert second.payload == {"answers": ["72"]}


@pytest.mark.parametrize("bits", ["float16", "float32"])
def test_short_floats_mean_what_was_written_wherever_they_are(tmp_path: Path, bits: str):
    pyarrow = importlib.import_module("pyarrow")
    short, text = getattr(pyarrow, bits)(), pyarrow.string()
    kinds: dict[str, tuple[Any, Any]] = {
        "large": (pyarrow.large_list(short), [0.1, None]),
        "fixed": (pyarrow.list_(short, 2), [0.1, 72.5]),
        "struct": (pyarrow.struct([("x", pyarrow.large_list(short))]), {"x": [0.1]}),
        "structs": (pyarrow.large_list(pyarrow.struct([("x", short)])), [{"x": 0.1}]),
        "map": (pyarrow.map_(text, pyarrow.list_(short)), {"k": [0.1]}),
        "plain": (short, 0.1),
    }
    arrays = {
        name: pyarrow.array([list(held.items()) if name == "map" else held], kind)
        for name, (kind, held) in kinds.items()
    }
    file = write_columns(tmp_path / "d.parquet", q=["?"], **arrays)
    columns = {"prompt": "q", "answers": "plain", **{f"payload.{name}": name for name in kinds}}
    (task,) = read_task_file(source(file, columns=columns))
    expected = {name: held for name, (_, held) in kinds.items()}
    assert task.payload == {"answers": ["0.1"], **expected}


@pytest.mark.parametrize("missing", [None, math.nan])
def test_a_row_whose_answer_or_id_is_missing_is_refused(tmp_path: Path, missing: float | None):
    rows = [{"q": "?", "a": 72.0, "n": 1.0}, {"q": "?", "a": missing, "n": missing}]
    file = write_parquet(tmp_path / "d.parquet", rows)
    for part, column, said in (
        ("answers", "a", "must hold the accepted answers"),
        ("id", "n", "must hold the id of every row"),
    ):
        with pytest.raises(TaskFileError) as caught:
            read_task_file(source(file, columns={"prompt": "q", part: column}))
        assert str(caught.value).startswith(f"{file}, row 2: column {column!r} ({missing}) {said}")


def test_a_bad_row_of_a_parquet_file_is_named_by_file_and_row(tmp_path: Path):
    rows = [verl_row(0), {**verl_row(1), "prompt": []}]
    file = write_parquet(tmp_path / "train.parquet", rows)
    with pytest.raises(TaskFileError) as caught:
        read_task_file(source(file))
    assert str(caught.value).startswith(f"{file}, row 2: ")
    assert "empty prompt" in str(caught.value)


def test_columns_that_mean_nothing_are_explained(tmp_path: Path):
    file = write_parquet(tmp_path / "d.parquet", [{"question": "?", "answer": "x"}])
    with pytest.raises(TaskFileError, match=r"row 1: .*or be named in columns"):
        read_task_file(source(file))
    mapped = source(file, columns={"prompt": "question", "answers": "answer"})
    assert read_task_file(mapped)[0].payload == {"answers": ["x"]}


def test_a_file_that_is_no_parquet_file_is_named(tmp_path: Path):
    file = tmp_path / "d.parquet"
    file.write_text("no")
    with pytest.raises(TaskFileError, match=r"d\.parquet: the Parquet file cannot be read"):
        read_task_file(file)
    with pytest.raises(TaskFileError, match=r"gone\.parquet: the Parquet file cannot be read"):
        read_task_file(tmp_path / "gone.parquet")


def test_without_the_package_the_message_has_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)
    with pytest.raises(MissingPackageError, match=r"pip install 'agent-r1\[data\]'"):
        read_task_file(tmp_path / "d.parquet")


# --- The hub -------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Stand in for the `datasets` library, which needs the hub; note what is asked of it."""
    calls: list[tuple[Any, ...]] = []

    def load_dataset(name: str, subset: str | None, *, split: str) -> list[dict[str, Any]]:
        calls.append((name, subset, split))
        if name == "owner/gone":
            raise FileNotFoundError("Dataset 'owner/gone' doesn't exist on the Hub")
        return [{"question": "Where?", "answer": "there"}, {"question": "When?", "answer": "then"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return calls


def test_a_data_set_of_the_hub_is_read_by_its_name(asked: list[tuple[Any, ...]]):
    columns = {"prompt": "question", "answers": "answer"}
    tasks = read_task_file(source("hf:owner/name:train[:2]", columns=columns))
    assert [task.payload["answers"] for task in tasks] == [["there"], ["then"]]
    read_task_file(source("hf:owner/name/main:test", columns=columns))
    assert asked == [("owner/name", None, "train[:2]"), ("owner/name", "main", "test")]


def test_the_library_itself_reads_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # It takes a folder of this name for the data set, and asks no hub.
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    rows = [{"question": f"{i}?", "answer": str(i)} for i in range(4)]
    write_parquet(folder / "train.parquet", rows)
    monkeypatch.chdir(tmp_path)
    columns = {"prompt": "question", "answers": "answer"}
    (second,) = read_task_file(source("hf:owner/name:train[1:2]", columns=columns))
    assert (second.prompt, second.payload) == ("1?", {"answers": ["1"]})
    with pytest.raises(TaskFileError, match="the data set cannot be loaded: Unknown split"):
        read_task_file(source("hf:owner/name:test"))


def test_a_data_set_of_the_hub_is_not_padded_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    write_parquet(folder / "train.parquet", padded_rows())
    monkeypatch.chdir(tmp_path)
    lines = read_task_file(write_lines(tmp_path / "d.jsonl", *padded_rows()))
    assert read_task_file(source("hf:owner/name:train")) == lines


def test_short_floats_of_the_hub_mean_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    pyarrow = importlib.import_module("pyarrow")
    single = pyarrow.float32()
    kind = pyarrow.struct([("x", pyarrow.list_(single))])
    arrays = {"a": pyarrow.array([0.1], single), "s": pyarrow.array([{"x": [0.1]}], kind)}
    write_columns(folder / "train.parquet", q=["?"], **arrays)
    monkeypatch.chdir(tmp_path)
    columns = {"prompt": "q", "answers": "a", "payload.s": "s"}
    (task,) = read_task_file(source("hf:owner/name:train", columns=columns))
    assert task.payload == {"answers": ["0.1"], "s": {"x": [0.1]}}


@pytest.mark.usefixtures("asked")
def test_a_data_set_that_cannot_be_loaded_is_named():
    with pytest.raises(TaskFileError, match="hf:owner/gone:train: the data set cannot be loaded"):
        read_task_file(source("hf:owner/gone:train"))


def test_without_the_library_the_message_has_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'agent-r1\[data\]'"):
        read_task_file(source("hf:owner/name:train"))


# --- Folders of `save_to_disk` -------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    datasets = importlib.import_module("datasets")
    rows = [{"id": "a", "prompt": "Where?", "n": 1.0}, {"id": "b", "prompt": "Who?", "n": None}]
    table = datasets.Dataset.from_list(rows)
    table.with_format("numpy").save_to_disk(tmp_path / "one", num_shards=2)
    datasets.DatasetDict(train=table, test=table).save_to_disk(tmp_path / "dict")
    return tmp_path


def test_a_saved_data_set_is_read(saved: Path):
    columns = {"id": "id", "prompt": "prompt", "payload.n": "n"}
    for folder in (saved / "one", saved / "dict" / "train"):
        first, second = read_task_file(source(folder, columns=columns))
        assert first == Task(id="a", prompt="Where?", payload={"n": 1.0})
        assert second == Task(id="b", prompt="Who?")
    digests = {source_digest(source(saved / name, columns=columns)) for name in ("one", "one")}
    assert len(digests) == 1
    with pytest.raises(TaskFileError, match=r"one, row 1: n: Extra inputs .*named in columns"):
        read_task_file(source(saved / "one"))


def test_a_folder_of_splits_is_answered_with_their_names(saved: Path):
    with pytest.raises(TaskFileError, match=r"holds the splits train, test .* such as .*/train$"):
        read_task_file(source(saved / "dict"))


def test_another_folder_is_called_one(saved: Path):
    with pytest.raises(TaskFileError, match=r"is a folder, and none that datasets\.save_to_disk"):
        read_task_file(source(saved))
    (saved / "one" / "state.json").write_text("{}")
    with pytest.raises(TaskFileError, match="one: the data set cannot be loaded"):
        read_task_file(source(saved / "one"))
