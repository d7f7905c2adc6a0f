"""Curves of a run: the columns of `metrics.jsonl`, read as it grows, thinned and smoothed.

The learner appends a line a step; app.py answers the pages from here. Dimension key: N = steps.
"""

from __future__ import annotations

import json
import math
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from agent_r1.console.run_state import as_number
from agent_r1.launch.local_view import Tail, read_json_lines
from agent_r1.runtime.files.run_folder import (
    CONDITIONS_FILE,
    EVALUATIONS_FILE,
    FAILURES_FILE,
    METRICS_FILE,
    STARTS_DIR,
)
from agent_r1.runtime.files.state import read_object
from agent_r1.runtime.unicode import repair_text

MOST_POINTS = 2000
"""Most points of one series that are sent."""
MOST_POINTS_TOGETHER = 8000
"""Most points of one chart, whose answer then has some 200 kB."""
FEWEST_POINTS = 100
MOST_NAMES = 2000
"""Most metrics of a run that are kept; a learner writes about a hundred."""
BLOCK_LINES = 512
"""Most lines that are added at once."""
MOST_CELLS = 32 << 20
"""Most numbers that are kept in memory, eight bytes each; the run that was asked for least recently
goes first."""
MOST_MARKS = 200
"""Most marks of a kind on a chart, divided among its runs: the newest ones of each."""
Floats = npt.NDArray[np.float64]
Axis = Literal["step", "tokens", "time"]
SECONDS_AN_HOUR = 3600.0


class RunMetrics:
    """The metrics of one run, a column each; NaN where a step has not measured one."""

    def __init__(self, folder: Path) -> None:
        self._tail = Tail(folder / METRICS_FILE)
        self._steps: array[float] = array("d")
        self._columns: dict[str, array[float]] = {}

    def update(self) -> None:
        """Read the lines that were added."""
        block: list[dict[str, Any]] = []
        for record in self._tail.new():
            step = record.get("step")
            if type(step) is not int or math.isnan(as_number(step)):
                continue
            if block and (
                len(block) == BLOCK_LINES
                or record["step"] <= block[-1]["step"]
                or record.keys() != block[0].keys()
            ):
                self._add(block)
                block = []
            block.append(record)
        if block:
            self._add(block)

    def _add(self, block: list[dict[str, Any]]) -> None:
        """Add lines with the same names and ascending steps: all at once takes a tenth as long."""
        kept = bisect_left(self._steps, block[0]["step"])
        for column in (self._steps, *self._columns.values()):
            del column[kept:]  # a learner that was resumed has gone back to its checkpoint
        rows = [[as_number(value) for value in record.values()] for record in block]
        for name, values in zip(block[0], np.array(rows).T, strict=True):
            column = self._column(repair_text(name), kept, has_values=not np.isnan(values).all())
            if column is not None and len(column) == kept:  # two names may be repaired to one
                column.frombytes(values.tobytes())
        self._steps.extend(record["step"] for record in block)
        for column in self._columns.values():
            column.extend([math.nan] * (len(self._steps) - len(column)))

    def _column(self, name: str, rows: int, *, has_values: bool) -> array[float] | None:
        column = self._columns.get(name)
        if column is None and has_values and len(self._columns) < MOST_NAMES:
            column = self._columns[name] = array("d", [math.nan]) * rows
        return column

    @property
    def names(self) -> list[str]:
        """Names of the metrics, sorted."""
        return sorted(name for name in self._columns if name not in ("step", "time/at"))

    @property
    def cells(self) -> int:
        """Numbers held in memory."""
        return len(self._steps) * (len(self._columns) + 1)

    def column(self, name: str) -> Floats:
        """Return [N] the values of a metric."""
        column = self._columns.get(name)
        return np.full(len(self._steps), math.nan) if column is None else np.array(column)

    @property
    def steps(self) -> Floats:
        """[N] learner steps."""
        return np.array(self._steps, dtype=np.float64)

    def axis(self, kind: Axis) -> Floats:
        """Return [N] where each step is on an axis: steps, sampled tokens, hours of training."""
        if kind == "step":
            return self.steps
        seconds = np.nan_to_num(self.column("time/step_s"))
        if kind == "time":
            return np.cumsum(seconds) / SECONDS_AN_HOUR
        return np.cumsum(np.nan_to_num(self.column("throughput/tokens_per_s")) * seconds)


class MetricsCache:
    """The metrics of the runs that were asked for last. Threads may share it."""

    def __init__(self, most_cells: int = MOST_CELLS) -> None:
        self._most_cells = most_cells
        self._runs: OrderedDict[Path, RunMetrics] = OrderedDict()
        self._lock = Lock()

    @contextmanager
    def reading(self, folders: Iterable[Path]) -> Generator[list[RunMetrics]]:
        """Yield the metrics of runs as they are now; nobody else changes them meanwhile."""
        with self._lock:
            yield [self._read(folder) for folder in folders]

    def _read(self, folder: Path) -> RunMetrics:
        run = self._runs.pop(folder, None) or RunMetrics(folder)
        run.update()
        self._runs[folder] = run
        while len(self._runs) > 1 and self.cells > self._most_cells:
            self._runs.popitem(last=False)
        return run

    @property
    def cells(self) -> int:
        """Numbers held in memory."""
        return sum(run.cells for run in self._runs.values())


