"""Measures pushes over HTTP: what the learner sends to 1 to 8 servers, and how small deltas are.

    python scripts/bench_push.py [--steps 20]

Trains the random model of bench_rollout.py in bfloat16 with the training engine (PPO on random
tokens with random advantages), publishes the weights after every step as `learner.push = "delta"`
does, and pulls every version with one fetcher. Then 1, 2, 4 and 8 fetchers pull the last version
whole, at once. Everything runs in this process, over loopback. Writes runs/bench/push.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI

from agent_r1.learner.config import EngineConfig
from agent_r1.learner.engine.interface import LossSpec, PolicyEngine, TrainSample
from agent_r1.learner.engine.microbatches import scoring_sample
from agent_r1.learner.server import serve_learner
from agent_r1.runtime.config import ListenConfig, ModelConfig
from agent_r1.runtime.http.serving import advertised_url, bind, serving
from agent_r1.weights.http import HttpFetcher, HttpTransport
from agent_r1_proto.registry import RolloutServer
from agent_r1_proto.weights import MANIFEST_FILE, SNAPSHOT_FILE, NewestVersion, WeightManifest

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "runs" / "bench"
FETCHERS = (1, 2, 4, 8)
LR = 1e-6
SEQUENCES = 8
TOKENS = 96
RUN = "bench"


class Servers(AsyncExitStack):
    """Rollout servers without an engine: a fetcher each, that the others may take from."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._announced: list[RolloutServer] = []
        self.fetchers: list[HttpFetcher] = []

    async def rollout_servers(self) -> list[RolloutServer]:
        """Return all of them, as the registry would."""
        return self._announced

    async def start(self, count: int) -> None:
        """Start so many."""
        registry: Any = self
        for number in range(count):
            fetcher = HttpFetcher(
                registry,
                run_id=RUN,
                server_id=str(number),
                parent=self._folder,
                timeout_s=600.0,
                token=None,
            )
            await self.enter_async_context(fetcher)
            self.fetchers.append(fetcher)
            app, listen = FastAPI(), ListenConfig()
            fetcher.add_routes(app)
            listener = bind(str(number), listen, None)
            await self.enter_async_context(serving(app, listener, listen, None))
            url = advertised_url(str(number), listen, listener.getsockname()[1])
            self._announced.append(
                RolloutServer(
                    server_id=str(number),
                    url=url,
                    policy_version=0,
                    pid=0,
                    host="localhost",
                    started_at=0.0,
                )
            )


