"""Measures what the canary sees of pushes that arrived, and of those pushes had they been missed.

    python scripts/bench_canary.py [--seeds 0 1 2] [--set KEY=VALUE ...]

Trains examples/tiny_world with `agent-r1 train`, without evaluation. Right before a version is
published, the server is asked for the log-probabilities that the canary will compare: that is what
it would answer if the push were missed. Prints both distributions, what share of them the canary
judges rightly, and what share of a step it takes. Writes runs/bench/canary.json.

A missed push counts if its step had a gradient and a learning rate above a tenth of the largest:
others change less than float32 can show.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from agent_r1.learner.algorithms.advantages import AdvantageBatch, Advantages
from agent_r1.learner.algorithms.advantages.grpo import Grpo
from agent_r1.runtime.files.json_lines import split_lines

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "runs" / "bench"
CONFIG = ROOT / "examples" / "tiny_world" / "run.toml"
MISSED = "missed_pushes.jsonl"
TENTH = 0.1


class WatchedGrpo(Grpo):
    """GRPO, in a learner whose missed pushes are measured from the first batch on."""

    def __call__(self, batch: AdvantageBatch) -> Advantages:
        """Return the advantages of a batch."""
        watch_missed_pushes()
        return super().__call__(batch)


@cache
def watch_missed_pushes() -> None:
    """Let every publisher of this process compare a server before it publishes a version as well.

    Once a version is published, servers load it by themselves.
    """
    from agent_r1.learner.weights.canary import canary_request, compare
    from agent_r1.learner.weights.publisher import WeightPublisher
    from agent_r1_proto.weights import CanaryReply

    publish: Any = WeightPublisher.publish

    async def compare_and_publish(self: Any, canary: Any = ()) -> Any:
        if canary:
            started = time.perf_counter()
            (server,) = await self._registry.rollout_servers()
            prompts = await self._choose_tokens(canary)
            request = canary_request(prompts)
            reply = await self._servers.post(server, "/weights/canary", request, CanaryReply)
            assert reply.policy_version == self.newest.policy_version
            missed = compare(prompts, reply.logprobs)
            line = {**asdict(missed), "extra_s": time.perf_counter() - started}
            with (self._weights_dir.parent / MISSED).open("a") as file:
                file.write(json.dumps(line) + "\n")
        return await publish(self, canary)

    WeightPublisher.publish = compare_and_publish


def train(folder: Path, seed: int, settings: Sequence[str]) -> None:
    """Train tiny_world once; it stops at nothing that the canary finds."""
    shutil.rmtree(folder, ignore_errors=True)
    given = {
        "run.seed": seed,
        "run.plugins": json.dumps([str(Path(__file__).parent)]),
        "learner.advantage": "bench_canary:WatchedGrpo",
        "learner.canary_action": "warn",
        "learner.checkpoint_every": 0,
        "learner.keep_best": 0,
        "evaluation.every": 0,
        "evaluation.sets": "{}",
    }
    command = [str(Path(sys.executable).with_name("agent-r1")), "train", str(CONFIG)]
    for setting in [*(f"{key}={value}" for key, value in given.items()), *settings]:
        command += ["--set", setting]
    subprocess.run([*command, "--run-dir", str(folder)], check=True, stdout=subprocess.DEVNULL)


def read_lines(path: Path) -> list[dict[str, float]]:
    """Return the objects of a file with one a line."""
    return [json.loads(line) for line in split_lines(path.read_text(encoding="utf-8"))]


def read_pushes(folder: Path) -> list[dict[str, float]]:
    """Return what a run measured of each push."""
    steps = read_lines(folder / "metrics.jsonl")
    largest = max(step["learn/lr"] for step in steps)
    return [
        {
            "step": step["step"],
            "right": step["canary/dlogp_mean"],
            "missed": missed["mean"],
            "counts": step["grad/norm"] > 0 and step["learn/lr"] > TENTH * largest * (1 + 1e-9),
            "cost": step["push/canary_s"] / (step["time/step_s"] - missed["extra_s"]),
        }
        for step, missed in zip(steps, read_lines(folder / MISSED), strict=True)
    ]


def report(pushes: Sequence[dict[str, float]], bound: float) -> dict[str, Any]:
    """Return the two distributions, and how many of each the bound judges rightly."""
    right = sorted(push["right"] for push in pushes)
    missed = sorted(push["missed"] for push in pushes if push["counts"])
    return {
        "bound": bound,
        "right": spread(right),
        "missed": spread(missed),
        "right_share": sum(value <= bound for value in right) / len(right),
        "missed_share": sum(value > bound for value in missed) / len(missed),
        "cost": statistics.median(push["cost"] for push in pushes),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the count, the ends and three quantiles of rising values."""
    at = {"min": 0.0, "p1": 0.01, "median": 0.5, "p99": 0.99, "max": 1.0}
    last = len(values) - 1
    return {"n": len(values), **{name: values[round(q * last)] for name, q in at.items()}}


def main() -> None:
    """Train every seed and print what the canary would have seen."""
    from agent_r1.learner.weights.canary import MEAN_DLOGP

    parser = argparse.ArgumentParser(description="Measure the canary on right and missed pushes.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    subprocess.run([sys.executable, ROOT / "scripts/demo", "--world-only"], check=True)
    pushes: list[dict[str, float]] = []
    for seed in arguments.seeds:
        folder = OUT / "canary" / f"seed{seed}"
        train(folder, seed, arguments.set)
        pushes += read_pushes(folder)
    found = report(pushes, MEAN_DLOGP["float32"])
    for name in ("right", "missed"):
        values = ", ".join(f"{key} {value:.3g}" for key, value in found[name].items())
        print(f"{name} pushes, mean |dlogp|: {values}")
    print(
        f"with the bound {found['bound']:g}, {found['right_share']:.1%} of the right pushes pass "
        f"and {found['missed_share']:.1%} of the missed ones are seen"
    )
    print(f"the canary takes {found['cost']:.2%} of a step (median)")
    (OUT / "canary.json").write_text(json.dumps({**found, "pushes": pushes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
