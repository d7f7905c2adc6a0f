"""The rollout service against vLLM alone, and its engine against an older one and the machine.

    make bench CASE=rollout ARGS="--models base 90m --rounds 3 --against CHECKOUT"

"ours" are sampled tokens a second of the whole service: samples from Redis, the agent loop, tools
over HTTP, trajectories back to Redis. "other" is vLLM alone: an engine with the same settings
samples, turn by turn, as many tokens after the same prompts, with the same seeds, and neither calls
a tool nor publishes. Rounds are pairs. Two models: the committed tiny base, and a random one of 90
million parameters whose every turn is read as a search.

CHECKOUT is another clone with its `.venv`: its engine then replays the first samples in turn with
this one ("engine" in the report). The limit is what one thread would take for the products with the
weights if it did nothing else and computed no token twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from agent_r1.text.tokens import turn_seed
from agent_r1_proto.registry import Registry
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import RolloutKey, RolloutTask, Task
from agent_r1_proto.trajectory import Trajectory
from agent_r1_proto.weights import NewestVersion
from benchmarks.harness import OUT, ROOT, Row, alternate, compare, read_options, write_report
from benchmarks.models import BASE, FLOAT_BYTES, count_weights, measure_limits, random_model
from benchmarks.processes import (
    PLUGINS,
    announced_url,
    cpu_s,
    make_world,
    process,
    read_json_lines,
    redis_server,
)

ROUND_TIMEOUT_S = 900.0
GOALS = {0.0: "≥ 0.95", 0.2: "≥ 0.93"}
"""By the seconds that a call of the tool takes."""
RUN_SEED = 0
AGENT_R1 = Path(sys.executable).with_name("agent-r1")


@dataclass(frozen=True)
class Load:
    """A model, and how much of it is sampled in a round."""

    model: Path
    samples: int
    max_concurrent: int
    max_num_seqs: int
    env: str = ""
    """More of its table."""

    def config(self, redis_url: str, tool_url: str) -> str:
        """Return the run.toml of its rollout server."""
        return f"""
run = {{id = "bench", log_level = "WARNING", plugins = [{json.dumps(str(PLUGINS))}]}}
model = {{path = {json.dumps(str(self.model))}, max_context = 1024}}
redis = {{url = "{redis_url}"}}
tools = {{search = {{url = "{tool_url}"}}}}
[rollout]
max_concurrent = {self.max_concurrent}
max_num_seqs = {self.max_num_seqs}
kv_cache_gib = 1.0
[env]
max_turns = 5
max_calls_per_turn = 1
max_tokens_per_turn = 96
{self.env}"""

    def engine(self) -> dict[str, Any]:
        """Return the same settings for vLLM alone."""
        return {
            "model": {"path": str(self.model), "max_context": 1024},
            "rollout": {"max_num_seqs": self.max_num_seqs, "kv_cache_gib": 1.0},
        }


def load_of(name: str) -> Load:
    """Return a load by its name."""
    if name == "base":
        return Load(BASE, samples=1024, max_concurrent=192, max_num_seqs=128)
    env = 'tool_format = "bench_parts:EveryTurnSearches"\n'
    return Load(random_model("90m", 48), samples=32, max_concurrent=24, max_num_seqs=16, env=env)


class Engine(contextlib.ExitStack):
    """An engine of a checkout, in a process that replays when it is told to."""

    def __init__(self, checkout: Path, load: Load) -> None:
        super().__init__()
        program = [checkout / ".venv/bin/python", Path(__file__).with_name("replay.py")]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = [*program, json.dumps(load.engine())]
        self._process: Any = self.enter_context(process(*command, **pipes, text=True))
        self._max_concurrent = load.max_concurrent
        self.callback(self._process.wait, 60)
        self.callback(self._process.stdin.close)  # it then ends its engine, and itself

    def replay(self, trajectories: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Replay once, and return what it took.

        Raises:
            SystemExit: the process ended.
        """
        asked = {"trajectories": trajectories, "max_concurrent": self._max_concurrent}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        return json.loads(line) if line else sys.exit("the engine ended; the lines above say why")


def recorded(trajectory: Trajectory) -> dict[str, Any]:
    """Return what of a trajectory vLLM alone samples again."""
    seeds = [turn_seed(RUN_SEED, trajectory.rollout, n) for n in range(len(trajectory.turns))]
    return {
        "tokens": trajectory.token_ids.tolist(),
        "turns": [(turn.start, turn.end) for turn in trajectory.turns],
        "seeds": seeds,
        "temperature": trajectory.temperature,
    }


async def sample(redis_url: str, tasks: Sequence[RolloutTask]) -> tuple[float, list[Trajectory]]:
    """Ask the service for samples; return tokens a second and the trajectories.

    Raises:
        RuntimeError: a sample failed.
    """
    taken: list[Trajectory] = []
    async with asyncio.timeout(ROUND_TIMEOUT_S), await Broker.connect(redis_url, "bench") as broker:
        keys = broker.keys
        registry = Registry(broker)
        await registry.set_incarnation(0)
        await registry.set_newest_version(NewestVersion(policy_version=0))
        names = {"group": "bench", "consumer": "bench"}
        async with broker.consumer(keys.trajectories, Trajectory, **names) as consumer:
            started = time.perf_counter()
            await broker.publish_many(keys.tasks, tasks)
            while len(taken) < len(tasks):
                for entry in await consumer.read(64, 1.0):
                    taken.append(entry.message)
                    await consumer.finish(entry)
            seconds = time.perf_counter() - started
    if failed := [t.reason for t in taken if t.status == "FAILED"]:
        raise RuntimeError(f"{len(failed)} of {len(tasks)} samples failed: {failed[0]}")
    return sum(t.num_action_tokens for t in taken) / seconds, taken


