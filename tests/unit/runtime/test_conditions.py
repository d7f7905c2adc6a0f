"""What is wrong for a while: begun once, ended once, added up for the summary."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_r1.runtime.files.conditions import (
    Condition,
    Conditions,
    append_condition,
    close_left_open,
    read_conditions,
    summarize,
)
from tests.support.builders import SEPARATORS

FULL = {"redis:full": ("Redis is full", "raise maxmemory")}


def condition(began_at: float, ended_at: float | None, kind: str = "redis:full") -> Condition:
    return Condition(
        source="launcher",
        kind=kind,
        what="Redis is full",
        remedy="raise maxmemory",
        began_at=began_at,
        ended_at=ended_at,
    )


def test_a_condition_is_noted_when_it_begins_and_when_it_is_over():
    noted: list[Condition] = []
    conditions = Conditions("learner", noted.append)
    conditions.update(FULL, {"redis:full": 3.0})
    conditions.update(FULL)
    conditions.update({})
    conditions.update({})
    begun, over = noted
    assert begun.text().startswith("!! since ")
    assert begun.text().endswith(": Redis is full; raise maxmemory")
    assert over.text() == "over after 3s: Redis is full"
    assert begun.began_at == over.began_at


def test_times_of_one_kind_are_added_up(tmp_path: Path):
    file = tmp_path / "conditions.jsonl"
    for one in (
        *(condition(100.0, None), condition(100.0, 110.0)),
        *(condition(200.0, None), condition(200.0, 204.5)),
    ):
        append_condition(file, one)
    with file.open("a") as lines:
        lines.write('{"source": "launch')  # cut off by a crash
    # 10 s and 4.5 s.
    assert summarize(read_conditions(file)) == [
        {"what": "Redis is full", "times": 2, "seconds": 14.5, "lasts": False}
    ]


@pytest.mark.parametrize("separator", SEPARATORS)
def test_a_line_separator_in_a_condition_ends_no_line(tmp_path: Path, separator: str):
    file = tmp_path / "conditions.jsonl"
    one = condition(100.0, None, f"a{separator}b")
    append_condition(file, one)
    assert read_conditions(file) == [one]


def test_what_a_killed_process_left_open_is_closed_for_it_alone(tmp_path: Path):
    file = tmp_path / "conditions.jsonl"
    close_left_open(file, "launcher")  # there is none yet
    append_condition(file, condition(100.0, None))
    close_left_open(file, "learner")
    assert read_conditions(file)[0].ended_at is None
    close_left_open(file, "launcher")
    assert read_conditions(file)[0].ended_at is not None


def test_what_was_left_open_ended_when_the_run_was_last_seen_alive(tmp_path: Path):
    file = tmp_path / "conditions.jsonl"
    for kind in ("redis:full", "redis:away"):
        append_condition(file, condition(100.0, None, kind))
    log = tmp_path / "logs" / "learner.log"
    log.parent.mkdir()
    log.touch()
    os.utime(file, (100.0, 100.0))
    os.utime(log, (160.0, 160.0))
    close_left_open(file, "launcher", "learner")  # now, which is years later
    assert [one.lasted_s for one in read_conditions(file)] == [60.0, 60.0]
