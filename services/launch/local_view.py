"""The terminal of a training run while it runs: progress, failures, scores.

Reads `metrics.jsonl`, `evaluations.jsonl` and `failures.jsonl` of the run folder, which the learner
writes; writes to the terminal only. On a terminal one line is kept up to date below the lines that
stay; elsewhere (a log, a pipe) every step is a line. local_result.py shows the result.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.text import Text

from agent_r1.config.run import Config
from agent_r1.config.sources import at_hand, quoted
from agent_r1.evaluation.score_names import ScoreNames
from agent_r1.learner.prompts import PromptOrder
from agent_r1.runtime.durations import format_duration
from agent_r1.runtime.files.conditions import Condition
from agent_r1.runtime.files.run_folder import (
    CONDITIONS_FILE,
    EVALUATIONS_FILE,
    FAILURES_FILE,
    LOGS_DIR,
    METRICS_FILE,
)
from agent_r1.runtime.files.state import parse_objects
from agent_r1_proto.failures import Failure

UPDATE_S = 0.5
STEPS_FOR_ETA = 10
COLUMN_GAP = 2
INDENT = "   "
SHOWN_LINES = 12
"""Lines of a reason that are shown: its first, and the last ones of its traceback."""

_HEADINGS = {
    "tools": "first error of its kind from a tool (the model reads it as text)",
    "evaluation": "first failure of its kind in the evaluation",
}


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSON-lines file that may be growing: lines that are cut off are left out."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return parse_objects(text[: text.rfind("\n") + 1])


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
            yield from parse_objects(line.decode(errors="replace"))

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


def _policy(metrics: dict[str, Any]) -> list[tuple[str, str]]:
    """Return how the policy changes, as far as it was measured."""
    kl = metrics.get("loss/kl_ref", metrics.get("reward/kl"))
    measured = {"KL": kl, "entropy": metrics.get("policy/entropy")}
    return [(name, f"{value:.3f}") for name, value in measured.items() if value is not None]


def _losses(metrics: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what went wrong or was lost in a step; nothing where nothing was."""
    values = [
        ("tool errors", f"{metrics.get('tools/error_share') or 0:.0%}"),
        ("truncated", f"{metrics.get('trajectory/truncated_share') or 0:.0%}"),
        ("failed attempts", f"{metrics.get('failures/attempts') or 0:.0f}"),
        ("failed", f"{metrics.get('failures/failed') or 0:.0f}"),
        ("dead letters", f"{metrics.get('failures/dead_letters') or 0:.0f}"),
        ("late", f"{metrics.get('staleness/late_share') or 0:.0%}"),
        ("skipped optimizer steps", f"{metrics.get('batch/skipped_optimizer_steps') or 0:.0f}"),
    ]
    return [(name, value) for name, value in values if value not in ("0", "0%")]


def step_scores(metrics: dict[str, Any], names: ScoreNames) -> list[tuple[str, str]]:
    """Return what a step's trajectories scored and what went wrong, as (name, value)."""
    components, calls = (with_prefix(metrics, prefix) for prefix in ("reward/", "calls/"))
    scores = names.line(metrics.get("reward/mean"), components, calls)
    return [*scores, *_policy(metrics), *_losses(metrics)]


def step_values(
    metrics: dict[str, Any], names: ScoreNames, total_steps: int, left_s: float | None
) -> list[tuple[str, str]]:
    """Return what is shown of one step, as (name, value)."""
    return [
        ("step", f"{metrics['step']}/{total_steps}" if total_steps else str(metrics["step"])),
        *step_scores(metrics, names),
        ("tokens/s", _number(metrics.get("throughput/tokens_per_s"), ",.0f")),
        ("queue", _number(metrics.get("queue/depth"), ".0f")),
        ("staleness", _number(metrics.get("staleness/max"), ".0f")),
        ("policy", "v" + _number(metrics.get("policy/version"), ".0f")),
        ("left", "-" if left_s is None else format_duration(left_s)),
    ]


def with_prefix(metrics: dict[str, Any], prefix: str) -> dict[str, float]:
    """Return the metrics of one area, by what follows its prefix."""
    return {name.removeprefix(prefix): v for name, v in metrics.items() if name.startswith(prefix)}


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def in_line(values: Sequence[tuple[str, str]]) -> str:
    """Render names and values as a line."""
    return "  ".join(f"{name} {value}" for name, value in values)


def in_columns(values: Sequence[tuple[str, str]]) -> Columns:
    """Render names over values, in as many rows as the width asks for."""
    cells = [Text.assemble((name, "dim"), "\n", (value, "bold")) for name, value in values]
    return Columns(cells, padding=(0, COLUMN_GAP, 0, 0))


def total_steps(config: Config) -> int:
    """Return the learner steps of a run, as the learner counts them; 0 where they are unknown."""
    learner = config.learner
    if learner.steps is not None or config.data is None:
        return learner.steps or 0
    if config.data.max_prompt_tokens is not None and config.data.over_long == "drop":
        return 0  # only the learner knows how many prompts are left
    return learner.num_steps(len(PromptOrder.of(config.data, config.run.seed)))


