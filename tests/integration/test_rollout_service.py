"""The whole rollout server over a real Redis and real HTTP tools; only the sampler is scripted."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from agent_r1.learner.config import LearnerConfig
from agent_r1.learner.weights.transports.http import HttpTransport
from agent_r1.rollout.chat_format import ChatFormat
from agent_r1.rollout.config import EnvConfig, RolloutConfig
from agent_r1.rollout.envs import ToolEnv
from agent_r1.rollout.main import RolloutSettings, serve_policy
from agent_r1.rollout.policy import EngineDeadError
from agent_r1.rollout.trajectory_builder import failed_trajectory
from agent_r1_proto.failures import FailureBoard
from agent_r1_proto.registry import Registry
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import RolloutTask
from agent_r1_proto.trajectory import Trajectory
from agent_r1_proto.weights import (
    CanaryReply,
    CanaryRequest,
    LoadReply,
    LoadRequest,
    NewestVersion,
    TransportName,
    WeightManifest,
)
from agent_r1_service.config import ModelConfig, RedisConfig, RunConfig
from tests.conftest import REPOSITORY
from tests.support.builders import rollout_task
from tests.support.fakes import FakePolicy, FakeToolServer, build_tokenizer, call_text
from tests.support.snapshot_files import write_snapshot

pytestmark = pytest.mark.redis

WAIT_S = 60.0
POLL_S = 0.005
ANSWER = "<think>done</think><answer>Ada</answer>"
SEARCH = "<think>look</think>" + call_text(query="Ada")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


@pytest.fixture(scope="module")
def end_id(tokenizer: Any) -> int:
    return tokenizer.convert_tokens_to_ids("<|im_end|>")


@pytest.fixture(scope="module")
def chat(tokenizer: Any, end_id: int) -> ChatFormat:
    return ChatFormat(tokenizer, end_of_turn_ids=[end_id])


@pytest.fixture
async def broker(redis_url: str, run_id: str) -> AsyncIterator[Broker]:
    async with await Broker.connect(redis_url, run_id, lease_s=60.0) as connected:
        yield connected


@dataclass
class Bench:
    """What a test needs to start servers of one run and to look at their work."""

    broker: Broker
    registry: Registry
    chat: ChatFormat
    end_id: int
    redis_url: str
    folder: Path

    def policy(self, *turns: str, **options: Any) -> FakePolicy:
        """A model that writes these turns."""
        script = [[*self.chat.encode(turn), self.end_id] for turn in turns]
        return FakePolicy(script, eos_token_ids=[self.end_id], **options)

    def gated_policy(self, gate: asyncio.Event, text: str = ANSWER) -> FakePolicy:
        """A model that answers once the gate is open."""

        async def script(_: list[int], __: int) -> list[int]:
            await gate.wait()
            return [*self.chat.encode(text), self.end_id]

        return FakePolicy(script, eos_token_ids=[self.end_id])

    @asynccontextmanager
    async def server(
        self,
        policy: FakePolicy,
        *tools: FakeToolServer,
        env: dict[str, Any] | None = None,
        rollout: dict[str, Any] | None = None,
        transport: TransportName = "file",
        lease_s: float = 60.0,
    ) -> AsyncIterator[asyncio.Task[None]]:
        """Run a server until the block ends; it is then stopped in order."""
        settings = RolloutSettings(
            run=RunConfig(id=self.run_id),
            model=ModelConfig(path="scripted"),
            redis=RedisConfig(url=self.redis_url, lease_s=lease_s),
            env=EnvConfig.model_validate({"tool_retries": 0} | (env or {})),
            rollout=RolloutConfig.model_validate(rollout or {}),
            tools={tool.name: tool.url for tool in tools},
            weights_dir=self.folder,
            transport=transport,
            announce_dir=self.folder,
        )
        serving = asyncio.create_task(serve_policy(policy, self.chat, settings))
        try:
            await until(lambda: (self.folder / "rollout.json").exists() or serving.done())
            yield serving
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError, EngineDeadError):
                await serving
            (self.folder / "rollout.json").unlink(missing_ok=True)

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return self.broker.keys.prefix.split(":")[1]

    async def left(self) -> bool:
        """Whether no server is announced."""
        return await self.registry.rollout_servers() == []

    async def num_pending(self) -> int:
        """Number of samples that a server has taken and not finished."""
        group = await self.broker.redis.xpending(self.broker.keys.tasks, "rollout")
        return int(group["pending"])

    @property
    def url(self) -> str:
        """Base URL of the server that announced itself last."""
        return json.loads((self.folder / "rollout.json").read_text())["url"]

    async def submit(self, *tasks: RolloutTask) -> None:
        """Put samples on the stream."""
        await self.broker.publish_many(self.broker.keys.tasks, tasks)

    async def trajectories(self, count: int) -> list[Trajectory]:
        """Take this many results from the stream."""
        taken: list[Trajectory] = []
        async with (
            asyncio.timeout(WAIT_S),
            self.broker.consumer(
                self.broker.keys.trajectories, Trajectory, group="reward", consumer="test"
            ) as consumer,
        ):
            while len(taken) < count:
                for entry in await consumer.read(count - len(taken), 1.0):
                    taken.append(entry.message)
                    await consumer.finish(entry)
        return sorted(taken, key=lambda trajectory: trajectory.rollout_id)

    async def publish(self, version: int, **options: Any) -> str:
        """Write a manifest, make its version the newest, and return its path."""
        location = self.manifest(version, **options)
        newest = NewestVersion(policy_version=version, manifest_location=location)
        await self.registry.set_newest_version(newest)
        return location

    def manifest(self, version: int, *, run_id: str | None = None, named: int | None = None) -> str:
        """Write a manifest of a version, in the file of version `named`, and return its path."""
        path = self.folder / f"v{version if named is None else named}.json"
        manifest = WeightManifest(
            run_id=run_id or self.run_id,
            policy_version=version,
            location=str(self.folder / "model.safetensors"),
            size_bytes=0,
            tensors=[],
        )
        path.write_text(manifest.model_dump_json())
        return str(path)


@pytest.fixture
async def bench(
    broker: Broker, redis_url: str, chat: ChatFormat, end_id: int, tmp_path: Path
) -> Bench:
    registry = Registry(broker)
    await registry.set_newest_version(NewestVersion(policy_version=0))
    await registry.set_incarnation(1)
    return Bench(broker, registry, chat, end_id, redis_url, tmp_path)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition of this process holds."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - what changes is not ours to signal
            await asyncio.sleep(POLL_S)


async def until_true(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until a condition that must be asked for holds."""
    async with asyncio.timeout(WAIT_S):
        while not await condition():  # noqa: ASYNC110 - Redis changes, not this process
            await asyncio.sleep(POLL_S)


