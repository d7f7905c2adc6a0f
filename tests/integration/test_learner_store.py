"""A console that shares no folder with the learner: it follows a run that trains, over HTTP."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from agent_r1.console.app import create_app
from agent_r1.console.run_state import read_run_state
from agent_r1.console.runs import Runs
from agent_r1.learner.train import Learner
from agent_r1.runs.remote import Mirror, list_files
from agent_r1.runs.run import Run
from agent_r1_proto.streams import Broker
from tests.support.learner_fakes import (
    FakeEngine,
    FakeServices,
    eventually,
    training_spec,
    write_tasks,
)
from tests.support.runs import steps

pytestmark = pytest.mark.redis


async def test_a_console_gets_the_end_of_a_run(tmp_path: Path, redis_url: str, run_id: str):
    folder = tmp_path / "run"
    sets = {"near": write_tasks(tmp_path / "near.jsonl", 2, name="near")}
    spec = training_spec(folder, redis_url, run_id, steps=3, evaluation={"sets": sets})
    spec.folder.write_config(spec.resolved_config)
    followed = asyncio.Event()
    mirrors: list[Mirror] = []

    def open_mirror(url: str) -> None:
        mirrors.append(Mirror(url, None, tmp_path / "cache"))
        followed.set()

    async with await Broker.connect(redis_url, run_id) as broker, FakeServices(broker).running():
        training = asyncio.create_task(Learner(spec, FakeEngine()).run(open_mirror))
        await asyncio.wait_for(followed.wait(), 30)
        with mirrors[0].following():
            assert await asyncio.wait_for(training, 60) == "finished"
    copy = mirrors[0].folder / "run"
    assert list_files(copy) == list_files(folder)
    assert {"summary.json", "evaluation_after.jsonl"} <= {path.name for path in copy.iterdir()}
    assert "after" in [file.evaluation for file in Run(copy).files()]
    assert [one["name"] for one in Run(copy).evaluations] == ["before", "after"]
    assert read_run_state(copy).status == "finished"


async def test_a_console_follows_a_learner_and_keeps_what_it_had(
    tmp_path: Path, redis_url: str, run_id: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "run"
    spec = training_spec(folder, redis_url, run_id, steps=1000)
    spec.folder.write_config(spec.resolved_config)
    learner = Learner(spec, FakeEngine())
    urls: list[str] = []
    async with await Broker.connect(redis_url, run_id) as broker, FakeServices(broker).running():
        training = asyncio.create_task(learner.run(urls.append))
        await eventually(lambda: len(steps(folder)) >= 2, training)
        with closing(Mirror(urls[0], None)) as mirror:
            app = create_app(Runs(mirror.folder, mirror), None)
            shown = httpx.AsyncClient(
                transport=httpx.ASGITransport(app=app), base_url="http://console"
            )
            async with shown as client:

                async def page(path: str) -> str:
                    await asyncio.to_thread(mirror.refresh)
                    answer = await client.get(path, headers={"accept": "text/html"})
                    return answer.raise_for_status().text

                assert f"running (the learner at {urls[0]})" in await page("/runs/run")
                before = len(steps(mirror.folder / "run"))
                new = f"step_{before + 5:06d}.parquet"
                await eventually((folder / "trajectories" / new).is_file, training)
                assert f"/trajectories/{new}/0" in await page("/runs/run/trajectories")
                assert len(steps(mirror.folder / "run")) > before
                learner.request_stop("the test has seen enough")
                await asyncio.wait_for(training, 60)
                gone = await page("/")
    assert f"{urls[0]} has not answered since" in gone
    whole = Run(mirror.folder / "run")
    last = whole.steps[-1]["step"]
    assert whole.steps == Run(folder).steps[:last]
    assert [file.step for file in whole.files()][-1] in (last - 1, last)
    copied = {one.path: one for one in list_files(folder).files}
    stored = [one for one in list_files(mirror.folder / "run").files if "step_" in one.path]
    assert all(copied[one.path] == one for one in stored)
