"""The application of the console: its pages, and the numbers that their scripts ask for.

Reads the folders of the runs and the Redis of a running one; actions.py changes it. door.py lets
callers in.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.staticfiles import StaticFiles
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, RedirectResponse, Response

from agent_r1.config.live_run import check_redis, redis_of
from agent_r1.console import evaluations, operations, series
from agent_r1.console.actions import (
    ACTIONS,
    STOP,
    STOP_DONE,
    STOP_QUESTION,
    WEIGHT_PREFIX,
    Fields,
)
from agent_r1.console.door import LOGIN, Door, local_path
from agent_r1.console.pages import STATIC_DIR, name_of, page
from agent_r1.console.runs import Run, Runs, UnknownRunError, configuration_differences
from agent_r1.console.services_view import (
    read_models,
    read_servers,
    read_streams,
    read_tools,
    since,
)
from agent_r1.launch.local_view import read_json_lines
from agent_r1.runtime.files.dead_letters import load_letters
from agent_r1.runtime.files.run_folder import EVALUATIONS_FILE, FAILURES_FILE
from agent_r1.runtime.http.token import RunToken
from agent_r1_proto.registry import ToolRegistry
from agent_r1_proto.streams import Broker

ROWS = 100
"""Most rows of a table on a page; of the metrics of one step, three times as many."""
MOST_RUNS = 20
"""Most runs that are compared, or on one chart."""
MOST_METRICS = 12
"""Most charts on a page."""
Keys = Annotated[list[str], Query(max_length=MOST_RUNS)]
Metrics = Annotated[list[str], Query(max_length=MOST_METRICS)]
Smoothing = Annotated[float, Query(ge=0, le=0.99)]
FIRST_METRICS = ("reward/mean",)
"""Metrics on a page of curves that names none."""


def create_app(
    runs: Runs, token: RunToken | None, clock: Callable[[], float] = time.time
) -> FastAPI:
    """Return the application over a folder of runs; `clock` gives Unix time, in seconds."""
    app = FastAPI(title="Agent-R1", openapi_url=None)
    app.add_middleware(Door, token=token, clock=clock)
    app.state.metrics = series.MetricsCache()
    app.mount("/static", StaticFiles(directory=STATIC_DIR))
    _add_errors(app)
    _add_runs(app, runs)
    _add_curves(app, runs)
    _add_services(app, runs)
    _add_evaluations(app, runs)

    @app.get("/healthz")
    def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.api_route(LOGIN, methods=["GET", "POST"])
    def login(request: Request, next: str = "/") -> Response:
        was_sent = request.method == "POST"  # the door lets in who sends the right one
        wanted = request.state.form.get("next", "/") if was_sent else next
        return page(
            request, "login.html", 403 if was_sent else 200, next=local_path(wanted), wrong=was_sent
        )

    return app


def _add_errors(app: FastAPI) -> None:
    def answer(request: Request, status: int, text: str) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return page(request, "error.html", status, text=text)
        return JSONResponse({"detail": text}, status)

    @app.exception_handler(UnknownRunError)
    async def unknown(request: Request, exc: UnknownRunError) -> Response:
        return answer(request, 404, str(exc))

    @app.exception_handler(ValueError)
    async def refused(request: Request, exc: ValueError) -> Response:
        return answer(request, 409, str(exc))

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, exc: RequestValidationError) -> Response:
        first = exc.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return answer(request, 422, f"{where} ({first['input']!r:.100}): {first['msg']}")

    @app.exception_handler(HTTPException)
    async def failed(request: Request, exc: HTTPException) -> Response:
        return answer(request, exc.status_code, str(exc.detail))


def _add_runs(app: FastAPI, runs: Runs) -> None:
    @app.get("/")
    def all_runs(request: Request, start: Annotated[int, Query(ge=0)] = 0) -> Response:
        names = runs.names()
        some = runs.some(names[start : start + ROWS])
        later = start + ROWS if start + ROWS < len(names) else None
        return page(
            request,
            "runs.html",
            root=runs.root,
            runs=some,
            start=start,
            later=later,
            count=len(names),
            most=MOST_RUNS,
        )

    cache: series.MetricsCache = app.state.metrics

    @app.get("/runs/{name}")
    def one_run(request: Request, name: str, step: int | None = None) -> Response:
        run = runs.run(name)
        failures = read_json_lines(run.folder / FAILURES_FILE)
        found = read_json_lines(run.folder / EVALUATIONS_FILE)
        with cache.reading([run.folder]) as (metrics,):
            at_step = _step_metrics(metrics, step)
        return page(
            request,
            "run.html",
            run=run,
            failures=failures[-ROWS:],
            evaluations=_evaluation_rows(found)[-ROWS:],
            letters=load_letters(run.folder)[-ROWS:],
            step=step,
            step_metrics=at_step,
        )

    @app.get("/compare")
    def compared(request: Request, run: Keys = []) -> Response:  # noqa: B006 - FastAPI copies it
        some = runs.some(map(name_of, run))
        rows = configuration_differences(some)
        left_out = max(0, len(rows) - ROWS)
        return page(request, "compare.html", runs=some, rows=rows[:ROWS], left_out=left_out)


def _evaluation_rows(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each set of each evaluation."""
    rows: list[dict[str, Any]] = []
    for record in records:
        sets = record.get("sets")
        for name, scores in (sets if isinstance(sets, dict) else {}).items():
            known = {key: scores.get(key) for key in ("n", "failed", "reward")}
            components = scores.get("components") or {}
            label = {"name": record.get("name"), "step": record.get("step"), "set": name}
            rows.append(label | known | {"components": components})
    return rows


