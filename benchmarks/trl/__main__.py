"""Trajectories trained a second: ours against TRL's GRPOTrainer with its tools.

    make bench CASE=trl ARGS="--cells tool0 tool200 --rounds 3 --steps 0 --again tool0"

Both sides train the same model on the same questions in the same order, with groups of one size,
one learning rate, the same limits on tokens and turns, and the same search as the tool. A round is
a run of ours and a run of TRL, one after the other; figures are medians over a run's steps without
the first. TRL runs with whichever of TRL_SETTINGS is fastest for the model; those are tried first,
and our side trains in the dtype of the one that is chosen. What is done is kept in
runs/bench/trl/done.json, and a second call goes on from there (`--again CELL` forgets a cell;
`--steps` replaces those of the cells).

A round counts only if both sides trained as many trajectories in every step, and about as many
tokens that carry loss. TRL lives in an environment of its own, runs/bench/trl/venv, which this
command makes from requirements.txt.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import time
import venv
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import OUT, ROOT, Row, compare, read_options, write_report
from benchmarks.models import BASE, random_model
from benchmarks.processes import (
    POLL_S,
    cpu_s,
    make_world,
    process,
    read_json_lines,
    train_command,
    tree,
)

FOLDER = OUT / "trl"
DONE = FOLDER / "done.json"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
RUN_TIMEOUT_S = 3 * 3600.0
TRIAL_TIMEOUT_S = 600.0
HOPELESS = 3.0
"""A setting whose trial takes so many times as long as the shortest is given up."""
TRIAL_STEPS = 3
PACKAGES = {"agent_r1": ROOT / "services", "agent_r1_proto": ROOT / "proto" / "agent_r1_proto"}
"""What TRL's side imports from this repository: the search index and the score."""
SMOOTHED = 3
MEAN_TURN_TOKENS = 48
NUM_WAITS = 2000
WAITS_SEED = 20_250
TAIL_SCALE_S, TAIL_SHAPE, TAIL_LONGEST_S = 0.3, 1.2, 8.0
Lines = list[dict[str, Any]]
Done = dict[str, dict[str, Any]]
"""TRL's trials (`settings`) and rounds (`cells`), by model and by cell."""


@dataclass(frozen=True)
class Cell:
    """One load: a model, a tool, and the size of a step."""

    goal: str | None
    """Of trajectories a second, ours over TRL's."""
    latency: str = "0"
    """Seconds that a call of the tool takes, or the heavy `tail`."""
    model: str = "tiny"
    """`tiny` (examples/tiny_world) or `90m`."""
    questions: int = 16
    group_size: int = 8
    max_turns: int = 5
    max_tokens_per_turn: int = 96
    max_completion: int = 640
    """Most tokens after the prompt, tool text included; no trajectory of these models reaches it
    before it has used up its turns."""
    steps: int = 8
    trl_steps: int = 8
    """Fewer where a step of TRL takes minutes."""
    trial_questions: int = 16
    """Questions of a step while TRL's settings compete."""
    staleness: int = 0
    lr: float = 2e-4
    reward: float = math.inf
    """Train until the mean reward of SMOOTHED steps reaches this, and compare the time until then
    instead of trajectories a second."""
    tokens_apart: float = 0.1
    """The two sides' loss tokens a trajectory may differ by this share; they sample differently."""

    @property
    def trajectories(self) -> int:
        """Trajectories of one step."""
        return self.questions * self.group_size

    def waits_s(self) -> list[float]:
        """Return the seconds that call after call takes; both sides take the same ones."""
        if self.latency != "tail":
            return [float(self.latency)]
        draw = random.Random(WAITS_SEED).paretovariate
        return [min(TAIL_SCALE_S * draw(TAIL_SHAPE), TAIL_LONGEST_S) for _ in range(NUM_WAITS)]


