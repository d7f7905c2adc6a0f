"""Conditions that hinder a run for a while: noted when they begin, and when they are over.

the launcher's watch, the learner --`conditions.jsonl`--> the terminal, `agent-r1 status`, the
summary of the run
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from agent_r1.runtime.durations import format_duration
from agent_r1.runtime.files.run_folder import CONDITIONS_FILE, LOGS_DIR, METRICS_FILE
from agent_r1.runtime.files.state import split_lines
from agent_r1_proto.messages import StrictMessage

Source = Literal["launcher", "learner"]


class Condition(StrictMessage):
    """One time that something was wrong."""

    source: Source
    """The process that saw it."""
    kind: str
    what: str
    """Trouble, in a clause."""
    remedy: str
    """Remedy for the user, in a clause."""
    began_at: float
    """Unix time, seconds."""
    ended_at: float | None = None
    """Time of its end; None while it lasts."""

    @property
    def lasted_s(self) -> float:
        """Seconds so far, or until it was over."""
        return max(0.0, (self.ended_at or time.time()) - self.began_at)

    def text(self) -> str:
        """Render it for the terminal: loud while it lasts."""
        if self.ended_at is not None:
            return f"over after {format_duration(self.lasted_s)}: {self.what}"
        since = time.strftime("%H:%M:%S", time.localtime(self.began_at))
        return f"!! since {since}: {self.what}; {self.remedy}"


class Conditions:
    """The conditions that one observer sees begin and end.

    Args:
        source: as in `Condition`.
        note: gets each condition when it begins, and with its end when it is over.
    """

    def __init__(self, source: Source, note: Callable[[Condition], None]) -> None:
        self._source: Source = source
        self.note = note
        self._lasting: dict[str, Condition] = {}

    def update(
        self, found: Mapping[str, tuple[str, str]], ago_s: Mapping[str, float] | None = None
    ) -> None:
        """Note what has begun and what is over.

        Args:
            found: all that is wrong now: what and remedy, by kind.
            ago_s: how long ago it was found first, in seconds; None is now.
        """
        for kind in [kind for kind in self._lasting if kind not in found]:
            over = self._lasting.pop(kind)
            self.note(over.model_copy(update={"ended_at": time.time()}))
        for kind, (what, remedy) in found.items():
            if kind not in self._lasting:
                self._lasting[kind] = begun = Condition(
                    source=self._source,
                    kind=kind,
                    what=what,
                    remedy=remedy,
                    began_at=time.time() - (ago_s or {}).get(kind, 0.0),
                )
                self.note(begun)


def append_condition(file: Path, condition: Condition) -> None:
    """Write a condition down."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(condition.model_dump_json() + "\n")


def read_conditions(file: Path, since: float = 0.0) -> list[Condition]:
    """Return the conditions in a file that began at a Unix time or later, oldest first."""
    found: dict[tuple[str, str, float], Condition] = {}
    try:
        lines = split_lines(file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return []
    for line in lines:
        try:
            one = Condition.model_validate_json(line)
        except ValidationError:
            continue  # cut off by a full disk or a crash
        if one.began_at >= since:
            found[one.source, one.kind, one.began_at] = one
    return list(found.values())


def close_left_open(file: Path, *sources: Source) -> None:
    """End the conditions that processes left open which ended themselves: nobody saw them end.

    They are taken to have ended when the run was last seen alive, so call this before anything is
    written to its folder.
    """
    lasting = [one for one in read_conditions(file) if one.ended_at is None]
    last = _last_alive(file.parent)
    for one in lasting:
        if one.source in sources:
            end = max(one.began_at, last)
            append_condition(file, one.model_copy(update={"ended_at": end}))


def _last_alive(folder: Path) -> float:
    """Return when a run last wrote to its folder, as Unix time."""
    files = [folder / METRICS_FILE, folder / CONDITIONS_FILE, *(folder / LOGS_DIR).glob("*.log")]
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


def summarize(conditions: list[Condition]) -> list[dict[str, object]]:
    """Return for each kind what it was, how often, how long in all, and whether it lasts."""
    by_kind: dict[tuple[str, str], list[Condition]] = {}
    for one in conditions:
        by_kind.setdefault((one.source, one.kind), []).append(one)
    return [
        {
            "what": times[-1].what,
            "times": len(times),
            "seconds": round(sum(one.lasted_s for one in times), 1),
            "lasts": times[-1].ended_at is None,
        }
        for times in by_kind.values()
    ]
