"""What all wires share of HTTP: keys, bodies, errors, and answers to connections that may end.

A wire reads a request with `read_request`, and returns an `AnswerResponse` of its `Answer`. Errors
are written in the form of the wire that was called.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Annotated, Any, ClassVar, NoReturn, Self, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from agent_r1.gateway.wire import (
    Asked,
    Begun,
    Ended,
    ErrorKind,
    Said,
    Session,
    Sessions,
    Waiting,
    WireError,
)
from agent_r1.runtime.http.api import parse_body
from agent_r1_proto.session_log import SessionTakenError

logger = logging.getLogger(__name__)

WRITE_TIMEOUT_S = 60.0
"""How long a client may take to read what was written, before its connection is given up."""
MAX_NOTED = 100
"""Names of what is ignored that are logged."""
STREAM_TYPE = "text/event-stream; charset=utf-8"
STATUSES: Mapping[ErrorKind, int] = {
    "invalid_request": 400,
    "context_full": 400,
    "no_session": 401,
    "ended": 410,
    "busy": 429,
    "too_large": 413,
    "unavailable": 503,
}
"""HTTP status of each kind of error, where a wire has no other one."""

B = TypeVar("B", bound=BaseModel)


class Body(BaseModel):
    """A body, or a part of one; a field that is not known is refused by its name."""

    model_config = ConfigDict(extra="forbid", strict=True)


class WireRequest(BaseModel):
    """Body of a request for a turn; a field that is not known is refused by its name."""

    model_config = ConfigDict(extra="allow", strict=True)
    sampling: ClassVar[frozenset[str]]
    """Parameters that are the task's."""
    changes_nothing: ClassVar[frozenset[str]]
    """Fields that make no difference to what is sampled."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        given = {name for name, value in self.others.items() if value is not None}
        unknown = sorted(given - self.sampling - self.changes_nothing)
        if unknown:
            names = ", ".join(f"{name:.40}" for name in unknown[:8])
            raise ValueError(f"unknown fields: {names}; leave them out")
        return self

    @property
    def others(self) -> dict[str, Any]:
        """Fields that make no difference to what is sampled."""
        return self.model_extra or {}

    def overruled(self) -> set[str]:
        """Return the names of its parameters that are the task's."""
        return {name for name in self.sampling if self.others.get(name) is not None}


class HostedToolsRequest(WireRequest):
    """Body of a request that may name tools which its provider would run."""

    own_tools: ClassVar[frozenset[str]]
    """Types of tools that the client runs; the policy is not offered others."""

    tools: Annotated[list[dict[str, JsonValue]] | None, Field(max_length=1024)] = None

    def hosted(self) -> set[str]:
        """Return the types of its tools that its provider would run."""
        kinds = {str(tool.get("type") or "custom") for tool in self.tools or ()}
        return kinds - self.own_tools


# -- requests ------------------------------------------------------------------------------------


async def find_session(sessions: Sessions, request: Request, session_id: str) -> Session:
    """Return the session that a request has the key of.

    Raises:
        WireError: there is none, or it has ended.
    """
    session = request.state.session = await sessions.find(session_id, key_of(request))
    return session


def key_of(request: Request) -> str:
    """Return the key of a request, as OpenAI's SDKs send it or as Anthropic's do; "" without."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    key = key.strip() if scheme.lower() == "bearer" else ""
    return key or request.headers.get("x-api-key", "")


async def read_request(model: type[B], request: Request) -> B:
    """Return the body of a request.

    Raises:
        WireError: it is no JSON, or does not fit.
    """
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        refuse("", f"content-type ({content_type!r:.100}) must be application/json; send JSON")
    try:
        return parse_body(model, await request.body())
    except HTTPException as exc:
        refuse("", exc.detail, exc)


def retries_of(request: Request) -> int:
    """Return how often a client says that it has sent a request before."""
    retries = request.headers.get("x-stainless-retry-count", "")
    return int(retries) if retries.isdecimal() and len(retries) < 4 else 0


def _note(names: set[str], noted: set[str], text: str) -> None:
    """Log names that a client has sent, each once; of the first ones, since it may send any."""
    for name in {f"{name:.40}" for name in names} - noted:
        if len(noted) < MAX_NOTED:
            noted.add(name)
            logger.warning(text, name)


def note_overruled(body: WireRequest, noted: set[str]) -> None:
    """Log parameters that are the task's, each once; `noted` has those that were logged."""
    _note(body.overruled(), noted, "parameter of an agent is the task's, so it is ignored name=%s")


def note_ignored(body: HostedToolsRequest, noted: set[str]) -> None:
    """Log what of a request is ignored, each once."""
    note_overruled(body, noted)
    _note(body.hosted(), noted, "tool that a provider would run is not offered type=%s")


def refuse(param: str, message: str, cause: Exception | None = None) -> NoReturn:
    """Refuse a request that is wrong.

    Raises:
        WireError: always.
    """
    raise WireError("invalid_request", message, param=param) from cause


