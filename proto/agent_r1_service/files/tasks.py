"""Task files: the questions users bring, one JSON object (`Task`) a line.

learner, evaluation and chat read `.jsonl` or `.jsonl.gz` files through here.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from agent_r1_proto.tasks import Task
from agent_r1_service.files.foreign import foreign_format, open_data


class TaskFileError(ValueError):
    """A task file that cannot be used; the message names the file and the line."""


def _lines(path: Path) -> Iterator[bytes]:
    with open_data(path) as file:
        yield from file


def _problem(exc: ValidationError) -> str:
    first = exc.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"]


def read_task_file(path: Path) -> list[Task]:
    """Read every task of a file, in order.

    Raises:
        TaskFileError: the file is missing, empty or unreadable, a line is empty or no valid
            `Task`, or an id occurs twice; file and line number are named.
    """
    foreign = foreign_format(path)
    if foreign is not None:
        raise TaskFileError(foreign)
    tasks: list[Task] = []
    line_of: dict[str, int] = {}
    number = 0
    try:
        for number, line in enumerate(_lines(path), start=1):
            if not line.strip():
                raise TaskFileError(f"{path}:{number}: the line is empty; remove it")
            try:
                task = Task.model_validate_json(line)
            except ValidationError as exc:
                raise TaskFileError(
                    f"{path}:{number}: {_problem(exc)}; a line is one JSON object with `id`, "
                    "`prompt` and, optionally, `payload`, `tools`, `tool_context`, `metadata`"
                ) from exc
            if task.id in line_of:
                raise TaskFileError(
                    f"{path}:{number}: id {task.id!r} was used in line {line_of[task.id]}; "
                    "ids must be unique within a file"
                )
            line_of[task.id] = number
            tasks.append(task)
    except (OSError, EOFError, zlib.error) as exc:
        where = f"{path}:{number + 1}" if number else str(path)
        why = getattr(exc, "strerror", None) or exc
        raise TaskFileError(f"{where}: the task file cannot be read: {why}") from exc
    if not tasks:
        raise TaskFileError(f"{path}: the file holds no task; it needs at least one line")
    return tasks


def read_sets(files: Mapping[str, Path], max_questions: int | None) -> dict[str, list[Task]]:
    """Read evaluation sets; every task carries its set's name as `metadata.set`.

    Args:
        files: task file of each set, by the set's name.
        max_questions: most questions of each set, from its beginning; None is all.

    Raises:
        TaskFileError: as `read_task_file`.
    """
    return {
        name: [
            task.model_copy(update={"metadata": {**task.metadata, "set": name}})
            for task in read_task_file(path)[:max_questions]
        ]
        for name, path in files.items()
    }
