"""Log lines as JSON: one object a line, with the run and the ids of the sample.

A message of this project is constant text followed by `key=value`; the keys become fields, with
the values as they were given. Other libraries' messages are texts.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from agent_r1.runtime.config import LogFormat
from agent_r1_proto.tasks import RolloutKey

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_FIELD = re.compile(r"(?:\s*\b(\w+)=)?%(?:%|[-#0 +]*\d*(?:\.\d+)?[a-zA-Z])")
"""One place of a value in a message, with the key before it."""


class JsonFormatter(logging.Formatter):
    """Writes a record as one JSON object.

    Args:
        run_id: of the run.
        service: rollout, reward, learner, launcher, or the name of a tool.
    """

    def __init__(self, run_id: str = "", service: str = "") -> None:
        super().__init__()
        self._always = {"run_id": run_id, "service": service}

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        text, fields = _fields(record)
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": text,
            **self._always,
            **_of_sample(fields.get("rollout_id")),
            **fields,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def make_formatter(log_format: LogFormat, *, run_id: str, service: str) -> logging.Formatter:
    """Return what formats the lines of one service."""
    return (
        JsonFormatter(run_id, service) if log_format == "json" else logging.Formatter(TEXT_FORMAT)
    )


def _fields(record: logging.LogRecord) -> tuple[str, dict[str, Any]]:
    """Return the constant text of a message, and its values by key."""
    template, given = record.msg, record.args
    if not isinstance(template, str) or not given or isinstance(given, Mapping):
        return record.getMessage(), {}
    places = [place for place in _FIELD.finditer(template) if not place[0].endswith("%%")]
    named = [(place[1], value) for place, value in zip(places, given, strict=False) if place[1]]
    if len(places) != len(given) or not named:
        return record.getMessage(), {}
    first = next(place.start() for place in places if place[1])
    unnamed = sum(place[1] is None and place.start() < first for place in places)
    return template[:first] % given[:unnamed], {key: _plain(value) for key, value in named}


def _plain(value: object) -> object:
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _of_sample(rollout_id: object) -> dict[str, int]:
    """Return group and sample of an attempt's name; {} for anything else."""
    try:
        key = RolloutKey.parse(str(rollout_id))
    except ValueError:
        return {}
    return {"group_id": key.group_id, "sample_index": key.sample_index, "attempt": key.attempt}