def smooth(values_N: Floats, weight: float) -> Floats:
    """Smooth a curve: an exponential moving average that begins without bias.

    Args:
        values_N: [N] finite values.
        weight: of what came before, from 0 to below 1; 0 changes nothing.

    Source: Adam, arXiv:1412.6980, section 3: the mean is divided by 1 - weight^n.
    """
    mean, scale = 0.0, 1.0
    smoothed = np.empty_like(values_N)
    for place, value in enumerate(values_N.tolist()):
        mean = weight * mean + (1 - weight) * value
        scale *= weight
        smoothed[place] = mean / (1 - scale)
    return smoothed


def thin(values_N: Floats, most: int) -> npt.NDArray[np.intp]:
    """Choose which points of a curve are drawn: the least and the greatest of each stretch.

    Args:
        values_N: [N] finite values.
        most: points, at least 4.

    Returns:
        Their places in order, the first and the last among them; all where they are few enough.
    """
    count = values_N.size
    if count <= most:
        return np.arange(count)
    bounds = np.linspace(0, count, most // 2, dtype=np.intp)  # one stretch less: two for the ends
    chosen = {0, count - 1}
    for start, end in pairwise(bounds):
        stretch = values_N[start:end]
        chosen |= {int(start + stretch.argmin()), int(start + stretch.argmax())}
    return np.array(sorted(chosen), dtype=np.intp)


def read_series(
    run: RunMetrics, metric: str, axis: Axis, weight: float, most: int
) -> dict[str, list[float]]:
    """Return the curve of a metric as JSON values; `x` only on other axes than that of steps."""
    known = np.isfinite(run.column(metric))
    values = run.column(metric)[known]
    places = thin(values, most)
    found = {
        "step": run.steps[known][places].astype(int).tolist(),
        "y": _short(values[places]),
    }
    if axis != "step":
        found["x"] = _short(run.axis(axis)[known][places])
    return found | ({"smooth": _short(smooth(values, weight)[places])} if weight else {})


def _short(values: Floats) -> list[float]:
    return [float(f"{value:.7g}") for value in values]


def points_each(series: int) -> int:
    """Return how many points each of so many series on a chart may have."""
    return max(FEWEST_POINTS, min(MOST_POINTS, MOST_POINTS_TOGETHER // max(1, series)))


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step."""

    kind: Literal["push", "restart", "evaluation", "failure", "hindrance"]
    step: int
    text: str


def read_marks(folder: Path, run: RunMetrics, most: int = MOST_MARKS) -> list[Mark]:
    """Return what happened to a run, by step; of each kind the newest, up to `most`."""
    pushed = run.steps[np.isfinite(run.column("push/servers"))]
    kinds: list[list[Mark]] = [
        [Mark("push", int(step), "weights pushed") for step in pushed],
        [Mark("restart", step, "started again") for step in _restarts(folder, run)],
        [
            Mark("evaluation", _step(record), f"evaluation {record.get('name')}")
            for record in read_json_lines(folder / EVALUATIONS_FILE)
        ],
        [
            Mark("failure", _step(record), f"{record.get('where')}: {record.get('kind')}")
            for record in read_json_lines(folder / FAILURES_FILE)
        ],
        list(_hindrances(folder, run)),
    ]
    marks = [mark for kind in kinds for mark in kind[-most:]]
    return sorted(marks, key=lambda mark: mark.step)


def _step(record: dict[str, Any]) -> int:
    step = record.get("step")
    return step if isinstance(step, int) else 0


def _restarts(folder: Path, run: RunMetrics) -> Iterator[int]:
    for path in sorted((folder / STARTS_DIR).glob("*.json"))[1:]:
        try:
            since = float(read_object(path)["since"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        step = _step_after(run, since)
        if step is not None:
            yield step


def _hindrances(folder: Path, run: RunMetrics) -> Iterator[Mark]:
    for record in read_json_lines(folder / CONDITIONS_FILE):
        began = record.get("began_at")
        if record.get("ended_at") is not None or not isinstance(began, int | float):
            continue  # the line of its end has the same beginning
        step = _step_after(run, began)
        if step is not None:
            yield Mark("hindrance", step, str(record.get("what")))


def _step_after(run: RunMetrics, at: float) -> int | None:
    """Return the first step that was written after a time; None where none was."""
    later = run.steps[run.column("time/at") > at]
    return int(later[0]) if later.size else None


def version_of(folders: Sequence[Path], *more: str) -> str:
    """Return a text that changes when a curve or a mark of the runs does."""
    names = (METRICS_FILE, EVALUATIONS_FILE, FAILURES_FILE, CONDITIONS_FILE, STARTS_DIR)
    return json.dumps([more, [_stamp(folder / name) for folder in folders for name in names]])


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns
