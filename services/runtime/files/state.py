"""JSON and JSON lines that a run folder holds: what is wrong with a damaged file, in one line.

Those who read such files at a start ask here: checkpoints, ledger, summary, launcher and views.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError

Model = TypeVar("Model", bound=BaseModel)

LAST_LINE_BYTES = 16 << 10
"""Bytes that are read first in search of the last line."""


def split_lines(text: str) -> list[str]:
    """Return the lines of a JSON-lines file; the last one may lack its newline.

    Not `str.splitlines`, which also breaks at U+2028, U+0085 and others that a JSON string holds as
    they are.
    """
    return text.removesuffix("\n").split("\n") if text else []


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Return the JSON object of a text.

    Raises:
        ValueError: it is none; the message says what it is.
    """
    if not text.strip():
        raise ValueError("it is empty")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"it is cut off or damaged: {exc}") from exc
    if not isinstance(values, dict):
        raise ValueError(f"it holds {json.dumps(values):.40} and not a JSON object")
    return cast("dict[str, Any]", values)


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds none; the message does not name the file.
    """
    return parse_object(file.read_bytes())


def check_object(model: type[Model], values: dict[str, Any]) -> Model:
    """Return an object as a model.

    Raises:
        ValueError: it is none; the message has the first fault.
    """
    try:
        return model.model_validate(values)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise ValueError(f"{where} ({first['input']!r:.40}): {first['msg']}") from exc


def last_object(file: Path) -> dict[str, Any]:
    """Return the last whole line of a growing JSON-lines file; {} without one."""
    try:
        with file.open("rb") as lines:
            end = lines.seek(0, os.SEEK_END)
            size = LAST_LINE_BYTES
            while True:
                start = lines.seek(max(0, end - size))
                whole = lines.read(end - start).rpartition(b"\n")[0]
                line = whole.rpartition(b"\n")[2]
                if start == 0 or b"\n" in whole:
                    return parse_object(line)
                size *= 2  # the line is longer than that
    except (OSError, ValueError):
        return {}


def parse_objects(text: str) -> list[dict[str, Any]]:
    """Return the objects of JSON lines; what a crash has cut off is left out."""
    found: list[dict[str, Any]] = []
    for line in split_lines(text):
        try:
            found.append(parse_object(line))
        except ValueError:
            continue
    return found
