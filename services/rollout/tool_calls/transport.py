"""The requests that client.py makes of tool services, and what can be wrong with the answers.

Every answer that cannot be used is a `RequestError` of a kind that outages.py lists.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Iterable

import aiohttp
import httpx
import httpx_aiohttp
from pydantic import ValidationError

from agent_r1.rollout.tool_calls.discovery import Endpoint
from agent_r1.rollout.tool_calls.outages import OUTAGES, RequestError
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
MAX_REPLY_BYTES = 16 << 20
JSON_HEADERS = {"content-type": "application/json"}
_KIND_OF = {
    409: "tool_session_lost",
    429: "tool_full",
    501: "tool_broken",
    503: "tool_busy",
    504: "tool_timeout",
}
"""The kind of outage that the status of an answer means, where it is one of its own."""
# What a lost connection may raise; httpx-aiohttp maps most of aiohttp's errors, not all.
CONNECTION_ERRORS = (httpx.TransportError, aiohttp.ClientError, OSError)
NOT_CONNECTED = (httpx.ConnectError, aiohttp.ClientConnectorError, ConnectionRefusedError)


class ToolHttp:
    """One connection pool for all tools.

    Args:
        names: of the tools.
        max_requests: most requests in flight for one tool; further ones wait, so that a slow tool
            cannot keep the others from being called.
        token: sent with every request.
    """

    def __init__(self, names: Iterable[str], max_requests: int, token: RunToken | None) -> None:
        self._slots = {name: asyncio.Semaphore(max_requests) for name in names}
        self._http = httpx_aiohttp.HttpxAiohttpClient(
            timeout=None,  # every request runs under its call's own deadline
            limits=httpx.Limits(max_connections=None),  # the slots bound them
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
                status, content = await self._exchange(url, body)
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

    async def _exchange(self, url: str, body: str) -> tuple[int, bytes]:
        """Return status and body; no more of the body than the limit is ever held."""
        chunks: list[bytes] = []
        size = 0
        headers = JSON_HEADERS | trace_headers()
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
                        response = await self._http.get(url)
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
