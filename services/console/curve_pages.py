"""The page of curves, and the numbers that its script asks for again and again.

series.py reads them; app.py adds the routes.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from starlette.responses import JSONResponse, Response

from agent_r1.console import series
from agent_r1.console.pages import MOST_RUNS, Keys, fitting, key_of, name_of, page
from agent_r1.console.runs import Runs

MOST_METRICS = 12
"""Most charts on a page."""
Metrics = Annotated[list[str], Query(max_length=MOST_METRICS)]
Smoothing = Annotated[float, Query(ge=0, le=0.99)]
FIRST_METRICS = ("reward/mean",)
"""Metrics on a page of curves that names none."""


def add_curves(app: FastAPI, runs: Runs, cache: series.MetricsCache) -> None:
    """Add the page of curves, and the numbers that it asks for."""

    @app.get("/curves")
    def curves(
        request: Request,
        run: Keys = [],  # noqa: B006 - FastAPI copies it
        metric: Metrics = list(FIRST_METRICS),  # noqa: B006
        x: series.Axis = "step",
        smooth: Smoothing = 0.0,
    ) -> Response:
        listed = runs.names()[:MOST_RUNS]
        chosen = [name_of(key) for key in run] or listed[:1]
        folders = [runs.folder(name) for name in chosen]
        with cache.reading(folders) as read:
            names = {name for metrics in read for name in metrics.names}
        drawn = list(map(name_of, metric))
        # Two of its three cells are its name and its key; the third is the rest of its element.
        listed_names = fitting(sorted(names), lambda name: [name, key_of(name), ""], len(names))
        return page(
            request,
            "curves.html",
            runs=list(dict.fromkeys([*chosen, *listed])),
            chosen=chosen,
            areas=_areas({*listed_names, *drawn}),
            left_out=len(names - {*listed_names, *drawn}),
            metrics=drawn,
            x=x,
            smooth=smooth,
            most_runs=MOST_RUNS,
            most_metrics=MOST_METRICS,
        )

    @app.get("/api/series")
    def numbers(
        request: Request,
        run: Keys = [],  # noqa: B006 - FastAPI copies it
        metric: Metrics = [],  # noqa: B006
        x: series.Axis = "step",
        smooth: Smoothing = 0.0,
    ) -> Response:
        folders = {key: runs.folder(name_of(key)) for key in run}
        version = series.version_of(list(folders.values()), request.url.query)
        tag = f'"{sha256(version.encode()).hexdigest()[:32]}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"etag": tag})
        most = series.points_each(len(run) * (2 if smooth else 1))
        with cache.reading(folders.values()) as read:
            metrics = dict(zip(folders, read, strict=True))
            found = {
                "metrics": {
                    of: {
                        key: series.read_series(one, name_of(of), x, smooth, most)
                        for key, one in metrics.items()
                    }
                    for of in metric
                },
                "marks": [mark for key in metrics for mark in _marks(key, folders, metrics, x)],
            }
        return JSONResponse(found, headers={"etag": tag})


def _marks(
    key: str, folders: Mapping[str, Path], metrics: Mapping[str, series.RunMetrics], x: series.Axis
) -> list[dict[str, Any]]:
    """Return the marks of a run that stand on its curves, as JSON values."""
    run = metrics[key]
    return [
        {"run": key, "kind": mark.kind, "text": mark.text, "step": mark.step, "x": at}
        for mark in series.read_marks(folders[key], run, series.MOST_MARKS // len(metrics))
        if (at := _place(run, mark.step, x)) is not None
    ]


def _place(run: series.RunMetrics, step: int, x: series.Axis) -> float | None:
    """Return where a step is on an axis; None before the first one was written."""
    if x == "step":
        return float(step)
    place = int((run.steps <= step).sum()) - 1
    return float(run.axis(x)[place]) if place >= 0 else (0.0 if run.steps.size else None)


def _areas(names: set[str]) -> dict[str, list[str]]:
    areas: dict[str, list[str]] = {}
    for name in sorted(names):
        areas.setdefault(name.partition("/")[0], []).append(name)
    return areas