async def until_empty(bench: Bench) -> None:
    """Wait until every sample is finished and deleted."""

    async def is_empty() -> bool:
        return await bench.broker.depth(bench.broker.keys.tasks) == 0

    await until_true(is_empty)


def keys(trajectories: Sequence[Trajectory]) -> list[tuple[int, int, int, int]]:
    """Return incarnation, group, sample and attempt of each."""
    found = [trajectory.rollout.key for trajectory in trajectories]
    return [(k.incarnation, k.group_id, k.sample_index, k.attempt) for k in found]


def task(bench: Bench, **fields: Any) -> RolloutTask:
    return rollout_task(bench.run_id, **fields)


async def test_samples_become_trajectories_and_leave_the_stream(bench: Bench):
    async with FakeToolServer() as search:
        policy = bench.policy(SEARCH, ANSWER)
        async with bench.server(policy, search):
            samples = [task(bench, group_id=g, sample_index=s) for g in (0, 1) for s in (0, 1)]
            await bench.submit(*samples)
            done = await bench.trajectories(4)
            await until_empty(bench)
            (server,) = await bench.registry.rollout_servers()
            async with httpx.AsyncClient() as client:
                health = (await client.get(f"{bench.url}/healthz")).json()
        assert await bench.registry.rollout_servers() == []
    assert keys(done) == [(1, 0, 0, 0), (1, 0, 1, 0), (1, 1, 0, 0), (1, 1, 1, 0)]
    assert {(t.status, t.reason, len(t.turns)) for t in done} == {("COMPLETED", "answer", 2)}
    assert [t.rollout for t in done] == samples
    assert server.url.startswith("http://127.0.0.1:")
    assert done[0].server_id == server.server_id
    assert health == {
        "status": "ok",
        "server_id": server.server_id,
        "policy_version": 0,
        "in_flight": 0,
    }
    assert len({request.seed for request in policy.requests}) == 8  # 4 samples of 2 turns


