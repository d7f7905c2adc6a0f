"""The rows of a source of tasks: a JSON-lines or Parquet file, or a data set on the hub.

tasks.py makes a `Task` of each row, and names the row by its `where` when it cannot.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_r1_service.extras import import_extra
from agent_r1_service.files.data_source import DataSource
from agent_r1_service.files.foreign import foreign_format, open_data

EXTRA = "data"
ROWS_AT_ONCE = 1024


class TaskFileError(ValueError):
    """A source of tasks that cannot be used; the message names the file and the line or row."""


def lines_of(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the lines of a JSON-lines file, plain or .gz, each with its place (`train.jsonl:3`).

    Raises:
        TaskFileError: it cannot be read, holds something else, or a line is empty.
    """
    foreign = foreign_format(path)
    if foreign is not None:
        raise TaskFileError(foreign)
    number = 0
    try:
        with open_data(path) as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    raise TaskFileError(f"{path}:{number}: the line is empty; remove it")
                yield f"{path}:{number}", line
    except (OSError, EOFError, zlib.error) as exc:
        where = f"{path}:{number + 1}" if number else str(path)
        why = getattr(exc, "strerror", None) or exc
        raise TaskFileError(f"{where}: the task file cannot be read: {why}") from exc


def rows_of(source: DataSource) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a Parquet file or of a data set, each with its place, counted from 1.

    Raises:
        TaskFileError: it cannot be read.
        MissingPackageError: the package that reads it is not installed.
    """
    rows = _hub_rows(source) if source.is_hub else _parquet_rows(source.source)
    for number, row in enumerate(rows, start=1):
        yield f"{source}, row {number}", row


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    parquet = import_extra("pyarrow.parquet", EXTRA, f"reading {path}")
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
                yield from _as_written(batch).to_pylist(maps_as_pydicts="lossy")
    except (OSError, ValueError) as exc:  # what pyarrow raises is a ValueError
        why = getattr(exc, "strerror", None) or exc
        raise TaskFileError(f"{path}: the Parquet file cannot be read: {why}") from exc


def _as_written(batch: Any) -> Any:
    """Return a batch of Arrow's whose floats of 32 bits mean what was written: 0.1 stays 0.1.

    As a float of 64 bits, the nearest one of 32 bits is 0.10000000149011612.
    """
    pyarrow = import_extra("pyarrow", EXTRA, "reading floats")

    def schema(leaf: Any) -> Any:
        fields = [
            field.with_type(_with_floats(pyarrow, field.type, leaf)) for field in batch.schema
        ]
        return pyarrow.schema(fields)

    as_texts = schema(pyarrow.string())
    if as_texts.equals(batch.schema):
        return batch
    return batch.cast(as_texts).cast(schema(pyarrow.float64()))


def _with_floats(pyarrow: Any, kind: Any, leaf: Any) -> Any:
    """Return a type of Arrow's with `leaf` for each float of 32 bits, also in structs and lists."""
    if pyarrow.types.is_float32(kind):
        return leaf
    if pyarrow.types.is_struct(kind):
        return pyarrow.struct(
            [field.with_type(_with_floats(pyarrow, field.type, leaf)) for field in kind]
        )
    if pyarrow.types.is_list(kind):
        return pyarrow.list_(_with_floats(pyarrow, kind.value_type, leaf))
    return kind


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
    yield from found
