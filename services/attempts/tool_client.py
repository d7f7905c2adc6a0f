"""HTTP client of the tool services: specs at start, calls and sessions while trajectories run.

rollout/call_runner.py calls through here; tool_discovery.py says which instance gets a call. A
reply is a `ToolReply` the model reads; anything else (timeout, lost connection, 5xx, a reply that
does not parse) is a `ToolOutageError`, which fails the attempt: tool_transport.py makes the
requests and has the table.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import jsonschema.protocols
from pydantic import JsonValue

from agent_r1.attempts.tool_discovery import POLL_S, ToolDirectory
from agent_r1.attempts.tool_transport import (
    FIRST_DELAY_S,
    LONGEST_DELAY_S,
    Endpoint,
    RequestError,
    ToolHttp,
)
from agent_r1.runtime.argument_schema import find_error, find_problem, make_validator
from agent_r1.runtime.http.token import RunToken
from agent_r1_proto.registry import ToolRegistry
from agent_r1_proto.tools import (
    CallReply,
    ForkRequest,
    SessionRequest,
    ToolCall,
    ToolResult,
    ToolSpec,
)

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
LONGEST_WAIT_S = 300.0
"""Longest time a call waits for a free place at a tool, besides its own time."""
MAX_ERROR_CHARS = 300
COMPOSE_PROFILES = {"python_exec": "python", "code_tests": "code"}
"""Profiles of docker-compose.yml, by the tool that each turns on."""

T = TypeVar("T")


class ToolOutageError(Exception):
    """A tool service did not do its part; never the model's failure.

    Attributes:
        reason: kind, tool and what happened, such as "tool_timeout: search: ..."; the
            trajectory's reason.
        attempts: requests that were made.
        instance: the one that had not answered when the time was up; "" after any other outage.
    """

    def __init__(
        self, kind: str, tool: str, detail: str, attempts: int, instance: str = ""
    ) -> None:
        self.reason = f"{kind}: {tool}: {detail}"
        super().__init__(self.reason)
        self.attempts = attempts
        self.instance = instance


@dataclass(frozen=True)
class ToolReply:
    """A tool service's answer to one call."""

    result: ToolResult
    version: str
    instance: str
    attempt: int
    """Retries before this answer."""
    latency_ms: float
    """Time from the first request to the answer."""


_Sent = tuple[ToolCall, asyncio.Future[tuple[CallReply, int]]]
"""A call that travels with others, and where its answer goes."""


