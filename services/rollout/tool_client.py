"""HTTP client of the tool services: specs at start, calls and sessions while trajectories run.

agent_loop.py calls through here. A reply is a `ToolReply` the model reads; anything else (timeout,
lost connection, 5xx, a reply that does not parse) is a `ToolOutageError`, which fails the attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import aiohttp
import httpx
import httpx_aiohttp
import jsonschema
from jsonschema.exceptions import best_match
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from pydantic import JsonValue, ValidationError

from agent_r1_proto.tools import (
    CallReply,
    CallRequest,
    SessionRequest,
    ToolCall,
    ToolResult,
    ToolSpec,
)

logger = logging.getLogger(__name__)

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
SPEC_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 5.0
MAX_DETAIL_CHARS = 300
JSON_HEADERS = {"content-type": "application/json"}
# What a lost connection may raise; httpx-aiohttp maps most of aiohttp's errors, not all.
CONNECTION_ERRORS = (httpx.TransportError, aiohttp.ClientError, OSError)

T = TypeVar("T")


class ToolOutageError(Exception):
    """A tool service did not do its part; never the model's failure.

    Attributes:
        reason: kind and tool, such as "tool_timeout: search"; the trajectory's reason.
        attempts: requests that were made.
    """

    def __init__(self, kind: str, tool: str, detail: str, attempts: int) -> None:
        super().__init__(f"{kind}: {tool}: {detail}")
        self.reason = f"{kind}: {tool}"
        self.attempts = attempts


class _RetryableError(Exception):
    """A request that may succeed if sent again."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class _RefusedError(Exception):
    """A request that would fail again: the service and this client do not agree."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


@dataclass(frozen=True)
class ToolReply:
    """What a tool service answered to one call."""

    result: ToolResult
    version: str
    instance: str
    attempt: int
    """Retries before this answer."""
    latency_ms: float
    """From the first request to the answer."""


@dataclass
class _Waiting:
    """Calls of one tool made within one turn of the event loop; they travel together."""

    calls: list[tuple[ToolCall, asyncio.Future[tuple[CallReply, int]]]] = field(
        default_factory=list
    )


class ToolClient:
    """Calls tools by name.

    Calls made within one turn of the event loop travel in one request, up to the tool's
    `max_batch`; a call that is retried travels alone, so that it cannot fail others twice.

    Args:
        urls: base URL of every tool service, by name.
        timeout_s: time for one call, retries included.
        retries: most retries of one call.
        max_requests: most HTTP requests in flight; further ones wait.
    """

    def __init__(
        self,
        urls: Mapping[str, str],
        *,
        timeout_s: float = 30.0,
        retries: int = 3,
        max_requests: int = 64,
    ) -> None:
        self._urls = {name: url.rstrip("/") for name, url in urls.items()}
        self._timeout_s = timeout_s
        self._retries = retries
        self._slots = asyncio.Semaphore(max_requests)
        self._http = httpx_aiohttp.HttpxAiohttpClient(
            timeout=None,  # every request runs under its call's own deadline
            limits=httpx.Limits(max_connections=max_requests),
            trust_env=False,
        )
        self._validators: dict[str, Validator] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._sends: set[asyncio.Task[None]] = set()
        self._sessions: dict[tuple[str, str], str] = {}
        self.specs: dict[str, ToolSpec] = {}
        """What each tool is, by name, once `start` has returned."""

    async def start(self, wait_s: float) -> None:
        """Fetch every tool's spec, waiting until the services answer.

        Raises:
            ValueError: a service did not answer in time, or is not the tool it should be.
        """
        specs = await asyncio.gather(*(self._fetch_spec(name, wait_s) for name in self._urls))
        for name, spec in zip(self._urls, specs, strict=True):
            if spec.name != name:
                raise ValueError(
                    f"the service at {self.resolve(name)} is the tool {spec.name!r}, expected "
                    f"{name!r}; correct tools.{name}.url or rename the table to [tools.{spec.name}]"
                )
            validator = validator_for(spec.parameters, default=jsonschema.Draft202012Validator)
            try:
                validator.check_schema(spec.parameters)
            except jsonschema.SchemaError as exc:
                raise ValueError(
                    f"parameters of the tool {name!r} are not a JSON Schema: {exc.message}"
                ) from exc
            self._validators[name] = validator(spec.parameters)
            self.specs[name] = spec

    async def stop(self) -> None:
        """Close the connections; calls in flight fail."""
        for task in list(self._sends):
            task.cancel()
        await asyncio.gather(*self._sends, return_exceptions=True)
        await self._http.aclose()

    def resolve(self, name: str) -> str:
        """Return the base URL of an instance of a tool: the one place that decides it."""
        return self._urls[name]

    def argument_error(self, name: str, arguments: Mapping[str, JsonValue]) -> str | None:
        """Return why arguments do not fit a tool, in one line for the model; None if they do."""
        error = best_match(self._validators[name].iter_errors(arguments))
        if error is None:
            return None
        where = "/".join(str(step) for step in error.absolute_path)
        message = error.message[:MAX_DETAIL_CHARS]
        return f"{where}: {message}" if where else message

    async def call(
        self,
        name: str,
        arguments: dict[str, JsonValue],
        *,
        rollout_id: str,
        turn: int,
        tool_context: JsonValue = None,
    ) -> ToolReply:
        """Run one call.

        Raises:
            ToolOutageError: no usable answer within the time and retries allowed.
        """
        started = time.monotonic()
        deadline = started + self._timeout_s

        async def send(attempt: int) -> tuple[CallReply, int]:
            message = ToolCall(
                name=name,
                arguments=arguments,
                rollout_id=rollout_id,
                turn=turn,
                tool_context=tool_context,
                timeout_s=max(deadline - time.monotonic(), 0.001),
            )
            if attempt == 0 and self.specs[name].max_batch > 1:
                return await self._send_together(name, message)
            url = self._sessions.get((name, rollout_id)) or self.resolve(name)
            return await self._post_calls(url, name, [message]), 0

        (reply, index), attempt = await self._retrying(name, send, deadline)
        return ToolReply(
            result=reply.results[index],
            version=reply.version,
            instance=reply.instance,
            attempt=attempt,
            latency_ms=(time.monotonic() - started) * 1000,
        )

    # -- sessions --------------------------------------------------------------------------------

    async def open_session(self, name: str, rollout_id: str, tool_context: JsonValue) -> None:
        """Open a session; the rollout's calls of this tool then go to the same instance.

        Raises:
            ToolOutageError: the service did not open it.
        """
        url = self.resolve(name)
        self._sessions[name, rollout_id] = url
        body = SessionRequest(rollout_id=rollout_id, tool_context=tool_context).model_dump_json()

        async def send(attempt: int) -> None:
            await self._post(f"{url}/open", body)

        await self._retrying(name, send, time.monotonic() + self._timeout_s)

    async def close_session(self, name: str, rollout_id: str) -> None:
        """Close a session, if it can be reached: a lost one expires at the service."""
        url = self._sessions.pop((name, rollout_id), None)
        if url is None:
            return
        body = SessionRequest(rollout_id=rollout_id).model_dump_json()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._post(f"{url}/close", body)
        except (TimeoutError, _RetryableError, _RefusedError) as exc:
            logger.warning(
                "tool session not closed tool=%s rollout_id=%s error=%s", name, rollout_id, exc
            )

    # -- requests --------------------------------------------------------------------------------

    async def _retrying(
        self, name: str, send: Callable[[int], Awaitable[T]], deadline: float
    ) -> tuple[T, int]:
        """Run `send(attempt)` until it succeeds, the retries are used up or the deadline passes."""
        delay_s = FIRST_DELAY_S
        attempt = 0
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
                while True:
                    try:
                        return await send(attempt), attempt
                    except _RetryableError as exc:
                        if attempt == self._retries:
                            raise ToolOutageError(exc.kind, name, str(exc), attempt + 1) from exc
                        logger.debug("tool call retried tool=%s error=%s", name, exc)
                    attempt += 1
                    await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
                    delay_s = min(delay_s * 2, LONGEST_DELAY_S)
        except TimeoutError as exc:
            detail = f"no answer within {self._timeout_s:g} s (env.tool_timeout_s)"
            raise ToolOutageError("tool_timeout", name, detail, attempt + 1) from exc
        except _RefusedError as exc:
            raise ToolOutageError(exc.kind, name, str(exc), attempt + 1) from exc

    def _send_together(self, name: str, call: ToolCall) -> asyncio.Future[tuple[CallReply, int]]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[CallReply, int]] = loop.create_future()
        url = self._sessions.get((name, call.rollout_id)) or self.resolve(name)
        key = f"{name} {url}"
        if key not in self._waiting:
            self._waiting[key] = _Waiting()
            loop.call_soon(self._flush, key, name, url)
        self._waiting[key].calls.append((call, future))
        return future

    def _flush(self, key: str, name: str, url: str) -> None:
        calls = self._waiting.pop(key).calls
        size = self.specs[name].max_batch
        for start in range(0, len(calls), size):
            task = asyncio.create_task(self._send_batch(url, name, calls[start : start + size]))
            self._sends.add(task)
            task.add_done_callback(self._sends.discard)

    async def _send_batch(
        self,
        url: str,
        name: str,
        calls: list[tuple[ToolCall, asyncio.Future[tuple[CallReply, int]]]],
    ) -> None:
        try:
            # The callers' own deadlines end their waiting; this one ends the request.
            async with asyncio.timeout(max(call.timeout_s for call, _ in calls)):
                reply = await self._post_calls(url, name, [call for call, _ in calls])
        except (TimeoutError, _RetryableError, _RefusedError) as exc:
            failure: Exception = exc
            if isinstance(exc, _RefusedError) and len(calls) > 1:
                # One call may have spoilt the request for all: each tries again alone.
                failure = _RetryableError(exc.kind, str(exc))
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

    async def _post_calls(self, url: str, name: str, calls: list[ToolCall]) -> CallReply:
        response = await self._post(f"{url}/call", CallRequest(calls=calls).model_dump_json())
        try:
            reply = CallReply.model_validate_json(response.content)
        except ValidationError as exc:
            first = exc.errors(include_url=False)[0]
            where = ".".join(str(step) for step in first["loc"])
            raise _RefusedError(
                "tool_bad_reply", f"the reply does not parse: {where}: {first['msg']}"
            ) from exc
        if len(reply.results) != len(calls):
            raise _RefusedError(
                "tool_bad_reply", f"{len(reply.results)} results for {len(calls)} calls"
            )
        return reply

    async def _post(self, url: str, body: str) -> httpx.Response:
        async with self._slots:
            try:
                response = await self._http.post(url, content=body, headers=JSON_HEADERS)
            except CONNECTION_ERRORS as exc:
                detail = f"{url}: {type(exc).__name__}: {exc}"
                raise _RetryableError("tool_unreachable", detail) from exc
        if response.status_code == httpx.codes.OK:
            return response
        detail = f"{url} answered {response.status_code}: {response.text[:MAX_DETAIL_CHARS]}"
        if response.status_code == httpx.codes.GATEWAY_TIMEOUT:
            raise _RefusedError("tool_timeout", detail)
        kind = f"tool_http_{response.status_code}"
        if response.status_code >= 500 or response.status_code == httpx.codes.TOO_MANY_REQUESTS:
            raise _RetryableError(kind, detail)
        raise _RefusedError(kind, detail)

    async def _fetch_spec(self, name: str, wait_s: float) -> ToolSpec:
        url = f"{self.resolve(name)}/spec"
        deadline = time.monotonic() + wait_s
        delay_s = FIRST_DELAY_S
        problem = ""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SPEC_TIMEOUT_S):
                    try:
                        response = await self._http.get(url)
                        if response.status_code == httpx.codes.OK:
                            return ToolSpec.model_validate_json(response.content)
                        problem = f"it answered {response.status_code}"
                    except CONNECTION_ERRORS as exc:
                        problem = f"{type(exc).__name__}: {exc}"
                    except ValidationError as exc:
                        raise ValueError(f"the spec at {url} does not parse: {exc}") from exc
            if time.monotonic() + delay_s > deadline:
                raise ValueError(
                    f"the tool {name!r} did not answer at {url} within {wait_s:g} s "
                    f"({problem or 'no answer'}); start it, correct tools.{name}.url, or raise "
                    "rollout.tool_start_timeout_s"
                )
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(delay_s * 2, LONGEST_DELAY_S)
