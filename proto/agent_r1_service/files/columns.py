"""Which column of a row is which part of a task: `DataSource.columns` --> fields of `Task`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

VERL_COLUMNS = {
    "prompt": "prompt",
    "answers": "reward_model.ground_truth",
    "payload.ground_truth": "reward_model.ground_truth",
    "payload.data_source": "data_source",
    "payload.extra_info": "extra_info",
    "metadata.type": "data_source",
}
"""Of the Parquet files that verl's examples write."""
_VERL_MARK = "reward_model"
_MISSING = object()


def default_columns(row: Mapping[str, Any]) -> Mapping[str, str] | None:
    """Return the columns of a source that names none, by its first row; None: a task's own."""
    if _VERL_MARK not in row:
        return None
    return {target: column for target, column in VERL_COLUMNS.items() if _root(column) in row}


def task_fields(row: Mapping[str, Any], columns: Mapping[str, str], number: int) -> dict[str, Any]:
    """Return the fields of a task, read from the columns of a row.

    Args:
        row: one row of the source.
        columns: as `DataSource.columns`.
        number: of the row, from 1; it makes the id where no column does.

    Raises:
        ValueError: a column is missing, or holds no answers.
    """
    task: dict[str, Any] = {"id": f"row-{number}"}
    for target, column in columns.items():
        value = _value(row, column)
        table, _, name = target.partition(".")
        if target == "id":
            task["id"] = str(value)
        elif target == "answers":
            payload = task.setdefault("payload", {})
            payload["answers"] = _answers(value, column)
        elif name:
            task.setdefault(table, {})[name] = value
        elif table in ("payload", "metadata"):
            task[table] = {**task.get(table, {}), **_table(value, column)}
        else:
            task[table] = value
    return without_empty_columns(task)


def without_empty_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what a table of columns holds only because other rows need it."""
    kept = {name: value for name, value in row.items() if value is not None}
    if isinstance(kept.get("prompt"), list):
        messages = cast("list[Any]", kept["prompt"])
        kept["prompt"] = [_without_empty(message) for message in messages]
    return kept


def _without_empty(message: Any) -> Any:
    fields = _as_table(message)
    return message if fields is None else {k: v for k, v in fields.items() if v is not None}


def _as_table(value: Any) -> Mapping[str, Any] | None:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else None


def _root(column: str) -> str:
    return column.partition(".")[0]


def _value(row: Mapping[str, Any], column: str) -> Any:
    value: Any = row.get(column, _MISSING)
    if value is _MISSING:  # not the name of a column: of a field in one
        value = row
        for name in column.split("."):
            value = (_as_table(value) or {}).get(name, _MISSING)
    if value is _MISSING:
        raise ValueError(f"there is no column {column!r}; the columns are {', '.join(sorted(row))}")
    return value


def _table(value: Any, column: str) -> Mapping[str, Any]:
    table = _as_table(value)
    if table is None:
        raise ValueError(f"column {column!r} ({value!r:.80}) must hold a table of values")
    return table


def _answers(value: Any, column: str) -> list[str]:
    """Return the accepted answers as texts; Search-R1 keeps them as `{"target": [...]}`."""
    held: Any = (_as_table(value) or {}).get("target", value)
    answers = cast("list[Any]", held) if isinstance(held, list) else [held]
    if not answers or not all(isinstance(one, str | int | float) for one in answers):
        raise ValueError(
            f"column {column!r} ({held!r:.80}) must hold the accepted answers: a text, a number "
            "or a list of them"
        )
    return [str(one) for one in answers]
