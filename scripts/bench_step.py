"""Measures the parts of a training step for a model of 90 million parameters, on this machine.

    python scripts/bench_step.py [--steps 6]

Runs `agent-r1 train` through every service on tiny_world's questions with the random model of
bench_rollout.py and a reward by chance, so that every step has gradients, and prints the medians of
its summary.json. The run stays in runs/bench/step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent_r1_proto.rewards import ScoreRequest

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "runs" / "bench"
PARTS = ("rollout_s", "reward_s", "learn_s", "push_s")


def chance(request: ScoreRequest) -> float:
    """Return a reward in [0, 1) that depends on nothing but the text; a component of the run."""
    text = "".join(turn.text for turn in request.turns)
    return hashlib.blake2b(text.encode(), digest_size=1).digest()[0] / 256


def train_command(model: Path, run_dir: Path, steps: int) -> list[str]:
    """Return the command that runs the steps, without evaluation and checkpoints."""
    data = OUT / "world"
    settings = {
        "run.plugins": json.dumps([str(Path(__file__).parent)]),
        "model.path": str(model),
        "data.train": json.dumps([str(data / "train.jsonl")]),
        "tools.search.corpus": str(data / "corpus.jsonl"),
        "env.max_tokens_per_turn": "64",
        "reward.components": '{"bench_step:chance" = 1.0}',
        "learner.steps": str(steps),
        "learner.groups_per_batch": "4",
        "learner.checkpoint_every": "0",
        "evaluation.every": "0",
        "evaluation.sets": "{}",
    }
    config = ROOT / "examples" / "tiny_world" / "run.toml"
    command = [Path(sys.executable).with_name("agent-r1"), "train", config, "--run-dir", run_dir]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    return [str(part) for part in command]


def prepare_model() -> Path:
    """Generate the questions and the random model, unless they are there; return the model."""
    from bench_rollout import make_random_model, make_world

    model = OUT / "random90m_model"
    OUT.mkdir(parents=True, exist_ok=True)
    if not (OUT / "world" / "train.jsonl").exists():
        make_world(OUT / "world")
    if not model.exists():
        make_random_model(model)
    return model


def main() -> None:
    """Train and print what a step was spent on."""
    parser = argparse.ArgumentParser(description="Measure the parts of a step of a 90M model.")
    parser.add_argument("--steps", type=int, default=6, help="steps of the run")
    steps = parser.parse_args().steps
    model = prepare_model()
    shutil.rmtree(OUT / "step", ignore_errors=True)
    subprocess.run(train_command(model, OUT / "step", steps), check=True)
    summary = json.loads((OUT / "step" / "summary.json").read_text(encoding="utf-8"))
    size = (model / "model.safetensors").stat().st_size
    print(f"{size / 1e6:.0f} MB of weights, {summary['steps']} steps, medians:")
    print(f"  step_s {summary['step_s']:.2f}")
    for part in PARTS:
        print(f"  {part} {summary[part]:.2f} ({summary[part] / summary['step_s']:.0%})")
    print(f"  canary_max_dlogp {summary['canary_max_dlogp']:.1e}")


if __name__ == "__main__":
    main()
