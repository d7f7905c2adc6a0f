"""The requests that tool_client.py makes of tool services, and what can be wrong with the answers.

Two kinds of things go wrong. What the model or the tool itself did is answered to the model as
text, and the trajectory continues (rollout/call_runner.py, `status` of the call record). What a
service or the network did is an outage: no token of it is trained on, and the attempt ends as
FAILED.

| what happened | call status | becomes |
|---|---|---|
| the call does not parse, or its arguments break the schema | malformed | text for the model |
| a tool that is not offered | unknown_tool | text for the model |
| more calls in a turn than `env.max_calls_per_turn` | over_limit | text for the model |
| the tool's own error answer, an exception in the user's `call` | error | text for the model |
| an outage, by its kind: see OUTAGES | failed | the attempt is FAILED and tried again |
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass

import aiohttp
import httpx
import httpx_aiohttp
from pydantic import ValidationError

from agent_r1.runtime.http import MAX_DETAIL_CHARS
from agent_r1.runtime.http.token import RunToken, token_headers
from agent_r1.runtime.tracing import trace_headers
from agent_r1.runtime.unicode import repair_text
from agent_r1_proto.tools import CallReply, CallRequest, ToolCall, ToolSpec

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
SPEC_TIMEOUT_S = 10.0
SLOT_TIMEOUT_S = 1.0
"""Longest time a request waits for others of its tool; then its call tries anew, with all its time.
"""
BREAKER_FAILURES = 3
"""Failures in a row that open an instance's circuit breaker."""
BREAKER_OPEN_S = 2.0
"""Time for which an open breaker keeps calls away; then one call tries."""
MAX_REPLY_BYTES = 16 << 20
JSON_HEADERS = {"content-type": "application/json"}
_KIND_OF = {
    409: "tool_session_lost",
    429: "tool_full",
    501: "tool_broken",
    503: "tool_busy",
    504: "tool_timeout",
}
"""Kind of outage that the status of an answer means, where it is one of its own."""
# What a lost connection may raise; httpx-aiohttp maps most of aiohttp's errors, not all.
CONNECTION_ERRORS = (httpx.TransportError, aiohttp.ClientError, OSError)
NOT_CONNECTED = (httpx.ConnectError, aiohttp.ClientConnectorError, ConnectionRefusedError)


@dataclass(frozen=True)
class Outage:
    """One kind of outage, and its treatment."""

    means: str
    resend: bool
    """Send the call again, within its deadline."""
    may_have_run: bool = True
    """The tool may have carried the call out: a tool that is not idempotent is not asked again."""
    free_attempt: bool = False
    """The next attempt does not count against `max_attempts`: nothing is wrong with the sample."""


OUTAGES: dict[str, Outage] = {
    "tool_refused": Outage("no connection could be made", resend=True, may_have_run=False),
    "tool_unreachable": Outage("the connection was lost under way", resend=True),
    "tool_full": Outage("429: no free place to run in", resend=True, may_have_run=False),
    "tool_busy": Outage("503: overloaded, draining or down", resend=True, may_have_run=False),
    "tool_broken": Outage(
        "501: the tool's own code is wrong (`call` returned no result, or `open` raised)",
        resend=False,
    ),
    "tool_http_5xx": Outage("another 5xx answer", resend=True),
    "tool_http_4xx": Outage("the service does not take the request", resend=False),
    "tool_absent": Outage("no instance is announced", resend=True, may_have_run=False),
    "tool_moved": Outage("another version answered at this address", resend=True),
    "tool_bad_reply": Outage("an answer that does not parse", resend=False),
    "tool_too_large": Outage("an answer over the size limit", resend=False),
    "tool_timeout": Outage("no answer within env.tool_timeout_s", resend=False),
    "tool_version_gone": Outage(
        "the last instance of the pinned version is gone", resend=False, free_attempt=True
    ),
    "tool_session_lost": Outage(
        "the instance that holds the session is gone, or has closed it",
        resend=False,
        free_attempt=True,
    ),
}
"""Kinds of outage; a trajectory's `reason` begins with one."""


