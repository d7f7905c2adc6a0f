"""What the launcher tells Prometheus: how its services are, and where to ask them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent_r1.config.run import Config, load_config
from agent_r1.launch import local_metrics
from agent_r1.launch.local_metrics import launcher_server
from agent_r1.launch.supervisor import ServiceState
from agent_r1.runtime.metrics import metrics_of
from tests.support.config_scene import write_scene

TOKEN = "0123456789abcdef"


class Services:
    """A supervisor of services that are as a test says."""

    def states(self) -> list[ServiceState]:
        return [
            ServiceState("redis", up=True, starts=1, url=""),
            ServiceState("search", up=True, starts=1, url="http://127.0.0.1:8001"),
            ServiceState("rollout-0", up=True, starts=1, url="http://127.0.0.1:8002"),
            ServiceState("rollout-1", up=False, starts=3, url="http://127.0.0.1:8003"),
            ServiceState("learner", up=False, starts=1, url=""),
        ]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    options = [f"run.token_file={token}"]
    return load_config(write_scene(tmp_path / "example"), options, {}).config


async def ask(url: str, path: str, token: str = TOKEN) -> httpx.Response:
    headers = {"authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client:
        return await client.get(path)


async def test_prometheus_is_told_of_every_service_that_answers(config: Config) -> None:
    services: Any = Services()
    async with launcher_server(config, services) as url:
        found = (await ask(url, "/targets")).json()
    jobs = {(one["targets"][0], one["labels"]["job"]) for one in found}
    assert jobs == {
        (url.removeprefix("http://"), "launcher"),
        ("127.0.0.1:8001", "tools"),
        ("127.0.0.1:8002", "rollout"),
        ("127.0.0.1:8003", "rollout"),
    }
    assert {one["labels"]["run"] for one in found} == {"demo"}


async def test_the_state_and_the_restarts_of_each_service_are_exported(config: Config) -> None:
    services: Any = Services()
    async with launcher_server(config, services) as url:
        page = (await ask(url, "/metrics")).text
    assert 'agent_r1_launcher_service_up{service="search"} 1.0' in page
    assert 'agent_r1_launcher_service_up{service="rollout-1"} 0.0' in page
    assert 'agent_r1_launcher_service_starts_total{service="rollout-1"} 3.0' in page
    names = set(re.findall(r"^(agent_r1_\w+)", page, re.MULTILINE))
    assert {one.name for one in metrics_of(local_metrics)} <= names


@pytest.mark.parametrize("path", ["/metrics", "/targets"])
async def test_without_the_token_nothing_is_said(config: Config, path: str) -> None:
    services: Any = Services()
    async with launcher_server(config, services) as url:
        assert (await ask(url, path, "another token 0123")).status_code == 401