async def test_malformed_call_is_answered_and_the_trajectory_goes_on(bench: Bench):
    async with FakeToolServer() as search:
        policy = bench.policy("<tool_call>search Ada</tool_call>", SEARCH, ANSWER)
        async with bench.server(policy, search):
            await bench.submit(task(bench))
            (done,) = await bench.trajectories(1)
    assert done.status == "COMPLETED"
    assert [call.status for call in done.calls()] == ["malformed", "ok"]
    assert "Error: the tool call is not valid JSON" in bench.chat.decode(done.token_ids.tolist())


async def test_tool_that_is_down_fails_the_sample_after_all_attempts(
    bench: Bench, caplog: pytest.LogCaptureFixture
):
    async with FakeToolServer(always=503) as search:
        async with bench.server(bench.policy(SEARCH, ANSWER), search):
            samples = [task(bench, sample_index=i, max_attempts=3) for i in range(3)]
            await bench.submit(*samples)
            done = await bench.trajectories(3)
            await until_empty(bench)
        assert sorted({call.rollout_id.rsplit("/", 1)[1] for call in search.calls}) == [
            "0",
            "1",
            "2",
        ]
    assert keys(done) == [(1, 0, 0, 2), (1, 0, 1, 2), (1, 0, 2, 2)]
    assert {(t.status, t.reason.split(": ")[0]) for t in done} == {("FAILED", "tool_busy")}
    # Nine attempts failed the same way; the first is shown with what happened, the rest counted.
    (shown,) = [
        r.getMessage()
        for r in caplog.records
        if r.levelno == logging.WARNING and "attempt failed" in r.getMessage()
    ]
    assert "out of order" in shown


async def test_attempt_after_a_short_outage_succeeds(bench: Bench):
    async with (
        FakeToolServer(statuses=[500]) as search,
        bench.server(bench.policy(SEARCH, ANSWER), search),
    ):
        await bench.submit(task(bench))
        (done,) = await bench.trajectories(1)
    assert (done.status, done.rollout.key.attempt) == ("COMPLETED", 1)


async def test_a_lost_session_is_nobodys_failure_and_costs_no_attempt(bench: Bench):
    # open, call, close of two attempts that lose their session; the third keeps it
    statuses = [200, 409, 200, 200, 409, 200]
    async with (
        FakeToolServer(sessions=True, statuses=statuses) as search,
        bench.server(bench.policy(SEARCH, SEARCH, SEARCH, ANSWER), search),
    ):
        await bench.submit(task(bench, max_attempts=1))
        (done,) = await bench.trajectories(1)
    assert (done.status, done.rollout.key.attempt) == ("COMPLETED", 2)
    assert len(search.opened) == 3
    assert sorted(search.closed) == sorted(search.opened)


async def test_samples_of_an_earlier_incarnation_are_dropped(bench: Bench):
    await bench.registry.set_incarnation(2)
    async with bench.server(bench.policy(ANSWER)):
        await bench.submit(
            task(bench, incarnation=1, group_id=0),
            task(bench, incarnation=1, group_id=1, purpose="eval"),
            task(bench, incarnation=2, group_id=2),
        )
        done = await bench.trajectories(2)
        await until_empty(bench)
    assert keys(done) == [(1, 1, 0, 0), (2, 2, 0, 0)]
    assert await bench.broker.depth(bench.broker.keys.trajectories) == 0


async def test_samples_in_flight_of_an_earlier_incarnation_are_stopped(bench: Bench):
    policy = bench.gated_policy(asyncio.Event())
    async with bench.server(policy, rollout={"announce_expiry_s": 0.3}):
        await bench.submit(task(bench))
        await until(lambda: policy.num_in_flight == 1)
        await bench.registry.set_incarnation(2)
        await until_empty(bench)
        assert policy.num_in_flight == 0


async def test_a_sample_that_is_asked_for_twice_is_made_once(
    bench: Bench, caplog: pytest.LogCaptureFixture
):
    gate = asyncio.Event()
    policy = bench.gated_policy(gate)
    async with bench.server(policy):
        await bench.submit(*[task(bench)] * 3, task(bench, sample_index=1))
        await until(lambda: policy.num_in_flight == 2)

        async def repeats_are_gone() -> bool:
            return await bench.broker.depth(bench.broker.keys.tasks) == 2

        await until_true(repeats_are_gone)
        gate.set()
        done = await bench.trajectories(2)
        await until_empty(bench)
    assert keys(done) == [(1, 0, 0, 0), (1, 0, 1, 0)]
    assert len(policy.requests) == 2
    assert await bench.broker.dead_letters() == []
    shown = [r for r in caplog.records if "asked for twice" in r.message and r.levelname != "DEBUG"]
    assert len(shown) == 1


