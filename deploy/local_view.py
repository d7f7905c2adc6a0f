"""What the user sees of a training run in the terminal: progress, warnings, the result.

Reads `metrics.jsonl`, `evaluations.jsonl`, `summary.json` and `trajectories/eval_*.jsonl` of the
run folder, which the learner writes; writes to the terminal only. On a terminal one line is kept up
to date below the lines that stay; elsewhere (a log, a pipe) every step is a line.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from agent_r1.config import RunConfig
from agent_r1.transcript import print_transcript
from agent_r1_proto.task_files import read_task_file

UPDATE_S = 0.5
STEPS_FOR_ETA = 10
ERROR_PREFIX = "agent-r1: error: "

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
SUMMARY_FILE = "summary.json"


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSON-lines file that may be growing: a line cut off at the end is left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return []
    complete = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in complete.splitlines() if line.strip()]


class Tail:
    """Yields the lines that were added to a JSON-lines file since the last look.

    A resumed learner puts a file in its place that begins with the same lines, up to its
    checkpoint: these are not yielded again, what follows them is.
    """

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0
        self._seen: list[int] = []  # hashes of the lines before the offset
        if from_end:
            self._added()

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield complete new lines."""
        for line in self._added():
            if line.strip():
                yield json.loads(line)

    def _added(self) -> list[bytes]:
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode = status.st_ino
                    self._skip_seen(file)
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        lines = complete.splitlines(keepends=True)
        self._seen += map(hash, lines)
        return lines

    def _skip_seen(self, file: BinaryIO) -> None:
        """Set the offset behind the lines that this file has in common with the one before."""
        self._offset = same = 0
        for line, known in zip(file, self._seen, strict=False):
            if hash(line) != known:
                break
            self._offset += len(line)
            same += 1
        del self._seen[same:]


def duration(seconds: float) -> str:
    """Render seconds as `1h02m`, `3m20s` or `12s`."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{secs:02d}s" if minutes else f"{secs}s"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def step_values(
    metrics: dict[str, Any], total_steps: int, left_s: float | None
) -> list[tuple[str, str]]:
    """Return what is shown of one step, as (name, value)."""
    return [
        ("step", f"{metrics['step']}/{total_steps}"),
        ("reward", _number(metrics.get("reward/mean"), ".3f")),
        ("EM", _number(metrics.get("reward/exact_match"), ".3f")),
        ("calls", _number(metrics.get("tools/calls_mean"), ".2f")),
        ("tokens/s", _number(metrics.get("throughput/tokens_per_s"), ",.0f")),
        ("queue", _number(metrics.get("queue/depth"), ".0f")),
        ("staleness", _number(metrics.get("staleness/max"), ".0f")),
        ("policy", "v" + _number(metrics.get("policy/version"), ".0f")),
        ("left", "-" if left_s is None else duration(left_s)),
    ]


def step_line(metrics: dict[str, Any], total_steps: int, left_s: float | None) -> str:
    """Render one step as a line."""
    values = step_values(metrics, total_steps, left_s)
    return "  ".join(f"{name} {value}" for name, value in values)


def step_table(metrics: dict[str, Any], total_steps: int, left_s: float | None) -> Table:
    """Render one step as names over values, which fits a terminal of 80 columns."""
    values = step_values(metrics, total_steps, left_s)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row(*(Text(name, style="dim") for name, _ in values))
    table.add_row(*(Text(value, style="bold") for _, value in values))
    return table


def total_steps(config: RunConfig) -> int:
    """Return the learner steps of a run, as the learner counts them."""
    learner = config.learner
    if learner.steps is not None or config.data is None:
        return learner.steps or 0
    num_tasks = sum(len(read_task_file(path)) for path in config.data.train)
    return max(1, learner.epochs * num_tasks // learner.groups_per_batch)


class TrainingView:
    """Shows one run while it runs."""

    def __init__(self, folder: Path, config: RunConfig, output: TextIO | None = None) -> None:
        self._folder = folder
        self._total = total_steps(config)
        self._metrics = Tail(folder / METRICS_FILE, from_end=True)
        self._evaluations = Tail(folder / EVALUATIONS_FILE, from_end=True)
        self._console = Console(
            file=output or sys.stdout, highlight=False, markup=False, emoji=False
        )
        self._live: Live | None = None
        self._step_s: list[float] = []
        self._latest: dict[str, Any] | None = None
        self._status = "starting"
        self._was_waiting = False
        self._started = time.monotonic()
        if self._console.is_terminal:
            # No thread of its own: the launcher's loop refreshes it.
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()

    def event(self, line: str) -> None:
        """Print a line that stays; one that starts with !! is loud."""
        loud = line.startswith("!!")
        self._console.print(Text(line, style="bold red" if loud else ""), soft_wrap=True)

    def status(self, text: str) -> None:
        """Say what is going on before the first step."""
        if text == self._status:
            return
        self._status = text
        if self._live is None:
            self.event(text)

    async def follow(self, starting: Callable[[], list[str]]) -> None:
        """Show what happens until cancelled.

        Args:
            starting: returns the names of the services that are still starting.
        """
        while True:
            self.update(starting())
            await asyncio.sleep(UPDATE_S)

    def update(self, waiting: list[str]) -> None:
        """Look once at what the learner has written.

        Args:
            waiting: names of the services that are still starting.
        """
        if waiting:
            self._was_waiting = True
            self.status(f"starting {', '.join(waiting)}")
        elif self._was_waiting and self._latest is None:
            self.status("services are up")
        for record in self._evaluations.new():
            self.event(_evaluation_line(record))
        for metrics in self._metrics.new():
            self._latest = metrics
            self._step_s.append(float(metrics.get("time/step_s") or 0.0))
            if self._live is None:
                self.event(step_line(metrics, self._total, self._left_s(metrics)))
        if self._live is not None:
            self._live.update(self._below(), refresh=True)

    def _left_s(self, metrics: dict[str, Any]) -> float | None:
        """Estimate the time to the last step, in seconds, from the latest steps."""
        if not self._step_s or not self._total:
            return None
        remaining = self._total - int(metrics["step"])
        return remaining * statistics.median(self._step_s[-STEPS_FOR_ETA:])

    def _below(self) -> Table | Text:
        if self._latest is None:
            return Text(f"{self._status} … {duration(time.monotonic() - self._started)}")
        return step_table(self._latest, self._total, self._left_s(self._latest))

    def close(self) -> None:
        """Show what came last, and leave the terminal as it was."""
        self._was_waiting = False  # services that are still starting never came up
        self.update([])
        if self._live is not None:
            self._live.stop()
            if self._latest is not None:
                self._console.print(self._below())
            self._live = None


def _evaluation_line(record: dict[str, Any]) -> str:
    parts = []
    for name, scores in record.get("sets", {}).items():
        parts.append(
            f"{name} EM {_number(scores.get('em'), '.3f')} "
            f"(n {scores.get('n')}, searches {_number(scores.get('mean_searches'), '.2f')})"
        )
    return f"evaluation {record.get('name')} at step {record.get('step')}: " + "; ".join(parts)


# --- The result --------------------------------------------------------------------------------


def _changed_answer(folder: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Find one held-out question with its answer before and after, best one that was wrong."""
    before = {r["task_id"]: r for r in read_json_lines(folder / "trajectories/eval_before.jsonl")}
    pairs = [
        (before[record["task_id"]], record)
        for record in read_json_lines(folder / "trajectories/eval_after.jsonl")
        if record["task_id"] in before
    ]
    if not pairs:
        return None

    def gain(pair: tuple[dict[str, Any], dict[str, Any]]) -> tuple[float, int]:
        rewards = [(record.get("reward") or {}).get("total", 0.0) for record in pair]
        num_turns = [len(record["turns"]) for record in pair]
        return rewards[1] - rewards[0], num_turns[1] - num_turns[0]

    return max(pairs, key=gain)


