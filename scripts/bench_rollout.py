"""Measures the rollout service against raw vLLM, and writes runs/bench/rollout.json.

    python scripts/bench_rollout.py [--models base,random90m] [--rounds 3]

"ours" is the number of sampled tokens a second through the whole service: samples from Redis, the
agent loop, tools over HTTP, trajectories back to Redis. "other" is vLLM alone: an engine with the
same settings in this process samples, turn by turn, as many tokens after the same prompts, with
the same seeds, and neither calls a tool nor publishes. Rounds alternate between the two, and the
ratio is the median over rounds. Two models: the committed tiny base, and a random one of 90 million
parameters whose turns end by script. What the first round samples is written to runs/bench, for
bench_engine.py to sample again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from bench_engine import Recorded, replay, replay_file, write_replay
from bench_service import engine_settings
from bench_tools import entry, print_entries

from agent_r1.config.redis_server import find_redis_server
from agent_r1.launch.local_redis import free_port
from agent_r1.rollout.config import RolloutConfig
from agent_r1.rollout.vllm.policy import VllmPolicy
from agent_r1.runtime.config import ModelConfig
from agent_r1.runtime.files.json_lines import split_lines
from agent_r1.text.trajectory_builder import turn_seed
from agent_r1_proto.registry import Registry
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import RolloutKey, RolloutTask, Task
from agent_r1_proto.trajectory import Trajectory
from agent_r1_proto.weights import NewestVersion

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "runs" / "bench"
BASE = ROOT / "examples" / "tiny_world" / "base"
START_TIMEOUT_S = 300.0
ROUND_TIMEOUT_S = 900.0
POLL_S = 0.1
GOALS = {0.0: 0.95, 0.2: 0.93}
RUN_SEED = 0


@dataclass(frozen=True)
class Bench:
    """One model and how much of it is sampled in a round."""

    name: str
    model: Path
    scripted: bool
    samples: int
    max_concurrent: int
    max_num_seqs: int
    kv_cache_gib: float

    def tables(self) -> tuple[ModelConfig, RolloutConfig]:
        """Return the tables `model` and `rollout` of both sides."""
        return (
            ModelConfig(path=str(self.model), max_context=1024),
            RolloutConfig(
                max_concurrent=self.max_concurrent,
                max_num_seqs=self.max_num_seqs,
                kv_cache_gib=self.kv_cache_gib,
            ),
        )


def make_random_model(out: Path) -> None:
    """Write a random model of 90 million parameters with the tiny base's tokenizer.

    It hardly ever ends a turn: feature 0 is 1 in every embedding, no layer writes to it, and only
    the end token's output row reads it.
    """
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(BASE)
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=768,
        num_hidden_layers=14,
        intermediate_size=2048,
        num_attention_heads=12,
        num_key_value_heads=4,
        vocab_size=len(tokenizer),
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
    )
    model: Any = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[config.eos_token_id, 0] = -20.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def make_world(out: Path) -> None:
    """Generate the world of tiny_world whose questions are asked."""
    command = [sys.executable, str(ROOT / "examples/tiny_world/generate.py"), "--no-sft"]
    subprocess.run([*command, "--seed", "0", "--out", str(out)], check=True)


@contextlib.contextmanager
def process(*command: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program while the context lasts."""
    running = subprocess.Popen([str(part) for part in command])
    try:
        yield running
    finally:
        running.terminate()
        try:
            running.wait(30)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


async def announced(folder: Path, name: str, running: subprocess.Popen[bytes]) -> str:
    """Wait for a service's announcement and return its URL."""
    file = folder / f"{name}.json"
    async with asyncio.timeout(START_TIMEOUT_S):
        while not file.exists():
            if running.poll() is not None:
                raise RuntimeError(f"{name} ended with code {running.returncode}; see above")
            await asyncio.sleep(POLL_S)
    return json.loads(file.read_text(encoding="utf-8"))["url"]


class Service:
    """The running services as the bench uses them: samples in, trajectories out."""

    def __init__(self, broker: Broker, questions: list[Task], server: psutil.Process) -> None:
        self._broker = broker
        self._server = server
        self._questions = itertools.cycle(questions)
        self._groups = itertools.count()

    async def run(self, samples: int, latency_s: float) -> tuple[float, list[Trajectory]]:
        """Return tokens a second and the trajectories of one round."""
        tasks = [self._task(latency_s) for _ in range(samples)]
        keys = self._broker.keys
        trajectories: list[Trajectory] = []
        async with asyncio.timeout(ROUND_TIMEOUT_S):
            consumer = self._broker.consumer(
                keys.trajectories, Trajectory, group="bench", consumer="bench"
            )
            async with consumer:
                started = time.perf_counter()
                await self._broker.publish_many(keys.tasks, tasks)
                while len(trajectories) < samples:
                    for entry in await consumer.read(64, 1.0):
                        trajectories.append(entry.message)
                        await consumer.finish(entry)
                elapsed = time.perf_counter() - started
        if failed := [t.reason for t in trajectories if t.status == "FAILED"]:
            raise RuntimeError(f"{len(failed)} of {samples} samples failed, the first: {failed[0]}")
        return sum(t.num_action_tokens for t in trajectories) / elapsed, trajectories

    def server_cpu_s(self) -> float:
        """Return the CPU seconds of the rollout server so far, those of its engine apart."""
        times = self._server.cpu_times()
        return times.user + times.system

    def _task(self, latency_s: float) -> RolloutTask:
        key = RolloutKey(run_id="bench", incarnation=0, group_id=next(self._groups), sample_index=0)
        question = next(self._questions).model_copy(update={"tool_context": latency_s})
        return RolloutTask(key=key, group_size=1, task=question)