CELLS = {
    "tool0": Cell("≥ 3"),
    "tool200": Cell("≥ 5", latency="0.2", trl_steps=3),
    "tail": Cell("≥ 5", latency="tail", steps=6, trl_steps=2),
    "tail_async": Cell("≥ 10", latency="tail", trl_steps=2, staleness=2),
    # Apart, because the two policies are not the same any more.
    "tail_reward": Cell(
        "≥ 5", latency="tail", steps=80, trl_steps=80, reward=0.8, tokens_apart=0.3
    ),
    "random90m": Cell(
        None,  # it is 0.8 of what padding alone explains: TRL's computed tokens over ours
        model="90m",
        questions=4,
        trial_questions=2,
        max_turns=1,
        max_tokens_per_turn=256,
        max_completion=256,
        steps=4,
        trl_steps=4,
        lr=1e-8,  # the weights that draw the lengths must stay as they are
        tokens_apart=0.4,  # 3 steps of 32 geometric lengths: 14 % of standard error
    ),
}
TRL_SETTINGS: dict[str, dict[str, Any]] = {
    "one batch": {"batch": 128},
    "batches of 32": {"batch": 32},
    "batches of 16": {"batch": 16},
    "one thread": {"batch": 32, "threads": 1},
    "eager attention": {"batch": 32, "attention": "eager"},
    "bfloat16": {"batch": 32, "dtype": "bfloat16"},
    "static cache": {"batch": 32, "config": {"cache_implementation": "static"}},
    "no cache": {"batch": 32, "config": {"generation_kwargs": {"use_cache": False}}},
    "continuous batching": {"batch": 32, "config": {"use_transformers_continuous_batching": True}},
    "vLLM": {"batch": 32, "config": {"use_vllm": True, "vllm_mode": "colocate"}},
}
"""What competes to be TRL's best: trajectories of one forward and backward pass, threads, attention
and dtype of the model, and keys of GRPOConfig."""


def smoothed_reward(lines: Lines) -> float:
    """Return the mean reward of the last steps."""
    rewards = [line["reward"] for line in lines[-SMOOTHED:]]
    return statistics.mean(rewards) if len(rewards) == SMOOTHED else -math.inf


def watch(
    command: Sequence[str],
    file: Path,
    timeout_s: float,
    reward: float,
    env: Mapping[str, str] | None = None,
    rename: Mapping[str, str] | None = None,
) -> Lines:
    """Run a command that appends a JSON line a step to `file`; return the lines, with `cpu`.

    The command is ended when the mean reward of its last steps has reached `reward`.

    Raises:
        RuntimeError: the command failed; the text is the end of its output.
    """
    lines: Lines = []
    log, used, names = FOLDER / "log.txt", 0.0, rename or {}
    deadline = time.monotonic() + timeout_s
    with (
        log.open("wb") as out,
        process(*command, env=env, stdout=out, stderr=subprocess.STDOUT) as running,
    ):
        ended = done = False
        while not (ended or done) and time.monotonic() < deadline:
            ended = running.poll() is not None  # what it wrote last is read below
            with suppress(psutil.Error):  # one of its processes has just ended
                used = max(used, 0.0 if ended else cpu_s(*tree(running)))
            for line in read_json_lines(file)[len(lines) :]:
                named = {own: line[name] for own, name in names.items()}
                lines.append({**line, **named, "cpu": used})
            done = smoothed_reward(lines) >= reward
            time.sleep(POLL_S)
    if not (ended or done):
        raise RuntimeError(f"not done after {timeout_s:g} s")
    if not done and running.returncode != 0:
        raise RuntimeError(log.read_text(encoding="utf-8", errors="replace")[-2000:])
    return lines


def figures(lines: Lines) -> dict[str, Any]:
    """Return the figures of a run; its first step warms up, and counts in `runs an hour` only."""
    rest = lines[1:]
    count = statistics.mean(line["trajectories"] for line in rest)
    cpu = [after["cpu"] - before["cpu"] for before, after in itertools.pairwise(lines)]
    return {
        "runs an hour": 3600 / sum(line["seconds"] for line in lines),
        "a second": count / statistics.median(line["seconds"] for line in rest),
        "a CPU second": count / statistics.median(cpu),
        "reward": statistics.mean(line["reward"] for line in rest),
        "last_reward": smoothed_reward(rest),
        "trajectories": sorted({line["trajectories"] for line in rest}),
        "loss_tokens": statistics.mean(line["loss_tokens"] for line in rest) / count,
        "computed_tokens": statistics.mean(line["computed_tokens"] for line in rest) / count,
    }


OUR_NAMES = {
    "seconds": "time/step_s",
    "reward": "reward/mean",
    "loss_tokens": "batch/trained_tokens",
    "computed_tokens": "batch/computed_tokens",
    "trajectories": "batch/segments",
}


def run_ours(cell: Cell, model: Path, steps: int, seed: int, dtype: str) -> dict[str, Any]:
    """Train with this project."""
    reward = "exact_match" if cell.model == "tiny" else '"bench_parts:chance"'
    corpus = str(make_world() / "corpus.jsonl")
    settings = {
        "run.seed": seed,
        "model.path": model,
        "model.dtype": dtype,
        "env.max_turns": cell.max_turns,
        "env.max_tokens_per_turn": cell.max_tokens_per_turn,
        "tools.search.settings.corpus": corpus,
        "tools.search.settings.waits_s": cell.waits_s(),
        "reward.components": f"{{{reward} = 1.0}}",
        "rollout.max_concurrent": cell.trajectories * (1 + cell.staleness),
        "rollout.max_num_seqs": cell.trajectories,
        "learner.steps": steps,
        "learner.groups_per_batch": cell.questions,
        "learner.group_size": cell.group_size,
        "learner.max_staleness": cell.staleness,
        "engine.lr": cell.lr,
    }
    run_dir = FOLDER / "ours"
    command = train_command(run_dir, settings, config="benchmarks/trl/run.toml")
    file = run_dir / "metrics.jsonl"
    lines = watch(command, file, RUN_TIMEOUT_S, cell.reward, rename=OUR_NAMES)
    if lost := sum(line["results/failed"] for line in lines):
        raise RuntimeError(f"{lost:g} trajectories of ours failed; see {run_dir}")
    return figures(lines)


def run_trl(
    cell: Cell,
    model: Path,
    steps: int,
    seed: int,
    setting: Mapping[str, Any],
    timeout_s: float = RUN_TIMEOUT_S,
) -> dict[str, Any]:
    """Train with TRL."""
    folder, world = FOLDER / "theirs", make_world()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    settings = {
        "trl": setting,
        "cell": dataclasses.asdict(cell),
        "waits_s": cell.waits_s(),
        "steps": steps,
        "seed": seed,
        "folder": str(folder),
        "questions": str(world / "train.jsonl"),
        "corpus": str(world / "corpus.jsonl"),
        "model": str(model),
    }
    file = folder / "settings.json"
    file.write_text(json.dumps(settings), encoding="utf-8")
    packages = folder / "packages"
    packages.mkdir()
    for name, target in PACKAGES.items():
        (packages / name).symlink_to(target)
    env = os.environ | {"PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"}
    side = Path(__file__).with_name("side.py")
    command = [str(FOLDER / "venv" / "bin" / "python"), str(side), str(file)]
    return figures(watch(command, folder / "steps.jsonl", timeout_s, cell.reward, env))


def make_environment() -> None:
    """Make TRL's environment, unless it is there with these requirements."""
    folder, stamp = FOLDER / "venv", FOLDER / "venv" / ".requirements"
    digest = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return
    venv.create(folder, clear=True, with_pip=True)
    command = [str(folder / "bin" / "pip"), "install", "--quiet", "--no-deps"]
    command += ["--requirement", str(REQUIREMENTS)]
    if subprocess.run(command).returncode != 0:  # where only PyTorch's own index has CPU builds
        subprocess.run([*command, "--extra-index-url", TORCH_INDEX], check=True)
    stamp.write_text(digest)


