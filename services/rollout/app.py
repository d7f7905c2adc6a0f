"""HTTP routes of a rollout server: health, readiness, weight loads, the canary, and generation.

The learner calls `/weights/load` and `/weights/canary`; supervisors ask `/healthz` and `/readyz`;
samples come over the stream `tasks`, see attempts/worker.py. `/generate` samples for those who run
the rest of an interaction elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Literal

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from agent_r1.rollout.policy import Policy
from agent_r1.rollout.weight_versions import OlderVersionError, WeightVersions
from agent_r1.runtime.http.api import Route, describe, json_response, parse_body
from agent_r1.text.tokens import EngineDeadError, PolicyError
from agent_r1.weights.manifest import WeightsNotArrivedError, WeightsRefusedError
from agent_r1_proto.generation import GeneratedPart, GenerateRequest
from agent_r1_proto.messages import Message
from agent_r1_proto.weights import CanaryReply, CanaryRequest, LoadReply, LoadRequest


class RolloutHealth(Message):
    """Answer of `GET /healthz`."""

    status: Literal["ok", "dead"]
    server_id: str
    policy_version: int
    in_flight: int
    """Trajectories being worked on."""


class RolloutReadiness(Message):
    """Answer of `GET /readyz`."""

    ready: bool
    """Whether the server samples with the newest weights."""
    policy_version: int
    newest_version: int | None
    """Newest published version; None: the learner has published none, or Redis did not say in
    time."""


LINES_TYPE = "application/x-ndjson"
_DEAD = {"503": "The engine is dead, or Redis or the weights did not come in time."}
ROUTES = (
    Route("/healthz", "get", answer=RolloutHealth, errors=_DEAD),
    Route(
        "/readyz",
        "get",
        answer=RolloutReadiness,
        errors={"503": "The newest weights are not held, or it is not known which they are."},
    ),
    Route(
        "/weights/load",
        "post",
        LoadRequest,
        LoadReply,
        {
            **_DEAD,
            "409": "A newer version is held already.",
            "422": "The body does not fit the schema, or the weights cannot be used.",
        },
    ),
    Route(
        "/weights/canary",
        "post",
        CanaryRequest,
        CanaryReply,
        {**_DEAD, "422": "The body does not fit the schema, or cannot be scored."},
    ),
    Route(
        "/generate",
        "post",
        GenerateRequest,
        GeneratedPart,
        {
            "409": "A request of this id is in flight.",
            "422": "The body does not fit the schema, or the prompt leaves nothing to sample.",
            "503": "The engine is dead.",
        },
        answer_type=LINES_TYPE,
    ),
)


def create_app(
    *, server_id: str, policy: Policy, versions: WeightVersions, in_flight: Callable[[], int]
) -> FastAPI:
    """Build the application; it holds no state of its own.

    Args:
        server_id: name of the server.
        policy: asked whether it lives.
        versions: loads weights and scores tokens.
        in_flight: returns the number of trajectories being worked on.
    """
    app = FastAPI(title="Agent-R1 rollout", docs_url=None, redoc_url=None)
    describe(app, ROUTES)
    _add_probes(app, server_id, policy, versions, in_flight)
    _add_weights(app, versions)
    _add_generation(app, policy)
    return app


def _add_probes(
    app: FastAPI,
    server_id: str,
    policy: Policy,
    versions: WeightVersions,
    in_flight: Callable[[], int],
) -> None:
    @app.get("/healthz")
    async def health() -> Response:
        dead = policy.death is not None
        body = RolloutHealth(
            status="dead" if dead else "ok",
            server_id=server_id,
            policy_version=versions.held,
            in_flight=in_flight(),
        )
        return JSONResponse(body.model_dump(), status_code=503 if dead else 200)

    @app.get("/readyz")
    async def readiness() -> Response:
        try:
            newest = await versions.newest()
        except TimeoutError:
            newest = None
        body = RolloutReadiness(
            ready=newest is not None and versions.held >= newest.policy_version,
            policy_version=versions.held,
            newest_version=None if newest is None else newest.policy_version,
        )
        return JSONResponse(body.model_dump(), status_code=200 if body.ready else 503)


def _add_weights(app: FastAPI, versions: WeightVersions) -> None:
    @app.post("/weights/load")
    async def load_weights(request: Request) -> Response:
        body = parse_body(LoadRequest, await request.body())
        try:
            return json_response(await versions.load(body))
        except OlderVersionError as exc:
            raise HTTPException(409, str(exc)) from exc
        except (EngineDeadError, TimeoutError, WeightsNotArrivedError) as exc:
            raise HTTPException(503, str(exc)) from exc
        except WeightsRefusedError as exc:
            raise HTTPException(422, str(exc)) from exc

    @app.post("/weights/canary")
    async def score_canary(request: Request) -> Response:
        body = parse_body(CanaryRequest, await request.body())
        try:
            policy_version, logprobs = await versions.score(body.prompts())
        except EngineDeadError as exc:
            raise HTTPException(503, str(exc)) from exc
        except PolicyError as exc:
            raise HTTPException(422, str(exc)) from exc
        return json_response(CanaryReply(policy_version=policy_version, logprobs=logprobs))


def _add_generation(app: FastAPI, policy: Policy) -> None:
    @app.post("/generate", response_class=StreamingResponse)
    async def generate(request: Request) -> Response:
        body = parse_body(GenerateRequest, await request.body())
        try:
            parts = policy.stream(body)
        except EngineDeadError as exc:
            raise HTTPException(503, str(exc)) from exc
        except PolicyError as exc:
            raise HTTPException(422, str(exc)) from exc
        except ValueError as exc:
            raise HTTPException(409, str(exc)) from exc
        return StreamingResponse(_lines(parts, body.every_s), media_type=LINES_TYPE)


async def _lines(parts: AsyncGenerator[GeneratedPart], every_s: float) -> AsyncIterator[str]:
    """Yield parts as lines; a caller that goes away ends them, and the request in the engine."""
    waiting: list[GeneratedPart] = []
    due = 0.0
    async with aclosing(parts):
        try:
            async for part in parts:
                waiting.append(part)
                if part.finish_reason is None and time.monotonic() < due:
                    continue
                yield GeneratedPart.joined(waiting).model_dump_json() + "\n"
                waiting, due = [], time.monotonic() + every_s
        except PolicyError as exc:
            waiting.append(GeneratedPart(error=str(exc)))
            yield GeneratedPart.joined(waiting).model_dump_json() + "\n"
