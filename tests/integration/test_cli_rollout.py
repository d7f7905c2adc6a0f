"""`agent-r1 rollout` against the real Redis of a run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent_r1.cli.main import main
from agent_r1.config.run import load_config, write_config
from agent_r1.rollout.weight_versions import WeightVersions
from agent_r1_proto.registry import Registry
from agent_r1_proto.streams import Broker
from tests.support.config_scene import write_scene
from tests.support.fakes import FakePolicy

pytestmark = pytest.mark.redis

WAIT_S = 60.0
EXPIRY_S = 0.6


@contextmanager
def announced(redis_url: str, run_id: str, *names: str) -> Iterator[dict[str, float]]:
    """Announce servers from another thread; yield what they were told, by name."""
    told: dict[str, float] = {}
    up, stop = threading.Barrier(len(names) + 1), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def announce(name: str) -> None:
        async with await Broker.connect(redis_url, run_id) as broker:
            registry = Registry(broker)
            beats = 0

            async def on_beat() -> None:
                nonlocal beats
                beats += 1
                if beats == 1:
                    await asyncio.to_thread(up.wait, WAIT_S)

            policy = FakePolicy([], eos_token_ids=[0])
            versions = WeightVersions(policy, registry, None)  # pyright: ignore[reportArgumentType]
            told[name] = await versions.announce_until_drained(
                server_id=name,
                url=f"http://10.0.0.1/{name}",
                expiry_s=EXPIRY_S,
                on_beat=on_beat,
            )
            await registry.withdraw_rollout_server(name)

    async def serve() -> None:
        tasks = [asyncio.create_task(announce(name)) for name in names]
        await stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        up.wait(WAIT_S)
        yield told
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(WAIT_S)
        loop.close()


def test_servers_are_listed_and_drained_by_name(
    redis_url: str, run_id: str, capsys: pytest.CaptureFixture[str]
):
    where = ["--redis", redis_url, "--id", run_id]
    with announced(redis_url, run_id, "one", "two") as told:
        assert main(["status", *where]) == 0
        printed = capsys.readouterr().out
        assert "http://10.0.0.1/one" in printed
        assert "http://10.0.0.1/two" in printed

        assert main(["rollout", "drain", "one", "--timeout-s", "7", *where]) == 0
        assert told == {"one": 7.0}
        assert "one takes no more samples" in capsys.readouterr().out

        assert main(["rollout", "drain", "two", *where]) == 0
        assert "the run waits until another one joins" in capsys.readouterr().out

        assert main(["status", *where]) == 0
        assert "no rollout server is announced" in capsys.readouterr().out


def test_a_server_that_is_not_there_is_refused_with_those_that_are(
    redis_url: str, run_id: str, capsys: pytest.CaptureFixture[str]
):
    where = ["--redis", redis_url, "--id", run_id]
    with announced(redis_url, run_id, "one"):
        assert main(["rollout", "drain", "other", *where]) == 2
    assert "no rollout server 'other' is announced; there are one" in capsys.readouterr().err


def test_redis_and_id_beat_those_of_the_run_folder(
    redis_url: str, run_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = write_scene(tmp_path / "example")
    folder = tmp_path / "run"
    folder.mkdir()
    config = load_config(file, ["redis.url=redis://127.0.0.1:1/0", "run.id=other"], {}).config
    write_config(config, folder / "config.json")
    where = [str(folder), "--redis", redis_url, "--id", run_id]
    with announced(redis_url, run_id, "one"):
        assert main(["status", *where]) == 0
    assert "http://10.0.0.1/one" in capsys.readouterr().out


def test_a_place_is_needed(capsys: pytest.CaptureFixture[str]):
    assert main(["rollout", "drain", "one"]) == 2
    assert "name a run folder, or give both --redis and --id" in capsys.readouterr().err
