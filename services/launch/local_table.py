"""`agent-r1 table` on one machine: one start of the services, and one learner after another.

cli/evaluation/table.py --configuration, runs--> here --> the processes (local_services.py), the
folder of each run.
All runs have the same run id and Redis, so that rollout keeps serving; a run begins by pushing
its own weights under the next policy version. The numbers go from one run folder's ledger to the
next.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from agent_r1.config.models import fetch_models, model_variables
from agent_r1.config.run import Config, ConfigError, write_config
from agent_r1.launch.local import open_folder, prepare_redis, run_services
from agent_r1.launch.local_client import failures_shown
from agent_r1.launch.local_result import losses_text, summary_of
from agent_r1.launch.local_services import LocalServices
from agent_r1.launch.local_view import (
    UPDATE_S,
    Tail,
    conditions_seen,
    first_failure,
    in_line,
    set_scores,
    step_scores,
    total_steps,
)
from agent_r1.launch.status_line import StatusLine
from agent_r1.launch.supervisor import ServiceError
from agent_r1.learner.checkpoints.ledger import Ledger
from agent_r1.learner.checkpoints.standing import resume_notes, state_problem
from agent_r1.learner.outcome import FINISHED, FINISHED_WITH_LOSSES
from agent_r1.runtime.durations import format_duration
from agent_r1.runtime.files.private import private_folder
from agent_r1.runtime.files.run_folder import (
    CONDITIONS_FILE,
    CONFIG_FILE,
    FAILURES_FILE,
    LOGS_DIR,
    METRICS_FILE,
    running_launcher,
)

LOG_STEPS = 10
"""Steps between two lines where there is no terminal."""

Client = Callable[[Config], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class TableRun:
    """One training run of a table."""

    label: str
    """Name for the user: `PPO seed 0`."""
    folder: Path
    config: Config


def run_table(
    config: Config,
    folder: Path,
    *,
    baselines: Client | None,
    runs: Sequence[TableRun],
    view: TableView,
) -> bool:
    """Start the services once, let the baselines answer, then train every run.

    Args:
        config: of the services; every run has the same tables for them, and the same run id.
        folder: gets their `config.json` and `logs/`.
        baselines: asks the services before anything is trained; None where nothing is left to ask.
        runs: in order; one whose folder holds a run continues it.
        view: shows what happens.

    Returns:
        True when the user stopped it; everything finished is kept.

    Raises:
        ConfigError: nothing was started, for the reason given.
        ServiceError: a service did not come up, or died too often; the text says which and why.
    """
    check_idle(folder)
    for run in runs:
        if (problem := state_problem(run.folder)) is not None:
            raise ConfigError(problem)
    private_folder(folder / LOGS_DIR)

    async def work(services: LocalServices) -> None:
        await _work(services, config, folder, baselines, runs, view)

    variables = {**model_variables(fetch_models(config, view.event)), **open_folder(config, folder)}
    return run_services(config, folder, variables, work, view)


def check_idle(folder: Path) -> None:
    """Refuse a folder whose table is still running.

    Raises:
        ConfigError: it is.
    """
    live = running_launcher(folder)
    if live is not None:
        raise ConfigError(
            f"the table in {folder} is still running (process {live['pid']}); stop it first, or "
            "name another folder with --out"
        )


async def _work(
    services: LocalServices,
    config: Config,
    folder: Path,
    baselines: Client | None,
    runs: Sequence[TableRun],
    view: TableView,
) -> None:
    view.event("starting Redis, tools, reward and rollout")
    await prepare_redis(services, config, view.event, learner=True)
    await services.start_all(learner=False, resume=False)
    if baselines is not None:
        served = _served(services, config)
        async with failures_shown(served, folder / LOGS_DIR, view.event):
            await baselines(served)
    # Fresh servers hold version 0, the configured model.
    incarnation = policy_version = 0
    for run in runs:
        if run.config.model.path != config.model.path:
            policy_version = max(policy_version, 1)  # so that it begins by pushing its own model
        private_folder(run.folder)
        (run.folder / LOGS_DIR).mkdir(exist_ok=True)
        ledger = Ledger(run.folder)
        resume = ledger.starts > 0
        ledger.go_on_after(incarnation=incarnation, policy_version=policy_version)
        write_config(run.config, run.folder / CONFIG_FILE)
        view.begin(run)
        for note in resume_notes(run.folder) if resume else ():
            view.event(note)
        await services.run_learner(run.folder, resume=resume)
        view.end()
        status = summary_of(run.folder).get("status")
        if status not in (FINISHED, FINISHED_WITH_LOSSES):
            raise ServiceError(
                f"{run.label} ended with the status {status!r}; see {run.folder / 'logs'}"
            )
        ledger = Ledger(run.folder)
        incarnation, policy_version = ledger.last_incarnation, ledger.last_policy_version


def _served(services: LocalServices, config: Config) -> Config:
    """Return the configuration with the addresses of the services."""
    tools = {
        name: tool.model_copy(update={"url": services.tool_urls.get(name, tool.url)})
        for name, tool in config.tools.items()
    }
    return services.served().model_copy(update={"tools": tools})


class TableView:
    """Shows a table while its runs train: on a terminal in a line that changes, else in lines."""

    def __init__(self, done: int, runs: Sequence[TableRun], output: TextIO | None = None) -> None:
        self._line = StatusLine(output or sys.stdout)
        self.event, self.close = self._line.print, self._line.close
        self._done, self._total = done, done + len(runs)
        self._begun = self._ended = 0
        self._steps_left = sum(total_steps(run.config) for run in runs)
        self._run: TableRun | None = None
        self._steps = 0
        self._files: list[Tail] = []
        self._step_s: list[float] = []
        self._began = 0.0

    @property
    def _row(self) -> str:
        return f"row {self._done + self._begun} of {self._total}"

    def begin(self, run: TableRun) -> None:
        """Show a run from now on."""
        self._began = self._began or time.monotonic()
        self._begun += 1
        self._run, self._steps = run, total_steps(run.config)
        self._steps_left -= int(summary_of(run.folder).get("steps") or 0)  # of one that continues
        names = (FAILURES_FILE, CONDITIONS_FILE, METRICS_FILE)
        self._files = [Tail(run.folder / name, from_end=True) for name in names]
        self.event(f"{self._row}: {run.label}, {run.folder}")

    def end(self) -> None:
        """Show the result of the run."""
        self.update()
        run, self._run = self._run, None
        self._ended += 1
        if run is not None:
            summary = summary_of(run.folder)
            self.event(
                f"{self._row}: {run.label} {summary.get('status')} after "
                f"{format_duration(summary.get('wall_s') or 0.0)}; {_scores(summary, run.config)}"
            )
            if summary.get("status") == FINISHED_WITH_LOSSES:
                self.event(losses_text(summary, run.folder))

    async def follow(self, starting: Callable[[], list[str]]) -> None:
        """Show what happens until cancelled; what is `starting` is said beforehand."""
        while True:
            self.update()
            await asyncio.sleep(UPDATE_S)

    def update(self) -> None:
        """Look once at what the learner has written."""
        if self._run is None:
            return
        failures, conditions, steps = self._files
        for record in failures.new():
            self.event(first_failure(record, self._run.folder))
        for line in conditions_seen(conditions):
            self.event(line)
        for metrics in steps.new():
            self._steps_left -= 1
            self._step_s.append(float(metrics.get("time/step_s") or 0.0))
            self._show(self._run, metrics)

    def _show(self, run: TableRun, metrics: dict[str, Any]) -> None:
        step, steps = int(metrics["step"]), self._steps
        line = (
            f"{self._row}  {run.label}  step {step}/{steps}  "
            f"{in_line(step_scores(metrics, run.config.score_names()))}  "
            f"left {format_duration(self._left_s())}"
        )
        if self._line.live:
            self._line.show(line)
        elif step % LOG_STEPS == 0 or step == steps:
            self.event(line)

    def _left_s(self) -> float:
        """Estimate the time to the end of the table, in seconds: at the pace so far."""
        if self._ended:  # then what a run takes beside its steps is part of the pace
            pace_s = (time.monotonic() - self._began) / max(1, len(self._step_s))
        else:
            pace_s = statistics.median(self._step_s)
        return self._steps_left * pace_s


def _scores(summary: dict[str, Any], config: Config) -> str:
    """Return the scores after training, set by set."""
    parts = []
    for name, of_set in (summary.get("sets") or {}).items():
        scores = of_set.get("after") or {}
        failed = f", failed {scores['failed']}" if scores.get("failed") else ""
        shown = in_line(set_scores(scores, config.score_names()))
        parts.append(f"{name} {shown} (n {scores.get('n', '-')}{failed})")
    return "; ".join(parts) or "no evaluation"
