"""The HTTP side of the reward service: scores one interaction per request.

Reads `ScoreRequest` from clients that have no stream (evaluation of foreign trajectories, users'
own loops), writes `Reward`. Rollout servers that search ask `POST /value` about branches which have
not ended. Training goes through `worker.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable

from fastapi import FastAPI, HTTPException, Request, Response

from agent_r1.reward.metrics import reward_page
from agent_r1.reward.scorer import ComponentError, Scorer
from agent_r1.reward.worker import RewardWorker
from agent_r1.runtime.http.api import Route, describe, json_response, parse_body
from agent_r1_proto.messages import Message
from agent_r1_proto.rewards import Reward, ScoreRequest, Value, ValueRequest

logger = logging.getLogger(__name__)


class RewardHealth(Message):
    """Answer of `GET /healthz`."""

    status: str = "ok"
    in_flight: int = 0
    """Trajectories being scored."""
    scored: int = 0
    """Trajectories scored since the start."""
    passed_on_failed: int = 0
    """FAILED trajectories passed on without a reward."""
    dead_lettered: int = 0


ROUTES = (
    Route("/healthz", "get", answer=RewardHealth),
    Route(
        "/score",
        "post",
        ScoreRequest,
        Reward,
        {
            "422": "The body does not fit the schema, or a component cannot read it.",
            "500": "A component failed.",
        },
    ),
    Route(
        "/value",
        "post",
        ValueRequest,
        Value,
        {
            "422": "The body does not fit the schema, or the component cannot score a branch.",
            "500": "The component failed.",
        },
    ),
)


def create_app(scorer: Scorer, worker: RewardWorker | None = None) -> FastAPI:
    """Return the web application: `POST /score`, `/healthz` and, of a worker, `/metrics`."""
    app = FastAPI(title="Agent-R1 reward")
    describe(app, ROUTES)
    if worker is not None:
        reward_page(worker, scorer.asking).add_route(app)

    @app.get("/healthz")
    async def healthz() -> Response:
        health = RewardHealth()
        if worker is not None:
            health = RewardHealth(
                in_flight=worker.num_in_flight,
                scored=worker.num_scored,
                passed_on_failed=worker.num_passed,
                dead_lettered=worker.num_dead,
            )
        return json_response(health)

    @app.post("/score")
    async def score(request: Request) -> Response:
        body = parse_body(ScoreRequest, await request.body())
        return await answered(scorer.score(body))

    @app.post("/value")
    async def value(request: Request) -> Response:
        body = parse_body(ValueRequest, await request.body())
        return await answered(scorer.value(body.component, body.interaction))

    async def answered(scoring: Awaitable[Message]) -> Response:
        try:
            return json_response(await scoring)
        except ValueError as exc:
            raise HTTPException(422, str(exc)) from exc
        except ComponentError as exc:
            logger.exception("scoring failed")
            raise HTTPException(500, str(exc)) from exc

    return app
