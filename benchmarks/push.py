"""Pushes by every transport to 1, 2 and 4 servers, against a call for each tensor.

    make bench CASE=push ARGS="--servers 1 2 4 --rounds 5 --engine-rounds 5"

A learner with the random model of 90 million parameters in bfloat16 pushes through its publisher:
over HTTP, as files and by broadcast. Before a push over HTTP as a delta it trains a step (PPO on
random tokens), since the delta is of what has changed. "other" is what a trainer is written with
first: every tensor in a POST of its own, which the server copies, or has its engine load, before it
answers. Rounds take turns. A push has ended when every server has its weights; the canary follows.

Rollout servers are real, with their own processes and sockets, but for the engine: they verify and
copy. Then one server of each kind has an engine of vLLM, which stands still for the pause, and a
canary follows. Everything runs on one machine, over loopback. The parts alone are measured in this
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from httpx_aiohttp import AiohttpTransport
from transformers import AutoConfig

from agent_r1.learner.checkpoints.ledger import Ledger
from agent_r1.learner.config import EngineConfig, EvaluationConfig, LearnerConfig
from agent_r1.learner.engine.interface import LossSpec, TrainSample
from agent_r1.learner.engine.policy_engine import DeepSpeedPolicyEngine
from agent_r1.learner.engine.ranks.messages import EngineSetup
from agent_r1.learner.run_spec import RunSpec
from agent_r1.learner.server import serve_learner
from agent_r1.learner.weights.publisher import WeightPublisher
from agent_r1.runtime.config import ListenConfig, ModelConfig, RedisConfig, RunConfig
from agent_r1.weights.chunks import hash_chunks
from agent_r1.weights.collective import buckets, checksum
from agent_r1.weights.layout import read_model_layout
from agent_r1.weights.snapshot import (
    raw_bytes,
    safetensors_bytes,
    verify_snapshot,
    write_safetensors,
    write_snapshot,
)
from agent_r1_proto.registry import Registry
from agent_r1_proto.streams import Broker
from agent_r1_proto.weights import NewestVersion
from benchmarks.harness import OUT, Row, alternate, compare, read_options, write_report
from benchmarks.models import random_model
from benchmarks.processes import announced_url, process, redis_server
from benchmarks.push_servers import DTYPE, MAX_CONTEXT
from benchmarks.samples import as_sampled, random_samples

TRANSPORTS: dict[str, dict[str, Any]] = {
    "http": {"transport": "http"},
    "http, delta": {"transport": "http", "push": "delta", "dense_every": 1_000_000},
    "file": {"transport": "file"},
    "collective": {"transport": "collective"},
}
CALLS = "a call for each tensor"
GOALS = {"collective": "≤ 0.25"}
SEQUENCES = 2
TOKENS = 96
START_TIMEOUT_S = 300.0
POLL_S = 0.005
Push = Callable[[], Coroutine[None, None, dict[str, float]]]


class Learner:
    """The training engine, and the thread that works with it."""

    def __init__(self) -> None:
        self.model = random_model("90m")
        self.table = ModelConfig(path=str(self.model), dtype=DTYPE, max_context=MAX_CONTEXT)
        self.config = EngineConfig(lr=1e-6, device="cpu")
        self.engine = DeepSpeedPolicyEngine(EngineSetup.of(self.table, self.config))
        self.thread = ThreadPoolExecutor(1)
        self._vocabulary = AutoConfig.from_pretrained(self.model).vocab_size
        self._steps = 0

    def samples(self) -> list[TrainSample]:
        """Return random sequences, as the policy of now would sample them."""
        self._steps += 1
        rows = random_samples(
            [TOKENS] * SEQUENCES, self._vocabulary, prompt_tokens=TOKENS // 3, seed=self._steps
        )
        return as_sampled(rows, self.engine)

    def train(self) -> None:
        """Take a step."""
        self.engine.train_batch(self.samples(), LossSpec())

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the engine's thread."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, function, *arguments)

    def spec(self, run_id: str, redis_url: str, folder: Path) -> RunSpec:
        """Return the run of a transport."""
        settings = {**TRANSPORTS[run_id], "canary_action": "warn", "weights_dir": folder}
        return RunSpec(
            run=RunConfig(id=run_id.replace(", ", "_")),
            model=self.table,
            redis=RedisConfig(url=redis_url),
            learner=LearnerConfig(**settings),
            engine=self.config,
            evaluation=EvaluationConfig(),
            prompts=None,  # pyright: ignore - nothing is sampled
            resolved_config={},
            resume=False,
        )


async def push_by_calls(
    learner: Learner, urls: list[str], client: httpx.AsyncClient
) -> dict[str, float]:
    """Send every tensor in a call of its own, to all servers at once; return milliseconds."""

    async def tell(name: str, data: bytes = b"") -> None:
        for answer in await asyncio.gather(
            *(client.post(f"{url}/tensors/{name}", content=data) for url in urls)
        ):
            answer.raise_for_status()

    started = time.perf_counter()
    # As `engine.weights` does, but for a copy of all tensors: each call makes its own.
    weights = await learner.run(learner.engine._collect)
    gathered = time.perf_counter()
    await tell("begin")
    for name, tensor in weights.tensors.items():
        await tell(name, raw_bytes(tensor).tobytes())
    await tell("end")
    ended = time.perf_counter()
    return {"all": 1e3 * (ended - started), "pause": 1e3 * (ended - gathered)}


async def push_by_publisher(
    learner: Learner, publisher: WeightPublisher, registry: Registry, servers: int, canary: bool
) -> dict[str, float]:
    """Push, and wait until every server has the version; return milliseconds by part, and MB."""
    samples = (await learner.run(learner.samples))[:2] if canary else []
    started = time.perf_counter()
    report = await publisher.push(samples)
    while report.servers < servers:
        held = [one.policy_version for one in await registry.rollout_servers()]
        if min(held) >= report.policy_version:
            break
        await asyncio.sleep(POLL_S)
    canary_s = report.predict_s + report.score_s
    parts = {
        "all": time.perf_counter() - started - canary_s,
        "gather": report.gather_s,
        "write, hash": report.write_s,
        "send, verify": report.fetch_s,
        "pause": report.pause_s,
        "canary": canary_s,
    }
    sent = report.bytes_sent + publisher.transport.take_bytes_sent()
    return {name: 1e3 * value for name, value in parts.items()} | {"sent, MB": sent / 1e6}


async def open_sides(
    stack: AsyncExitStack, learner: Learner, servers: int, engine: bool, folder: Path
) -> dict[str, Push]:
    """Start the servers, and return what pushes to them in each way."""
    redis_url, _ = stack.enter_context(redis_server(folder))
    weights = folder / "weights"
    specs = {name: learner.spec(name, redis_url, weights) for name in TRANSPORTS}
    transports = {spec.run.id: spec.learner.transport for spec in specs.values()}
    runs: dict[str, tuple[WeightPublisher, Registry]] = {}
    for name, spec in specs.items():
        run_folder = folder / spec.run.id
        run_folder.mkdir()
        registry = Registry(
            await stack.enter_async_context(await Broker.connect(redis_url, spec.run.id))
        )
        await registry.set_incarnation(0)
        await registry.set_newest_version(NewestVersion(policy_version=0))
        publisher = WeightPublisher(
            spec,
            engine=learner.engine,
            engine_thread=learner.thread,
            registry=registry,
            ledger=Ledger(run_folder),
            server=await stack.enter_async_context(serve_learner(ListenConfig(), None)),
            canary_floor=None,
        )
        runs[name] = await stack.enter_async_context(publisher), registry
    urls: list[str] = []
    for number in range(servers):
        name = f"calls{number}"
        place = json.dumps([name, redis_url, str(weights), str(learner.model), transports, engine])
        running = stack.enter_context(
            process(sys.executable, "-m", "benchmarks.push_servers", place)
        )
        urls.append(await asyncio.to_thread(announced_url, weights, name, running))
    async with asyncio.timeout(START_TIMEOUT_S):
        for _, registry in runs.values():
            while len(await registry.rollout_servers()) < servers:  # noqa: ASYNC110 - in Redis
                await asyncio.sleep(0.2)
    client = httpx.AsyncClient(transport=AiohttpTransport(), timeout=START_TIMEOUT_S)
    await stack.enter_async_context(client)

    async def by(name: str) -> dict[str, float]:
        if name == "http, delta":
            await learner.run(learner.train)
        return await push_by_publisher(learner, *runs[name], servers, engine)

    calls = partial(push_by_calls, learner, urls, client)
    return {CALLS: calls, **{name: partial(by, name) for name in TRANSPORTS}}


async def measure(learner: Learner, servers: int, engine: bool, rounds: int) -> list[Row]:
    """Push by turns to so many servers; return a row for each way."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=OUT)))
        pushes = await open_sides(stack, learner, servers, engine, folder)
        for push in pushes.values():
            await push()  # warms up
        loop = asyncio.get_running_loop()

        def side(push: Push) -> dict[str, float]:
            return asyncio.run_coroutine_threadsafe(push(), loop).result()

        sides = {name: partial(side, push) for name, push in pushes.items()}
        found = await asyncio.to_thread(alternate, sides, rounds)
    rows: list[Row] = []
    for name, taken in found.items():
        ours, calls = ([one["all"] for one in found[side]] for side in (name, CALLS))
        parts = {key: statistics.median(one[key] for one in taken) for key in taken[0]}
        row = {"servers": f"{servers} {'vLLM' if engine else 'copying'}"}
        rows.append(row | compare(name, ours, calls, GOALS.get(name)) | parts)
        del rows[-1]["all"]
    return rows


