"""`agent-r1 status` against the real Redis of a run."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from agent_r1.cli.main import main
from agent_r1.config.run import load_config, write_config
from agent_r1.learner.checkpoints.ownership import FolderLock
from agent_r1.runtime.files.conditions import Condition, append_condition
from agent_r1_proto.connection import ROLLOUT_GROUP
from agent_r1_proto.registry import Registry, RolloutServer, ToolRegistry
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import RolloutTask
from tests.support.builders import rollout_task
from tests.support.config_scene import write_scene
from tests.unit.attempts.test_tool_discovery import instance

pytestmark = pytest.mark.redis


@pytest.fixture
def run_folder(tmp_path: Path, redis_url: str, run_id: str) -> Path:
    """A run whose learner has finished two of three steps."""
    scene = write_scene(tmp_path / "scene")
    folder = tmp_path / "run"
    folder.mkdir()
    options = [f"run.id={run_id}", f'redis.url="{redis_url}"', f'run.dir="{folder}"']
    write_config(load_config(scene, options).config, folder / "config.json")
    lines = [{"step": step, "reward/mean": 0.25 * step, "policy/version": step} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


async def work(redis_url: str, run_id: str) -> None:
    """Announce a server that holds one sample of three."""
    async with await Broker.connect(redis_url, run_id) as broker:
        server = RolloutServer(
            server_id="one", url="http://h:1", policy_version=2, pid=1, host="h", started_at=0.0
        )
        await Registry(broker).announce_rollout_server(server, 60.0)
        tasks = [rollout_task(sample_index=i) for i in range(3)]
        await broker.publish_many(broker.keys.tasks, tasks)
        consumer = broker.consumer(
            broker.keys.tasks, RolloutTask, group=ROLLOUT_GROUP, consumer="one"
        )
        async with consumer:
            assert len(await consumer.read(1, 5.0)) == 1


def words(text: str) -> list[list[str]]:
    return [line.replace("│", " ").split() for line in text.splitlines()]


def test_the_last_step_streams_and_services_of_a_run_are_shown(
    run_folder: Path, redis_url: str, run_id: str, capsys: pytest.CaptureFixture[str]
):
    asyncio.run(work(redis_url, run_id))
    assert main(["status", str(run_folder)]) == 0
    text = capsys.readouterr().out
    assert "step 2/3  reward 0.500" in text
    assert ["tasks", "2", "1"] in words(text)
    assert ["scored", "0", "0"] in words(text)
    (server,) = (line for line in words(text) if line[:1] == ["one"])
    assert server[1:4] == ["2", "h", "http://h:1"]
    assert "no rollout server" not in text


def test_a_run_that_has_ended_says_how(run_folder: Path, capsys: pytest.CaptureFixture[str]):
    summary = {"status": "failed", "reason": "tool 'search' raised"}
    (run_folder / "summary.json").write_text(json.dumps(summary))
    assert main(["status", str(run_folder)]) == 0
    text = capsys.readouterr().out
    assert f"in {run_folder}: failed: tool 'search' raised" in text
    assert "no rollout server" not in text


def test_a_learner_that_goes_on_has_not_ended_as_its_earlier_start_did(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
):
    (run_folder / "summary.json").write_text('{"status": "interrupted", "reason": "SIGTERM"}')
    lock = FolderLock(run_folder)
    lock.acquire()
    assert main(["status", str(run_folder)]) == 0
    lock.release()
    text = capsys.readouterr().out
    assert f"in {run_folder}: running (the learner is process {os.getpid()} on " in text
    assert "SIGTERM" not in text


def test_what_hinders_a_run_now_is_shown_and_what_is_over_is_not(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
):
    for kind, ended_at in (("silent:reward", None), ("silent:search", 7.0)):
        name = kind.partition(":")[2]
        one = Condition(
            source="launcher",
            kind=kind,
            what=f"{name} does not answer",
            remedy="continue it",
            began_at=5.0,
            ended_at=ended_at,
        )
        append_condition(run_folder / "conditions.jsonl", one)
    assert main(["status", str(run_folder)]) == 0
    text = capsys.readouterr().out
    assert "reward does not answer; continue it" in text
    assert "search does not answer" not in text


def test_a_run_without_a_rollout_server_says_that_samples_wait(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["status", str(run_folder)]) == 0
    text = capsys.readouterr().out
    assert "no launcher on this machine" in text
    assert "no rollout server is announced: samples wait until one is" in text


def test_what_is_no_run_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["status", str(tmp_path)]) == 2
    assert "has no config.json; name a run folder" in capsys.readouterr().err


async def announce_tool(redis_url: str, pool: str) -> None:
    async with await Broker.connect(redis_url, "tools") as broker:
        await ToolRegistry(broker, pool).announce(instance("a"), 60.0)


def test_a_pool_alone_shows_its_tools(
    redis_url: str, run_id: str, capsys: pytest.CaptureFixture[str]
):
    command = ["status", "--redis", redis_url, "--pool", run_id]
    assert main(command) == 0
    assert capsys.readouterr().out == f"no tool instance is announced in the pool {run_id!r}\n"
    asyncio.run(announce_tool(redis_url, run_id))
    assert main(command) == 0
    text = capsys.readouterr().out
    (tool,) = (line for line in words(text) if line[:1] == ["search"])
    assert "takes calls" in " ".join(tool)
    assert "rollout server" not in text


def test_of_a_run_that_redis_does_not_know_nothing_is_said_to_wait(
    redis_url: str, run_id: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["status", "--redis", redis_url, "--id", run_id]) == 0
    said = capsys.readouterr().out
    assert said == (
        f"Redis has nothing of a run {run_id!r} (--id): no rollout server is announced, and no "
        "sample waits\n"
    )
    asyncio.run(work(redis_url, run_id))
    assert main(["status", "--redis", redis_url, "--id", run_id]) == 0
    assert ["tasks", "2", "1"] in words(capsys.readouterr().out)


def test_redis_alone_names_nothing_to_show(redis_url: str, capsys: pytest.CaptureFixture[str]):
    assert main(["status", "--redis", redis_url]) == 2
    assert "--redis with --id or --pool" in capsys.readouterr().err


async def test_what_an_asker_writes_to_see_whether_it_can_is_nothing_of_the_run(
    redis_url: str, run_id: str
):
    async with await Broker.connect(redis_url, run_id) as broker:
        await broker.redis.set(broker.keys.probe, b"", px=60_000)
        assert not await broker.knows_run()
        await broker.redis.set(broker.keys.incarnation, b"1")
        assert await broker.knows_run()
