"""The learner's HTTP server, of rank 0: health, metrics, and what the weight transport serves.

train.py opens it before anything else, so that a port that is taken is said at once; the transport
of weights adds its files, reporting/prometheus.py the metrics.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Literal, Self

from fastapi import FastAPI, Response

from agent_r1.runtime.config import ListenConfig
from agent_r1.runtime.http.api import Route, describe, json_response
from agent_r1.runtime.http.serving import advertised_url, bind, serving
from agent_r1.runtime.http.token import RunToken
from agent_r1_proto.messages import Message

NAME = "learner.server"


class LearnerHealth(Message):
    """Answer of `GET /healthz`."""

    status: Literal["ok"] = "ok"


ROUTES = (Route("/healthz", "get", answer=LearnerHealth),)


class LearnerServer(AbstractAsyncContextManager["LearnerServer"]):
    """Serves an application while its context lasts; routes may be added meanwhile.

    Args:
        listen: where (`learner.server`).
        token: what every request must have.
    """

    def __init__(self, listen: ListenConfig, token: RunToken | None) -> None:
        self._listen = listen
        self._token = token
        self._open = AsyncExitStack()
        self.url = ""
        """Base URL, once it serves."""
        self.app = FastAPI(title="Agent-R1 learner", docs_url=None, redoc_url=None)
        describe(self.app, ROUTES)

        @self.app.get("/healthz")
        async def healthz() -> Response:
            return json_response(LearnerHealth())

    def serve_targets(self, find: Callable[[], Awaitable[list[dict[str, object]]]]) -> None:
        """Answer `GET /targets`: what Prometheus is to ask, as its service discovery wants it."""

        @self.app.get("/targets")
        async def targets() -> list[dict[str, object]]:
            return await find()

    async def __aenter__(self) -> Self:
        """Start to serve.

        Raises:
            ValueError: the address cannot be bound, is open to other machines without a token, or
                must be advertised under another name.
        """
        listener = bind(NAME, self._listen, self._token)
        self._open.callback(listener.close)
        try:
            self.url = advertised_url(NAME, self._listen, listener.getsockname()[1])
            server = serving(self.app, listener, self._listen, self._token)
            await self._open.enter_async_context(server)
        except BaseException:
            await self._open.aclose()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Stop to serve; pulls under way are cut off."""
        await self._open.aclose()
