"""Serve applications: a replica runs one process of a service: a rollout server, a tool, a gateway.

`serve deploy` or up.py --arguments--> `build` --> Replica --process.py--> `agent-r1 serve SERVICE
--join RUN_ID`, which takes everything from the learner and announces its own address in Redis.
Learner, rollout servers and tools talk to that address. Serve starts the process, replaces it when
it is ill, and stops it in order; requests to Serve's proxy are passed on to the same process.
"""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from pathlib import Path
from typing import Any, cast

import httpx
from pydantic import PositiveFloat
from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import AutoscalingContext
from starlette.requests import Request
from starlette.responses import Response

from agent_r1.config.host_settings import given_redis
from agent_r1.launch.service import is_healthy
from agent_r1.runtime.config import StrictConfig
from agent_r1_deploy.ray.process import Process
from agent_r1_proto.streams import Broker

POLL_S = 0.1
API_TIMEOUT_S = 60.0
PASSED_ON = ("authorization", "content-type")
"""Headers of a request that reach the service."""
WANTED = "wanted_servers"
"""Key of what a rollout server reports to the autoscaler."""


class Arguments(StrictConfig):
    """Arguments of one application."""

    service: str
    """`rollout`, `reward`, `gateway`, `agents`, or the name of a tool."""
    run_id: str
    redis_url: str
    """URL of Redis, without a password, which is in the environment of the nodes."""
    options: list[str] = []
    """`KEY=VALUE` texts for `--set`, above the configuration of the run."""
    stop_timeout_s: PositiveFloat = 60.0
    """Time the service gets to end in order, in seconds."""
    samples_per_server: PositiveFloat = 64.0
    """Rollout: samples for each server, of which `count_servers` makes a number of servers."""


class Replica:
    """One process of a service.

    Raises:
        RuntimeError: it ended before it was up; the log of the replica says why.
    """

    async def __init__(self, arguments: dict[str, Any]) -> None:  # Serve awaits it
        self._given = given = Arguments.model_validate(arguments)
        self._broker: Broker | None = None
        self._client = httpx.AsyncClient(timeout=API_TIMEOUT_S, trust_env=False)
        self._folder = tempfile.TemporaryDirectory(prefix="agent_r1_replica_")
        sets = [part for option in given.options for part in ("--set", option)]
        where = ("--join", given.run_id, "--redis", given.redis_url)
        self._process = await Process.start(
            ["serve", given.service, *where, *sets, "--announce-dir", self._folder.name],
            stop_timeout_s=given.stop_timeout_s,
        )
        announcement = Path(self._folder.name) / f"{given.service}.json"
        while not announcement.exists():
            self._require_running()
            await asyncio.sleep(POLL_S)
        self._url: str = json.loads(announcement.read_text())["url"]

    def _require_running(self) -> None:
        status = self._process.status
        if status is not None:
            raise RuntimeError(
                f"agent-r1 serve {self._given.service} ended with exit status {status}; the log "
                "of this replica says why"
            )

    async def check_health(self) -> None:
        """Raise unless the process runs and says that it is well."""
        self._require_running()
        if not await is_healthy(self._url):
            raise RuntimeError(f"{self._url}/healthz does not answer, or not with 200")

    async def __call__(self, request: Request) -> Response:
        """Pass a request on to the service, which asks for the run's token."""
        path = request.url.path.removeprefix(request.scope.get("root_path", ""))
        answer = await self._client.request(
            request.method,
            f"{self._url}{path}",
            params=str(request.query_params),
            headers={key: request.headers[key] for key in PASSED_ON if key in request.headers},
            content=await request.body(),
        )
        return Response(
            answer.content, answer.status_code, media_type=answer.headers.get("content-type")
        )

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return how many rollout servers the samples of the run need; Serve asks."""
        if self._given.service != "rollout":
            return {}
        if self._broker is None:
            url = given_redis(self._given.redis_url)
            self._broker = await Broker.connect(url, self._given.run_id)
        samples = await self._broker.depth(self._broker.keys.tasks)
        return {WANTED: samples / self._given.samples_per_server}

    async def __del__(self) -> None:
        """Let the service give back its samples, or finish its calls; Serve awaits it."""
        await self._process.stop()
        await self._client.aclose()
        if self._broker is not None:
            await self._broker.close()
        self._folder.cleanup()


DEPLOYMENT = cast(Deployment, serve.deployment(Replica))  # it says that it returns a function


def count_servers(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return how many rollout servers there should be; Serve keeps it within its bounds.

    Every server reports the same: the samples of the run that wait or run, in units of
    `samples_per_server`. If waiting ones alone counted, servers would be taken away as soon as they
    work on all of them.
    """
    reported = (context.aggregated_metrics or {}).get(WANTED, {}).values()
    return math.ceil(max(reported, default=context.target_num_replicas)), {}


def build(arguments: dict[str, Any]) -> Application:
    """Return the application of one service; `import_path` of a Serve configuration names this.

    Raises:
        ValidationError: an argument is missing, unknown or not allowed.
    """
    return DEPLOYMENT.bind(Arguments.model_validate(arguments).model_dump())
