"""Tasks that users bring: a `DataSource` --rows.py, columns.py--> `Task`s, each checked.

learner, evaluation and chat read training data and evaluation sets through here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from agent_r1.runtime.files.columns import column_json, default_columns, task_fields
from agent_r1.runtime.files.file_formats import BadLines, LineError, check_utf8
from agent_r1.runtime.files.rows import TaskFileError, lines_of, rows_of
from agent_r1.runtime.files.task_source import DataSource
from agent_r1.runtime.files.writing import hash_file
from agent_r1_proto.parts import ImageRefusedError, text_of
from agent_r1_proto.tasks import Task

__all__ = [
    "TaskFileError",
    "numbered_tasks",
    "read_sets",
    "read_task_file",
    "refuse_images",
    "source_digest",
]

TASK_FIELDS = "`id`, `prompt` and, optionally, `payload`, `tools`, `tool_context`, `metadata`"


Row = tuple[str, Callable[[], Task], str]
"""The place of a line or row, what parses it, and what to do where it is no task."""


def _lines(source: DataSource) -> Iterator[Row]:
    remedy = "" if source.columns else f"a line is one JSON object with {TASK_FIELDS}"
    for number, (where, line) in enumerate(lines_of(source.source), start=1):
        yield where, partial(_task_of_line, line, source, number), remedy


def _task_of_line(line: bytes, source: DataSource, number: int) -> Task:
    if not line.strip():
        raise ValueError("the line is empty; remove it")
    check_utf8(line, Path(source.source))
    if not source.columns:
        return Task.model_validate_json(line)
    try:
        row = from_json(line)
    except ValueError as exc:
        raise ValueError(f"Invalid JSON: {exc}") from exc
    return Task.model_validate(_from_columns(row, source.columns, number))


def _rows(source: DataSource) -> Iterator[Row]:
    columns: Mapping[str, str] | None = source.columns or None
    for number, (where, row) in enumerate(rows_of(source), start=1):
        if number == 1 and columns is None:
            columns = default_columns(row)
        remedy = "" if columns else f"its columns must be {TASK_FIELDS}, or be named in columns"
        yield where, partial(_task_of_row, row, columns, number), remedy


def _task_of_row(row: dict[str, Any], columns: Mapping[str, str] | None, number: int) -> Task:
    fields = row if columns is None else _from_columns(row, columns, number)
    return Task.model_validate(column_json(fields))


def _from_columns(row: Any, columns: Mapping[str, str], number: int) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError("it is not an object with columns")
    return task_fields(row, columns, number)  # pyright: ignore[reportUnknownArgumentType]


def numbered_tasks(source: DataSource | Path) -> Iterator[tuple[str, Task]]:
    """Yield every task of a source in order, each with its place: file and line, or row.

    Raises:
        TaskFileError: the source is missing, empty or unreadable, lines are empty or no valid
            tasks, or an id occurs twice; the first ten are named, and no task behind the first of
            them is given.
        MissingPackageError: the package that reads the source is not installed.
    """
    source = DataSource.model_validate(source) if isinstance(source, Path) else source
    read = _rows(source) if source.is_table else _lines(source)
    bad, place_of, total = BadLines(source), dict[str, str](), 0
    for where, parse, remedy in islice(read, source.max_items):
        total += 1
        try:
            task = parse()
            if task.id in place_of:
                used = f"id {task.id!r} was used in {place_of[task.id]}"
                raise LineError(used, "ids must be unique within a file")
        except ValueError as exc:
            bad.add(where, exc, remedy)
            continue
        place_of[task.id] = where
        if not bad:
            yield where, task
    if bad:
        raise TaskFileError(bad.text(total))
    if not place_of:
        raise TaskFileError(f"{source}: the file holds no task; it needs at least one line or row")


def read_task_file(source: DataSource | Path) -> list[Task]:
    """Read every task of a file or data set, in order.

    Raises:
        TaskFileError: as `numbered_tasks`.
        MissingPackageError: as `numbered_tasks`.
    """
    return [task for _, task in numbered_tasks(source)]


def refuse_images(where: str, task: Task) -> None:
    """Check that a policy which reads text alone can be asked a task.

    Raises:
        TaskFileError: its prompt holds an image; `where` is named.
    """
    for message in task.messages():
        try:
            text_of(message.content)
        except ImageRefusedError as exc:
            raise TaskFileError(f"{where}: {exc}") from exc


def read_sets(
    sets: Mapping[str, DataSource | Path], max_questions: int | None
) -> dict[str, list[Task]]:
    """Read evaluation sets; every task carries its set's name as `metadata.set`.

    Args:
        sets: source of each set, by the set's name.
        max_questions: most questions of each set, from its beginning; None is all.

    Raises:
        TaskFileError: as `numbered_tasks`.
        MissingPackageError: as `numbered_tasks`.
    """
    return {
        name: [
            task.model_copy(update={"metadata": {**task.metadata, "set": name}})
            for task in read_task_file(source)[:max_questions]
        ]
        for name, source in sets.items()
    }


def source_digest(source: DataSource | Path) -> str:
    """Return the SHA-256 of what a source holds: of the file, where it is read as it is."""
    source = DataSource.model_validate(source) if isinstance(source, Path) else source
    if source.source.is_file() and not source.columns and source.max_items is None:
        return hash_file(source.source)
    digest = hashlib.sha256()
    for task in read_task_file(source):
        digest.update(task.model_dump_json().encode())
    return digest.hexdigest()
