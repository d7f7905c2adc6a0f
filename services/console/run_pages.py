"""Pages of runs: all of them, one, several side by side.

Read from the run folders; app.py adds them.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from starlette.responses import Response

from agent_r1.console.pages import MOST_RUNS, ROWS, Keys, fitting, name_of, page, pager
from agent_r1.console.runs import Runs, configuration_differences
from agent_r1.console.series import MetricsCache, RunMetrics
from agent_r1.launch.local_view import read_json_lines
from agent_r1.runtime.files.dead_letters import load_letters
from agent_r1.runtime.files.run_folder import EVALUATIONS_FILE, FAILURES_FILE


def add_runs(app: FastAPI, runs: Runs, cache: MetricsCache) -> None:
    """Add the pages of all runs, of one, and of several side by side."""

    @app.get("/")
    def all_runs(request: Request, start: Annotated[int, Query(ge=0)] = 0) -> Response:
        names = runs.names()
        some = runs.some(names[start : start + ROWS])
        return page(
            request,
            "runs.html",
            where=runs.root if runs.mirror is None else runs.mirror.url,
            runs=some,
            pager=pager(request, start, len(names) - start, ROWS),
            count=len(names),
            most=MOST_RUNS,
        )

    @app.get("/runs/{name}")
    def one_run(request: Request, name: str, step: int | None = None) -> Response:
        run = runs.run(name)
        found = read_json_lines(run.folder / EVALUATIONS_FILE)
        with cache.reading([run.folder]) as (metrics,):
            at_step = _step_metrics(metrics, step)
        failed, evaluated = _failure_rows(run.folder), _evaluation_rows(found)
        failures = fitting(failed, lambda row: row)[::-1]
        evaluations = fitting(evaluated, _texts_of)[::-1]
        return page(
            request,
            "run.html",
            run=run,
            failures=failures,
            older_failures=len(failed) - len(failures),
            evaluations=evaluations,
            older_evaluations=len(evaluated) - len(evaluations),
            step=step,
            step_metrics=at_step,
        )

    @app.get("/compare")
    def compared(request: Request, run: Keys = []) -> Response:  # noqa: B006 - FastAPI copies it
        some = runs.some(map(name_of, run))
        rows = configuration_differences(some)
        kept = fitting(rows, lambda row: [row[0], *row[1]])
        return page(request, "compare.html", runs=some, rows=kept, left_out=len(rows) - len(kept))


def _failure_rows(folder: Path) -> list[tuple[object, object, object]]:
    """Return where, at which step and why something failed, and the dead letters; newest first."""
    failures = [
        tuple(one.get(name, "-") for name in ("where", "step", "reason"))
        for one in read_json_lines(folder / FAILURES_FILE)
    ]
    letters = [(f"dead letter {one.letter_id}", "", one.reason) for one in load_letters(folder)]
    return [*reversed(letters), *reversed(failures)]


def _evaluation_rows(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each set of each evaluation, the newest first."""
    rows: list[dict[str, Any]] = []
    for record in records:
        sets = record.get("sets")
        for name, scores in (sets if isinstance(sets, dict) else {}).items():
            if not isinstance(scores, dict):
                continue
            known = {key: scores.get(key) for key in ("n", "failed", "reward")}
            components = scores.get("components")
            known["components"] = list((components if isinstance(components, dict) else {}).items())
            rows.append(
                {"name": record.get("name"), "step": record.get("step"), "set": name} | known
            )
    return rows[::-1]


def _texts_of(row: dict[str, Any]) -> list[Any]:
    return [row["name"], row["set"], *row["components"]]


def _step_metrics(run: RunMetrics, step: int | None) -> list[tuple[str, float]]:
    """Return the metrics of a step; none where it has not been, or is not asked for."""
    places = [] if step is None else [place for place, one in enumerate(run.steps) if one == step]
    values = [(name, run.column(name)[place]) for place in places for name in run.names]
    known = [(name, float(value)) for name, value in values if math.isfinite(value)]
    return fitting(known, lambda row: row, 3 * ROWS)