def check_equal(cell: Cell, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Refuse a round in which the two sides did not do the same work.

    Raises:
        RuntimeError: another number of trajectories, or of tokens that carry loss; or a reward
            that was to be reached and was not.
    """
    for side, found in (("ours", ours), ("TRL", theirs)):
        if found["trajectories"] != [cell.trajectories]:
            raise RuntimeError(f"{side} trained {found['trajectories']} trajectories in its steps")
        if math.isfinite(cell.reward) and found["last_reward"] < cell.reward:
            raise RuntimeError(f"{side} ended with a reward of {found['last_reward']}")
    a, b = ours["loss_tokens"], theirs["loss_tokens"]
    if abs(a - b) > cell.tokens_apart * b:
        raise RuntimeError(f"a trajectory has {a} tokens that carry loss, TRL's {b}")


def load_done() -> Done:
    """Return what was measured before."""
    empty: Done = {"settings": {}, "cells": {}}
    return json.loads(DONE.read_text(encoding="utf-8")) if DONE.exists() else empty


def save(done: Done) -> None:
    """Write down what was measured."""
    DONE.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")


def best_setting(done: Done, cell: Cell, model: Path) -> str:
    """Return the fastest of TRL's settings on this model with a tool that takes no time."""
    tried = done["settings"].setdefault(cell.model, {})
    trial = dataclasses.replace(cell, latency="0", staleness=0, questions=cell.trial_questions)
    limit_s = TRIAL_TIMEOUT_S
    for name in (one for one in TRL_SETTINGS if one not in tried):
        began = time.monotonic()
        try:
            found = run_trl(trial, model, TRIAL_STEPS, 0, TRL_SETTINGS[name], limit_s)
            limit_s = min(limit_s, HOPELESS * (time.monotonic() - began))
            tried[name] = found["a second"]
        except RuntimeError as exc:
            tried[name] = f"does not run: {str(exc).strip().splitlines()[-1]}"
        print(f"TRL on {cell.model}, {name}: {tried[name]}", flush=True)
        save(done)
    return max((name for name in tried if isinstance(tried[name], float)), key=tried.__getitem__)


def measure(done: Done, name: str, rounds: int, steps: int) -> list[Row]:
    """Run the rounds of a cell that are missing; return what came of all of them."""
    cell = CELLS[name]
    model = BASE if cell.model == "tiny" else random_model(cell.model, MEAN_TURN_TOKENS)
    setting = best_setting(done, cell, model)
    chosen, found = TRL_SETTINGS[setting], done["cells"].setdefault(name, [])
    while (seed := len(found)) < rounds:
        dtype = chosen.get("dtype", "float32")
        ours = run_ours(cell, model, steps or cell.steps, seed, dtype)
        theirs = run_trl(cell, model, steps or cell.trl_steps, seed, chosen)
        check_equal(cell, ours, theirs)
        found.append({"setting": setting, "ours": ours, "other": theirs})
        save(done)
        print(f"{name}, round {seed + 1}: {json.dumps(found[-1])}", flush=True)

    def of(side: str, figure: str) -> list[float]:
        return [one[side][figure] for one in found]

    rate = "a second" if math.isinf(cell.reward) else "runs an hour"
    more = {
        "reward": statistics.mean(of("ours", "reward")),
        "TRL's reward": statistics.mean(of("other", "reward")),
        "TRL computes, over ours": statistics.median(of("other", "computed_tokens"))
        / statistics.median(of("ours", "computed_tokens")),
    }
    return [
        compare(f"{name}, {rate}", of("ours", rate), of("other", rate), cell.goal) | more,
        compare(f"{name}, a CPU second", of("ours", "a CPU second"), of("other", "a CPU second")),
    ]


def main() -> None:
    """Measure the chosen cells."""
    options = read_options(__doc__, cells=tuple(CELLS), rounds=3, steps=0, again=())
    FOLDER.mkdir(parents=True, exist_ok=True)
    make_environment()
    done = load_done()
    for name in options.again:
        done["cells"].pop(name, None)
    rows: list[Row] = []
    for name in options.cells:
        rows += measure(done, name, options.rounds, options.steps)
    write_report("trl", rows, settings=done["settings"])


if __name__ == "__main__":
    main()