def measure_parts(learner: Learner, rounds: int) -> Row:
    """Return the medians of each part alone, in milliseconds."""
    weights, layout = learner.engine.weights(), read_model_layout(learner.model, tied=False)

    def timed(work: Callable[[], Any]) -> float:
        started = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - started)

    with tempfile.TemporaryDirectory(dir=OUT) as text:
        path = Path(text) / "weights"
        manifest = write_snapshot(path.parent / "v1", "bench", 1, weights)
        parts: dict[str, Callable[[], Any]] = {
            "write": lambda: write_safetensors(path, weights),
            "hash": lambda: hash_chunks(path),
            "write, hash and sync": lambda: write_snapshot(path.parent / "v1", "bench", 1, weights),
            "verify": lambda: verify_snapshot(manifest, layout, DTYPE),
            "sums of buckets": lambda: list(map(checksum, buckets(safetensors_bytes(weights)))),
        }
        found = alternate({name: partial(timed, work) for name, work in parts.items()}, rounds)
    return {name: statistics.median(times) for name, times in found.items()}


def main() -> None:
    """Measure the parts, and every number of servers."""
    options = read_options(__doc__, servers=(1, 2, 4), rounds=5, engine_rounds=5)
    learner = Learner()
    with contextlib.closing(learner.engine):
        parts = measure_parts(learner, options.rounds)
        numbers = [(servers, False, options.rounds) for servers in options.servers]
        if options.engine_rounds:
            numbers.append((1, True, options.engine_rounds))
        rows: list[Row] = []
        for one in numbers:
            rows += asyncio.run(measure(learner, *one))
    learner.thread.shutdown()
    write_report("push_parts", [parts])
    write_report("push", rows)


if __name__ == "__main__":
    main()