async def test_an_attempt_that_the_learner_has_asked_for_already_is_skipped(bench: Bench):
    # Attempt 0 fails while attempt 1 is under way; so its own next one is attempt 2.
    first, gate = asyncio.Event(), asyncio.Event()
    attempts: list[int] = []

    async def run(_: object, rollout: RolloutTask) -> Trajectory:
        attempts.append(rollout.key.attempt)
        await (first if rollout.key.attempt == 0 else gate).wait()
        return failed_trajectory(rollout, "tool_timeout: search")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agent_r1.rollout.agent_loop.AgentLoop.run", run)
        async with bench.server(bench.policy(ANSWER)):
            retried = task(bench).key.model_copy(update={"attempt": 1})
            await bench.submit(task(bench), task(bench).replace(key=retried, max_attempts=2))
            await until(lambda: attempts == [0, 1])
            first.set()
            await until(lambda: attempts == [0, 1, 2])
            gate.set()
            await until_empty(bench)


async def test_questions_of_two_clients_with_one_number_are_both_answered(bench: Bench):
    gate = asyncio.Event()
    policy = bench.gated_policy(gate)
    replies = [bench.broker.keys.replies(name) for name in ("chat", "evaluation")]
    asked = [task(bench, purpose="eval", incarnation=0, reply_stream=reply) for reply in replies]
    async with bench.server(policy):
        await bench.submit(*asked)
        await until(lambda: policy.num_in_flight == 2)
        gate.set()
        done = await bench.trajectories(2)
    assert {one.rollout.reply_stream for one in done} == set(replies)
    assert len({request.request_id for request in policy.requests}) == 2


async def test_no_more_samples_are_taken_than_fit(bench: Bench):
    gate = asyncio.Event()
    policy = bench.gated_policy(gate)
    async with bench.server(policy, rollout={"max_concurrent": 2}):
        await bench.submit(*(task(bench, sample_index=i) for i in range(5)))
        await until(lambda: policy.num_in_flight == 2)
        assert await bench.num_pending() == 2  # the others are still anybody's
        gate.set()
        done = await bench.trajectories(5)
    assert len(done) == 5


# -- weights -------------------------------------------------------------------------------------


async def test_no_sample_is_taken_before_the_newest_version_is_known(bench: Bench):
    await bench.broker.redis.delete(bench.broker.keys.newest_version)
    policy = bench.policy(ANSWER)
    async with bench.server(policy):
        await bench.submit(task(bench))
        async with httpx.AsyncClient() as client:
            for _ in range(3):
                assert (await client.get(f"{bench.url}/healthz")).json()["in_flight"] == 0
                await asyncio.sleep(0.1)
        assert policy.requests == []
        await bench.registry.set_newest_version(NewestVersion(policy_version=0))
        await bench.trajectories(1)


async def test_server_that_is_behind_fetches_the_newest_version_by_itself(bench: Bench):
    policy = bench.policy(ANSWER)
    newest = NewestVersion(policy_version=3, manifest_location=bench.manifest(3))
    await bench.registry.set_newest_version(newest)
    async with bench.server(policy):
        await bench.submit(task(bench))
        (done,) = await bench.trajectories(1)

        async def is_announced() -> bool:
            return (await bench.registry.rollout_servers())[0].policy_version == 3

        await until_true(is_announced)
    assert done.policy_versions() == [3]
    assert policy.loaded == [3]


