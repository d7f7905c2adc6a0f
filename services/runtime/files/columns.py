"""Columns of a row as parts of a task: `DataSource.columns` --> fields of `Task`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any, cast

VERL_COLUMNS = {
    "prompt": "prompt",
    "answers": "reward_model.ground_truth",
    "payload.ground_truth": "reward_model.ground_truth",
    "payload.data_source": "data_source",
    "payload.extra_info": "extra_info",
    "metadata.type": "data_source",
}
"""Columns of the Parquet files that verl's examples write."""
_VERL_MARK = "reward_model"
_MISSING = object()
_NO_JSON: Mapping[type[object], tuple[str, str]] = {
    bytes: ("bytes", "text, such as base64"),
    timedelta: ("a duration", "a number of seconds"),
}


class Struct(dict[str, Any]):
    """A row or struct of Arrow's: it has all fields that any row has, null where a row lacks one.

    A table from JSON, or a map of Arrow's, is a plain `dict`, and has the keys that were written.
    """


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
        ValueError: a column is missing, or holds no id or answers.
    """
    task: dict[str, Any] = {"id": f"row-{number}"}
    for target, column in columns.items():
        value = _value(row, column)
        table, _, name = target.partition(".")
        if target == "id":
            task["id"] = _id(value, column)
        elif target == "answers":
            payload = task.setdefault("payload", {})
            payload["answers"] = _answers(value, column)
        elif name:
            fields = task.setdefault(table, {})
            if value is not None or not isinstance(row, Struct):
                fields[name] = column_json(value, column)
        elif table in ("payload", "metadata"):
            task[table] = {**task.get(table, {}), **column_json(_table(value, column), column)}
        else:
            task[table] = column_json(value, column)
    return _without_empty_columns(task)


def as_json(value: Any) -> Any:
    """Return a value of Arrow's as JSON lines have it.

    At every depth, a null in a struct is taken for a missing field, as Arrow writes null into the
    fields that a row lacks. A null in a list or a map is kept: nothing but the row itself puts it
    there. Decimals become numbers, dates and times texts after ISO 8601.
    """
    if isinstance(value, Mapping):
        fields = cast("Mapping[str, Any]", value)
        padded = isinstance(value, Struct)
        return {k: as_json(v) for k, v in fields.items() if v is not None or not padded}
    if isinstance(value, list):
        return [as_json(one) for one in cast("list[Any]", value)]
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value.isoformat() if isinstance(value, date | time) else value


def column_json(value: Any, column: str = "") -> Any:
    """Return a value of Arrow's as JSON lines have it, where they can.

    Args:
        value: of a column, or a whole row.
        column: its name; "" for a row.

    Raises:
        ValueError: it holds bytes or a duration; the column is named.
    """
    found = as_json(value)
    _check_json(found, column)
    return found


def _check_json(value: Any, column: str) -> None:
    if isinstance(value, Mapping):
        for name, inner in cast("Mapping[str, Any]", value).items():
            _check_json(inner, f"{column}.{name}" if column else name)
    elif isinstance(value, list):
        for inner in cast("list[Any]", value):
            _check_json(inner, column)
    elif not isinstance(value, str | int | float | None):
        held = cast("type[object]", type(value))
        kind, other = _NO_JSON.get(held, (f"a {held.__name__}", "text"))
        raise ValueError(
            f"the column {column} holds {kind}, which a task cannot have; convert it to {other} "
            "in the file, or choose the columns without it (columns = {...})"
        )


def _without_empty_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out parts of a task, and fields of its messages, that are null."""
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
            # In Parquet a struct without any field is null, and so is each of its fields.
            value = None if value is None else (_as_table(value) or {}).get(name, _MISSING)
    if value is _MISSING:
        raise ValueError(f"there is no column {column!r}; the columns are {', '.join(sorted(row))}")
    return value


def _table(value: Any, column: str) -> Mapping[str, Any]:
    table = dict[str, Any]() if value is None else _as_table(value)
    if table is None:
        raise ValueError(f"column {column!r} ({value!r:.80}) must hold a table of values")
    return table


def _id(value: Any, column: str) -> str:
    text = _text(value)
    if text is None:
        raise ValueError(
            f"column {column!r} ({value!r:.80}) must hold the id of every row: a text or a number; "
            "fill it in, or leave id out of columns"
        )
    return text


def _answers(value: Any, column: str) -> list[str]:
    """Return the accepted answers as texts; Search-R1 keeps them as `{"target": [...]}`."""
    held: Any = (_as_table(value) or {}).get("target", value)
    answers = [
        _text(one) for one in (cast("list[Any]", held) if isinstance(held, list) else [held])
    ]
    known = [text for text in answers if text is not None]
    if not known or len(known) < len(answers):
        raise ValueError(
            f"column {column!r} ({held!r:.80}) must hold the accepted answers: a text, a number "
            "or a list of them; fill them in, or remove the row"
        )
    return known


def _text(value: Any) -> str | None:
    """Return a text, or a number as people write it; None for nothing, NaN and anything else.

    A column of floats holds 72 as 72.0 and large numbers as 1e+16: these are 72 and
    10000000000000000 here. A truth value is written as in JSON: true; a date after ISO 8601.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if not isinstance(value, float | Decimal) or not Decimal(value).is_finite():
        return None
    digits = f"{Decimal(str(value)):f}"
    whole = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return "0" if value == 0 else whole
