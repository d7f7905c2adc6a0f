"""The page of evaluations; evaluations.py reads and computes them, app.py adds the route."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from agent_r1.console import evaluations
from agent_r1.console.pages import ROWS, name_of, page
from agent_r1.console.runs import Runs


def add_evaluations(app: FastAPI, runs: Runs) -> None:
    """Add the page of evaluations."""

    @app.get("/evaluations")
    def all_evaluations(request: Request, a: str = "", b: str = "") -> Response:
        listed = evaluations.list_evaluations(runs)
        chosen = {
            side: evaluations.find_evaluation(runs, name_of(key))
            for side, key in (("A", a), ("B", b))
            if key
        }
        return page(
            request,
            "evaluations.html",
            listed=listed[:ROWS],
            left_out=max(0, len(listed) - ROWS),
            chosen=chosen,
            scores={side: evaluations.summarise(one) for side, one in chosen.items()},
            comparison=evaluations.compare(*chosen.values()) if len(chosen) == 2 else None,
            rows=ROWS,
        )
