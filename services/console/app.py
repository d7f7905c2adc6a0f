"""The application of the console over a folder of runs.

Reads the folders of the runs and the Redis of a running one; control/ changes it. door.py lets
callers in; the files `*_pages.py`, trajectories/ and control/ have the pages.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from agent_r1.console.control.pages import add_services
from agent_r1.console.curve_pages import add_curves
from agent_r1.console.door import HEADERS, LOGIN, Door, local_path
from agent_r1.console.evaluation_pages import add_evaluations
from agent_r1.console.fall_pages import add_falls
from agent_r1.console.pages import STATIC_DIR, page
from agent_r1.console.run_pages import add_runs
from agent_r1.console.runs import Runs, UnknownRunError
from agent_r1.console.series import MetricsCache
from agent_r1.console.trajectories.pages import add_trajectories
from agent_r1.runtime.http.token import RunToken


def create_app(
    runs: Runs, token: RunToken | None, clock: Callable[[], float] = time.time
) -> FastAPI:
    """Return the application over a folder of runs; `clock` gives Unix time, in seconds."""
    app = FastAPI(title="Agent-R1", openapi_url=None)
    app.add_middleware(Door, token=token, clock=clock)
    app.state.mirror = runs.mirror
    app.mount("/static", StaticFiles(directory=STATIC_DIR))
    _add_errors(app)
    cache = MetricsCache()
    add_runs(app, runs, cache)
    add_curves(app, runs, cache)
    add_services(app, runs)
    add_evaluations(app, runs)
    add_trajectories(app, runs)
    add_falls(app, runs, cache)

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
    async def answer(request: Request, exc: Exception) -> Response:
        status, text = _problem(exc)
        if "text/html" in request.headers.get("accept", ""):
            found = page(request, "error.html", status, text=text)
        else:
            found = JSONResponse({"detail": text}, status)
        found.headers.update(HEADERS)  # an unknown error is answered outside the door
        return found

    for kind in (ValueError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _problem(exc: Exception) -> tuple[int, str]:
    """Return the status of an error, and what its page says."""
    match exc:
        case RequestValidationError():
            first = exc.errors()[0]
            where = ".".join(map(str, first["loc"]))
            return 422, f"{where} ({first['input']!r:.100}): {first['msg']}"
        case HTTPException():
            return exc.status_code, str(exc.detail)
        case ValueError():
            return 404 if isinstance(exc, UnknownRunError) else 409, str(exc)
    what = f"{type(exc).__name__}: {exc}"
    return 500, f"a file of the run may be damaged ({what:.200}); the console's log says where"
