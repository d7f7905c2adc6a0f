"""Pages of stored trajectories: the list, by every column and by text.

Rows come from the index of the run (runs/index.py), which each page brings up to date for a short
time; app.py adds the routes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from fastapi import FastAPI, Query, Request
from starlette.responses import Response

from agent_r1.console.pages import page
from agent_r1.console.runs import Runs
from agent_r1.console.trajectory_filter import EVALUATION, STEPS, Filter
from agent_r1.runs.index import COMPONENT, SORTED, RunIndex
from agent_r1.runs.store import stored_files

INDEX_S = 1.0
"""Time for which a page reads files into the index; the next page goes on."""
PAGE_ROWS = 50
"""Rows of a page: with the longest texts they stay below 200 kB."""
OPTIONS = 60
"""Most values that a choice offers; the names of tools are what models have written."""
COLUMNS = (
    *(("step", "Step"), ("set", "Set"), ("reward", "Reward"), ("components", "Components")),
    *(("advantage", "Advantage"), ("status", "Status"), ("num_tokens", "Tokens")),
    *(("num_turns", "Turns"), ("num_calls", "Calls"), ("last_version", "Version")),
    ("staleness", "Staleness"),
)
Start = Annotated[int, Query(ge=0, le=10**9)]


def add_trajectories(app: FastAPI, runs: Runs) -> None:
    """Add the pages of trajectories."""

    @contextmanager
    def opened(name: str) -> Iterator[tuple[RunIndex, int]]:
        """Open the index of a run; yields it, and the number of files that it lacks."""
        with RunIndex(runs.folder(name)) as index:
            yield index, index.refresh(INDEX_S)

    @app.get("/runs/{name}/trajectories")
    def trajectories(request: Request, name: str, start: Start = 0) -> Response:
        chosen = Filter(request.query_params)
        with opened(name) as (index, left):
            rows = index.rows(chosen.query(PAGE_ROWS + 1, start))
            options = {
                column: [(one, one) for one in index.values(column) if len(one) <= 60][:OPTIONS]
                for column in ("set", "status", "tool", "component")
            }
            evaluations = index.values("evaluation")[:OPTIONS]
        return page(
            request,
            "trajectories.html",
            name=name,
            filter=chosen,
            rows=rows[:PAGE_ROWS],
            more=len(rows) > PAGE_ROWS,
            start=start,
            page_rows=PAGE_ROWS,
            left=left,
            files=len(stored_files(runs.folder(name))),
            columns=COLUMNS,
            sortable=SORTED,
            options=options.__getitem__,
            sources=[(STEPS, "steps"), *((EVALUATION + one, one) for one in evaluations)],
            sorts=[
                *((column, column.replace("_", " ")) for column in SORTED),
                *((COMPONENT + one, COMPONENT + one) for one, _ in options["component"]),
            ],
            links=(),
        )