class RequestError(Exception):
    """A request that gave no usable answer, or could not be made; `kind` is a key of OUTAGES."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.outage = OUTAGES[kind]


@dataclass
class Endpoint:
    """One instance as this process sees it."""

    url: str
    instance: str
    version: str | None
    """Version that it serves; None: a fixed URL, whatever version answers there."""
    capacity: int = 1
    draining: bool = False
    in_flight: int = 0
    failures: int = 0
    """Failures in a row."""
    open_until: float = 0.0
    """Monotonic seconds until which its circuit breaker keeps calls away."""

    def succeeded(self) -> None:
        """Close the breaker."""
        self.failures = 0
        self.open_until = 0.0

    def failed(self, now: float, *, unreachable: bool) -> None:
        """Count a failure; a lost connection opens the breaker at once."""
        self.failures += 1
        if unreachable or self.failures >= BREAKER_FAILURES:
            self.open_until = now + BREAKER_OPEN_S

    @property
    def load(self) -> float:
        """Calls in flight from here, as a share of what it takes."""
        return self.in_flight / self.capacity


class ToolHttp:
    """One connection pool for all tools.

    Args:
        names: of the tools.
        max_requests: most requests in flight for one tool; further ones wait, so that a slow tool
            cannot keep the others from being called.
        token: sent with every request.
        own_tokens: sent in its place to tools that have another one, by name.
    """

    def __init__(
        self,
        names: Iterable[str],
        max_requests: int,
        token: RunToken | None,
        own_tokens: Mapping[str, RunToken],
    ) -> None:
        self._slots = {name: asyncio.Semaphore(max_requests) for name in names}
        self._headers = {name: token_headers(own) for name, own in own_tokens.items()}
        self._http = httpx_aiohttp.HttpxAiohttpClient(
            timeout=None,  # every request runs under its call's own deadline
            limits=httpx.Limits(
                max_connections=0
            ),  # no limit, while None is 100; the slots bound them
            trust_env=False,
            headers=token_headers(token),
        )

    async def close(self) -> None:
        """Close the connections; requests in flight fail."""
        await self._http.aclose()

    async def post_calls(self, endpoint: Endpoint, name: str, calls: list[ToolCall]) -> CallReply:
        """Send calls in one request.

        Raises:
            RequestError: there is no usable answer.
        """
        body = CallRequest(calls=calls).model_dump_json()
        content = await self.post(endpoint, name, "/call", body, weight=len(calls))
        try:
            reply = CallReply.model_validate_json(content)
        except ValidationError as exc:
            first = exc.errors(include_url=False)[0]
            where = ".".join(str(step) for step in first["loc"])
            raise RequestError(
                "tool_bad_reply", f"the reply does not parse: {where}: {first['msg']}"
            ) from exc
        if len(reply.results) != len(calls):
            raise RequestError(
                "tool_bad_reply", f"{len(reply.results)} results for {len(calls)} calls"
            )
        if endpoint.version not in (None, reply.version):
            endpoint.failed(time.monotonic(), unreachable=True)
            raise RequestError(
                "tool_moved",
                f"{endpoint.url} answered as version {reply.version} and was announced as "
                f"{endpoint.version}",
            )
        return reply

    async def post(
        self, endpoint: Endpoint, name: str, path: str, body: str, weight: int = 1
    ) -> bytes:
        """Send one request; return the body of a 200 answer.

        Raises:
            RequestError: there is no usable answer.
        """
        url = endpoint.url + path
        endpoint.in_flight += weight
        try:
            async with self._slot(name):
                status, content = await self._exchange(url, body, self._headers.get(name, {}))
        except httpx.DecodingError as exc:
            detail = f"{url}: the answer is not in the encoding that its headers name: {exc}"
            raise RequestError("tool_bad_reply", detail) from exc
        except CONNECTION_ERRORS as exc:
            endpoint.failed(time.monotonic(), unreachable=True)
            kind = "tool_refused" if isinstance(exc, NOT_CONNECTED) else "tool_unreachable"
            raise RequestError(kind, f"{url}: {type(exc).__name__}: {exc}") from exc
        finally:
            endpoint.in_flight -= weight
        if status == httpx.codes.OK:
            endpoint.succeeded()
            return content
        kind = _kind_of(status)
        if OUTAGES[kind].resend and kind != "tool_full":
            endpoint.failed(time.monotonic(), unreachable=False)
        raise RequestError(kind, f"{_error_text(content)} ({url} answered {status})")

    @contextlib.asynccontextmanager
    async def _slot(self, name: str) -> AsyncIterator[None]:
        slots = self._slots[name]
        try:
            async with asyncio.timeout(SLOT_TIMEOUT_S):
                await slots.acquire()
        except TimeoutError as exc:
            raise RequestError("tool_full", f"{SLOT_TIMEOUT_S:g} s without a free slot") from exc
        try:
            yield
        finally:
            slots.release()

    async def _exchange(self, url: str, body: str, more: dict[str, str]) -> tuple[int, bytes]:
        """Return status and body; no more of the body than the limit is ever held."""
        chunks: list[bytes] = []
        size = 0
        headers = JSON_HEADERS | trace_headers() | more
        async with self._http.stream("POST", url, content=body, headers=headers) as response:
            async for chunk in response.aiter_bytes():
                chunks.append(chunk)
                size += len(chunk)
                if size > MAX_REPLY_BYTES:
                    raise RequestError(
                        "tool_too_large", f"{url} answers more than {MAX_REPLY_BYTES} bytes"
                    )
        return response.status_code, b"".join(chunks)

    async def fetch_spec(self, name: str, base_url: str, wait_s: float) -> ToolSpec:
        """Ask a service what it is, until it answers.

        Raises:
            ValueError: it did not within `wait_s`, it refuses the run's token, or what it answers
                is no `ToolSpec`.
        """
        url = f"{base_url}/spec"
        deadline = time.monotonic() + wait_s
        delay_s = FIRST_DELAY_S
        problem = ""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SPEC_TIMEOUT_S):
                    try:
                        response = await self._http.get(url, headers=self._headers.get(name))
                        if response.status_code == httpx.codes.OK:
                            return ToolSpec.model_validate_json(response.content)
                        if response.status_code == httpx.codes.UNAUTHORIZED:
                            raise ValueError(
                                f"the tool {name!r} refuses this run: "
                                f"{_error_text(response.content)}"
                            )
                        problem = f"it answered {response.status_code}"
                    except (*CONNECTION_ERRORS, httpx.DecodingError) as exc:
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


def _error_text(content: bytes) -> str:
    """Return what a refusal says: `detail` of our own services, or the beginning of the body."""
    try:
        said = json.loads(content)["detail"]
    except (ValueError, KeyError, TypeError):
        said = content[:MAX_DETAIL_CHARS].decode(errors="replace")
    return repair_text(str(said)[:MAX_DETAIL_CHARS]) or "no reason given"


def _kind_of(status: int) -> str:
    """Return what an answer with a status other than 200 is: a key of OUTAGES."""
    return _KIND_OF.get(status, "tool_http_5xx" if status >= 500 else "tool_http_4xx")
