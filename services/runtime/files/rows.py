"""The rows of a source of tasks: a JSON-lines or Parquet file, a saved data set, or one on the hub.

tasks.py makes a `Task` of each row, and names the row by its `where` when it cannot.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from agent_r1.runtime.files.columns import Struct
from agent_r1.runtime.files.file_formats import foreign_format, numbered_lines
from agent_r1.runtime.files.task_source import DataSource
from agent_r1.runtime.imports import import_extra

EXTRA = "data"
ROWS_AT_ONCE = 1024
_NARROW_FLOATS = {"halffloat": np.float16, "float": np.float32}
"""By Arrow's names of their types."""


class TaskFileError(ValueError):
    """A source of tasks that cannot be used; the message names the file and the line or row."""


def lines_of(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the lines of a JSON-lines file, plain or .gz, each with its place (`train.jsonl:3`).

    Raises:
        TaskFileError: it cannot be read, or holds something else.
    """
    foreign = foreign_format(path)
    if foreign is not None:
        raise TaskFileError(foreign)
    number = 0
    try:
        for number, line in numbered_lines(path):
            yield f"{path}:{number}", line
    except (OSError, EOFError, zlib.error) as exc:
        where = f"{path}:{number + 1}" if number else str(path)
        why = getattr(exc, "strerror", None) or exc
        raise TaskFileError(f"{where}: the task file cannot be read: {why}") from exc


def rows_of(source: DataSource) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a table (`DataSource.is_table`), each with its place, counted from 1.

    Raises:
        TaskFileError: it cannot be read.
        MissingPackageError: the package that reads it is not installed.
    """
    if source.is_hub:
        rows = _hub_rows(source)
    elif source.is_parquet:
        rows = _parquet_rows(source.source)
    else:
        rows = _saved_rows(source.source)
    for number, row in enumerate(rows, start=1):
        yield f"{source}, row {number}", row


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    parquet = import_extra("pyarrow.parquet", EXTRA, f"reading {path}")
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    yield _as_struct(row, batch.schema)
    except (OSError, ValueError) as exc:  # what pyarrow raises is a ValueError
        why = getattr(exc, "strerror", None) or exc
        raise TaskFileError(f"{path}: the Parquet file cannot be read: {why}") from exc


def _as_struct(row: Mapping[str, Any], schema: Any) -> Struct:
    """Return a row with its structs marked, its maps as tables and its floats as written.

    Args:
        row: as Python has it.
        schema: the fields of Arrow's that it has; None where they are not known.
    """
    kinds = {field.name: field.type for field in schema or ()}
    return Struct({name: _as_written(value, kinds.get(name)) for name, value in row.items()})


def _as_written(value: Any, kind: Any) -> Any:
    if isinstance(value, float):
        return _as_short_float(value, str(getattr(kind, "value_type", kind)))
    if isinstance(value, Mapping):
        fields = getattr(getattr(kind, "value_type", kind), "fields", None)
        return _as_struct(cast("Mapping[str, Any]", value), fields)
    if isinstance(value, list):
        items = cast("list[Any]", value)
        if hasattr(kind, "item_type"):  # a map
            return {key: _as_written(held, kind.item_type) for key, held in items}
        return [_as_written(one, getattr(kind, "value_type", kind)) for one in items]
    return value


def _as_short_float(value: float, kind: str) -> float:
    """Return what was written: the 0.1 of 32 bits is 0.10000000149011612 as a float of 64."""
    narrow = _NARROW_FLOATS.get(kind)
    return value if narrow is None else float(str(narrow(value)))


def _hub_rows(source: DataSource) -> Iterator[dict[str, Any]]:
    datasets = import_extra("datasets", EXTRA, f"reading {source}")
    name, subset, split = source.hub_parts()
    try:
        found = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError, RuntimeError) as exc:  # not found, no such split, no network
        raise TaskFileError(
            f"{source}: the data set cannot be loaded: {exc}; check its name, subset and "
            "split, and that the hub can be reached"
        ) from exc
    yield from _data_set_rows(found)


def _saved_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a folder that `save_to_disk` of the package datasets wrote."""
    if splits := _splits(folder):
        raise TaskFileError(
            f"{folder} holds the splits {', '.join(splits)} of a data set; name one of them, such "
            f"as {folder / splits[0]}"
        )
    if not (folder / "state.json").is_file():
        raise TaskFileError(
            f"{folder} is a folder, and none that datasets.save_to_disk wrote; name a file of "
            "tasks in it"
        )
    datasets = import_extra("datasets", EXTRA, f"reading {folder}")
    try:
        found = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as exc:  # KeyError: a torn state.json
        why = getattr(exc, "strerror", None) or exc
        raise TaskFileError(f"{folder}: the data set cannot be loaded: {why}") from exc
    yield from _data_set_rows(found.with_format(None))  # it may be saved as one of tensors


def _splits(folder: Path) -> list[str]:
    try:
        return json.loads((folder / "dataset_dict.json").read_bytes())["splits"]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _data_set_rows(found: Any) -> Iterator[dict[str, Any]]:
    features = getattr(found, "features", None)
    for row in found:
        yield _as_struct(row, features and features.arrow_schema)
