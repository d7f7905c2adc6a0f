"""The prompt order: strict files, seeded shuffles, every task once an epoch."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.learner.prompts import PromptOrder, epoch_order
from agent_r1_proto.tasks import Task
from agent_r1_service.files.tasks import TaskFileError, read_task_file


def tasks(count: int) -> list[Task]:
    return [Task(id=f"q{i}", prompt=f"question {i}") for i in range(count)]


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


GOOD = '{"id": "a", "prompt": "who?"}'


def test_a_file_is_read_in_order(tmp_path: Path):
    path = write(tmp_path / "d.jsonl", GOOD, '{"id": "b", "prompt": "where?"}')
    assert [task.id for task in read_task_file(path)] == ["a", "b"]


def test_a_compressed_file_is_read(tmp_path: Path):
    path = tmp_path / "d.jsonl.gz"
    path.write_bytes(gzip.compress((GOOD + "\n").encode()))
    assert [task.id for task in read_task_file(path)] == ["a"]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("", "the line is empty"),
        ("   ", "the line is empty"),
        ('{"id": "b", "prompt": "x"', "Invalid JSON"),
        ('{"id": "b"}', "prompt: Field required"),
        ('{"id": "b", "prompt": ""}', "empty prompt"),
        ('{"id": "b", "prompt": "x", "answer": 1}', "answer: Extra inputs"),
        ("[1]", "object"),
        (GOOD, "id 'a' was used in line 1"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, bad: str, said: str):
    path = write(tmp_path / "d.jsonl", GOOD, bad)
    with pytest.raises(TaskFileError) as caught:
        read_task_file(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert said in str(caught.value)


def test_a_file_without_lines_is_refused(tmp_path: Path):
    path = write(tmp_path / "d.jsonl")
    with pytest.raises(TaskFileError, match="holds no task"):
        read_task_file(path)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(TaskFileError, match=r"missing\.jsonl: the task file cannot be read"):
        read_task_file(tmp_path / "missing.jsonl")


def test_a_cut_off_compressed_file_is_named(tmp_path: Path):
    path = tmp_path / "d.jsonl.gz"
    whole = gzip.compress("".join(f'{{"id": "{i}", "prompt": "x"}}\n' for i in range(999)).encode())
    path.write_bytes(whole[:-20])
    with pytest.raises(TaskFileError, match="cannot be read"):
        read_task_file(path)


@given(count=st.integers(1, 40), seed=st.integers(0, 9), epoch=st.integers(0, 3))
def test_every_epoch_holds_every_task_once(count: int, seed: int, epoch: int):
    order = PromptOrder(tasks(count), seed)
    ids = [order.task(epoch * count + i).id for i in range(count)]
    assert sorted(ids) == sorted(task.id for task in tasks(count))


def test_every_epoch_is_a_new_shuffle():
    orders = [tuple(epoch_order(20, 0, epoch)) for epoch in range(5)]
    assert len(set(orders)) == 5


def test_the_seed_decides_the_order():
    assert epoch_order(20, 1, 0) == epoch_order(20, 1, 0)
    assert epoch_order(20, 1, 0) != epoch_order(20, 2, 0)


def test_the_order_never_changes_between_versions():
    # Written down once: a checkpoint's cursor counts in this order.
    assert epoch_order(8, 7, 0) == [5, 1, 2, 6, 0, 3, 4, 7]


def test_the_order_is_the_same_from_any_cursor():
    order, again = PromptOrder(tasks(5), 3), PromptOrder(tasks(5), 3)
    forwards = [order.task(i).id for i in range(15)]
    backwards = [again.task(i).id for i in reversed(range(15))]
    assert forwards == backwards[::-1]


def test_without_shuffling_the_file_order_is_kept():
    order = PromptOrder(tasks(3), 0, shuffle=False)
    assert [order.task(i).id for i in range(4)] == ["q0", "q1", "q2", "q0"]


def test_the_fingerprint_changes_with_tasks_seed_and_shuffle():
    prints = {
        PromptOrder(tasks(3), 0).fingerprint(),
        PromptOrder(tasks(4), 0).fingerprint(),
        PromptOrder(tasks(3), 1).fingerprint(),
        PromptOrder(tasks(3), 0, shuffle=False).fingerprint(),
    }
    assert len(prints) == 4
    assert PromptOrder(tasks(3), 0).fingerprint() in prints


def test_no_tasks_are_refused():
    with pytest.raises(ValueError, match=r"data\.train needs at least one"):
        PromptOrder([], 0)


def test_several_files_follow_each_other(tmp_path: Path):
    first = write(tmp_path / "1.jsonl", GOOD)
    second = write(
        tmp_path / "2.jsonl", json.dumps({"id": "a", "prompt": "x", "metadata": {"set": "s"}})
    )
    order = PromptOrder.from_files([first, second], 0)
    assert len(order) == 2
    assert order.set_names() == {"s"}