def make_samples(engine: PolicyEngine, vocabulary: int, seed: int) -> list[TrainSample]:
    """Return random sequences with random advantages, as the policy of now would sample them."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocabulary, (SEQUENCES, TOKENS), dtype=np.int32)
    mask = np.arange(TOKENS) >= TOKENS // 3
    scored = [scoring_sample(row, 1.0) for row in tokens]
    return [
        TrainSample(
            token_ids=row,
            loss_mask=mask,
            rollout_logprobs=logprobs,
            advantages=np.full(TOKENS, rng.standard_normal(), np.float32),
        )
        for row, logprobs in zip(tokens, engine.token_logprobs(scored), strict=True)
    ]


def check_same(pulled: Path, published: Path) -> None:
    """Compare two files bit by bit."""
    if pulled.read_bytes() != published.read_bytes():
        raise SystemExit(f"{published} was pulled with other bytes")


async def measure_deltas(model: Path, folder: Path, steps: int) -> list[WeightManifest]:
    """Train, publish after every step, pull; return what was published, oldest first."""
    from agent_r1.learner.engine.policy_engine import DeepSpeedPolicyEngine
    from agent_r1.learner.engine.ranks.messages import EngineSetup

    vocabulary = int(json.loads((model / "config.json").read_text())["vocab_size"])
    settings = EngineConfig(lr=LR, device="cpu")
    described = ModelConfig(path=str(model), dtype="bfloat16", max_context=2 * TOKENS)
    engine = DeepSpeedPolicyEngine(EngineSetup.of(described, settings))
    manifests: list[WeightManifest] = []
    async with (
        serve_learner(ListenConfig(), None) as server,
        HttpTransport(server, dense_every=steps + 1) as learner,
        Servers(folder / "pulled") as servers,
    ):
        await servers.start(1)
        for version in range(1, steps + 1):
            engine.train_batch(make_samples(engine, vocabulary, version), LossSpec())
            directory = folder / f"v{version}"
            engine.write_snapshot(directory, RUN, version)
            started = time.perf_counter()
            location = (await learner.publish(version, directory)).location
            publish_s = time.perf_counter() - started
            newest = NewestVersion(policy_version=version, manifest_location=location)
            before = learner.files.bytes_out
            pulled = await servers.fetchers[0].fetch(newest)
            pull_s = time.perf_counter() - started - publish_s
            check_same(Path(pulled.location), directory / SNAPSHOT_FILE)
            manifests.append(
                WeightManifest.model_validate_json((directory / MANIFEST_FILE).read_bytes())
            )
            sent = learner.files.bytes_out - before - (directory / MANIFEST_FILE).stat().st_size
            share = sent / pulled.size_bytes
            print(
                f"push {version}: {sent / 1e6:.2f} MB, {share:.2%} of dense, made in "
                f"{publish_s:.1f} s, pulled in {pull_s:.1f} s",
                flush=True,
            )
            if version > 1:
                shutil.rmtree(folder / f"v{version - 1}")
    engine.close()
    return manifests


async def measure_fetchers(directory: Path, version: int) -> list[dict[str, float]]:
    """Pull one version with more and more servers at once; return a row for each number."""
    rows: list[dict[str, float]] = []
    for count in FETCHERS:
        async with (
            serve_learner(ListenConfig(), None) as server,
            HttpTransport(server, dense_every=1) as learner,
            Servers(directory.parent / "pulled") as servers,
        ):
            await servers.start(count)
            location = (await learner.publish(version, directory)).location
            newest = NewestVersion(policy_version=version, manifest_location=location)
            started = time.perf_counter()
            await asyncio.gather(*(one.fetch(newest) for one in servers.fetchers))
            seconds = time.perf_counter() - started
            size = (directory / SNAPSHOT_FILE).stat().st_size
            ratio = learner.files.bytes_out / size
            rows.append({"fetchers": count, "learner_bytes_ratio": ratio, "seconds": seconds})
            print(f"{count} fetchers: the learner sent {ratio:.3f} snapshots in {seconds:.1f} s")
    return rows


async def measure(model: Path, folder: Path, steps: int) -> dict[str, Any]:
    """Measure both parts."""
    manifests = await measure_deltas(model, folder, steps)
    shares = [m.delta.size_bytes / m.size_bytes for m in manifests if m.delta is not None]
    rows = await measure_fetchers(folder / f"v{steps}", steps)
    return {
        "dense_bytes": manifests[0].size_bytes,
        "delta_shares": shares,
        "median_delta_share": statistics.median(shares),
        "fetchers": rows,
    }


def main() -> None:
    """Measure, print and write the figures."""
    from bench_rollout import make_random_model

    parser = argparse.ArgumentParser(description="Measure pushes of weights over HTTP.")
    parser.add_argument("--steps", type=int, default=20, help="learner steps, each with a push")
    steps = parser.parse_args().steps
    model, folder = OUT / "random90m_model", OUT / "push"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if not model.exists():
        make_random_model(model)
    figures = asyncio.run(measure(model, folder, steps))
    (OUT / "push.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(
        f"dense {figures['dense_bytes'] / 1e6:.0f} MB; deltas of pushes 2 to {steps}: median "
        f"{figures['median_delta_share']:.2%}, largest {max(figures['delta_shares']):.2%} of it"
    )
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
