"""Stand-ins around the learner: an engine without a model, and rollout and reward in one coroutine.

Their Redis, their HTTP and their files are real. The first two tokens of every trajectory name its
group and sample, so that the engine knows what it was trained on.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
from aiohttp import web
from safetensors.numpy import load, load_file

from agent_r1.learner.config import DataConfig, EngineConfig, EvaluationConfig, LearnerConfig
from agent_r1.learner.engine.interface import (
    EngineError,
    LossSpec,
    Model,
    Predictions,
    TrainSample,
)
from agent_r1.learner.prompts import PromptOrder
from agent_r1.learner.run_spec import RunSpec
from agent_r1.learner.server import serve_learner
from agent_r1.learner.shutdown import cancel_and_wait
from agent_r1.learner.weights.publisher import make_transport
from agent_r1.runtime.config import ModelConfig, RedisConfig, RunConfig
from agent_r1.runtime.files.task_source import DataSource
from agent_r1.runtime.files.writing import check_seal, seal
from agent_r1.runtime.http.token import RunToken
from agent_r1.weights.collective import CollectiveFetcher
from agent_r1.weights.http import HttpTransport
from agent_r1.weights.manifest import WeightsNotArrivedError
from agent_r1.weights.snapshot import Weights
from agent_r1_proto.registry import Registry, RolloutServer
from agent_r1_proto.rewards import Reward, ScoredTrajectory
from agent_r1_proto.stream_consumer import Entry, StreamConsumer
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import RolloutTask
from agent_r1_proto.trajectory import Status, ToolCallRecord
from agent_r1_proto.weights import (
    CanaryReply,
    CanaryRequest,
    Invitation,
    LoadReply,
    LoadRequest,
    NewestVersion,
    WeightManifest,
)
from tests.support.builders import trajectory

GROUP_TOKEN = 1_000_000
SAMPLE_TOKEN = 2_000_000
NUM_SAMPLED = 6
ENGINE_FACTS = {"engine.zero_stage": 0, "model.dtype": "float32"}
"""The defaults of a configuration."""
KILL_CODE = 9


@contextlib.asynccontextmanager
async def http_transport(
    config: LearnerConfig, token: RunToken | None = None
) -> AsyncIterator[HttpTransport]:
    """Serve published versions as the learner does."""
    async with serve_learner(config.server, token) as server:
        transport = make_transport(config.model_copy(update={"transport": "http"}), server)
        assert isinstance(transport, HttpTransport)
        async with transport:
            yield transport


def fake_logprob(weights: int) -> float:
    """Log-probability of any token under weights that took so many steps."""
    return -0.5 - 0.01 * weights


class FakeEngine:
    """A PolicyEngine whose weights are the number of steps it took. Implements `PolicyEngine`.

    Args:
        kill_at: end the process, as kill -9 would, in the middle of this step (1 is the first).
        full_disk_at: find the disk full when the state of this step is saved.
        train_s: how long a step takes, in seconds.
    """

    def __init__(
        self,
        *,
        kill_at: int | None = None,
        full_disk_at: int | None = None,
        train_s: float = 0.0,
    ) -> None:
        self.steps = 0
        self.trained: list[tuple[int, int]] = []
        """(group, sample) of everything these weights were trained on."""
        self.batches: list[list[TrainSample]] = []
        self.lost: str | None = None
        """Why the engine has ended, from now on."""
        self.until: Callable[[], bool] = lambda: True
        """A step lasts until this holds."""
        self.bytes_of_a_snapshot = 1
        self._kill_at = kill_at
        self._train_s = train_s
        self._full_disk_at = full_disk_at

    @property
    def optimizer_steps(self) -> int:
        return self.steps

    def train_batch(self, samples: Sequence[TrainSample], spec: LossSpec) -> dict[str, float]:
        if self.steps + 1 == self._kill_at:
            os._exit(KILL_CODE)
        time.sleep(self._train_s)
        deadline = time.monotonic() + 60.0
        while not self.until():
            assert time.monotonic() < deadline, "what the step waits for did not come"
            time.sleep(0.01)
        self.batches.append(list(samples))
        for sample in samples:
            group, index = int(sample.token_ids[0]), int(sample.token_ids[1])
            self.trained.append((group - GROUP_TOKEN, index - SAMPLE_TOKEN))
        self.steps += 1
        return {"loss/policy": 0.1, "policy/entropy": 1.0, "grad_norm": 0.5, "lr": 1e-6}

    def token_logprobs(
        self, samples: Sequence[TrainSample], model: Model = "policy"
    ) -> list[npt.NDArray[np.float32]]:
        value = fake_logprob(self.steps if model == "policy" else 0)
        return [np.where(s.loss_mask, value, 0.0).astype(np.float32) for s in samples]

    def predictions(self, samples: Sequence[TrainSample]) -> list[Predictions]:
        return [
            Predictions(logprobs, np.where(sample.loss_mask, 0.5, 0.0).astype(np.float32))
            for sample, logprobs in zip(samples, self.token_logprobs(samples), strict=True)
        ]

    def token_values(self, samples: Sequence[TrainSample]) -> list[npt.NDArray[np.float32]]:
        return [np.zeros(s.num_tokens, np.float32) for s in samples]

    adapter = None

    def weights(self) -> Weights:
        import torch

        return Weights({"steps": torch.tensor([float(self.steps)])})

    def save_state(self, directory: Path) -> None:
        if self.steps == self._full_disk_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        directory.mkdir()
        state = {"steps": self.steps, "trained": self.trained}
        (directory / "state.json").write_text(json.dumps(state))
        seal(directory, ENGINE_FACTS)

    def load_state(self, directory: Path) -> None:
        check_seal(directory, ENGINE_FACTS)
        state = json.loads((directory / "state.json").read_text())
        self.steps = state["steps"]
        self.trained = [(group, index) for group, index in state["trained"]]

    def export_model(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "config.json").write_text("{}")

    def snapshot_bytes(self) -> int:
        return self.bytes_of_a_snapshot

    def checkpoint_bytes(self) -> int:
        return 1000

    def check(self) -> None:
        if self.lost is not None:
            raise EngineError(self.lost)

    def close(self, why: str = "") -> None:
        return


Answer = Callable[[RolloutTask, int], "ScoredTrajectory | None"]


def answered(
    rollout: RolloutTask,
    version: int,
    *,
    status: Status = "COMPLETED",
    reason: str = "answer",
    calls: list[ToolCallRecord] | None = None,
) -> ScoredTrajectory:
    """Return a trajectory for a sample: odd samples are right, even ones wrong."""
    key = rollout.key
    total = 2 + NUM_SAMPLED
    tokens = np.full(total, 5, np.int32)
    tokens[:2] = (GROUP_TOKEN + key.group_id, SAMPLE_TOKEN + key.sample_index)
    record = trajectory(
        rollout,
        num_sampled=NUM_SAMPLED,
        policy_version=version,
        token_ids=tokens,
        status=status,
        reason=reason,
        calls=calls,
        temperature=rollout.sampling.temperature,
        server_id="fake",
        started_at=1000.0,
        latency_ms=500.0,
    )
    right = float(key.sample_index % 2)
    components = {"exact_match": right, "f1": right}
    reward = None if status == "FAILED" else Reward(total=right, components=components)
    return ScoredTrajectory(trajectory=record, reward=reward, scored_at=1000.75)


class FakeServices:
    """Rollout and reward of one run: takes samples, holds weights, answers over HTTP."""

    def __init__(
        self,
        broker: Broker,
        *,
        answer: Answer | None = None,
        server_id: str = "fake",
        scores: bool = True,
        run_id: str = "",
    ) -> None:
        self.registry = Registry(broker)
        self.version = 0
        self.weights = 0
        self.seen: list[RolloutTask] = []
        self.loads: list[int] = []
        self.locations: list[str] = []
        """Of the manifests that were loaded."""
        self.published: list[ScoredTrajectory] = []
        self.answer: Answer = answer or answered
        self.refuse_loads = False
        self.outages = 0
        """Answer so many of the next loads with 503, as a server does whose engine has died."""
        self.may_load = asyncio.Event()
        """Cleared: loads take until it is set."""
        self.may_load.set()
        self.may_swap = asyncio.Event()
        """Cleared: what has come is not loaded until it is set."""
        self.may_swap.set()
        self.asked_to_load: list[int] = []
        self.stale_weights = False
        """Acknowledge new weights and go on sampling with the old ones."""
        self.stays_behind = False
        """Answer a load with the version held before."""
        self.moved_on = False
        """Answer a canary with weights of a later version."""
        self.short_canary = False
        """Answer a canary with fewer log-probabilities than its tokens have."""
        self.refuse_canary = False
        self.canaries = 0
        """Canaries that were asked for."""
        self.scores = scores
        """False sends trajectories on for a reward worker of the test's to score."""
        self._broker = broker
        self._server_id = server_id
        self._run_id = run_id
        """Of the weights that a learner sends; needed with `collective` alone."""
        self._url = ""

    async def publish(self, scored: ScoredTrajectory) -> None:
        """Send a result to whom it belongs."""
        self.published.append(scored)
        reply = scored.trajectory.rollout.reply_stream
        await self._broker.publish(reply or self._broker.keys.scored, scored)

    async def _serve_samples(self, consumer: StreamConsumer[RolloutTask]) -> None:
        while True:
            if not await self._holds_newest():
                await asyncio.sleep(0.01)  # as a real server: no new samples with old weights
                continue
            entries = await consumer.read(8, 0.1)
            is_current = await self._holds_newest()  # a version may have been published meanwhile
            for entry in entries:
                if is_current:
                    await self._handle(consumer, entry)
                else:
                    await consumer.release(entry)

    async def _holds_newest(self) -> bool:
        newest = await self.registry.newest_version()
        return newest is not None and newest.policy_version <= self.version

    async def _handle(
        self, consumer: StreamConsumer[RolloutTask], entry: Entry[RolloutTask]
    ) -> None:
        rollout = entry.message
        incarnation = await self.registry.incarnation() or 0
        if rollout.purpose == "train" and rollout.key.incarnation < incarnation:
            await consumer.finish(entry)
            return
        self.seen.append(rollout)
        scored = self.answer(rollout, self.version)
        if scored is None:
            await consumer.finish(entry)
            return
        self.published.append(scored)
        keys = self._broker.keys
        if self.scores:
            await consumer.finish(entry, [(rollout.reply_stream or keys.scored, scored)])
        else:
            await consumer.finish(entry, [(keys.trajectories, scored.trajectory)])

    async def _announce_forever(self) -> None:
        while True:
            server = RolloutServer(
                server_id=self._server_id,
                url=self._url,
                policy_version=self.version,
                pid=os.getpid(),
                host="localhost",
                started_at=0.0,
            )
            await self.registry.announce_rollout_server(server, 5.0)
            await asyncio.sleep(0.2)

    async def _load(self, request: web.Request) -> web.Response:
        body = LoadRequest.model_validate_json(await request.read())
        if self.outages:
            self.outages -= 1
            return web.Response(status=503, text="the engine was killed")
        if self.refuse_loads:
            return web.Response(status=422, text="checksum of lm_head differs")
        self.asked_to_load.append(body.policy_version)
        await self.may_load.wait()
        if body.invitation is None:
            weights = await asyncio.to_thread(_read_snapshot, body.manifest_location)
        else:
            try:
                weights = await self._receive(body, body.invitation)
            except WeightsNotArrivedError as exc:
                return web.Response(status=503, text=str(exc))
        await self.may_swap.wait()
        if not self.stale_weights:
            self.weights = weights
        if not self.stays_behind:
            self.version = body.policy_version
        self.loads.append(body.policy_version)
        self.locations.append(body.manifest_location)
        reply = LoadReply(policy_version=self.version, fetch_s=0.01, pause_s=0.02)
        return web.Response(body=reply.model_dump_json(), content_type="application/json")

    async def _receive(self, body: LoadRequest, invitation: Invitation) -> int:
        with tempfile.TemporaryDirectory() as folder:
            async with CollectiveFetcher(
                self._run_id, self._server_id, Path(folder), 60.0
            ) as fetcher:
                fetcher.accept(invitation)
                newest = NewestVersion(
                    policy_version=body.policy_version, manifest_location=body.manifest_location
                )
                manifest = await fetcher.fetch(newest)
                return int(load_file(manifest.location)["steps"][0])

    async def _canary(self, request: web.Request) -> web.Response:
        body = CanaryRequest.model_validate_json(await request.read())
        self.canaries += 1
        if self.refuse_canary:
            return web.Response(status=422, text="3 log-probabilities for a prompt of 9 tokens")
        count = 1 if self.short_canary else sum(len(p.wanted) for p in body.prompts())
        logprobs = [fake_logprob(self.weights + self.moved_on)] * count
        reply = CanaryReply(policy_version=self.version + self.moved_on, logprobs=logprobs)
        return web.Response(body=reply.model_dump_json(), content_type="application/json")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[FakeServices]:
        """Serve until the block ends."""
        app = web.Application()
        app.router.add_post("/weights/load", self._load)
        app.router.add_post("/weights/canary", self._canary)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        self._url = f"http://{host}:{port}"
        consumer = self._broker.consumer(
            self._broker.keys.tasks, RolloutTask, group="rollout", consumer=self._server_id
        )
        # A loop that fails ends the block with its error: the test must not wait in vain.
        async with consumer, asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._serve_samples(consumer)),
                group.create_task(self._announce_forever()),
            ]
            try:
                yield self
            finally:
                await cancel_and_wait(set(tasks))
                await runner.cleanup()