def _step_metrics(run: series.RunMetrics, step: int | None) -> list[tuple[str, float]]:
    """Return the metrics of a step; none where it has not been, or is not asked for."""
    places = [] if step is None else [place for place, one in enumerate(run.steps) if one == step]
    values = [(name, run.column(name)[place]) for place in places for name in run.names]
    return [(name, float(value)) for name, value in values if math.isfinite(value)][: 3 * ROWS]


def _add_curves(app: FastAPI, runs: Runs) -> None:
    cache: series.MetricsCache = app.state.metrics

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
        return page(
            request,
            "curves.html",
            runs=list(dict.fromkeys([*chosen, *listed])),
            chosen=chosen,
            areas=_areas(names | set(map(name_of, metric))),
            metrics=list(map(name_of, metric)),
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


def _add_services(app: FastAPI, runs: Runs) -> None:
    @app.get("/runs/{name}/services")
    async def services(request: Request, name: str, done: str = "") -> Response:
        run = await run_in_threadpool(runs.run, name)
        told = STOP_DONE if done == STOP else ACTIONS[done].done if done in ACTIONS else ""
        values: dict[str, Any] = {"run": run, "told": told, "problem": "", "since": since}
        try:
            async with connected(run) as (broker, registry):
                values |= {
                    "streams": await read_streams(broker),
                    "servers": await read_servers(broker),
                    "tools": await read_tools(registry),
                    "models": await read_models(broker),
                    "letters": (await broker.dead_letters())[-ROWS:],
                }
        except ValueError as exc:
            values["problem"] = str(exc)
        return page(request, "services.html", **values)

    @app.get("/runs/{name}/services/{action}")
    async def ask(request: Request, name: str, action: str) -> Response:
        run = await run_in_threadpool(runs.run, name)
        fields = {key: name_of(value) for key, value in request.query_params.items()}
        return await _confirm(request, run, action, fields)

    @app.post("/runs/{name}/services/{action}")
    async def do(request: Request, name: str, action: str) -> Response:
        run = await run_in_threadpool(runs.run, name)
        fields = {name_of(key): name_of(value) for key, value in request.state.form.items()}
        try:
            if action == STOP:
                operations.stop_run(run.folder)
            else:
                known = ACTIONS[_known(action, fields)]
                async with connected(run) as (broker, registry):
                    await known.change(broker, registry, fields)
        except ValueError as exc:
            return await _confirm(request, run, action, fields, str(exc))
        path = request.scope["raw_path"].decode("latin-1").rpartition("/")[0]
        return RedirectResponse(f"{path}?done={action}", 303)


def _known(action: str, fields: Fields) -> str:
    """Return the name of an action.

    Raises:
        HTTPException: 404, there is none; 422, a field is missing.
    """
    if action not in ACTIONS:
        raise HTTPException(404, f"there is no action {action!r}; there are {', '.join(ACTIONS)}")
    for field in ACTIONS[action].fields:
        if not fields.get(field):
            raise HTTPException(422, f"{action} needs the field {field!r}; choose it on the page")
    return action


async def _confirm(
    request: Request, run: Run, action: str, fields: Fields, problem: str = ""
) -> Response:
    if action == STOP:
        values: dict[str, Any] = {"button": "Stop", "question": STOP_QUESTION, "fields": {}}
    else:
        known = ACTIONS[_known(action, fields)]
        named = {field: fields[field] for field in known.fields}
        values = {"button": known.button, "question": known.question, "fields": named}
    weights = await _weights(run, fields["tool"]) if action == "weight" else {}
    status = 409 if problem else 200
    return page(
        request,
        "confirm.html",
        status,
        run=run,
        problem=problem,
        weights={f"{WEIGHT_PREFIX}{version}": one for version, one in weights.items()},
        prefix=WEIGHT_PREFIX,
        **values,
    )


async def _weights(run: Run, tool: str) -> Mapping[str, float | None]:
    """Return the weight of each version that has an instance, or a weight; None is without one."""
    async with connected(run) as (_, registry):
        state = await operations.tool_state(registry, tool)
    versions = dict.fromkeys([*state.live_versions(), *state.weights])
    return {version: state.weights.get(version) for version in versions}


@asynccontextmanager
async def connected(run: Run) -> AsyncGenerator[tuple[Broker, ToolRegistry]]:
    """Connect to the Redis of a run, and to the tools that it calls.

    Raises:
        ValueError: it has none now, or that does not answer.
    """
    if run.config is None:
        raise ValueError(run.problem)
    settings = run.config.run
    url = redis_of(run.folder, run.config)
    if url is None:
        raise ValueError("the run is not running, and its Redis has stopped with it")
    await check_redis(url, settings.id, "redis.url")
    async with await Broker.connect(url, settings.id) as broker:
        yield broker, ToolRegistry(broker, settings.tool_pool or settings.id)


def _add_evaluations(app: FastAPI, runs: Runs) -> None:
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