@dataclass
class ToolClient:
    """Calls tools by name.

    Calls of a tool that answers several at once (`max_batch`), made within one turn of the event
    loop, travel in one request; a call that is retried travels alone, so that it cannot fail others
    twice.
    """

    urls: Mapping[str, str]
    """Base URL of the tools whose address is fixed, by name."""
    directory: ToolDirectory = field(default_factory=ToolDirectory)
    """Chooses instances."""
    registry: ToolRegistry | None = None
    """Registry in which the other tools announce themselves."""
    announced: Sequence[str] = ()
    """Names of those tools."""
    timeout_s: float = 30.0
    """Time for one call, retries included, waiting for a free place not."""
    retries: int = 3
    """Most retries of one call."""
    max_requests: int = 64
    """Most HTTP requests in flight for one tool; further ones wait, so that a slow tool cannot keep
    the others from being called."""
    token: RunToken | None = None
    """Token that is sent with every request."""
    own_tokens: Mapping[str, RunToken] = field(default_factory=dict[str, RunToken])
    """Tokens that are sent in its place to tools that have another one, by name."""
    _validators: dict[str, jsonschema.protocols.Validator] = field(default_factory=dict, init=False)
    _waiting: dict[tuple[str, str], list[_Sent]] = field(default_factory=dict, init=False)
    """Calls made within one turn of the event loop, by tool and instance."""
    _sends: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _sessions: dict[tuple[str, str], Endpoint] = field(default_factory=dict, init=False)
    _watching: asyncio.Task[None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Open the connection pool."""
        names = (*self.urls, *self.announced)
        self._http = ToolHttp(names, self.max_requests, self.token, self.own_tokens)

    @property
    def specs(self) -> dict[str, ToolSpec]:
        """Specifications of the tools, by name, once `start` has returned."""
        return self.directory.specs

    async def start(self, wait_s: float) -> None:
        """Learn what every tool is, waiting until the services answer or announce themselves.

        Raises:
            ValueError: a service did not answer in time, or is not the tool it should be.
        """
        urls = {name: url.rstrip("/") for name, url in self.urls.items()}
        specs = await asyncio.gather(
            *(self._http.fetch_spec(name, url, wait_s) for name, url in urls.items()),
            self._find_announced(wait_s),
        )
        for (name, url), spec in zip(urls.items(), specs[:-1], strict=True):
            assert spec is not None
            if spec.name != name:
                raise ValueError(
                    f"the service at {url} is the tool {spec.name!r}, expected "
                    f"{name!r}; correct tools.{name}.url or rename the table to [tools.{spec.name}]"
                )
            self.directory.add_fixed(name, url, spec)
        for name, spec in self.specs.items():
            _check_schema(name, spec)
        if self.registry is not None and self.announced:
            watch = self.directory.watch_forever(self.registry, self.announced)
            self._watching = asyncio.create_task(watch)

    async def _find_announced(self, wait_s: float) -> None:
        """Wait until every tool without a fixed URL has an instance."""
        if self.registry is None or not self.announced:
            return
        missing = list(self.announced)
        deadline = time.monotonic() + wait_s
        while True:
            states = await self.registry.read(missing)
            missing = [name for name in missing if not self.directory.update(name, states[name])]
            if not missing:
                return
            if time.monotonic() > deadline:
                raise ValueError(
                    f"no instance of {', '.join(missing)} is announced in the tool pool "
                    f"{self.registry.pool!r} after {wait_s:g} s; start one (`agent-r1 serve tool "
                    "CONFIG --name TOOL` with the same redis.url and run.tool_pool"
                    f"{_compose_line(missing)}), set tools.<name>.url, or raise "
                    "rollout.tool_start_timeout_s"
                )
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """Close the connections; calls in flight fail."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        for task in list(self._sends):
            task.cancel()
        await asyncio.gather(*self._sends, return_exceptions=True)
        await self._http.close()

    def argument_error(self, spec: ToolSpec, arguments: Mapping[str, JsonValue]) -> str | None:
        """Return why arguments do not fit a tool, in one line for the model; None if they do."""
        key = json.dumps(spec.parameters, sort_keys=True)
        if key not in self._validators:
            self._validators[key] = make_validator(spec.parameters)
        error = find_error(self._validators[key], arguments)
        if error is None:
            return None
        where = "/".join(str(step) for step in error.absolute_path)
        message = error.message[:MAX_ERROR_CHARS]
        return f"{where}: {message}" if where else message

    async def call(
        self,
        name: str,
        arguments: dict[str, JsonValue],
        *,
        rollout_id: str,
        turn: int,
        tool_context: JsonValue = None,
        version: str | None = None,
        deadline: float | None = None,
        timeout_s: float | None = None,
    ) -> ToolReply:
        """Run one call.

        Args:
            name: of the tool.
            arguments: that fit its schema.
            rollout_id: the attempt that calls.
            turn: of the model, from 0.
            tool_context: the task's.
            version: the pinned one; None takes what the weights say.
            deadline: monotonic seconds at which the trajectory's time is up.
            timeout_s: in place of the client's own.

        Raises:
            ToolOutageError: no usable answer within the time and retries allowed.
        """
        started = time.monotonic()

        async def send(endpoint: Endpoint, attempt: int, deadline: float) -> tuple[CallReply, int]:
            message = ToolCall(
                name=name,
                arguments=arguments,
                rollout_id=rollout_id,
                turn=turn,
                tool_context=tool_context,
                timeout_s=max(deadline - time.monotonic(), 0.001),
            )
            if attempt == 0 and self.directory.spec(name, version).max_batch > 1:
                return await self._send_together(name, endpoint, version, message)
            return await self._http.post_calls(endpoint, name, [message]), 0

        choose = partial(self._endpoint, name, rollout_id, version)
        found = await self._retrying(name, choose, send, deadline or math.inf, timeout_s)
        (reply, index), attempt = found
        return ToolReply(
            result=reply.results[index],
            version=reply.version,
            instance=reply.instance,
            attempt=attempt,
            latency_ms=(time.monotonic() - started) * 1000,
        )

    # -- sessions --------------------------------------------------------------------------------

    async def open_session(
        self, name: str, rollout_id: str, tool_context: JsonValue, version: str | None = None
    ) -> None:
        """Open a session; the rollout's calls of this tool then go to the same instance.

        Raises:
            ToolOutageError: no service opened it.
        """
        body = SessionRequest(rollout_id=rollout_id, tool_context=tool_context)
        choose = partial(self.directory.choose, name, version)
        await self._begin_session(name, rollout_id, "/open", body.model_dump_json(), choose)

    async def fork_session(self, name: str, rollout_id: str, fork_id: str) -> None:
        """Open a session in the state of another one, at the same instance.

        Raises:
            ToolOutageError: the service did not.
        """
        body = ForkRequest(rollout_id=rollout_id, fork_id=fork_id)
        choose = partial(self._endpoint, name, rollout_id, None)
        await self._begin_session(name, fork_id, "/fork", body.model_dump_json(), choose)

    async def _begin_session(
        self, name: str, session_id: str, path: str, body: str, choose: Callable[[], Endpoint]
    ) -> None:
        async def send(endpoint: Endpoint, attempt: int, deadline: float) -> None:
            # Noted before the answer: a session that was opened and not answered is closed too.
            self._sessions[name, session_id] = endpoint
            await self._http.post(endpoint, name, path, body)

        await self._retrying(name, choose, send)

    def holder(self, name: str, rollout_id: str) -> str:
        """Return the instance that holds a session; "" where none is open."""
        held = self._sessions.get((name, rollout_id))
        return "" if held is None else held.instance

    def resume_session(self, name: str, rollout_id: str, instance: str) -> None:
        """Take over a session that another client has opened.

        Raises:
            ToolOutageError: the instance that holds it is gone.
        """
        endpoint = self.directory.endpoints(name).get(instance)
        if endpoint is None:
            raise ToolOutageError("tool_session_lost", name, f"{instance} is gone", attempts=0)
        self._sessions[name, rollout_id] = endpoint

    async def close_session(self, name: str, rollout_id: str) -> None:
        """Close a session, if it can be reached: a lost one expires at the service."""
        endpoint = self._sessions.pop((name, rollout_id), None)
        if endpoint is None:
            return
        body = SessionRequest(rollout_id=rollout_id).model_dump_json()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._http.post(endpoint, name, "/close", body)
        except (TimeoutError, RequestError) as exc:
            logger.warning(
                "tool session not closed tool=%s rollout_id=%s error=%s", name, rollout_id, exc
            )

    # -- requests --------------------------------------------------------------------------------

    def _endpoint(self, name: str, rollout_id: str, version: str | None) -> Endpoint:
        """Return the instance for a call: that of the session, or one that is chosen."""
        held = self._sessions.get((name, rollout_id))
        if held is None:
            return self.directory.choose(name, version)
        if held.instance not in self.directory.endpoints(name):
            raise RequestError("tool_session_lost", f"the instance {held.instance} is gone")
        return held

    async def _retrying(
        self,
        name: str,
        choose: Callable[[], Endpoint],
        send: Callable[[Endpoint, int, float], Awaitable[T]],
        end: float = math.inf,
        timeout_s: float | None = None,
    ) -> tuple[T, int]:
        """Run `send(asked, attempt, deadline)` until it succeeds, or retries or time are used up.

        While no instance is there, waiting costs no retry; while all of a tool's places are taken,
        it costs no time either, up to `end`.
        """
        delay_s = FIRST_DELAY_S
        attempt = retries = 0
        problem = "no answer"
        asked: Endpoint | None = None
        began = time.monotonic()
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = min(began + limit_s, end)
        try:
            async with asyncio.timeout(max(deadline - began, 0)) as clock:
                while True:
                    try:
                        asked = choose()
                        return await send(asked, attempt, deadline), attempt
                    except RequestError as exc:
                        asked = None  # it has answered
                        if not self._may_resend(name, exc, retries, time.monotonic() - began):
                            raise ToolOutageError(exc.kind, name, str(exc), attempt + 1) from exc
                        logger.debug("tool call retried tool=%s error=%s", name, exc)
                        problem = str(exc)
                        kind = exc.kind
                    attempt += 1
                    retries += kind not in ("tool_absent", "tool_full")
                    pause_s = delay_s * random.uniform(0.5, 1.0)
                    delay_s = min(delay_s * 2, LONGEST_DELAY_S)
                    if kind == "tool_full":
                        left_s = min(pause_s + limit_s, end - time.monotonic())
                        deadline = time.monotonic() + left_s
                        clock.reschedule(asyncio.get_running_loop().time() + left_s)
                    await asyncio.sleep(pause_s)
        except TimeoutError as exc:
            key = "env.tool_timeout_s" if deadline < end else "env.trajectory_timeout_s"
            detail = f"nothing usable within {deadline - began:.3g} s ({key}): {problem}"
            # Behind a fixed URL may be any.
            instance = "" if asked is None or asked.version is None else asked.instance
            detail += f" from instance {instance}" if instance else ""
            raise ToolOutageError("tool_timeout", name, detail, attempt + 1, instance) from exc

    def _may_resend(self, name: str, exc: RequestError, retries: int, waited_s: float) -> bool:
        outage = exc.outage
        if not outage.resend or (outage.may_have_run and not self.specs[name].idempotent):
            return False
        if exc.kind == "tool_full":
            return waited_s < LONGEST_WAIT_S
        return retries < self.retries

    def _send_together(
        self, name: str, endpoint: Endpoint, version: str | None, call: ToolCall
    ) -> asyncio.Future[tuple[CallReply, int]]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[CallReply, int]] = loop.create_future()
        key = (name, endpoint.instance)
        if key not in self._waiting:
            self._waiting[key] = []
            size = self.directory.spec(name, version).max_batch
            loop.call_soon(self._flush, key, endpoint, size)
        self._waiting[key].append((call, future))
        return future

    def _flush(self, key: tuple[str, str], endpoint: Endpoint, size: int) -> None:
        calls = self._waiting.pop(key)
        for start in range(0, len(calls), size):
            batch = self._send_batch(endpoint, key[0], calls[start : start + size])
            task = asyncio.create_task(batch)
            self._sends.add(task)
            task.add_done_callback(self._sends.discard)

    async def _send_batch(self, endpoint: Endpoint, name: str, calls: list[_Sent]) -> None:
        try:
            # The callers' own deadlines end their waiting; this one ends the request.
            async with asyncio.timeout(max(call.timeout_s for call, _ in calls)):
                reply = await self._http.post_calls(endpoint, name, [call for call, _ in calls])
        except (TimeoutError, RequestError) as exc:
            failure: Exception = exc
            if isinstance(exc, RequestError) and not exc.outage.resend and len(calls) > 1:
                # One call may have spoilt the request for all: each tries again alone.
                failure = RequestError("tool_http_5xx", str(exc))
            for _, future in calls:
                if not future.done():
                    future.set_exception(failure)
        except asyncio.CancelledError:
            for _, future in calls:
                future.cancel()
            raise
        else:
            for index, (_, future) in enumerate(calls):
                if not future.done():
                    future.set_result((reply, index))


def _compose_line(missing: Sequence[str]) -> str:
    """Return the command that starts those of the tools that docker-compose.yml has off."""
    off = [COMPOSE_PROFILES[name] for name in missing if name in COMPOSE_PROFILES]
    profiles = "".join(f" --profile {profile}" for profile in off)
    return f"; with docker compose and its files, `docker compose{profiles} up -d`" if off else ""


def _check_schema(name: str, spec: ToolSpec) -> None:
    problem = find_problem(spec.parameters)
    if problem is not None:
        raise ValueError(
            f"parameters of the tool {name!r} are not a JSON Schema: {problem}; correct them in "
            "the tool, and start its service again"
        )
