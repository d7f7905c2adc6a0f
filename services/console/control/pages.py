"""Pages of the services of a run: what they do now, and what may be changed.

services.py reads them from Redis; actions.py says what may be changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from agent_r1.config.live_run import check_redis, redis_of
from agent_r1.console.control import operations
from agent_r1.console.control.actions import (
    ACTIONS,
    STOP,
    STOP_DONE,
    STOP_QUESTION,
    WEIGHT_PREFIX,
    Fields,
)
from agent_r1.console.control.services import (
    read_models,
    read_servers,
    read_streams,
    read_tools,
    since,
)
from agent_r1.console.pages import ROWS, name_of, page
from agent_r1.console.runs import Run, Runs
from agent_r1_proto.registry import ToolRegistry
from agent_r1_proto.streams import Broker

CHANGE_TIMEOUT_S = 20.0
"""Longest that a page waits for Redis; the longest change, Undrain, waits 10 s itself."""


def add_services(app: FastAPI, runs: Runs) -> None:
    """Add the page of the services of a run, and those that change them."""

    @app.get("/runs/{name}/services")
    async def services(request: Request, name: str, done: str = "") -> Response:
        run = await run_in_threadpool(runs.run, name)
        told = STOP_DONE if done == STOP else ACTIONS[done].done if done in ACTIONS else ""
        values: dict[str, Any] = {"run": run, "told": told, "problem": "", "since": since}
        values["may_stop"] = await run_in_threadpool(operations.may_stop, run.folder)
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


def _why_no_redis(run: Run) -> str:
    if run.state.has_ended:
        return "the run is not running, and its Redis has stopped with it"
    if run.state.is_running:
        return (
            "the Redis of this run is known only where the run was started; `agent-r1 ui` there "
            "shows its services"
        )
    return (
        "no launcher on this machine runs it, so its Redis has stopped with it or is elsewhere; "
        "where it runs, `agent-r1 ui` shows its services"
    )


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
        raise ValueError(_why_no_redis(run))
    await check_redis(url, settings.id, "redis.url")
    try:
        async with (
            asyncio.timeout(CHANGE_TIMEOUT_S),
            await Broker.connect(url, settings.id) as broker,
        ):
            yield broker, ToolRegistry(broker, settings.tool_pool or settings.id)
    except TimeoutError as exc:
        raise ValueError(
            f"the run's Redis did not answer within {CHANGE_TIMEOUT_S:g} s; try again once it does"
        ) from exc