def _read_snapshot(location: str) -> int:
    if location.startswith("http"):
        manifest = WeightManifest.model_validate_json(httpx.get(location).content)
        content = httpx.get(location.replace("manifest.json", manifest.location)).content
    else:
        manifest = WeightManifest.model_validate_json(Path(location).read_bytes())
        content = Path(manifest.location).read_bytes()
    return int(load(content)["steps"][0])


async def eventually(
    condition: Callable[[], bool],
    running: asyncio.Task[Any] | None = None,
    *,
    timeout_s: float = 60.0,
) -> None:
    """Wait until a condition holds while a task, if given, keeps running.

    Raises:
        AssertionError: it did not within `timeout_s`, or the task ended first.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return
        if running is not None and running.done():
            await running
            raise AssertionError("the task ended before the condition held")
        await asyncio.sleep(0.01)
    raise AssertionError(f"the condition did not hold within {timeout_s} s")


def write_tasks(path: Path, count: int, *, name: str | None = None) -> Path:
    """Write a task file; with a name, of that set, with types `a` and `b` in turn."""
    lines: list[str] = []
    for i in range(count):
        task: dict[str, Any] = {"id": f"{name or 'q'}{i}", "prompt": f"question {i}"}
        if name is not None:
            task["metadata"] = {"set": name, "type": "ab"[i % 2]}
        lines.append(json.dumps(task) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))
    return path


def training_spec(
    folder: Path,
    redis_url: str,
    run_id: str,
    *,
    resume: bool = False,
    take_over: bool = False,
    num_tasks: int = 6,
    evaluation: dict[str, Any] | None = None,
    model: ModelConfig | None = None,
    engine: EngineConfig = EngineConfig(),  # noqa: B008 - frozen
    system_prompt: str | None = None,
    **learner: Any,
) -> RunSpec:
    """Return a spec of 3 steps of 2 groups of 2 samples, in `folder`."""
    data = folder.with_name(folder.name + "-data") / "train.jsonl"
    if not data.exists():
        write_tasks(data, num_tasks)
    defaults: dict[str, Any] = {
        "steps": 3,
        "groups_per_batch": 2,
        "group_size": 2,
        "stall_timeout_s": 20.0,
        "loggers": [],  # that of TensorBoard imports torch, seconds in each process of a learner
    }
    run = RunConfig(id=run_id, dir=folder, seed=1)
    model = model or ModelConfig(path="none", max_context=64)
    return RunSpec(
        run=run,
        model=model,
        redis=RedisConfig(url=redis_url, lease_s=2.0),
        prompts=PromptOrder.of(DataConfig(train=[DataSource(source=data)]), run.seed),
        learner=LearnerConfig(**(defaults | learner)),
        engine=engine,
        evaluation=EvaluationConfig(**(evaluation or {})),
        resolved_config={
            "run": run.model_dump(mode="json"),
            "model": model.model_dump(mode="json"),
            "tools": {},
        },
        resume=resume,
        system_prompt=system_prompt,
        take_over=take_over,
    ).prepare()


def samples_of(groups: Sequence[int], group_size: int = 2) -> list[tuple[int, int]]:
    """Return every (group, sample) of some groups."""
    return [(group, index) for group in groups for index in range(group_size)]
