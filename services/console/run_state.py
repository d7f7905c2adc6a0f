"""The state of a run, from its folder: how it stands, its last step, what hinders it.

`agent-r1 status` prints it, and the pages of the console show it. The end of `metrics.jsonl` is
read, never all of it.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1.config.run import Config
from agent_r1.launch.local_view import step_values
from agent_r1.learner.checkpoints.ownership import writer_of
from agent_r1.learner.outcome import last_summary
from agent_r1.runtime.durations import format_duration
from agent_r1.runtime.files.conditions import Condition, read_conditions
from agent_r1.runtime.files.run_folder import CONDITIONS_FILE, METRICS_FILE, running_launcher
from agent_r1.runtime.files.state import last_object

RUNNING = "running"
AWAY = "no launcher on this machine"
EXACT_BELOW = 2**53
"""Whole numbers from there on are no longer exact."""


@dataclass(frozen=True)
class RunState:
    """How a run stands."""

    status: str
    """`RUNNING`, how it ended, or `AWAY`."""
    detail: str
    """Process that runs it, or reason of its end; "" without one."""
    metrics: dict[str, Any]
    """Last step; {} before the first one has ended."""
    written_at: float | None
    """Time of the last step, Unix time in seconds; None before it."""
    hindrances: tuple[Condition, ...]
    """What is wrong with it now, as its launcher and its learner see it."""

    @property
    def is_running(self) -> bool:
        """Return whether its launcher or its learner lives on this machine."""
        return self.status == RUNNING

    @property
    def has_ended(self) -> bool:
        """Return whether a summary says how it ended."""
        return self.status not in (RUNNING, AWAY)

    @property
    def text(self) -> str:
        """Status with its detail."""
        if not self.detail:
            return self.status
        return (
            f"{self.status} ({self.detail})" if self.is_running else f"{self.status}: {self.detail}"
        )

    @property
    def age(self) -> str:
        """Time since the last step; "-" before it."""
        return (
            "-" if self.written_at is None else f"{format_duration(time.time() - self.written_at)}"
        )

    def values(self, config: Config, total_steps: int) -> list[tuple[str, str]]:
        """Return what is shown of the last step, as (name, value); [] before it."""
        if not self.metrics:
            return []
        shown = step_values(self.metrics, config.score_names(), total_steps, None)
        return [(name, value) for name, value in shown if name != "left"]


def read_run_state(folder: Path, at_work: str | None = None) -> RunState:
    """Read how a run stands; `at_work` is who trains it on another machine."""
    running = at_work or _at_work(folder)
    summary = {} if running is not None else last_summary(folder)
    metrics_file = folder / METRICS_FILE
    metrics = last_object(metrics_file)
    metrics = {name: value for name, value in metrics.items() if not math.isnan(as_number(value))}
    metrics = metrics if "step" in metrics else {}
    ended = str(summary.get("status")) if summary else None
    return RunState(
        status=RUNNING if running is not None else ended or AWAY,
        detail=running if running is not None else str(summary.get("reason") or ""),
        metrics=metrics,
        written_at=metrics_file.stat().st_mtime if metrics else None,
        hindrances=() if ended else tuple(_hindrances(folder)),
    )


def as_number(value: object) -> float:
    """Return a value of a file; NaN for one that is no number."""
    if isinstance(value, float):
        return value
    return float(value) if type(value) is int and abs(value) < EXACT_BELOW else math.nan


def _at_work(folder: Path) -> str | None:
    """Return the process of this machine that runs a run; None where none does."""
    launcher = running_launcher(folder)
    if launcher is not None:
        return str(launcher["pid"])
    writer = writer_of(folder)
    return None if writer is None else f"the learner is {writer}"


def _hindrances(folder: Path) -> list[Condition]:
    return [
        one
        for one in read_conditions(folder / CONDITIONS_FILE)
        # Whether Redis can be used is asked when it is read.
        if one.ended_at is None and not one.kind.startswith("redis:")
    ]
