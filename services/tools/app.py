"""The HTTP service of one tool.

Reads calls from rollout (`POST /call`, one or many; `POST /open`, `/fork`, `/close`), runs them
through a `Tool`, writes a `CallReply`. `GET /spec` says what the tool is, `GET /healthz` and
`GET /readyz` whether it takes calls. How a call can end:

- 200, result ok or error: the tool's own answer, an exception in the user's `call` included;
- 409: the call needs a session that is not open here; 422: the request is wrong;
- 501: the tool's own code is wrong: `call` returned no result, or `open` or `fork` raised;
- 429: no place to run was free in time; 503: draining, overloaded, or what stands behind the tool
  is down; 504: the time is up.
Everything but 200 is an outage for the caller, never an answer to the model.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException, Request, Response
from starlette.responses import JSONResponse

from agent_r1.runtime.argument_schema import find_error, holds_more_than, make_validator
from agent_r1.runtime.http.api import Route, describe, json_response, parse_body
from agent_r1.runtime.tracing import span, traceparent_of
from agent_r1.runtime.unicode import repair_text
from agent_r1.tools.base import (
    CallContext,
    Tool,
    ToolBusyError,
    ToolUnavailableError,
    error_result,
)
from agent_r1.tools.config import ToolConfig
from agent_r1.tools.loop_watch import watch_loop
from agent_r1.tools.metrics import ToolMetrics
from agent_r1.tools.results import (
    MAX_PROBLEM_CHARS,
    BrokenToolError,
    check_batch,
    describe_exception,
    to_result,
)
from agent_r1.tools.sessions import SessionNotOpenError, Sessions
from agent_r1_proto.tools import (
    CallReply,
    CallRequest,
    ForkRequest,
    SessionRequest,
    ToolCall,
    ToolHealth,
    ToolResult,
    ToolSpec,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499
"""The status that proxies log for a client that has gone; nobody reads the answer."""
_EXPIRY_CHECKS_PER_PERIOD = 4
_VALUES_AT_ONCE = 1000
"""Arguments with more values are checked beside the event loop."""

_SESSION_ERRORS = {
    "409": "The call needs a session that is not open here.",
    "422": "The body does not fit the schema, or names another tool.",
    "501": "The tool's own code is wrong; the text explains what to correct.",
    "503": "Draining, overloaded, or something behind the tool is down.",
}
_CALL_ERRORS = {
    **_SESSION_ERRORS,
    "429": "No place to run was free in time; send the call again.",
    "504": "The time is up.",
}
ROUTES = (
    Route("/spec", "get", answer=ToolSpec),
    Route("/healthz", "get", answer=ToolHealth),
    Route(
        "/readyz",
        "get",
        answer=ToolHealth,
        errors={"503": "Draining: trajectories that begin now use other instances."},
    ),
    Route("/call", "post", CallRequest, CallReply, _CALL_ERRORS),
    Route("/open", "post", SessionRequest, errors=_SESSION_ERRORS),
    Route("/fork", "post", ForkRequest, errors=_SESSION_ERRORS),
    Route("/close", "post", SessionRequest, errors=_SESSION_ERRORS),
)
_STATUS_OF: dict[type[Exception], int] = {
    SessionNotOpenError: 409,
    BrokenToolError: 501,
    ToolBusyError: 429,
    ToolUnavailableError: 503,
}


def _status_of(exc: Exception) -> int:
    if isinstance(exc, HTTPException):
        return exc.status_code
    return next(status for kind, status in _STATUS_OF.items() if isinstance(exc, kind))


@dataclass(eq=False)
class ToolService:
    """One tool as a service: runs its calls, keeps its sessions, drains.

    Raises:
        ValueError: the tool's attributes are wrong.
    """

    tool: Tool
    """Answers the calls."""
    instance: str = "local"
    """Name of this process, recorded with every call."""
    config: ToolConfig = field(default_factory=ToolConfig)
    """The tool's table."""

    def __post_init__(self) -> None:
        self.spec: ToolSpec = self.tool.spec()
        self.sessions = Sessions(self.tool, self.config.session_expiry_s)
        self.metrics = ToolMetrics(
            self.spec.name,
            self.spec.version,
            in_flight=lambda: self._calls_in_flight,
            sessions=lambda: len(self.sessions),
            counters=self.tool.counters,
        )
        self._validator = make_validator(self.spec.parameters)
        self._calls_in_flight = 0
        self._draining = False
        self._leaving = False
        self._drained = asyncio.Event()

    @property
    def health(self) -> ToolHealth:
        """Return the answer to `GET /healthz`."""
        return ToolHealth(
            status="draining" if self._draining or self._leaving else "ok",
            name=self.spec.name,
            version=self.spec.version,
            instance=self.instance,
            sessions=len(self.sessions),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start the tool, close expired sessions while it runs, stop it."""
        async with watch_loop(self.spec.name):
            await self.tool.start()
            expiry = asyncio.create_task(self._expire_sessions())
            try:
                yield
            finally:
                expiry.cancel()
                with suppress(asyncio.CancelledError):
                    await expiry
                await self.sessions.close_all()
                await self.tool.stop()

    async def call(self, request: CallRequest) -> CallReply:
        """Run the calls of one request, all within the shortest of their timeouts.

        Raises:
            HTTPException: the request is wrong, refused, or not answered in time.
            SessionNotOpenError: a call needs a session that is not open.
            ToolUnavailableError: what stands behind the tool is down.
            BrokenToolError: the tool returned something that is no result.
        """
        calls = request.calls
        started = time.perf_counter()
        try:
            reply = await self._answer(calls)
        except (HTTPException, *_STATUS_OF) as exc:
            self.metrics.count(str(_status_of(exc)), len(calls))
            raise
        finally:
            self.metrics.observe(time.perf_counter() - started)
        for result in reply.results:
            self.metrics.count(result.status)
        return reply

    async def _answer(self, calls: list[ToolCall]) -> CallReply:
        self._check_calls(calls)
        with self._in_flight(calls):
            refused = await self._check_arguments(calls)
            valid = [call for call, refusal in zip(calls, refused, strict=True) if refusal is None]
            answers = iter(await self._within_deadline(valid) if valid else ())
            results = [next(answers) if one is None else one for one in refused]
        return CallReply(version=self.spec.version, instance=self.instance, results=results)

    async def open(self, request: SessionRequest) -> None:
        """Open a session.

        Raises:
            HTTPException: the tool has no sessions, or the service drains.
            ToolUnavailableError: what stands behind the tool is down.
            BrokenToolError: the tool's `open` raised anything else.
        """
        self._require_sessions()
        self._refuse_when_draining()
        opening = self.sessions.open(request.rollout_id, request.tool_context)
        await self._begin("open", request.rollout_id, opening)

    async def fork(self, request: ForkRequest) -> None:
        """Open a session in the state of another one.

        Raises:
            HTTPException: the tool has no sessions, or does not fork them.
            SessionNotOpenError: the other one is not open here.
            ToolUnavailableError: what stands behind the tool is down.
            BrokenToolError: the tool's `fork` raised anything else.
        """
        self._require_sessions()
        if not self.spec.forks:
            raise HTTPException(
                409, f"tool {self.spec.name!r} forks no sessions; open one and repeat the calls"
            )
        opening = self.sessions.fork(request.rollout_id, request.fork_id)
        await self._begin("fork", request.fork_id, opening)

    def _require_sessions(self) -> None:
        if not self.spec.sessions:
            raise HTTPException(
                409, f"tool {self.spec.name!r} keeps no sessions; send its calls to /call directly"
            )

    async def _begin(self, hook: str, rollout_id: str, opening: Awaitable[None]) -> None:
        """Await what opens a session; anything it raises but an outage is the tool's mistake."""
        try:
            await opening
        except (ToolUnavailableError, SessionNotOpenError):
            raise
        except Exception as exc:
            logger.exception(
                "session %s raised tool=%s rollout_id=%s", hook, self.spec.name, rollout_id
            )
            kind = type(self.tool).__name__
            raise BrokenToolError(f"{kind}.{hook} raised {describe_exception(exc)}") from exc

    async def close(self, request: SessionRequest) -> None:
        """Close a session; one that is not open is already closed."""
        await self.sessions.close(request.rollout_id)
        self._note_drained()

    def note_draining(self, draining: bool) -> None:
        """Say so in `/healthz`; trajectories that began with this version are still answered."""
        self._leaving = draining

    async def drain(self, timeout_s: float) -> None:
        """Refuse new work; wait for calls in flight and open sessions, at most `timeout_s`."""
        self._draining = True
        self._note_drained()
        try:
            await asyncio.wait_for(self._drained.wait(), timeout_s)
        except TimeoutError:
            logger.warning(
                "drain timed out tool=%s calls_in_flight=%d sessions=%d timeout_s=%g",
                self.spec.name,
                self._calls_in_flight,
                len(self.sessions),
                timeout_s,
            )

    def _check_calls(self, calls: list[ToolCall]) -> None:
        if len(calls) > self.spec.max_batch:
            raise HTTPException(
                422,
                f"calls ({len(calls)}) must be at most {self.spec.max_batch} (max_batch of "
                f"/spec); send several requests",
            )
        for call in calls:
            if call.name != self.spec.name:
                raise HTTPException(
                    422,
                    f"name ({call.name!r}) must be {self.spec.name!r}, the tool of this service; "
                    "check the URL under which the tool is configured",
                )

    @contextmanager
    def _in_flight(self, calls: list[ToolCall]) -> Iterator[None]:
        with ExitStack() as stack:
            if self.spec.sessions:
                # An open session may continue while the service drains: nobody else can answer it.
                for call in calls:
                    stack.enter_context(self.sessions.use(call.rollout_id))
            else:
                self._refuse_when_draining()
            limit = self.config.max_calls_in_flight
            if self._calls_in_flight + len(calls) > limit:
                raise HTTPException(
                    503,
                    f"{self._calls_in_flight} calls are in flight and the limit is {limit}; raise "
                    "max_calls_in_flight or start more instances",
                )
            self._calls_in_flight += len(calls)
            try:
                yield
            finally:
                self._calls_in_flight -= len(calls)
                self._note_drained()

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise HTTPException(
                503, f"tool {self.spec.name!r} is shutting down; call another instance"
            )

    def _note_drained(self) -> None:
        if self._draining and self._calls_in_flight == 0 and len(self.sessions) == 0:
            self._drained.set()

    async def _check_arguments(self, calls: list[ToolCall]) -> list[ToolResult | None]:
        """Return an error for each call whose arguments do not fit, and None for the others."""
        if any(holds_more_than(_VALUES_AT_ONCE, call.arguments) for call in calls):
            # In a thread: a hundred thousand values take seconds, and others call meanwhile.
            return await asyncio.to_thread(lambda: [self._refuse_arguments(call) for call in calls])
        return [self._refuse_arguments(call) for call in calls]

    def _refuse_arguments(self, call: ToolCall) -> ToolResult | None:
        error = find_error(self._validator, call.arguments)
        if error is None:
            return None
        where = f" (at {error.json_path})" if error.path else ""
        return error_result(f"Error: the arguments are not valid: {error.message}{where}")

    async def _within_deadline(self, calls: list[ToolCall]) -> list[ToolResult]:
        timeout_s = min(call.timeout_s for call in calls)
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                return await self._run(calls)
        except TimeoutError as exc:
            if not deadline.expired():
                raise
            raise HTTPException(
                504,
                f"tool {self.spec.name!r} did not answer within {timeout_s:g} s (timeout_s of the "
                "call); raise env.tool_timeout_s or speed up the tool",
            ) from exc

    async def _run(self, calls: list[ToolCall]) -> list[ToolResult]:
        contexts = [CallContext(c.rollout_id, c.turn, c.tool_context, c.timeout_s) for c in calls]
        arguments = [(c.arguments, context) for c, context in zip(calls, contexts, strict=True)]
        try:
            answered: object = await self.tool.call_batch(arguments)
        except Exception as exc:  # noqa: BLE001 - user code; `to_result` logs the traceback
            answered = [exc] * len(calls)
        answers = zip(calls, check_batch(self.tool, answered, len(calls)), strict=True)
        return [to_result(self.tool, *answer, self.config.max_result_bytes) for answer in answers]

    async def _expire_sessions(self) -> None:
        while True:
            await asyncio.sleep(self.config.session_expiry_s / _EXPIRY_CHECKS_PER_PERIOD)
            await self.sessions.close_expired()
            self._note_drained()


def create_app(service: ToolService) -> FastAPI:
    """Return the web application of a tool; its `state.service` is the service."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = FastAPI(title=f"Agent-R1 tool: {service.spec.name}", lifespan=lifespan)
    app.state.service = service
    service.metrics.page.add_route(app)

    @app.get("/spec")
    async def spec() -> Response:
        return json_response(service.spec)

    @app.get("/healthz")
    async def healthz() -> Response:
        return json_response(service.health)

    @app.get("/readyz")
    async def readyz() -> Response:
        answer = json_response(service.health)
        answer.status_code = 200 if service.health.status == "ok" else 503
        return answer

    @app.post("/call")
    async def call(request: Request) -> Response:
        body = parse_body(CallRequest, await request.body())
        names = service.spec
        with span("tool", traceparent_of(request.headers), tool=names.name, version=names.version):
            return json_response(await _while_connected(request, service.call(body)))

    @app.post("/open")
    async def open_session(request: Request) -> Response:
        await service.open(parse_body(SessionRequest, await request.body()))
        return json_response(None)

    @app.post("/fork")
    async def fork_session(request: Request) -> Response:
        await service.fork(parse_body(ForkRequest, await request.body()))
        return json_response(None)

    @app.post("/close")
    async def close_session(request: Request) -> Response:
        await service.close(parse_body(SessionRequest, await request.body()))
        return json_response(None)

    async def outage(_: Request, exc: Exception) -> Response:
        if isinstance(exc, ToolBusyError):
            logger.warning("tool busy tool=%s problem=%s", service.spec.name, exc)
        elif isinstance(exc, ToolUnavailableError):
            logger.error("tool unavailable tool=%s", service.spec.name, exc_info=exc)
        detail = repair_text(str(exc))[:MAX_PROBLEM_CHARS]
        return JSONResponse({"detail": detail}, status_code=_status_of(exc))

    for kind in _STATUS_OF:
        app.add_exception_handler(kind, outage)
    describe(app, ROUTES)
    return app


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it when the client of a request (its body is read) disconnects.

    Raises:
        HTTPException: the client has gone.
    """
    answer = asyncio.create_task(work)
    departure = asyncio.create_task(_wait_for_departure(request))
    try:
        await asyncio.wait({answer, departure}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise HTTPException(CLIENT_CLOSED_REQUEST, "the client has closed the connection")
    finally:
        answer.cancel()
        departure.cancel()
        await asyncio.gather(answer, departure, return_exceptions=True)


async def _wait_for_departure(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