def record(trajectories: list[Trajectory]) -> list[Recorded]:
    """Return what vLLM alone samples again."""
    return [
        Recorded(
            tokens=trajectory.token_ids.tolist(),
            turns=[(turn.start, turn.end) for turn in trajectory.turns],
            seeds=[
                turn_seed(RUN_SEED, trajectory.rollout, number)
                for number in range(len(trajectory.turns))
            ],
            temperature=trajectory.temperature,
        )
        for trajectory in trajectories
    ]


async def run_raw(engine: Any, trajectories: list[Trajectory], max_concurrent: int) -> float:
    """Sample every turn of these trajectories again with vLLM alone; return tokens a second."""
    recorded = record(trajectories)
    started = time.perf_counter()
    async with asyncio.timeout(ROUND_TIMEOUT_S):
        tokens = await replay(engine, recorded, max_concurrent)
    return tokens / (time.perf_counter() - started)


async def measure(bench: Bench, rounds: int) -> list[dict[str, Any]]:
    """Start both sides, measure them in turns, and return the results."""
    folder = OUT / bench.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    world = OUT / "world"
    port = free_port()
    redis_url = f"redis://127.0.0.1:{port}/0"
    model, rollout = bench.tables()
    settings: dict[str, Any] = {
        "run_id": "bench",
        "redis_url": redis_url,
        "announce_dir": str(folder),
        "corpus": str(world / "corpus.jsonl"),
        "scripted": bench.scripted,
        "model": model.model_dump(),
        "rollout": rollout.model_dump(),
        "env": {"max_turns": 5, "max_calls_per_turn": 1, "max_tokens_per_turn": 96},
    }
    program = Path(__file__).with_name("bench_service.py")
    file = folder / "settings.json"
    with contextlib.ExitStack() as stack:
        redis = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        log = ["--logfile", str(folder / "redis.log")]
        stack.enter_context(process(find_redis_server(), *redis, *log))
        file.write_text(json.dumps(settings), encoding="utf-8")
        tool = stack.enter_context(process(sys.executable, program, "tool", file))
        settings["tool_url"] = await announced(folder, "search", tool)
        file.write_text(json.dumps(settings), encoding="utf-8")
        server = stack.enter_context(process(sys.executable, program, "rollout", file))
        await announced(folder, "rollout", server)
        broker = await Broker.connect(redis_url, "bench")
        registry = Registry(broker)
        await registry.set_incarnation(0)
        await registry.set_newest_version(NewestVersion(policy_version=0))
        policy = VllmPolicy(engine_settings(model, rollout))
        await policy.start()
        try:
            service = Service(broker, _questions(world), psutil.Process(server.pid))
            return await _alternate(bench, rounds, service, policy)
        finally:
            await policy.stop()
            await broker.close()


def _questions(world: Path) -> list[Task]:
    lines = split_lines((world / "train.jsonl").read_text(encoding="utf-8"))
    return [Task.model_validate_json(line) for line in lines]


async def _alternate(
    bench: Bench, rounds: int, service: Service, policy: VllmPolicy
) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    _, warm = await service.run(bench.max_concurrent, 0.0)
    await run_raw(policy.engine, warm, bench.max_concurrent)
    write_replay(
        replay_file(bench.name),
        engine_settings(*bench.tables()),
        record(warm),
        bench.max_concurrent,
    )
    for latency_s, goal in GOALS.items():
        ours: list[float] = []
        other: list[float] = []
        server_ms: list[float] = []
        for number in range(rounds):
            before = service.server_cpu_s()
            rate, trajectories = await service.run(bench.samples, latency_s)
            server_ms.append(1000 * (service.server_cpu_s() - before) / bench.samples)
            ours.append(rate)
            other.append(await run_raw(policy.engine, trajectories, bench.max_concurrent))
            turns = statistics.mean(len(t.turns) for t in trajectories)
            print(
                f"{bench.name}, tool {latency_s * 1000:.0f} ms, round {number + 1}: service "
                f"{ours[-1]:.0f}, vLLM {other[-1]:.0f} tokens/s, {turns:.1f} turns, "
                f"{server_ms[-1]:.2f} ms of the server's CPU a trajectory",
                flush=True,
            )
        ratio = statistics.median(a / b for a, b in zip(ours, other, strict=True))
        name = f"rollout/{bench.name}/tool_{latency_s * 1000:.0f}ms"
        middle = statistics.median(ours), statistics.median(other)
        result = entry(name, *middle, goal, "higher", ratio=ratio)
        results.append(result | {"server_ms": round(statistics.median(server_ms), 3)})
    return results


def main() -> None:
    """Measure the chosen models and write the results."""
    parser = argparse.ArgumentParser(description="Measure the rollout service against raw vLLM.")
    parser.add_argument("--models", default="base,random90m", help="which, separated by commas")
    parser.add_argument("--rounds", type=int, default=3, help="rounds per model and latency")
    arguments = parser.parse_args()
    random_model = OUT / "random90m_model"
    benches = {
        "base": Bench("base", BASE, False, 1024, 192, 128, 1.0),
        "random90m": Bench("random90m", random_model, True, 32, 24, 16, 1.0),
    }
    OUT.mkdir(parents=True, exist_ok=True)
    if not (OUT / "world" / "train.jsonl").exists():
        make_world(OUT / "world")
    results: list[dict[str, Any]] = []
    for name in arguments.models.split(","):
        if name == "random90m":
            make_random_model(random_model)
        results += asyncio.run(measure(benches[name], arguments.rounds))
    file = OUT / "rollout.json"
    file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print_entries(results)
    print(f"written to {file}")


if __name__ == "__main__":
    main()
