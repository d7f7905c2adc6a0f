"""The run folder: step_report.py, evaluation.py, run_end.py --> files that people and tools read.

`metrics.jsonl` (one line a step), `evaluations.jsonl` (one line an evaluation),
`evaluation_after.jsonl` (one line a question), `failures.jsonl` (the first failure of each kind),
`conditions.jsonl` (what hinders the run for a while),
`tensorboard/`, `trajectories/step_000012.parquet`, `summary.json`. The ledger and checkpoints live
beside them.
"""

from __future__ import annotations

import json
import logging
import math
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from agent_r1.learner.checkpoints.ledger import Ledger
from agent_r1.learner.checkpoints.ownership import FolderLock
from agent_r1.learner.checkpoints.standing import state_problem, traces
from agent_r1.learner.reporting.loggers import MetricLogger
from agent_r1.learner.reporting.loggers.completions import MOST_ROWS, completion_of
from agent_r1.runs.store import (
    StoredTrajectory,
    TrajectoryStore,
    remove_evaluation,
    remove_steps_after,
)
from agent_r1.runtime.files.conditions import (
    Condition,
    append_condition,
    close_left_open,
    read_conditions,
    summarize,
)
from agent_r1.runtime.files.private import private_folder
from agent_r1.runtime.files.run_folder import (
    ANSWERS_FILE,
    CONDITIONS_FILE,
    CONFIG_FILE,
    EVALUATIONS_FILE,
    FAILURES_FILE,
    LEDGER_FILE,
    LOGS_DIR,
    METRICS_FILE,
    SUMMARY_FILE,
    TRAJECTORIES_DIR,
)
from agent_r1.runtime.files.state import parse_objects, split_lines
from agent_r1.runtime.files.writing import report_full_disk, write_atomically
from agent_r1_proto.failures import Failure

logger = logging.getLogger(__name__)


def _anybody() -> None:
    """Let whoever asks write: before a start has its number, the lock alone decides."""


def _dump(record: Mapping[str, Any], indent: int | None = None) -> str:
    """Return JSON in which NaN and infinities are null."""
    values = to_jsonable_python(record, inf_nan_mode="null")
    return json.dumps(values, indent=indent, ensure_ascii=False, allow_nan=False)


def _line(record: Mapping[str, Any]) -> str:
    return _dump(record) + "\n"


def _lines_up_to(path: Path, step: int) -> list[str]:
    kept: list[str] = []
    for line in split_lines(path.read_text(encoding="utf-8", errors="replace")):
        # What a crash in the middle of the write has cut off is left out.
        if any(_is_up_to(record, step) for record in parse_objects(line)):
            kept.append(line + "\n")
    return kept


def _is_up_to(record: Mapping[str, Any], step: int) -> bool:
    return isinstance(record.get("step"), int) and record["step"] <= step


def _noting(
    samples: list[Mapping[str, Any]], trajectories: Iterable[StoredTrajectory]
) -> Iterator[StoredTrajectory]:
    """Yield trajectories, and note the records of the first ones that were trained."""
    for one in trajectories:
        if one.record["trained"] and len(samples) < MOST_ROWS:
            samples.append(one.record)
        yield one