class TrainingView:
    """Shows one run while it runs."""

    def __init__(self, folder: Path, config: Config, output: TextIO | None = None) -> None:
        self._folder = folder
        self._total = total_steps(config)
        self._metrics = Tail(folder / METRICS_FILE, from_end=True)
        self._evaluations = Tail(folder / EVALUATIONS_FILE, from_end=True)
        self._failures = Tail(folder / FAILURES_FILE, from_end=True)
        self._conditions = Tail(folder / CONDITIONS_FILE, from_end=True)
        self._names = config.score_names()
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
        """Say what happens before the first step."""
        if text == self._status:
            return
        self._status = text
        if self._live is None:
            self.event(text)

    async def follow(self, starting: Callable[[], list[str]]) -> None:
        """Show what happens until cancelled; `starting` names the services that are not up yet."""
        while True:
            self.update(starting())
            await asyncio.sleep(UPDATE_S)

    def update(self, waiting: list[str]) -> None:
        """Look once at what the learner has written; `waiting` are services that are not up yet."""
        if waiting:
            self._was_waiting = True
            self.status(f"starting {', '.join(waiting)}")
        elif self._was_waiting and self._latest is None:
            self.status("services are up")
        for record in self._failures.new():
            self.event(first_failure(record, self._folder))
        for line in conditions_seen(self._conditions):
            self.event(line)
        for record in self._evaluations.new():
            self.event(evaluation_line(record, self._names))
        for metrics in self._metrics.new():
            self._latest = metrics
            self._step_s.append(float(metrics.get("time/step_s") or 0.0))
            if self._live is None:
                self.event(in_line(self._values(metrics)))
        if self._live is not None:
            self._live.update(self._below(), refresh=True)

    def _left_s(self, metrics: dict[str, Any]) -> float | None:
        """Estimate the time to the last step, in seconds, from the latest steps."""
        if not self._step_s or not self._total:
            return None
        remaining = self._total - int(metrics["step"])
        return remaining * statistics.median(self._step_s[-STEPS_FOR_ETA:])

    def _values(self, metrics: dict[str, Any]) -> list[tuple[str, str]]:
        return step_values(metrics, self._names, self._total, self._left_s(metrics))

    def _below(self) -> Columns | Text:
        if self._latest is None:
            return Text(f"{self._status} … {format_duration(time.monotonic() - self._started)}")
        return in_columns(self._values(self._latest))

    def close(self) -> None:
        """Show what came last, and leave the terminal as it was."""
        self._was_waiting = False  # services that are still starting never came up
        self.update([])
        if self._live is not None:
            self._live.stop()
            if self._latest is not None:
                self._console.print(self._below())
            self._live = None


def set_scores(values: dict[str, Any], names: ScoreNames) -> list[tuple[str, str]]:
    """Return what is shown of a set in an evaluation, as (name, value)."""
    return names.line(
        values.get("reward"), values.get("components") or {}, values.get("calls") or {}
    )


def evaluation_line(record: dict[str, Any], names: ScoreNames) -> str:
    """Render one line of `evaluations.jsonl`."""
    parts = []
    for name, values in record.get("sets", {}).items():
        scores = in_line(set_scores(values, names))
        failed = f", failed {values['failed']}" if values.get("failed") else ""
        parts.append(f"{name} {scores} (n {values.get('n')}{failed})")
    return f"evaluation {record.get('name')} at step {record.get('step')}: " + "; ".join(parts)


def conditions_seen(tail: Tail) -> Iterator[str]:
    """Render the new lines of `conditions.jsonl` that the learner wrote."""
    for record in tail.new():
        one = Condition.model_validate(record)
        if one.source == "learner":  # the launcher shows its own at once
            yield one.text()


def first_failure(record: dict[str, Any], folder: Path) -> str:
    """Render one line of `failures.jsonl`."""
    one = Failure.model_validate(record)
    command, run = program("agent-r1"), quoted(folder)
    step = f"read the log; when the step is over, run `{command} show {run} --failed`"
    if one.where == "tools":
        step = (
            f"nothing, if the model should learn from it; `{command} show {run}` prints the calls"
        )
    return failure_text(one, log=str(at_hand(log_of(folder / LOGS_DIR, one))), next_step=step)


def failure_text(one: Failure, *, log: str, next_step: str) -> str:
    """Render the first failure of a kind; every line of it stays on the terminal."""
    heading = _HEADINGS.get(one.where, f"first failure of its kind in {one.where}")
    first, *rest = one.reason.splitlines() or ["no reason given"]
    rest = [line for line in rest if line != first]
    if len(rest) >= SHOWN_LINES:
        rest = ["…", *rest[-SHOWN_LINES + 2 :]]
    sample = f"sample {one.rollout_id}; " if one.rollout_id else ""
    lines = [f"!! {heading}: {first}", *rest, f"{sample}log: {log}", f"next: {next_step}"]
    return f"\n{INDENT}".join(lines)


def log_of(log_dir: Path, one: Failure) -> Path:
    """Return the log that says more about a failure: that of the tool it names, or the service."""
    logs = {path.stem: path for path in sorted(log_dir.glob("*.log"))}
    words = re.findall(r"[\w-]+", one.kind)
    tools = [log for name, log in logs.items() if name in words and words[0].startswith("tool")]
    services = [log for name, log in logs.items() if name.startswith(one.where)]
    return next(iter(tools + services), log_dir)


def program(name: str) -> str:
    """Return how to call a program of this environment: by name, or by path when not on PATH."""
    own = Path(sys.executable).with_name(name)
    if name == "agent-r1" and not own.exists():  # an environment on top of another one
        return f"{quoted(Path(sys.executable))} -m agent_r1.cli.main"
    return name if shutil.which(name) else quoted(own)
