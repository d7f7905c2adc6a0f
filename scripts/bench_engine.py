"""The engine alone: how fast it samples, beside an older one and beside the machine's limit.

    python scripts/bench_engine.py [--models base,random90m] [--against CHECKOUT] [--rounds 5]

Replays the trajectories that bench_rollout.py has recorded, turn by turn, in a process of its own,
and writes runs/bench/engine.json. CHECKOUT is another clone of this repository with its `.venv`:
its engine replays the same trajectories in turn with this one. The limit is what one thread would
take for the products with the weights if it did nothing else and computed no token twice.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from machine_limits import FLOAT_BYTES, Limits, count_weights, measure_limits

if TYPE_CHECKING:
    from agent_r1.rollout.vllm.settings import VllmSettings

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "runs" / "bench"


@dataclass(frozen=True)
class Recorded:
    """What of a trajectory is sampled again: T tokens, the turns among them and their seeds."""

    tokens: list[int]
    turns: list[tuple[int, int]]
    """Index of the first token of a turn, and the one after its last."""
    seeds: list[int]
    temperature: float


async def replay(engine: Any, trajectories: Sequence[Recorded], max_concurrent: int) -> int:
    """Sample as many tokens after the same prompts; return how many.

    Args:
        engine: vLLM's AsyncLLM.
        trajectories: what to sample.
        max_concurrent: trajectories at a time.
    """
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    room = asyncio.Semaphore(max_concurrent)
    request_ids = itertools.count()

    async def one(trajectory: Recorded) -> int:
        async with room:
            for (start, end), seed in zip(trajectory.turns, trajectory.seeds, strict=True):
                params = SamplingParams(
                    max_tokens=end - start,
                    ignore_eos=True,
                    temperature=trajectory.temperature,
                    seed=seed,
                    logprobs=0,
                    flat_logprobs=True,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                    skip_clone=True,
                )
                prompt = tokens_input(trajectory.tokens[:start])
                async for _ in engine.generate(prompt, params, f"raw-{next(request_ids)}"):
                    pass
        return sum(end - start for start, end in trajectory.turns)

    return sum(await asyncio.gather(*(one(trajectory) for trajectory in trajectories)))


@dataclass
class Replay:
    """What one replay took."""

    tokens: int
    wall_s: float
    steps: int
    server_cpu_s: float
    engine_cpu_s: float


def _cpu_s() -> tuple[float, float]:
    own = time.process_time()
    children = psutil.Process(os.getpid()).children(recursive=True)
    times = [child.cpu_times() for child in children]
    return own, sum(time.user + time.system for time in times)


async def serve(settings: dict[str, Any]) -> None:
    """Start an engine, and replay once for each line of standard input."""
    from agent_r1.rollout.vllm.policy import VllmPolicy
    from agent_r1.rollout.vllm.settings import VllmSettings

    trajectories = [Recorded(**recorded) for recorded in settings["trajectories"]]
    policy = VllmPolicy(VllmSettings(**settings["engine"]))
    await policy.start()
    try:
        while await asyncio.to_thread(sys.stdin.readline):
            server, engine = _cpu_s()
            steps, started = policy.work.steps, time.perf_counter()
            tokens = await replay(policy.engine, trajectories, settings["max_concurrent"])
            wall_s = time.perf_counter() - started
            server_after, engine_after = _cpu_s()
            taken = Replay(
                tokens,
                wall_s,
                policy.work.steps - steps,
                server_after - server,
                engine_after - engine,
            )
            print(json.dumps(asdict(taken)), flush=True)
    finally:
        await policy.stop()


def replay_file(model: str) -> Path:
    """Return where the trajectories of a model's replay are."""
    return OUT / f"replay_{model}.json"


def write_replay(
    file: Path, settings: VllmSettings, trajectories: Sequence[Recorded], max_concurrent: int
) -> None:
    """Write down what a replay needs."""
    content = {
        "engine": {
            name: value
            for name, value in asdict(settings).items()
            if name in ("model_path", "max_context", "max_num_seqs", "kv_cache_gib", "threads")
        },
        "max_concurrent": max_concurrent,
        "trajectories": [asdict(trajectory) for trajectory in trajectories],
    }
    file.write_text(json.dumps(content), encoding="utf-8")