async def test_a_server_pulls_the_newest_version_over_http_and_serves_it_to_others(bench: Bench):
    written = write_snapshot(bench.folder / "v3", {"weight": np.ones(9, np.float32)}, 3, {})
    of_run = written.model_copy(update={"run_id": bench.run_id})
    (bench.folder / "v3" / "manifest.json").write_text(of_run.model_dump_json())
    policy = FakePolicy([[bench.end_id]], eos_token_ids=[bench.end_id])
    options = {"weights_dir": bench.folder / "pulled"}
    async with (
        HttpTransport(LearnerConfig(), None) as learner,
        bench.server(policy, transport="http", rollout=options),
    ):
        location = await learner.publish(3, bench.folder / "v3")
        newest = NewestVersion(policy_version=3, manifest_location=location)
        await bench.registry.set_newest_version(newest)
        await until(lambda: policy.loaded == [3])
        async with httpx.AsyncClient(base_url=bench.url) as client:
            part = await client.get(
                "/weights/files/3/model.safetensors", headers={"range": "bytes=0-7"}
            )
            assert (part.status_code, len(part.content)) == (206, 8)
            path = str(bench.folder / "v3" / "manifest.json")
            by_path = LoadRequest(manifest_location=path, policy_version=3)
            refused = await client.post("/weights/load", json=by_path.model_dump())
            assert (refused.status_code, "learner.transport" in refused.text) == (422, True)
    assert list((bench.folder / "pulled").iterdir()) == []


async def test_sample_read_while_a_push_is_announced_waits_for_the_new_weights(bench: Bench):
    # The server is idle in its read, holding version 0, when the learner publishes version 1 and
    # then issues a sample: that sample must not see version 0.
    policy = bench.policy(ANSWER)
    async with bench.server(policy):
        await bench.submit(task(bench, group_id=0))
        (first,) = await bench.trajectories(1)
        newest = NewestVersion(policy_version=1, manifest_location=bench.manifest(1))
        await bench.registry.set_newest_version(newest)
        await bench.submit(task(bench, group_id=1))
        (second,) = await bench.trajectories(1)
    assert (first.policy_versions(), second.policy_versions()) == ([0], [1])


async def test_a_server_that_falls_behind_leaves_the_samples_it_has_read_to_others(bench: Bench):
    # It is idle in its read when a version is published that it cannot load, and a sample issued.
    behind, current = bench.policy(ANSWER), bench.policy(ANSWER)
    async with bench.server(behind):
        await bench.submit(task(bench, group_id=0))
        await bench.trajectories(1)
        behind.refuse_weights = "the pull takes too long"
        newest = NewestVersion(policy_version=1, manifest_location=bench.manifest(1))
        await bench.registry.set_newest_version(newest)
        await bench.submit(task(bench, group_id=1))
        async with bench.server(current):
            (second,) = await bench.trajectories(1)
    assert second.policy_versions() == [1]
    assert current.loaded == [1]