def _result_table(summary: dict[str, Any]) -> Table:
    table = Table("set", "EM before", "EM after", "searches before", "searches after", "questions")
    for name, scores in (summary.get("sets") or {}).items():
        before, after = scores.get("before") or {}, scores.get("after") or {}
        kind = "" if scores.get("in_domain", True) else " (untrained kind)"
        table.add_row(
            f"{name}{kind}",
            _number(before.get("em"), ".3f"),
            _number(after.get("em"), ".3f"),
            _number(before.get("mean_searches"), ".2f"),
            _number(after.get("mean_searches"), ".2f"),
            str(after.get("n", before.get("n", "-"))),
        )
    table.add_section()
    table.add_row(
        "mean of the trained sets",
        _number(summary.get("em_before"), ".3f"),
        _number(summary.get("em_after"), ".3f"),
        _number(summary.get("mean_searches_before"), ".2f"),
        _number(summary.get("mean_searches_after"), ".2f"),
        "",
    )
    return table


def print_result(folder: Path, output: TextIO | None = None) -> None:
    """Print what a finished run achieved and where to look next."""
    console = Console(file=output or sys.stdout, highlight=False, markup=False, emoji=False)
    try:
        summary = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        console.print(f"{folder / SUMMARY_FILE} is missing; see {folder / 'logs'}")
        return
    pair = _changed_answer(folder)
    if pair is not None:
        for title, record in zip(("before", "after"), pair, strict=True):
            console.rule(f"one held-out question, {title} training", align="left")
            print_transcript(record, console)
    if summary.get("sets"):
        console.print(_result_table(summary))
    wall = summary.get("wall_s")
    console.print(
        f"{summary.get('steps')} steps, {summary.get('trajectories_trained')} trajectories, "
        f"{summary.get('sampled_tokens')} sampled tokens"
        + (f" in {duration(wall)}" if wall is not None else ""),
    )
    shown = _relative(folder)
    console.print("Next:", style="bold")
    agent_r1, tensorboard = _program("agent-r1"), _program("tensorboard")
    console.print(f"  {agent_r1} show {shown}            stored trajectories", soft_wrap=True)
    console.print(f"  {agent_r1} chat {shown}            ask the agent yourself", soft_wrap=True)
    console.print(f"  {tensorboard} --logdir {shown}/tensorboard", soft_wrap=True)
    console.print(f"  {shown}/summary.json, {shown}/logs/", soft_wrap=True)


def print_stopped(folder: Path, error: str | None) -> None:
    """Say why a run stopped before its end and how to go on."""
    stream = sys.stdout if error is None else sys.stderr
    if error is not None:
        print(f"{ERROR_PREFIX}{error}", file=stream)
    print(
        f"Stopped. To go on: {_program('agent-r1')} train --resume {_relative(folder)}",
        file=stream,
        flush=True,
    )


def _program(name: str) -> str:
    """Return how to call a program of this environment: by name, or by path when not on PATH."""
    return name if shutil.which(name) else str(_relative(Path(sys.executable).with_name(name)))


def _relative(folder: Path) -> Path:
    try:
        return folder.relative_to(Path.cwd())
    except ValueError:
        return folder