def start_services(stack: contextlib.ExitStack, name: str, load: Load) -> tuple[str, psutil.Popen]:
    """Start Redis, the tool and the rollout server; return Redis' URL and the server."""
    OUT.mkdir(parents=True, exist_ok=True)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    redis_url, _ = stack.enter_context(redis_server(folder))
    announce = ["--announce-dir", folder]
    tool = process(AGENT_R1, "serve", "tool", "bench_tools:TwoPassages", *announce, cwd=PLUGINS)
    tool_url = announced_url(folder, "search", stack.enter_context(tool))
    config = folder / "run.toml"
    config.write_text(load.config(redis_url, tool_url), encoding="utf-8")
    log = stack.enter_context((OUT / f"rollout_{name}.log").open("wb"))
    command = [AGENT_R1, "serve", "rollout", config, *announce]
    server = stack.enter_context(process(*command, stdout=log, stderr=log))
    announced_url(folder, "rollout", server)
    return redis_url, server


def measure(name: str, rounds: int, against: str) -> tuple[list[Row], Row]:
    """Start both sides of a load and measure them; return the rows, and what the engines took."""
    load, lines = load_of(name), read_json_lines(make_world() / "train.jsonl")
    numbers = itertools.count()
    with contextlib.ExitStack() as stack:
        redis_url, server = start_services(stack, name, load)
        engine = stack.enter_context(Engine(ROOT, load))

        def run(count: int, wait_s: float) -> tuple[float, list[dict[str, Any]]]:
            taken = itertools.islice(numbers, count)
            tasks = [_task(lines[number % len(lines)], number, wait_s) for number in taken]
            rate, trajectories = asyncio.run(sample(redis_url, tasks))
            return rate, [recorded(one) for one in trajectories]

        _, first = run(load.max_concurrent, 0.0)  # warms both sides up
        engine.replay(first)
        rows: list[Row] = []
        for wait_s, goal in GOALS.items():
            ours, other, before = [], [], cpu_s(server)
            for _ in range(rounds):
                rate, trajectories = run(load.samples, wait_s)
                ours.append(rate)
                other.append(engine.replay(trajectories)["tokens_per_s"])
                print(f"{name}: {ours[-1]:.0f} and {other[-1]:.0f} tokens/s", flush=True)
            row = compare(f"{name}, tool takes {1000 * wait_s:.0f} ms", ours, other, goal)
            server_ms = 1000 * (cpu_s(server) - before) / rounds / load.samples
            rows.append(row | {"server CPU, ms a trajectory": server_ms})
        server.terminate()
        return rows, compare_engines(load, engine, against, first, rounds)


def _task(line: dict[str, Any], number: int, wait_s: float) -> RolloutTask:
    key = RolloutKey(run_id="bench", incarnation=0, group_id=number, sample_index=0)
    task = Task.model_validate(line | {"tool_context": wait_s})
    return RolloutTask(key=key, group_size=1, task=task)


def compare_engines(
    load: Load, engine: Engine, against: str, trajectories: list[dict[str, Any]], rounds: int
) -> Row:
    """Return the medians of this engine and of another checkout's, and the limit."""
    engines = {"this": engine}
    with contextlib.ExitStack() as stack:
        if against:
            engines["against"] = stack.enter_context(Engine(Path(against).resolve(), load))
            engines["against"].replay(trajectories)  # the first is slower
        sides = {name: (lambda one=one: one.replay(trajectories)) for name, one in engines.items()}
        taken = alternate(sides, rounds)
    found: Row = {"limit_tokens_per_s": limit(load.model, trajectories)}
    for name, replays in taken.items():
        middle = {key: statistics.median(one[key] for one in replays) for key in replays[0]}
        found |= {f"{name}_{key}": value for key, value in middle.items()}
    for key in taken["this"][0] if against else ():
        pairs = zip(taken["this"], taken["against"], strict=True)
        found[f"ratio_{key}"] = statistics.median(a[key] / b[key] for a, b in pairs)
    return found


def limit(model: Path, trajectories: Sequence[dict[str, Any]]) -> float:
    """Return the tokens a second of a thread that multiplies with the weights and does no more."""
    weights, limits = count_weights(model), measure_limits()
    sampled = [sum(end - start for start, end in one["turns"]) for one in trajectories]
    computed = sum(len(one["tokens"]) - 1 for one in trajectories)
    operations = 2 * (computed * weights.layers + sum(sampled) * weights.head)
    read_s = max(sampled) * FLOAT_BYTES * weights.all / limits.bytes_per_s
    return sum(sampled) / max(operations / limits.flops_per_s, read_s)


def main() -> None:
    """Measure the chosen models."""
    options = read_options(__doc__, models=("base", "90m"), rounds=3, against="")
    rows: list[Row] = []
    engines: dict[str, Row] = {}
    for name in options.models:
        found, engines[name] = measure(name, options.rounds, options.against)
        rows += found
    write_report("rollout", rows, engine=engines)
    print(json.dumps(engines, indent=1))


if __name__ == "__main__":
    main()
