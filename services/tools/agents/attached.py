"""`AttachedAgents`: attempts of programs that are started elsewhere, and ask for them.

With `agent.attached`, the service that runs agents runs none. A program of the user's, such as an
evaluation harness, takes an attempt, works with the model of its session, and reports what came of
it; `agent-r1 agents attach` does that for a command.

    program --POST /attempts--> a task and a session; it calls the session's model at the gateway
    program --GET /attempts/{id}--> the same, while it goes on; 410 once it is over
    program --POST /attempts/{id}/end--> answer, reward; the gateway's call returns

The id is that of one taking: where an attempt is handed out again, the first program's is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from fastapi import FastAPI, HTTPException, Request, Response
from pydantic import JsonValue

from agent_r1.runtime.agent_settings import AgentSettings
from agent_r1.runtime.http.api import Route, describe, json_response, parse_body
from agent_r1.tools.agents.tool import read_attempt
from agent_r1.tools.base import (
    Arguments,
    CallContext,
    Tool,
    parse_settings,
)
from agent_r1_proto.agents import (
    AGENTS,
    AgentAttempt,
    AgentEnd,
    AttemptReport,
    AttemptWanted,
    OpenAttempt,
)
from agent_r1_proto.tools import ToolResult

logger = logging.getLogger(__name__)

NOTICE_S = 30.0
"""An attempt that nobody has asked for is spoken of so often."""
ARRIVE_S = 30.0
"""A program that has taken an attempt asks for it again within this time, or another one gets it:
the answer may not have arrived."""
GONE_S = 60.0
"""A program that has not asked for its attempt for so long has gone."""
LOOK_S = 1.0
"""How often it is seen that a program which waits has gone."""
_OVER = {"410": "The attempt is over: nobody waits for it any more."}
ROUTES = (
    Route("/attempts", "post", AttemptWanted, OpenAttempt, {"204": "None came in time."}),
    Route("/attempts/{id}", "get", answer=OpenAttempt, errors=_OVER),
    Route("/attempts/{id}/end", "post", AttemptReport, errors=_OVER),
)


class AttachedAgents(Tool):
    """Hands attempts out, and waits for what comes of them.

    Args:
        settings: fields of `AgentSettings`.
    """

    name = AGENTS
    description = "Lets a program that is started elsewhere make an attempt."
    parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    sessions = True

    def __init__(self, **settings: JsonValue) -> None:
        self.settings = parse_settings(AgentSettings, settings)
        self.version = self.settings.version or "1"
        self._open: dict[str, _Open] = {}
        self._offered = asyncio.Event()
        self._noticed = time.monotonic()
        """When a program last asked, or that none does was said."""

    async def call(self, arguments: Arguments, context: CallContext) -> ToolResult:
        """Offer an attempt, or wait for the one that was taken, and say how it ended.

        Raises:
            ToolUnavailableError: the call is wrong.
        """
        attempt, name = read_attempt(context), context.rollout_id
        found = self._open.get(name)
        if found is None:
            found = self._open[name] = _Open(attempt)
            self._offered.set()
        found.attempt = attempt
        deadline = time.monotonic() + attempt.timeout_s
        while not found.end.done() and (left := deadline - time.monotonic()) > 0:
            await asyncio.wait([found.end], timeout=min(left, NOTICE_S))
            self._notice(found)
            found.end_if_gone()
        return ToolResult(data=self._end_of(found).model_dump(mode="json"))

    def _notice(self, found: _Open) -> None:
        if (
            not found.end.done()
            and not found.is_held
            and time.monotonic() - self._noticed > NOTICE_S
        ):
            self._noticed = time.monotonic()
            logger.warning(
                "attempts wait and no program asks for one; start `agent-r1 agents attach` with "
                "the address of this service waiting=%d",
                sum(not one.is_held for one in self._open.values()),
            )

    def _end_of(self, found: _Open) -> AgentEnd:
        if found.end.done():
            report = found.end.result().model_dump()
            if report["exit"] == "given_back":
                report |= {"exit": "lost", "error": f"it was given back: {report['error']}"}
            return AgentEnd(**report, latency_s=time.monotonic() - found.took)
        if found.is_held:
            return AgentEnd(exit="timeout", error="the program took longer than the attempt may")
        return AgentEnd(
            exit="lost",
            error="no program asked for it in its time; start `agent-r1 agents attach`, and let "
            "agent.max_concurrent be no more than programs work on at a time",
        )

    async def close(self, rollout_id: str) -> None:
        """Forget an attempt; its program learns that when it asks."""
        self._open.pop(rollout_id, None)

    # -- what programs ask -----------------------------------------------------------------------

    async def take(self, wait_s: float) -> OpenAttempt | None:
        """Return an attempt that nobody makes yet; None where none comes in time."""
        self._noticed = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self._waiting() is None:
                    self._offered.clear()
                    await self._offered.wait()
        name = self._waiting()
        if name is None:
            return None
        found = self._open[name]
        found.takes += 1
        found.took, found.is_held, found.has_arrived = time.monotonic(), True, False
        taken = f"{name}.{found.takes}"
        asyncio.get_running_loop().call_later(ARRIVE_S, self._miss, taken)
        return OpenAttempt(id=taken, attempt=found.attempt)

    def _waiting(self) -> str | None:
        """Return the name of the oldest attempt that no program has."""
        waiting = (n for n, one in self._open.items() if not one.is_held and not one.end.done())
        return next(waiting, None)

    def _miss(self, taken: str) -> None:
        """Offer an attempt again whose program has not asked for it since it took it."""
        found = self._find(taken)
        if found is not None and not found.has_arrived:
            logger.warning("attempt did not arrive, so another program gets it attempt=%s", taken)
            self.offer_again(taken)

    def _find(self, taken: str) -> _Open | None:
        """Return an attempt that is not over, and that no program took after this one."""
        name, _, number = taken.rpartition(".")
        found = self._open.get(name)
        if found is None or found.end.done() or number != str(found.takes):
            return None
        return found

    def follow(self, taken: str) -> OpenAttempt | None:
        """Return an attempt that is not over to the program that works on it."""
        found = self._find(taken)
        if found is None:
            return None
        found.has_arrived = found.is_held = True  # it may be late, and nobody else has it yet
        found.asked = time.monotonic()
        return OpenAttempt(id=taken, attempt=found.attempt)

    def offer_again(self, taken: str) -> None:
        """Let another program take an attempt: the one that asked for it has gone."""
        found = self._find(taken)
        if found is not None:
            found.is_held = False
            self._offered.set()

    def end(self, taken: str, report: AttemptReport) -> bool:
        """Note what came of an attempt; False where nobody waits for it from this program."""
        found = self._find(taken)
        if found is None:
            return False
        found.end.set_result(report)
        return True


class _Open:
    """One attempt, until the gateway closes it."""

    def __init__(self, attempt: AgentAttempt) -> None:
        self.attempt = attempt
        self.takes = 0
        """How often it was handed out."""
        self.is_held = False
        """A program has it."""
        self.took = 0.0
        """When one took it last, by the clock of `time.monotonic`."""
        self.has_arrived = False
        """The program has said so, by its first question about it."""
        self.asked = 0.0
        """When it asked last."""
        self.end: asyncio.Future[AttemptReport] = asyncio.get_running_loop().create_future()

    def end_if_gone(self) -> None:
        """Give the attempt back where its program asks for it no more."""
        is_asked_for = time.monotonic() - self.asked < GONE_S
        if self.is_held and self.has_arrived and not is_asked_for and not self.end.done():
            error = f"its program has not asked for it for {GONE_S:g} s"
            self.end.set_result(AttemptReport(exit="given_back", error=error))


def add_attempts(app: FastAPI, agents: AttachedAgents) -> None:
    """Add the routes that programs call, behind the token of the service."""
    describe(app, ROUTES)

    def over(name: str) -> HTTPException:
        return HTTPException(410, f"the attempt {name:.64} is over; ask for another one")

    @app.post("/attempts")
    async def take(request: Request) -> Response:
        left = parse_body(AttemptWanted, await request.body() or b"{}").wait_s
        taken = await agents.take(min(left, LOOK_S))
        while taken is None and (left := left - LOOK_S) > 0 and not await request.is_disconnected():
            taken = await agents.take(min(left, LOOK_S))
        if taken is None:
            return Response(status_code=204)
        if await request.is_disconnected():
            agents.offer_again(taken.id)
        return json_response(taken)

    @app.get("/attempts/{name}")
    async def find(name: str) -> Response:
        found = agents.follow(name)
        if found is None:
            raise over(name)
        return json_response(found)

    @app.post("/attempts/{name}/end")
    async def end(name: str, request: Request) -> Response:
        if not agents.end(name, parse_body(AttemptReport, await request.body())):
            raise over(name)
        return json_response(None)
