"""The HTTP side of the reward service: scores one finished interaction per request.

Reads `ScoreRequest` from clients that have no stream (evaluation of foreign trajectories, users'
own loops), writes `Reward`. Training goes through `worker.py`.
"""

from __future__ import annotations

import logging

from fastapi import FastAPI, HTTPException, Request, Response
from pydantic import ValidationError

from agent_r1.reward.scorer import ComponentError, Scorer
from agent_r1.reward.worker import RewardWorker
from agent_r1_proto.messages import Message
from agent_r1_proto.rewards import ScoreRequest

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 << 20


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


def create_app(scorer: Scorer, worker: RewardWorker | None = None) -> FastAPI:
    """Return the web application: `POST /score` and `GET /healthz`.

    Args:
        scorer: computes the rewards.
        worker: the stream worker of this process, for the counts of `/healthz`.
    """
    app = FastAPI(title="Agent-R1 reward")

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
        return _json(health)

    @app.post("/score")
    async def score(request: Request) -> Response:
        body = _parse(await request.body())
        try:
            return _json(await scorer.score(body))
        except ValueError as exc:
            raise HTTPException(422, str(exc)) from exc
        except ComponentError as exc:
            logger.exception("scoring failed")
            raise HTTPException(500, str(exc)) from exc

    return app


def _parse(body: bytes) -> ScoreRequest:
    if len(body) > MAX_BODY_BYTES:
        raise HTTPException(
            413, f"the body has {len(body)} bytes; the limit is {MAX_BODY_BYTES}; send less text"
        )
    try:
        return ScoreRequest.model_validate_json(body)
    except ValidationError as exc:
        problems = "; ".join(
            f"{'.'.join(map(str, error['loc'])) or 'body'}: {error['msg']} "
            f"(got {error['input']!r:.100})"
            for error in exc.errors(include_url=False)
        )
        raise HTTPException(
            422, f"the body is not a ScoreRequest: {problems}; correct the named fields"
        ) from exc


def _json(message: Message) -> Response:
    return Response(message.model_dump_json(), media_type="application/json")