async def test_server_that_cannot_load_the_newest_version_takes_no_samples(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agent_r1.rollout.worker.CATCH_UP_RETRY_S", 0.05)
    policy = bench.policy(ANSWER)
    policy.refuse_weights = "checksum of model.norm.weight does not fit"
    newest = NewestVersion(policy_version=1, manifest_location=bench.manifest(1))
    await bench.registry.set_newest_version(newest)
    async with bench.server(policy):
        await bench.submit(task(bench))
        await until(lambda: sum("stays behind" in r.message for r in caplog.records) >= 2)
        assert policy.requests == []
        policy.refuse_weights = None
        (done,) = await bench.trajectories(1)
    assert done.policy_versions() == [1]


async def post_load(bench: Bench, version: int, location: str) -> httpx.Response:
    request = LoadRequest(manifest_location=location, policy_version=version)
    async with httpx.AsyncClient(base_url=bench.url, timeout=WAIT_S) as client:
        return await client.post("/weights/load", json=request.model_dump())


async def test_weight_routes(bench: Bench):
    policy = bench.policy(ANSWER)
    async with bench.server(policy), httpx.AsyncClient(base_url=bench.url) as client:
        loaded = await post_load(bench, 2, await bench.publish(2))
        reply = LoadReply.model_validate(loaded.json())
        assert (reply.policy_version, reply.pause_s) == (2, 0.125)
        assert reply.fetch_s > 0.25  # the policy's, and the time to read the manifest
        again = await post_load(bench, 2, bench.manifest(2))
        assert (again.json(), policy.loaded) == (loaded.json(), [2])
        (bench.folder / "v3.json").unlink(missing_ok=True)
        await bench.registry.set_newest_version(
            NewestVersion(policy_version=3, manifest_location=str(bench.folder / "v3.json"))
        )
        missing = await post_load(bench, 3, str(bench.folder / "v3.json"))
        assert (missing.status_code, "cannot be read" in missing.text) == (422, True)
        location = bench.manifest(3, named=4)
        await bench.registry.set_newest_version(
            NewestVersion(policy_version=4, manifest_location=location)
        )
        mislabelled = await post_load(bench, 4, location)
        assert (mislabelled.status_code, "of another version" in mislabelled.text) == (422, True)
        foreign = await post_load(bench, 5, await bench.publish(5, run_id="other"))
        assert (foreign.status_code, "of another run" in foreign.text) == (422, True)
        policy.refuse_weights = "checksum"
        refused = await post_load(bench, 6, await bench.publish(6))
        assert (refused.status_code, refused.json()) == (422, {"detail": "checksum"})
        unknown = await client.post("/weights/load", json={"version": 1})
        assert unknown.status_code == 422
        assert policy.loaded == [2]

        request = CanaryRequest(token_ids=[5, 6, 7])
        canary = await client.post("/weights/canary", json=request.model_dump())
        # The scripted policy scores a token as minus its id.
        assert CanaryReply.model_validate(canary.json()) == CanaryReply(
            policy_version=2, logprobs=[-6.0, -7.0]
        )


async def test_a_push_that_comes_late_brings_the_server_to_the_newest_version(
    bench: Bench, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, logger="agent_r1.rollout.weights")
    policy = bench.policy(ANSWER)
    async with bench.server(policy):
        deleted = bench.manifest(1)
        await bench.publish(3)
        (bench.folder / "v1.json").unlink()
        late = await post_load(bench, 1, deleted)
        later = await post_load(bench, 2, deleted)
    assert (late.status_code, late.json()["policy_version"]) == (200, 3)
    assert (later.status_code, later.json()["policy_version"]) == (200, 3)
    assert policy.loaded == [3]
    said = [r for r in caplog.records if r.name == "agent_r1.rollout.weights.versions"]
    assert [(r.levelname, "late" in r.message) for r in said] == [("INFO", True)]


async def test_only_versions_that_the_registry_knows_are_loaded(bench: Bench):
    policy = bench.policy(ANSWER)
    async with bench.server(policy):
        invented = await post_load(bench, 100000, bench.manifest(100000))
        await post_load(bench, 2, await bench.publish(2))
        await bench.publish(1)  # a learner that has lost its ledger
        behind = await post_load(bench, 1, bench.manifest(1))
    assert (invented.status_code, "is not published" in invented.text) == (422, True)
    assert (behind.status_code, "older than 2" in behind.text) == (409, True)
    assert policy.loaded == [2]


SECRET = "hunter2-hunter2-hunter2"


async def test_a_load_reads_nothing_outside_the_weights_folder_and_quotes_nothing(
    bench: Bench, tmp_path_factory: pytest.TempPathFactory
):
    # Each of these is what the registry itself calls the newest version: the worst case.
    outside = tmp_path_factory.mktemp("outside")
    (outside / "launcher.json").write_text(json.dumps({"password": SECRET, SECRET: 1}))
    inside = bench.folder / "notes.json"
    inside.write_text(json.dumps({"run_id": SECRET, "tensors": [{"name": SECRET}], SECRET: 1}))
    (bench.folder / "link.json").symlink_to(outside / "launcher.json")
    os.mkfifo(bench.folder / "pipe.json")
    (bench.folder / "large.json").touch()
    os.truncate(bench.folder / "large.json", 2**31)  # sparse: takes no room on the disk
    refusals = {
        "/dev/zero": "does not lie in",
        str(outside / "launcher.json"): "does not lie in",
        str(bench.folder / ".." / outside.name / "launcher.json"): "does not lie in",
        str(bench.folder / "link.json"): "does not lie in",
        "a\0b": "not a usable path",
        str(inside): "does not parse",
        str(bench.folder / "pipe.json"): "not a regular file",
        str(bench.folder): "not a regular file|cannot be read",
        str(bench.folder / "large.json"): "a manifest has at most",
    }
    policy = bench.policy(ANSWER)
    async with bench.server(policy):
        for version, (location, reason) in enumerate(refusals.items(), start=1):
            await bench.registry.set_newest_version(
                NewestVersion(policy_version=version, manifest_location=location)
            )
            answer = await asyncio.wait_for(post_load(bench, version, location), 10.0)
            assert answer.status_code == 422, location
            assert re.search(reason, answer.text), (location, answer.text)
            assert SECRET not in answer.text
        assert policy.loaded == []
        # A request for another place is refused although the registry names a good one, which the
        # server may have loaded by itself meanwhile.
        good = await bench.publish(50)
        answer = await post_load(bench, 50, "/etc/passwd")
        assert answer.status_code == 422
        assert (await post_load(bench, 50, good)).status_code == 200
        assert policy.loaded == [50]


# -- ends ----------------------------------------------------------------------------------------


async def test_stopped_server_gives_its_samples_back_at_once(bench: Bench):
    policy = bench.gated_policy(asyncio.Event())
    async with bench.server(policy):
        await bench.submit(task(bench, sample_index=0), task(bench, sample_index=1))
        await until(lambda: policy.num_in_flight == 2)
    # The lease is 60 s: only a sample that was given back reaches the next server in time.
    async with bench.server(bench.policy(ANSWER)):
        done = await bench.trajectories(2)
    assert keys(done) == [(1, 0, 0, 0), (1, 0, 1, 0)]


async def test_a_drained_server_finishes_its_samples_and_leaves(bench: Bench):
    gate = asyncio.Event()
    policy = bench.gated_policy(gate)
    async with bench.server(policy, rollout={"server_id": "one", "announce_expiry_s": 1.0}) as one:
        await bench.submit(task(bench, sample_index=0), task(bench, sample_index=1))
        await until(lambda: policy.num_in_flight == 2)
        await bench.registry.drain_rollout_server("one", timeout_s=WAIT_S)
        await until_true(bench.left)
        await bench.submit(task(bench, sample_index=2))
        async with bench.server(bench.policy(ANSWER), rollout={"server_id": "two"}):
            assert [done.server_id for done in await bench.trajectories(1)] == ["two"]
            gate.set()
            done = await bench.trajectories(2)
            assert [one.server_id for one in done] == ["one", "one"]
            await asyncio.wait_for(one, WAIT_S)  # ends by itself, in order
    assert keys(done) == [(1, 0, 0, 0), (1, 0, 1, 0)]


async def test_a_drained_server_gives_back_what_takes_too_long(bench: Bench):
    policy = bench.gated_policy(asyncio.Event())
    async with bench.server(policy, rollout={"server_id": "one", "announce_expiry_s": 1.0}) as one:
        await bench.submit(task(bench))
        await until(lambda: policy.num_in_flight == 1)
        await bench.registry.drain_rollout_server("one", timeout_s=0.2)
        await asyncio.wait_for(one, WAIT_S)
        # The launcher does not start again what has taken its announcement back.
        assert not (bench.folder / "rollout.json").exists()
    # Its successor of the same name is not drained.
    async with bench.server(bench.policy(ANSWER), rollout={"server_id": "one"}):
        assert keys(await bench.trajectories(1)) == [(1, 0, 0, 0)]


async def test_dead_engine_ends_the_server_and_gives_the_samples_back(bench: Bench):
    gate = asyncio.Event()
    policy = bench.gated_policy(gate)
    async with bench.server(policy) as serving:
        await bench.submit(task(bench))
        await until(lambda: policy.num_in_flight == 1)
        policy.die("the engine was killed")
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{bench.url}/healthz")).status_code == 503
        gate.set()
        with pytest.raises(EngineDeadError, match="was killed"):
            await asyncio.wait_for(serving, WAIT_S)
    async with bench.server(bench.policy(ANSWER)):
        (done,) = await bench.trajectories(1)
    assert done.rollout.key.attempt == 0


async def test_wedged_engine_ends_the_server_and_gives_the_samples_back(
    bench: Bench, caplog: pytest.LogCaptureFixture
):
    policy = bench.gated_policy(asyncio.Event())
    async with bench.server(policy, rollout={"engine_stall_timeout_s": 0.3}) as serving:
        await bench.submit(task(bench, sample_index=0), task(bench, sample_index=1))
        await until(lambda: policy.num_in_flight == 2)
        policy.answering.clear()
        with pytest.raises(EngineDeadError, match=r"2 requests gave no sign of work for 0\.3 s"):
            await asyncio.wait_for(serving, WAIT_S)
    assert await bench.registry.rollout_servers() == []
    assert "engine is wedged in_flight=2" in caplog.text
    # The lease is 60 s: only samples that were given back reach the next server in time.
    async with bench.server(bench.policy(ANSWER)):
        done = await bench.trajectories(2)
    assert keys(done) == [(1, 0, 0, 0), (1, 0, 1, 0)]


async def test_engine_that_is_wedged_while_idle_ends_the_server(bench: Bench):
    policy = bench.policy(ANSWER)
    policy.answering.clear()
    async with bench.server(policy, rollout={"engine_stall_timeout_s": 0.3}) as serving:
        with pytest.raises(EngineDeadError, match="without requests gave no sign of work"):
            await asyncio.wait_for(serving, WAIT_S)


async def test_engine_that_dies_while_idle_ends_the_server(bench: Bench):
    policy = bench.policy(ANSWER)
    async with bench.server(policy, rollout={"engine_stall_timeout_s": 0.3}) as serving:
        policy.die("the engine was killed")
        with pytest.raises(EngineDeadError, match="was killed"):
            await asyncio.wait_for(serving, WAIT_S)


class NeverCloses(ToolEnv):
    """An environment whose clean-up hangs, for one of the tasks."""

    async def close(self) -> None:
        if self.task.id == "q7":
            await asyncio.Event().wait()


async def test_one_sample_whose_clean_up_hangs_does_not_keep_the_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agent_r1.rollout.worker.STOP_TIMEOUT_S", 0.5)
    policy = bench.gated_policy(asyncio.Event())
    env = {"type": f"{__name__}:NeverCloses"}
    async with bench.server(policy, env=env):
        await bench.submit(task(bench, group_id=7), task(bench, sample_index=1))
        await until(lambda: policy.num_in_flight == 2)
    # The lease is 60 s: only a sample that was given back reaches the next server in time.
    async with bench.server(bench.policy(ANSWER)):
        (done,) = await bench.trajectories(1)
    assert keys([done]) == [(1, 0, 1, 0)]


async def test_sample_that_cannot_be_published_is_dead_lettered(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    async def broken(*_: object, **__: object) -> None:
        raise TypeError("a bug of ours")

    monkeypatch.setattr("agent_r1.rollout.agent_loop.AgentLoop.run", broken)
    async with bench.server(bench.policy(ANSWER)):
        await bench.submit(task(bench))
        await until_empty(bench)
        (letter,) = await bench.broker.dead_letters()
        (failed,) = await bench.trajectories(1)
        ((shown, count),) = await FailureBoard(bench.broker).read()
    assert "a bug of ours" in letter.reason
    # Whoever waits is told at once, and the board has the place.
    assert (failed.status, failed.reason) == ("FAILED", "rollout_error: TypeError: a bug of ours")
    assert (shown.where, count) == ("rollout", 3)
    assert 'raise TypeError("a bug of ours")' in shown.reason


@asynccontextmanager
async def server_process(
    bench: Bench, lease_s: float, num_samples: int
) -> AsyncIterator[subprocess.Popen[bytes]]:
    """A server process that has taken samples and is in the middle of them."""
    folder = bench.folder / "process"
    command = [sys.executable, "-m", "tests.support.rollout_process", bench.redis_url]
    command += [bench.run_id, str(folder), str(lease_s)]
    process = await asyncio.to_thread(subprocess.Popen, command, cwd=REPOSITORY)

    async def has_taken_them() -> bool:
        return await bench.num_pending() == num_samples

    try:
        await until(lambda: (folder / "rollout.json").exists() or process.poll() is not None)
        await bench.submit(*(task(bench, sample_index=i) for i in range(num_samples)))
        await until_true(has_taken_them)
        yield process
    finally:
        process.kill()
        process.wait(WAIT_S)


async def test_killed_server_loses_nothing(bench: Bench):
    async with server_process(bench, 1.0, 3) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(WAIT_S)
    survivor = {"server_id": "survivor"}
    async with bench.server(bench.policy(ANSWER), rollout=survivor, lease_s=1.0):
        done = await bench.trajectories(3)
        await until_empty(bench)
    assert keys(done) == [(1, 0, 0, 0), (1, 0, 1, 0), (1, 0, 2, 0)]
    assert {trajectory.server_id for trajectory in done} == {"survivor"}


async def test_sigterm_stops_a_server_process_in_order(bench: Bench):
    async with server_process(bench, 60.0, 1) as process:
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, WAIT_S) == 0
    assert await bench.registry.rollout_servers() == []
    async with bench.server(bench.policy(ANSWER)):
        (done,) = await bench.trajectories(1)
    assert keys([done]) == [(1, 0, 0, 0)]
