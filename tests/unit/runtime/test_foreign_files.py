"""Data files that are not JSON lines are called what they are."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from agent_r1.runtime.files.file_formats import foreign_format
from agent_r1.runtime.files.tasks import TaskFileError, read_task_file

LINE = b'{"id": "a", "prompt": "Where?"}\n'


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.data", b"PAR1\x15\x04", "is a Parquet file and not JSON lines; convert it: pandas."),
        ("a.jsonl", b"PAR1\x15\x04", "if it holds tasks, give its name the suffix .parquet"),
        ("a.jsonl.gz", gzip.compress(b"PAR1\x15\x04", mtime=0), "is a Parquet file"),
        ("a.jsonl", gzip.compress(LINE, mtime=0), "a gzip file without the suffix .gz"),
        ("a.xlsx", b"PK\x03\x04\0\0", "a zip archive or an Excel file"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("a.npy", b"\x93NUMPY\x01\0v\0", "is a binary file and not JSON lines; convert it to"),
        ("a.json", b"[\n" + LINE + b"]", "is one JSON array and not JSON lines"),
    ],
)
def test_a_foreign_file_is_named_with_the_way_to_convert_it(
    tmp_path: Path, name: str, data: bytes, expected: str
):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(TaskFileError) as caught:
        read_task_file(path)
    assert str(caught.value).startswith(f"{path} is ")
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("name", "data"), [("a.jsonl", LINE), ("a.jsonl.gz", gzip.compress(LINE, mtime=0))]
)
def test_json_lines_are_not_foreign(tmp_path: Path, name: str, data: bytes):
    path = tmp_path / name
    path.write_bytes(data)
    assert foreign_format(path) is None
    assert [task.id for task in read_task_file(path)] == ["a"]


def test_a_missing_file_is_told_without_its_error_number(tmp_path: Path):
    with pytest.raises(TaskFileError, match=r"cannot be read: No such file or directory$"):
        read_task_file(tmp_path / "nowhere.jsonl")


def test_a_damaged_gzip_file_of_tasks_is_named(tmp_path: Path):
    path = tmp_path / "tasks.jsonl.gz"
    # The first block of the packed data is of type 3, which deflate does not have.
    path.write_bytes(gzip.compress(b"{}\n", mtime=0)[:10] + b"\xff" * 20)
    with pytest.raises(TaskFileError, match=r"tasks\.jsonl\.gz: the task file cannot be read"):
        read_task_file(path)