class RunFolder:
    """Writes the learner's files of one run; every write is complete when the call returns.

    But for trajectories: a thread writes those, one file at a time, so that no step waits for them.

    Args:
        path: of the run folder.
        trajectories_max_gib: largest size of `trajectories/`.
    """

    def __init__(self, path: Path, trajectories_max_gib: float = math.inf) -> None:
        self.path = path
        self._max_gib = trajectories_max_gib
        self._trajectories: TrajectoryStore | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="trajectories")
        self._written: Future[None] | None = None
        self._loggers: list[MetricLogger] | None = None
        self._lock = FolderLock(path)
        self._require_owner: Callable[[], None] = _anybody

    @property
    def logs(self) -> Path:
        """Folder of the services' logs."""
        return self.path / LOGS_DIR

    def prepare(self, *, resume: bool, stored: bool = False) -> None:
        """Create and lock the folder, or check that it can be resumed.

        Args:
            resume: whether the run goes on.
            stored: the run store holds it, so that the folder may be empty.

        Raises:
            ValueError: a fresh run would mix with an earlier one, there is none to resume, or
                another learner is writing there.
        """
        if resume and (problem := state_problem(self.path, stored=stored)) is not None:
            raise ValueError(problem)
        # A ledger without a start of its own says which numbers are taken, and no more.
        left = [LEDGER_FILE] if Ledger(self.path).starts else []
        left += traces(self.path)
        # A run that was interrupted before its first start was counted has a config only.
        started = any((self.path / name).exists() for name in (CONFIG_FILE, LEDGER_FILE))
        if resume and not started and not stored:
            raise ValueError(
                f"{self.path} holds no run to resume ({CONFIG_FILE} and {LEDGER_FILE} are "
                "missing); start one without --resume"
            )
        if not resume and left:
            raise ValueError(
                f"run folder {self.path} is not empty (it has {left[0]}); continue with "
                f"`agent-r1 train --resume {shlex.quote(str(self.path))}`, or name another "
                "folder with --run-dir"
            )
        with report_full_disk("the run folder", self.path):
            private_folder(self.path)
            (self.path / TRAJECTORIES_DIR).mkdir(exist_ok=True)
            self._lock.acquire()

    def open_at(
        self,
        step: int,
        require_owner: Callable[[], None],
        open_loggers: Callable[[], list[MetricLogger]] = list,
    ) -> None:
        """Forget everything after `step` and open the loggers for the steps that follow.

        Args:
            step: the last step that is part of the run.
            require_owner: called before every write from now on; raises where this learner may
                not write.
            open_loggers: opens those that get the numbers besides `metrics.jsonl`; none by default.
        """
        self._require_owner = require_owner
        with report_full_disk("metrics", self.path):
            close_left_open(self.path / CONDITIONS_FILE, "learner")
            for name in (METRICS_FILE, EVALUATIONS_FILE):
                path = self.path / name
                if path.exists():
                    write_atomically(path, "".join(_lines_up_to(path, step)))
            remove_steps_after(self.path, step)
            self._loggers = open_loggers()

    def write_config(self, resolved: Mapping[str, Any]) -> None:
        """Write `config.json` unless the command that started the run has written it."""
        path = self.path / CONFIG_FILE
        if not path.exists():
            write_atomically(path, json.dumps(resolved, indent=2, default=str) + "\n")

    def write_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Append one step to `metrics.jsonl`, and give it to the loggers."""
        self._append(METRICS_FILE, [{"step": step, "time/at": round(time.time(), 3), **values}])
        self.write_scalars(step, values)

    def write_evaluation(self, step: int, name: str, record: Mapping[str, Any]) -> None:
        """Append one evaluation to `evaluations.jsonl`."""
        self._append(EVALUATIONS_FILE, [{"step": step, "name": name, **record}])

    def write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Give numbers to the loggers only (an evaluation's, at its own step)."""
        self._require_owner()
        assert self._loggers is not None
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        for metric_logger in self._loggers:
            metric_logger.log(step, finite)

    def write_answers(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write the scores of the last evaluation, one line a question."""
        self._require_owner()
        text = "".join(_line(record) for record in records)
        write_atomically(self.path / ANSWERS_FILE, text)

    def remove_last_evaluation(self) -> None:
        """Remove what only the evaluation of the last weights writes."""
        self._require_owner()
        self.finish_trajectories()
        (self.path / ANSWERS_FILE).unlink(missing_ok=True)
        remove_evaluation(self.path, "after")

    def write_trajectories(self, name: str, trajectories: Iterable[StoredTrajectory]) -> None:
        """Begin to write `trajectories/{name}.parquet`, once the file before is written.

        Args:
            name: `step_000012`, or `eval_` and the name of an evaluation.
            trajectories: asked for in the thread that writes them; no file for none.

        Raises:
            DiskFullError: there was no room for the file before.
        """
        self._require_owner()
        self.finish_trajectories()
        self._written = self._writer.submit(self._write_trajectories, name, trajectories)

    def _write_trajectories(self, name: str, trajectories: Iterable[StoredTrajectory]) -> None:
        self._require_owner()
        if self._trajectories is None:
            self._trajectories = TrajectoryStore(self.path, self._max_gib)
        samples: list[Mapping[str, Any]] = []
        self._trajectories.write(name, _noting(samples, trajectories))
        if samples:
            completions = list(map(completion_of, samples))
            for metric_logger in self._loggers or ():
                metric_logger.log_completions(samples[0]["step"], completions)

    def finish_trajectories(self) -> None:
        """Wait until all trajectories are written.

        Raises:
            DiskFullError: there is no room for them; said once.
        """
        written, self._written = self._written, None
        if written is not None:
            written.result()

    @property
    def removed_steps(self) -> int:
        """Steps whose trajectories were removed since this start, for want of room."""
        return 0 if self._trajectories is None else self._trajectories.removed_steps

    def write_failure(self, step: int, failure: Failure) -> None:
        """Append the first failure of a kind to `failures.jsonl`, with the log to look into."""
        logs = sorted(self.logs.glob(f"{failure.where}*.log"))
        log = str(logs[0] if logs else self.logs)
        record = {"step": step, **failure.model_dump(mode="json"), "log": log}
        self._append(FAILURES_FILE, [record])

    def write_condition(self, condition: Condition) -> None:
        """Append what hinders the run to `conditions.jsonl`."""
        self._require_owner()
        path = self.path / CONDITIONS_FILE
        with report_full_disk(CONDITIONS_FILE, path):
            append_condition(path, condition)

    def conditions(self) -> list[dict[str, object]]:
        """Return what has hindered the run so far, for the summary."""
        return summarize(read_conditions(self.path / CONDITIONS_FILE))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`."""
        self._require_owner()
        write_atomically(self.path / SUMMARY_FILE, _dump(summary, indent=2) + "\n")

    def _append(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        self._require_owner()
        path = self.path / name
        with report_full_disk(name, path), path.open("a", encoding="utf-8") as file:
            file.writelines(_line(record) for record in records)

    def close(self) -> None:
        """Close the loggers and give the lock back."""
        try:
            self._writer.shutdown()  # it may still use the loggers
            for metric_logger in self._loggers or ():
                metric_logger.close()
        finally:
            self._loggers = None
            self._lock.release()
