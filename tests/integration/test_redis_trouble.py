"""A Redis that is of no use: what is said of it, and who waits, goes on or ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from agent_r1.cli.main import main
from agent_r1.config.run import load_config, write_config
from agent_r1.launch.local_redis import answers
from agent_r1_proto.connection import Keys, NotRedisError, RedisConnection
from agent_r1_proto.failures import FailureBoard
from agent_r1_proto.redis_trouble import find_trouble
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import RolloutTask
from agent_r1_proto.weights import NewestVersion
from tests.conftest import RedisServer
from tests.support.builders import rollout_task
from tests.support.config_scene import write_scene
from tests.support.learner_fakes import eventually
from tests.support.rollout_bench import ANSWER, Bench

pytestmark = [pytest.mark.redis, pytest.mark.timeout(60)]

Fault = Callable[[Any, RedisServer], object]
BEGIN: dict[str, Fault] = {
    "read_only": lambda client, _: client.replicaof("127.0.0.1", 1),
    "no_replicas": lambda client, _: client.config_set("min-replicas-to-write", 1),
    "full": lambda client, _: client.config_set("maxmemory", "1kb"),
    "password": lambda client, _: client.config_set("requirepass", "another"),
    "crowded": lambda client, _: client.config_set("maxclients", 1),
    "silent": lambda _, server: server.freeze(),
    "away": lambda _, server: server.kill(),
}
END: dict[str, Fault] = {
    "read_only": lambda client, _: client.replicaof("NO", "ONE"),
    "no_replicas": lambda client, _: client.config_set("min-replicas-to-write", 0),
    "full": lambda client, _: client.config_set("maxmemory", 0),
    "password": lambda client, _: client.config_set("requirepass", ""),
    "crowded": lambda client, _: client.config_set("maxclients", 1000),
    "silent": lambda _, server: server.thaw(),
    "away": lambda _, server: server.start(),
}
SAYS = {
    "read_only": "is read-only",
    "no_replicas": "too few replicas",
    "full": "is full",
    "password": "refuses the password",
    "crowded": "takes no more connections",
    "silent": "frozen",
    "away": "no connection",
}


@contextlib.contextmanager
def fault(kind: str, server: RedisServer) -> Iterator[None]:
    with redis.Redis.from_url(server.url) as client:
        client.ping()  # this connection goes on where new ones are refused
        BEGIN[kind](client, server)
        try:
            yield
        finally:
            END[kind](client, server)


@pytest.fixture
def run_folder(tmp_path: Path, redis_server: RedisServer) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    options = [f'redis.url="{redis_server.url}"', f'run.dir="{folder}"']
    write_config(
        load_config(write_scene(tmp_path / "scene"), options).config, folder / "config.json"
    )
    return folder


@pytest.mark.parametrize("kind", BEGIN)
def test_each_trouble_is_told_from_the_others_and_status_names_it(
    kind: str,
    redis_server: RedisServer,
    run_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("agent_r1.config.live_run.ANSWER_TIMEOUT_S", 1.0)
    probe = Keys("r").probe
    with fault(kind, redis_server):
        trouble = asyncio.run(find_trouble(redis_server.url, probe, 1.0))
        assert trouble is not None
        assert (trouble.kind, SAYS[kind] in trouble.what) == (kind, True)
        assert main(["status", str(run_folder)]) == 2
    shown = capsys.readouterr()
    assert "no step has ended yet" in shown.out  # what the folder says is shown all the same
    assert SAYS[kind] in shown.err
    assert asyncio.run(find_trouble(redis_server.url, probe)) is None


@pytest.mark.parametrize("kind", ["read_only", "no_replicas", "full"])
async def test_messages_transactions_and_scripts_wait_until_it_is_over(
    kind: str, redis_server: RedisServer, run_id: str
):
    async with await Broker.connect(redis_server.url, run_id) as broker:
        board = FailureBoard(broker)
        with fault(kind, redis_server):
            waiting = [
                asyncio.create_task(broker.publish(broker.keys.tasks, rollout_task())),
                asyncio.create_task(board.note("rollout", "boom")),  # a script
            ]
            # Each has been refused once after two tries, 0.05 s apart at most.
            done, _ = await asyncio.wait(waiting, timeout=0.5)
            assert not done
        await asyncio.wait_for(asyncio.gather(*waiting), 20.0)
        assert await broker.depth(broker.keys.tasks) == 1
        assert [count for _, count in await board.read()] == [1]


BANNERS = {
    "http": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
    "smtp": b"220 mail ESMTP\r\n",
    "pop3": b"+OK ready\r\n-ERR what\r\n",
    "binary": b"J\x00\x00\x00\x0a8.0.36\x00",
}


@contextlib.asynccontextmanager
async def something_else(banner: bytes, port: int = 0) -> AsyncIterator[str]:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(banner)
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", port)
    async with server:
        yield f"redis://:secret@127.0.0.1:{server.sockets[0].getsockname()[1]}/0"


@pytest.mark.parametrize("banner", BANNERS.values(), ids=BANNERS)
async def test_something_else_at_the_address_is_an_error_that_a_user_can_read(
    banner: bytes, run_id: str
):
    async with something_else(banner) as url:
        with pytest.raises(NotRedisError, match="is not Redis: something else") as refusal:
            await asyncio.wait_for(Broker.connect(url, run_id), 10.0)
    assert "correct redis.url" in str(refusal.value)
    assert "secret" not in str(refusal.value)


async def test_something_else_that_takes_the_address_in_mid_run_ends_who_asks(
    redis_server: RedisServer, run_id: str
):
    async with await Broker.connect(redis_server.url, run_id) as broker:
        redis_server.kill()
        async with something_else(BANNERS["http"], redis_server.port):
            with pytest.raises(NotRedisError):
                await asyncio.wait_for(broker.depth(broker.keys.tasks), 20.0)


async def test_a_reward_service_at_the_address_of_something_else_ends_with_one_line(
    tmp_path: Path,
):
    command = [sys.executable, "-m", "agent_r1.cli.main", "serve", "reward"]
    async with something_else(BANNERS["http"]) as url:
        address = url.replace(":secret@", "")  # a password has no place in --set
        process = await asyncio.create_subprocess_exec(
            *(*command, str(write_scene(tmp_path)), "--set", f'redis.url="{address}"'),
            stderr=asyncio.subprocess.PIPE,
        )
        _, shown = await asyncio.wait_for(process.communicate(), 40.0)
    assert process.returncode == 2
    assert b"Traceback" not in shown
    assert shown.count(b"is not Redis: something else answers there") == 1


async def test_a_blocked_read_goes_on_after_its_redis_was_a_replica(
    redis_server: RedisServer, run_id: str
):
    async with await Broker.connect(redis_server.url, run_id) as broker:
        consumer = broker.consumer(broker.keys.tasks, RolloutTask, group="g", consumer="c")
        async with consumer:
            reading = asyncio.create_task(consumer.read(1, 30.0))

            with redis.Redis.from_url(redis_server.url) as client:
                await eventually(lambda: client.info("clients")["blocked_clients"] == 1)
            with fault("read_only", redis_server):
                await asyncio.wait({reading}, timeout=0.3)
            await broker.publish(broker.keys.tasks, rollout_task())
            assert len(await asyncio.wait_for(reading, 20.0)) == 1


async def test_a_rollout_server_whose_redis_gives_way_to_something_else_ends_with_that_reason(
    redis_server: RedisServer, run_id: str, tmp_path: Path
):
    async with await Broker.connect(redis_server.url, run_id) as broker:
        bench = await asyncio.to_thread(Bench.of, broker, redis_server.url, tmp_path)
        await bench.registry.set_newest_version(NewestVersion(policy_version=0))
        with contextlib.suppress(NotRedisError):  # again, where the block ends it
            async with bench.server(bench.policy(ANSWER)) as serving:
                redis_server.kill()
                async with something_else(BANNERS["http"], redis_server.port):
                    with pytest.raises(NotRedisError, match="is not Redis"):
                        await asyncio.wait_for(serving, 30.0)


async def open_and_close(url: str) -> None:
    async with await RedisConnection.connect(url, "run"):
        pass


@pytest.mark.parametrize(
    "work",
    [lambda url: find_trouble(url, "probe"), answers, open_and_close],
    ids=["find_trouble", "answers", "connection"],
)
def test_no_cancellation_leaves_a_connection_open(
    work: Callable[[str], Coroutine[Any, Any, object]], redis_url: str
):
    async def cancelled_after(steps: int) -> bool:
        task = asyncio.ensure_future(work(redis_url))
        for _ in range(steps):
            await asyncio.sleep(0)  # one step of the event loop
        done = task.done()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return done

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", ResourceWarning)
        for steps in itertools.count():
            done = asyncio.run(cancelled_after(steps))
            if done and steps > 40:  # closing, when nothing is waited for, begins at about step 20
                break
        gc.collect()
    assert [str(warning.message) for warning in found] == []
