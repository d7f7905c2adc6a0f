"""Pushes over HTTP: how small deltas are, and what the learner sends to 1 to 8 servers.

    make bench CASE=push ARGS="--steps 20"

Trains the random model of 90 million parameters in bfloat16 with the training engine (PPO on random
tokens with random advantages), publishes the weights after every step as `learner.push = "delta"`
does, and pulls every version with one fetcher. Then 1, 2, 4 and 8 fetchers pull the last version
whole, at once. Everything runs in this process, over loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import filecmp
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from transformers import AutoConfig

from agent_r1.learner.config import EngineConfig
from agent_r1.learner.engine.interface import LossSpec
from agent_r1.learner.engine.policy_engine import DeepSpeedPolicyEngine
from agent_r1.learner.engine.ranks.messages import EngineSetup
from agent_r1.learner.server import serve_learner
from agent_r1.runtime.config import ListenConfig, ModelConfig
from agent_r1.runtime.http.serving import advertised_url, bind, serving
from agent_r1.weights.http import HttpFetcher, HttpTransport
from agent_r1.weights.snapshot import write_snapshot
from agent_r1_proto.registry import RolloutServer
from agent_r1_proto.weights import MANIFEST_FILE, SNAPSHOT_FILE, NewestVersion
from benchmarks.harness import OUT, Row, read_options, write_report
from benchmarks.models import random_model
from benchmarks.samples import as_sampled, random_samples

FETCHERS = (1, 2, 4, 8)
LR = 1e-6
SEQUENCES = 8
TOKENS = 96
RUN = "bench"


class Servers(contextlib.AsyncExitStack):
    """Rollout servers without an engine: a fetcher each, that the others may take from."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._announced: list[RolloutServer] = []
        self.fetchers: list[HttpFetcher] = []

    async def rollout_servers(self) -> list[RolloutServer]:
        """Return all of them, as the registry would."""
        return self._announced

    async def start(self) -> None:
        """Start one more."""
        name, registry = str(len(self.fetchers)), self
        place: dict[str, Any] = {"parent": self._folder, "timeout_s": 600.0, "token": None}
        fetcher = HttpFetcher(registry, run_id=RUN, server_id=name, **place)  # pyright: ignore
        await self.enter_async_context(fetcher)
        self.fetchers.append(fetcher)
        app, listen = FastAPI(), ListenConfig()
        fetcher.add_routes(app)
        listener = bind(name, listen, None)
        await self.enter_async_context(serving(app, listener, listen, None))
        url = advertised_url(name, listen, listener.getsockname()[1])
        facts: dict[str, Any] = {"policy_version": 0, "pid": 0, "host": "here", "started_at": 0.0}
        self._announced.append(RolloutServer(server_id=name, url=url, **facts))


@contextlib.asynccontextmanager
async def transport(
    folder: Path, servers: int, dense_every: int
) -> AsyncIterator[tuple[HttpTransport, list[HttpFetcher]]]:
    """Yield a learner's end, and those of so many servers."""
    async with (
        serve_learner(ListenConfig(), None) as server,
        HttpTransport(server, dense_every=dense_every) as learner,
        Servers(folder / "pulled") as running,
    ):
        for _ in range(servers):
            await running.start()
        yield learner, running.fetchers


async def publish(learner: HttpTransport, version: int, directory: Path) -> NewestVersion:
    """Publish a version and return what the registry would say of it."""
    location = (await learner.publish(version, directory)).location
    return NewestVersion(policy_version=version, manifest_location=location)


def train(engine: DeepSpeedPolicyEngine, vocabulary: int, seed: int) -> None:
    """Take a step on random sequences, as the policy of now would sample them."""
    prompt = TOKENS // 3
    samples = random_samples([TOKENS] * SEQUENCES, vocabulary, prompt_tokens=prompt, seed=seed)
    engine.train_batch(as_sampled(samples, engine), LossSpec())


async def measure_deltas(engine: DeepSpeedPolicyEngine, folder: Path, steps: int) -> list[Row]:
    """Train, publish after every step, pull; return a row for each push."""
    vocabulary = AutoConfig.from_pretrained(random_model("90m")).vocab_size
    rows: list[Row] = []
    async with transport(folder, 1, steps + 1) as (learner, (fetcher,)):
        for version in range(1, steps + 1):
            train(engine, vocabulary, version)
            directory = folder / f"v{version}"
            write_snapshot(directory, RUN, version, engine.weights())
            started = time.perf_counter()
            newest = await publish(learner, version, directory)
            made_s, before = time.perf_counter() - started, learner.files.bytes_out
            pulled = await fetcher.fetch(newest)
            pulled_s = time.perf_counter() - started - made_s
            if not filecmp.cmp(pulled.location, directory / SNAPSHOT_FILE, shallow=False):
                raise SystemExit(f"{directory} was pulled with other bytes")
            sent = learner.files.bytes_out - before - (directory / MANIFEST_FILE).stat().st_size
            times = {"made in, s": made_s, "pulled in, s": pulled_s}
            rows.append(
                {"push": version, "bytes": sent, "share of dense": sent / pulled.size_bytes} | times
            )
            print(rows[-1], flush=True)
            if version > 1:
                shutil.rmtree(folder / f"v{version - 1}")
    return rows


async def measure_fetchers(directory: Path, version: int) -> list[Row]:
    """Pull one version with more and more servers at once; return a row for each number."""
    rows: list[Row] = []
    size = (directory / SNAPSHOT_FILE).stat().st_size
    for count in FETCHERS:
        async with transport(directory.parent, count, 1) as (learner, fetchers):
            newest = await publish(learner, version, directory)
            started = time.perf_counter()
            await asyncio.gather(*(one.fetch(newest) for one in fetchers))
            seconds, sent = time.perf_counter() - started, learner.files.bytes_out / size
            rows.append({"servers": count, "snapshots that are sent": sent, "seconds": seconds})
    return rows


def main() -> None:
    """Measure both parts."""
    steps = read_options(__doc__, steps=20).steps
    model = ModelConfig(path=str(random_model("90m")), dtype="bfloat16", max_context=2 * TOKENS)
    engine = DeepSpeedPolicyEngine(EngineSetup.of(model, EngineConfig(lr=LR, device="cpu")))
    with tempfile.TemporaryDirectory(dir=OUT) as text:
        folder = Path(text)
        deltas = asyncio.run(measure_deltas(engine, folder, steps))
        engine.close()
        servers = asyncio.run(measure_fetchers(folder / f"v{steps}", steps))
    write_report("push", deltas)
    write_report("push_servers", servers)


if __name__ == "__main__":
    main()
