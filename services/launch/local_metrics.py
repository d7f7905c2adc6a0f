"""The launcher's HTTP server: its numbers, and where Prometheus finds the services of the run.

local.py --Supervisor--> here --> `GET /metrics`, `GET /targets`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator

from fastapi import FastAPI

from agent_r1.config.run import Config
from agent_r1.launch.supervisor import Supervisor
from agent_r1.runtime.http.serving import advertised_url, bind, serving
from agent_r1.runtime.http.token import find_token
from agent_r1.runtime.metrics import Metric, MetricsPage, scrape_target

logger = logging.getLogger(__name__)

NAME = "placement.metrics_server"

SERVICE_UP = Metric(
    "agent_r1_launcher_service_up", "gauge", "1 for a service that is up, else 0.", ("service",)
)
STARTS = Metric(
    "agent_r1_launcher_service_starts_total",
    "counter",
    "Starts of a service; the first is none of its restarts.",
    ("service",),
)


@contextlib.asynccontextmanager
async def launcher_server(config: Config, supervisor: Supervisor) -> AsyncIterator[str]:
    """Serve while the context lasts.

    Args:
        config: of the services.
        supervisor: asked how they are.

    Yields:
        The base URL.

    Raises:
        ValueError: the address cannot be bound, or is open to other machines without a token.
    """
    listen, token = config.placement.metrics_server, find_token(config.run)
    app = FastAPI(title="Agent-R1 launcher", docs_url=None, redoc_url=None)
    _page(supervisor).add_route(app)
    listener = bind(NAME, listen, token)
    with contextlib.closing(listener):
        url = advertised_url(NAME, listen, listener.getsockname()[1])

        @app.get("/targets")
        async def targets() -> list[dict[str, object]]:
            run = config.run.id
            found = [
                scrape_target(one.url, _job(config, one.name), run)
                for one in supervisor.states()
                if one.url
            ]
            return [scrape_target(url, "launcher", run), *found]

        async with serving(app, listener, listen, token):
            logger.info("launcher serves metrics url=%s", url)
            yield url


def _page(supervisor: Supervisor) -> MetricsPage:
    page = MetricsPage("launcher")
    page.read(SERVICE_UP, lambda: {(one.name,): one.up for one in supervisor.states()})
    page.read(STARTS, lambda: {(one.name,): one.starts for one in supervisor.states()})
    return page


def _job(config: Config, name: str) -> str:
    if name in config.tools:
        return "tools"
    return "rollout" if name.startswith("rollout") else name
