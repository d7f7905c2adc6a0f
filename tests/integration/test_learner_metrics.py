"""What the learner's HTTP server says of a run that trains."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import pytest

from agent_r1.learner.reporting import prometheus
from agent_r1.learner.train import Learner
from agent_r1.runtime.metrics import metrics_of
from agent_r1_proto.registry import ToolRegistry
from agent_r1_proto.streams import Broker
from agent_r1_proto.tool_pool import ToolInstance
from agent_r1_proto.tools import ToolSpec
from tests.support.learner_fakes import FakeEngine, FakeServices, eventually, training_spec
from tests.support.prometheus import series_of
from tests.support.runs import steps

pytestmark = pytest.mark.redis


def search_at(url: str) -> ToolInstance:
    spec = ToolSpec(name="search", version="1", description="finds", parameters={"type": "object"})
    return ToolInstance(instance="search-1", url=url, spec=spec, capacity=8)


async def test_a_learner_exports_every_metric_and_names_who_is_announced(
    tmp_path: Path, redis_url: str, run_id: str
):
    folder = tmp_path / "run"
    spec = training_spec(folder, redis_url, run_id, steps=1000)
    learner = Learner(spec, FakeEngine())
    urls: list[str] = []
    async with (
        await Broker.connect(redis_url, run_id) as broker,
        FakeServices(broker).running() as services,
    ):
        await ToolRegistry(broker, run_id).announce(search_at("http://10.0.0.4:8400"), 60.0)
        training = asyncio.create_task(learner.run(urls.append))
        await eventually(lambda: len(steps(folder)) >= 2, training)
        (server,) = await services.registry.rollout_servers()
        async with httpx.AsyncClient(base_url=urls[0], timeout=60) as client:
            page = (await client.get("/metrics")).text
            targets = (await client.get("/targets")).json()
            health = await client.get("/healthz")
        learner.request_stop("the test has seen enough")
        await asyncio.wait_for(training, 60)
    named = {series for one in metrics_of(prometheus) for series in one.series()}
    assert named <= series_of(page)
    (filled,) = re.findall(r'learner_results_total{outcome="filled"} (\S+)', page)
    assert float(filled) >= 2 * 2 * 2  # steps, groups, samples
    (lowest,) = re.findall(r"^agent_r1_learner_steps_total (\S+)", page, re.MULTILINE)
    assert float(lowest) >= 2
    assert 'agent_r1_queue_entries{stream="tasks"}' in page
    assert 'agent_r1_learner_activity_seconds_total{activity="learning"}' in page
    assert health.json() == {"status": "ok"}
    addresses = {
        "learner": urls[0].removeprefix("http://"),
        "rollout": server.url.removeprefix("http://").rstrip("/"),
        "tools": "10.0.0.4:8400",
    }
    assert targets == [
        {"targets": [address], "labels": {"job": job, "run": run_id}}
        for job, address in addresses.items()
    ]
