"""The page that says why a score fell, in a span of steps against the one before.

fall_view.py reads and computes; app.py adds the route.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query, Request
from starlette.responses import Response

from agent_r1.console.fall_view import Numbers, read_fall, role_of, span_from
from agent_r1.console.pages import name_of, page
from agent_r1.console.runs import Runs
from agent_r1.console.series import MetricsCache

Step = Annotated[str, Query(pattern=r"^\s*\d{0,9}\s*$")]
"""A step; empty is none, as forms send it."""


def add_falls(app: FastAPI, runs: Runs, cache: MetricsCache) -> None:
    """Add the page of a fall."""

    @app.get("/runs/{name}/fall")
    def fall(
        request: Request,
        name: str,
        score: str = "",
        metric: str = "",
        step: Step = "",
        step_to: Step = "",
    ) -> Response:
        run = runs.run(name)
        first, last = (int(text) if text.strip() else None for text in (step, step_to))
        if first is None and last is not None:
            raise ValueError(f"the span ends at step {last} and begins nowhere; choose its step")
        with cache.reading([run.folder]) as (metrics,):
            numbers = Numbers.of(metrics, run.config)
        # Of a chart that shows something else, the page shows what fell most.
        drawn = [one for one, of_it in numbers.scores.items() if of_it == name_of(metric)]
        chosen = name_of(score) or "".join(drawn)
        span = None if first is None else span_from(numbers, first, last)
        return page(
            request,
            "fall.html",
            name=name,
            fall=read_fall(run.folder, numbers, run.config, chosen, span),
            score=chosen,
            scores=numbers.scores,
            roles={one: role_of(one, run.config) for one in numbers.scores},
        )
