"""The learner's HTTP server, of rank 0: health, metrics, and what the weight transport serves.

train.py opens it before anything else, so that a port that is taken is said at once; the transport
of weights adds its files, reporting/prometheus.py the metrics.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from typing import Literal

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


@dataclass
class LearnerServer:
    """A server that is up; routes may be added meanwhile."""

    app: FastAPI
    url: str
    """Base URL."""

    def serve_targets(self, find: Callable[[], Awaitable[list[dict[str, object]]]]) -> None:
        """Answer `GET /targets`: what Prometheus is to ask, as its service discovery wants it."""

        @self.app.get("/targets")
        async def targets() -> list[dict[str, object]]:
            return await find()


@asynccontextmanager
async def serve_learner(
    listen: ListenConfig, token: RunToken | None
) -> AsyncIterator[LearnerServer]:
    """Serve the learner's application inside the block; pulls under way are cut off at its end.

    Args:
        listen: where (`learner.server`).
        token: what every request must have.

    Raises:
        ValueError: the address cannot be bound, is open to other machines without a token, or must
            be advertised under another name.
    """
    app = FastAPI(title="Agent-R1 learner", docs_url=None, redoc_url=None)
    describe(app, ROUTES)

    @app.get("/healthz")
    async def healthz() -> Response:
        return json_response(LearnerHealth())

    with closing(bind(NAME, listen, token)) as listener:
        url = advertised_url(NAME, listen, listener.getsockname()[1])
        async with serving(app, listener, listen, token):
            yield LearnerServer(app, url)