class Engine:
    """An engine of a checkout, in a process that replays when it is told to."""

    def __init__(self, checkout: Path, file: Path) -> None:
        program = [str(checkout / ".venv/bin/python"), __file__, "--serve", str(file)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(program, stdin=pipe, stdout=pipe, text=True)

    def replay(self) -> Replay:
        """Replay once.

        Raises:
            SystemExit: the process ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            sys.exit("the engine ended; the lines above say why")
        return Replay(**json.loads(line))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def least_s(file: Path, limits: Limits) -> float:
    """Return the seconds that one thread needs at least for the products with the weights."""
    content = json.loads(file.read_text(encoding="utf-8"))
    weights = count_weights(Path(content["engine"]["model_path"]))
    computed, sampled, longest = 0, 0, 0
    for trajectory in content["trajectories"]:
        lengths = [end - start for start, end in trajectory["turns"]]
        computed += len(trajectory["tokens"]) - 1
        sampled += sum(lengths)
        longest = max(longest, sum(lengths))
    multiply_s = 2 * (computed * weights.layers + sampled * weights.head) / limits.flops_per_s
    return max(multiply_s, longest * FLOAT_BYTES * weights.all / limits.bytes_per_s)


def compare(model: str, checkouts: dict[str, Path], rounds: int) -> dict[str, Any]:
    """Replay in turns; return medians by checkout, and the limit."""
    file = replay_file(model)
    engines = {name: Engine(checkout, file) for name, checkout in checkouts.items()}
    for engine in engines.values():
        engine.replay()  # the first is slower
    taken: dict[str, list[Replay]] = {name: [] for name in engines}
    for _ in range(rounds):
        for name, engine in engines.items():
            taken[name].append(engine.replay())
    for engine in engines.values():
        engine.close()
    found: dict[str, Any] = {"model": model, "tokens": taken["this"][0].tokens}
    for name, replays in taken.items():
        found[name] = {
            "tokens_per_s": round(statistics.median(r.tokens / r.wall_s for r in replays), 1),
            "engine_cpu_s": round(statistics.median(r.engine_cpu_s for r in replays), 3),
            "server_cpu_s": round(statistics.median(r.server_cpu_s for r in replays), 3),
            "steps": statistics.median(r.steps for r in replays),
        }
    found["limit_tokens_per_s"] = round(found["tokens"] / least_s(file, measure_limits()), 1)
    if "against" in taken:
        pairs = list(zip(taken["against"], taken["this"], strict=True))
        found["faster"] = round(statistics.median(a.wall_s / b.wall_s for a, b in pairs), 3)
        cpu = statistics.median(a.engine_cpu_s / b.engine_cpu_s for a, b in pairs)
        found["less_cpu"] = round(cpu, 3)
    return found


def ready_checkout(text: str) -> Path:
    """Return the folder of another checkout, which must have been set up.

    Raises:
        argparse.ArgumentTypeError: it has no environment.
    """
    checkout = Path(text).resolve()
    if not (checkout / ".venv/bin/python").exists():
        raise argparse.ArgumentTypeError(
            f"{checkout} has no .venv; run `make setup` there, then this program again "
            "(what bench_rollout.py recorded is kept)"
        )
    return checkout


def main() -> None:
    """Compare, print and write the results."""
    parser = argparse.ArgumentParser(description="Measure the engine alone.")
    parser.add_argument("--models", default="base,random90m", help="which, separated by commas")
    parser.add_argument("--against", type=ready_checkout, help="another checkout, with its .venv")
    parser.add_argument("--rounds", type=int, default=5, help="replays of each engine")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(json.loads(arguments.serve.read_text(encoding="utf-8"))))
        return
    checkouts = {"this": ROOT}
    if arguments.against:
        checkouts["against"] = arguments.against
    models = arguments.models.split(",")
    if missing := [model for model in models if not replay_file(model).exists()]:
        sys.exit(f"nothing is recorded for {', '.join(missing)}; run bench_rollout.py first")
    results = [compare(model, checkouts, arguments.rounds) for model in models]
    print(json.dumps(results, indent=1))
    (OUT / "engine.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