def problem_of(error: Exception) -> str:
    """Return what is wrong with a part of a body."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    text = first["msg"].removeprefix("Value error, ")
    return f"{where}: {text}" if where else text


# -- errors --------------------------------------------------------------------------------------


class ErrorForm(ABC):
    """The form in which the clients of a wire read errors."""

    statuses: Mapping[ErrorKind, int] = STATUSES

    @abstractmethod
    def body(self, error: WireError) -> dict[str, Any]:
        """Return what a refusal says."""

    @abstractmethod
    def body_of_status(self, status: int, message: str) -> dict[str, Any]:
        """Return what a refusal says that comes before any wire."""

    def response(self, error: WireError) -> JSONResponse:
        """Return the answer to a request that is refused."""
        wait = error.retry_after_s
        headers = {} if wait is None else {"retry-after": str(math.ceil(wait))}
        return JSONResponse(self.body(error), self.statuses[error.kind], headers)


def failed(error: Exception, session: Session | None) -> WireError:
    """Return what a client may know of an error; one of ours is noted, and no agent's.

    Args:
        error: of a request.
        session: that it was for; None where it was not known yet.
    """
    if isinstance(error, WireError):
        return error
    if isinstance(error, SessionTakenError):
        return WireError("unavailable", f"{error}; send the request again")
    logger.error("a request of an agent failed", exc_info=error)
    if session is not None:
        session.note_fault(f"gateway_error: {type(error).__name__}: {error}")
    return WireError("unavailable", "the gateway failed; its log says why. Send the request again")


# -- answers -------------------------------------------------------------------------------------


class Answer(ABC):
    """The answer to one request, in pieces as they are written.

    Args:
        session: that is asked.
        asked: of it.
    """

    form: ErrorForm

    def __init__(self, session: Session, asked: Asked) -> None:
        self.session = session
        self.asked = asked
        self._turns: list[int] = []

    @abstractmethod
    def take(self, event: Begun | Said | Ended) -> bytes:
        """Return what is streamed of what has happened; b"" where nothing is."""

    @abstractmethod
    def finish(self) -> bytes:
        """Return the end of a stream, or the whole answer."""

    def ping(self) -> bytes:
        """Return what says in a stream that the connection is alive."""
        return b": ping\n\n"

    def failure(self, error: WireError) -> bytes:
        """Return what ends a stream that has begun and cannot go on."""
        return event(self.form.body(error))

    def refusal(self, error: WireError) -> Response:
        """Return the answer where nothing was begun."""
        return self.form.response(error)

    async def pieces(self) -> AsyncGenerator[bytes]:
        """Yield what is written; closing it ends what the session samples.

        Raises:
            WireError: the session refuses, or cannot go on.
        """
        is_streamed = self.asked.is_streamed
        async with aclosing(self.session.ask(self.asked)) as events:
            async for one in events:
                if isinstance(one, Begun):
                    self._turns.append(one.turn)
                piece = self.ping() if isinstance(one, Waiting) else self.take(one)
                if is_streamed and piece:
                    yield piece
        yield self.finish()

    async def delivered(self) -> None:
        """Tell the session that everything was written."""
        try:
            for turn in self._turns:
                await self.session.delivered(turn)
        except Exception as exc:
            self.error_of(exc)
            raise

    def error_of(self, error: Exception) -> WireError:
        """Return what the client may know of an error; one of ours is noted, and no agent's."""
        return failed(error, self.session)

    def release(self) -> None:
        """Tell the session that nothing more is written."""
        for turn in self._turns:
            self.session.release(turn)


def event(data: Mapping[str, Any] | str, name: str = "") -> bytes:
    """Return a server-sent event.

    Args:
        data: JSON, or what is to be written as JSON.
        name: of its type; "" where the wire has none.
    """
    text = data if isinstance(data, str) else json.dumps(data)
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {text}\n\n".encode()


class AnswerResponse(Response):
    """The writing of an answer to a connection that may end, or never be read."""

    def __init__(self, answer: Answer) -> None:
        self._is_streamed = answer.asked.is_streamed
        super().__init__(media_type=STREAM_TYPE if self._is_streamed else "application/json")
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            await self._tell(scope, receive, send)
        finally:
            self._answer.release()

    async def _tell(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_until_gone(receive))
        write = asyncio.create_task(self._write(scope, receive, send, gone))
        try:
            await asyncio.wait((gone, write), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            write.cancel()
            await asyncio.gather(gone, write, return_exceptions=True)
        if not write.cancelled() and write.result():
            # Not in the task, which ends with the connection: clients hang up once they have all.
            await self._answer.delivered()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(
        self, scope: Scope, receive: Receive, send: Send, gone: asyncio.Task[None]
    ) -> bool:
        """Write the answer but for its end, and return whether the client has all of it."""
        is_begun = False
        try:
            async with aclosing(self._answer.pieces()) as pieces:
                async for piece in pieces:
                    if not is_begun:
                        await self._start(send, None if self._is_streamed else len(piece))
                        is_begun = True
                    await _send(send, piece)
            await _send(send, b"")  # waits until little of the last piece is left in this process
        except _ClientStuckError:
            logger.warning("a client does not read, so its connection is given up")
            return False
        except Exception as exc:  # noqa: BLE001 - whatever it is, the client reads an error
            error = self._answer.error_of(exc)
            if not is_begun:
                await self._answer.refusal(error)(scope, receive, send)
            elif self._is_streamed:
                with suppress(_ClientStuckError):
                    await _send(send, self._answer.failure(error), more_body=False)
            return False
        # One turn of the loop, in which an end of the connection that came before is seen.
        await asyncio.sleep(0)
        return not gone.done()

    async def _start(self, send: Send, length: int | None) -> None:
        headers = {"content-type": str(self.media_type), "cache-control": "no-cache"}
        if length is not None:
            headers["content-length"] = str(length)
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})


class _ClientStuckError(Exception):
    """A client that does not read what is written."""


async def _send(send: Send, body: bytes, *, more_body: bool = True) -> None:
    """Write, once the client has read most of what was written before.

    Raises:
        _ClientStuckError: it has not.
    """
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await send({"type": "http.response.body", "body": body, "more_body": more_body})
    except TimeoutError as exc:
        raise _ClientStuckError from exc


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
