"""Trajectories trained a second: ours against TRL's GRPOTrainer with its tools.

    python scripts/bench_trl.py [--cells tool0,tool200,...] [--rounds 3] [--steps N]

Both sides train the same model on the same questions in the same order, with groups of one size,
one learning rate, the same limits on tokens and turns, and the same search as the tool. A round is
a run of ours and a run of TRL, one after the other; figures are medians over a run's steps without
the first, and ratios are medians over rounds. TRL runs with whichever of the settings in
bench_trl_cells.py is fastest for the model; those are tried first, and our side trains in the
dtype of the one that is chosen. What is done is kept in runs/bench/trl.json, and a second call goes
on from there (`--again CELL` forgets a cell).

A round counts only if both sides trained as many trajectories in every step, and about as many
tokens that carry loss. TRL lives in an environment of its own, runs/bench/trl/venv, which this
command makes from scripts/bench_trl_requirements.txt.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from bench_rollout import make_random_model, make_world
from bench_trl_cells import (
    BETAS,
    CELLS,
    MAX_GRAD_NORM,
    MEAN_TURN_TOKENS,
    SMOOTHED,
    TRL_SETTINGS,
    Cell,
)

from agent_r1.runtime.files.json_lines import split_lines
from agent_r1.runtime.files.writing import replace_directory

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
OUT = ROOT / "runs" / "bench"
FOLDER = OUT / "trl"
REPORT = OUT / "trl.json"
BASE = ROOT / "examples" / "tiny_world" / "base"
REQUIREMENTS = SCRIPTS / "bench_trl_requirements.txt"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
RUN_TIMEOUT_S = 3 * 3600.0
TRIAL_TIMEOUT_S = 600.0
HOPELESS = 3.0
"""A setting whose trial takes so many times as long as the shortest is given up."""
POLL_S = 0.1
TRIAL_STEPS = 3
PACKAGES = {
    "agent_r1": ROOT / "services",
    "agent_r1_proto": ROOT / "proto" / "agent_r1_proto",
}
"""What TRL's side imports from this repository: the search index and the score."""


@dataclasses.dataclass(frozen=True)
class Steps:
    """What one run did; the first step, which warms up, counts in `wall_s` only."""

    wall_s: float
    """All steps."""
    seconds: list[float]
    cpu_seconds: list[float]
    rewards: list[float]
    trajectories: list[int]
    loss_tokens: list[int]
    computed_tokens: list[int]

    def report(self) -> dict[str, Any]:
        """Return the figures of the run."""
        count = statistics.mean(self.trajectories)
        return {
            "wall_s": round(self.wall_s, 2),
            "trajectories_per_s": round(count / statistics.median(self.seconds), 3),
            "trajectories_per_cpu_s": round(count / statistics.median(self.cpu_seconds), 3),
            "step_s": [round(value, 2) for value in self.seconds],
            "reward": round(statistics.mean(self.rewards), 4),
            "last_reward": round(smoothed_reward(self.rewards), 4),
            "trajectories": sorted(set(self.trajectories)),
            "loss_tokens": round(statistics.mean(self.loss_tokens) / count, 2),
            "computed_tokens": round(statistics.mean(self.computed_tokens) / count, 2),
        }


def cpu_of(root: psutil.Process) -> float:
    """Return the CPU seconds that a process and those below it have used."""
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


Lines = list[dict[str, Any]]


def watch(
    command: list[str],
    env: dict[str, str],
    file: Path,
    log: Path,
    timeout_s: float,
    enough: Callable[[Lines], bool],
) -> Lines:
    """Run a command that appends a JSON line a step to `file`; return the lines, with `cpu`.

    The command is ended when it has written `enough`.

    Raises:
        RuntimeError: the command failed; the text is the end of its output.
    """
    lines: Lines = []
    used = 0.0
    with log.open("wb") as out:
        running = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
        try:
            root, deadline = psutil.Process(running.pid), time.monotonic() + timeout_s
            ended = done = False
            while not (ended or done) and time.monotonic() < deadline:
                ended = running.poll() is not None  # what it wrote last is read below
                used = used if ended else cpu_of(root)
                written = file.read_text(encoding="utf-8") if file.exists() else ""
                complete = split_lines(written[: written.rfind("\n") + 1])
                lines += [json.loads(line) | {"cpu": used} for line in complete[len(lines) :]]
                done = enough(lines)
                time.sleep(POLL_S)
        finally:
            running.terminate()
            running.wait(60)
    if not (ended or done):
        raise RuntimeError(f"not done after {timeout_s:g} s")
    if not done and running.returncode != 0:
        raise RuntimeError(log.read_text(encoding="utf-8", errors="replace")[-2000:])
    return lines


def smoothed_reward(rewards: list[float]) -> float:
    """Return the mean reward of the last steps."""
    return statistics.mean(rewards[-SMOOTHED:]) if len(rewards) >= SMOOTHED else -math.inf


def reached(cell: Cell, name: str) -> Callable[[Lines], bool]:
    """Return whether a run's lines, which call the reward `name`, have the reward of the cell."""
    goal = math.inf if cell.reward is None else cell.reward
    return lambda lines: smoothed_reward([line[name] for line in lines]) >= goal


def steps_of(lines: Lines, names: dict[str, str], count: int) -> Steps:
    """Read the lines of a run; `names` says what each field of `Steps` is called there."""
    first, *rest = lines
    cpu = [first["cpu"], *(line["cpu"] for line in rest)]
    values = {field: [line[name] for line in rest] for field, name in names.items()}
    values.setdefault("trajectories", [count for _ in rest])
    spent = [after - before for before, after in itertools.pairwise(cpu)]
    wall_s = sum(line[names["seconds"]] for line in lines)
    return Steps(wall_s=wall_s, cpu_seconds=spent, **values)


OUR_NAMES = {
    "seconds": "time/step_s",
    "rewards": "reward/mean",
    "loss_tokens": "batch/trained_tokens",
    "computed_tokens": "batch/computed_tokens",
}
TRL_NAMES = {
    "seconds": "seconds",
    "rewards": "reward",
    "loss_tokens": "loss_tokens",
    "computed_tokens": "computed_tokens",
    "trajectories": "trajectories",
}


def our_config(cell: Cell, model: Path, world: Path, steps: int, seed: int, dtype: str) -> str:
    """Return the run.toml of a cell."""
    corpus = json.dumps(str(world / "corpus.jsonl"))
    search = f'type = "search"\ncorpus = {corpus}\ntop_k = 2\npassage_template = " {{text}}"\n'
    search += 'separator = "\\n"\n'
    if cell.latency != "0":
        settings = f'{{corpus = {corpus}, latency = "{cell.latency}"}}'
        search = f'type = "bench_trl_tool:DelayedSearch"\nsettings = {settings}\n'
    reward = "exact_match" if cell.model == "tiny" else '"bench_step:chance"'
    in_flight = cell.trajectories * (1 + cell.staleness)
    return f"""
[run]
id = "bench-trl"
seed = {seed}
plugins = [{json.dumps(str(SCRIPTS))}]
[model]
path = {json.dumps(str(model))}
dtype = "{dtype}"
max_context = 1024
[data]
train = [{json.dumps(str(world / "train.jsonl"))}]
shuffle = false
[env]
type = "tool"
max_turns = {cell.max_turns}
max_calls_per_turn = 1
max_tokens_per_turn = {cell.max_tokens_per_turn}
max_tool_response_chars = 1024
[tools.search]
{search}
[reward.components]
{reward} = 1.0
[rollout]
max_concurrent = {in_flight}
max_num_seqs = {cell.trajectories}
kv_cache_gib = 1.0
[learner]
steps = {steps}
groups_per_batch = {cell.questions}
group_size = {cell.group_size}
max_staleness = {cell.staleness}
algorithm = "grpo"
checkpoint_every = 0

[engine]
lr = {cell.lr}
betas = [{BETAS[0]}, {BETAS[1]}]
max_grad_norm = {MAX_GRAD_NORM}
max_tokens_per_microbatch = 4096
device = "cpu"
"""


def run_ours(cell: Cell, model: Path, world: Path, steps: int, seed: int, dtype: str) -> Steps:
    """Train with this project."""
    folder = FOLDER / "ours"
    shutil.rmtree(folder, ignore_errors=True)
    config = FOLDER / "ours.toml"
    config.write_text(our_config(cell, model, world, steps, seed, dtype), encoding="utf-8")
    command = [str(Path(sys.executable).with_name("agent-r1")), "train", str(config)]
    command += ["--run-dir", str(folder)]
    lines = watch(
        command,
        dict(os.environ),
        folder / "metrics.jsonl",
        FOLDER / "ours.log",
        RUN_TIMEOUT_S,
        reached(cell, OUR_NAMES["rewards"]),
    )
    if lost := sum(line["results/failed"] for line in lines):
        raise RuntimeError(f"{lost:g} trajectories of ours failed; see {folder}")
    return steps_of(lines, OUR_NAMES, cell.trajectories)


def run_trl(
    cell: Cell,
    model: Path,
    world: Path,
    steps: int,
    seed: int,
    setting: dict[str, Any],
    timeout_s: float = RUN_TIMEOUT_S,
) -> Steps:
    """Train with TRL."""
    folder = FOLDER / "theirs"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    settings = {
        "trl": setting,
        "cell": dataclasses.asdict(cell),
        "steps": steps,
        "seed": seed,
        "folder": str(folder),
        "questions": str(world / "train.jsonl"),
        "corpus": str(world / "corpus.jsonl"),
        "model": str(model),
    }
    file = folder / "settings.json"
    file.write_text(json.dumps(settings), encoding="utf-8")
    packages = FOLDER / "packages"
    packages.mkdir(exist_ok=True)
    for name, target in PACKAGES.items():
        (packages / name).unlink(missing_ok=True)
        (packages / name).symlink_to(target)
    env = dict(os.environ) | {"PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"}
    command = [str(FOLDER / "venv" / "bin" / "python"), str(SCRIPTS / "bench_trl_side.py")]
    command.append(str(file))
    enough = reached(cell, TRL_NAMES["rewards"])
    lines = watch(command, env, folder / "steps.jsonl", FOLDER / "theirs.log", timeout_s, enough)
    return steps_of(lines, TRL_NAMES, cell.trajectories)


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


def make_ending_model(out: Path) -> None:
    """Write the random model of bench_rollout.py so that any token ends its turn equally likely.

    Only feature 0, which is 1 in every embedding and which no layer changes, feeds the output row
    of the end token; its weight there gives it a probability of about 1 in MEAN_TURN_TOKENS.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with replace_directory(out) as partial:
        make_random_model(partial)
        model: Any = AutoModelForCausalLM.from_pretrained(partial)
        end = model.config.eos_token_id
        torch.manual_seed(0)
        with torch.no_grad():
            tokens = torch.randint(3, model.config.vocab_size, (8, 64))
            hidden = model.model(tokens).last_hidden_state.flatten(0, 1)
            model.lm_head.weight[end] = 0.0
            others = torch.cat([model.lm_head.weight[:end], model.lm_head.weight[end + 1 :]])
            wanted = torch.logsumexp(hidden @ others.T, -1).mean() - math.log(MEAN_TURN_TOKENS - 1)
            model.lm_head.weight[end, 0] = wanted / hidden[:, 0].mean()
        model.save_pretrained(partial)


def check_equal(cell: Cell, ours: Steps, theirs: Steps) -> None:
    """Refuse a round in which the two sides did not do the same work.

    Raises:
        RuntimeError: another number of trajectories, or of tokens that carry loss; or a reward
            that was to be reached and was not.
    """
    for side, steps in (("ours", ours), ("TRL", theirs)):
        if set(steps.trajectories) != {cell.trajectories}:
            raise RuntimeError(f"{side} trained {steps.trajectories} trajectories in its steps")
    rewards = [smoothed_reward(steps.rewards) for steps in (ours, theirs)]
    if cell.reward is not None and min(rewards) < cell.reward:
        raise RuntimeError(f"the rewards ended at {rewards}, and both must reach {cell.reward}")
    a, b = (side.report()["loss_tokens"] for side in (ours, theirs))
    if abs(a - b) > cell.tokens_apart * b:
        raise RuntimeError(f"a trajectory has {a} tokens that carry loss, TRL's {b}")


class Bench:
    """The report on disk, and the runs that are still missing in it."""

    def __init__(self) -> None:
        self.report: dict[str, Any] = {"settings": {}, "cells": {}}
        if REPORT.exists():
            self.report = json.loads(REPORT.read_text(encoding="utf-8"))

    def save(self) -> None:
        """Write the report."""
        REPORT.write_text(json.dumps(self.report, indent=1) + "\n", encoding="utf-8")

    def best_setting(self, cell: Cell, model: Path, world: Path) -> str:
        """Return the fastest of TRL's settings on this model with a tool that takes no time."""
        tried: dict[str, Any] = self.report["settings"].setdefault(cell.model, {})
        questions = cell.trial_questions or cell.questions
        trial = dataclasses.replace(cell, latency="0", staleness=0, questions=questions)
        limit_s = TRIAL_TIMEOUT_S
        for name, setting in TRL_SETTINGS.items():
            if name in tried:
                continue
            began = time.monotonic()
            try:
                steps = run_trl(trial, model, world, TRIAL_STEPS, 0, setting, limit_s)
                limit_s = min(limit_s, HOPELESS * (time.monotonic() - began))
                tried[name] = steps.report()["trajectories_per_s"]
            except RuntimeError as exc:
                tried[name] = f"does not run: {str(exc).strip().splitlines()[-1]}"
            print(f"TRL on {cell.model}, {name}: {tried[name]}", flush=True)
            self.save()
        return max(
            (name for name, rate in tried.items() if isinstance(rate, float)), key=tried.__getitem__
        )

    def measure(self, cell: Cell, rounds: int, steps: int | None) -> None:
        """Run the rounds of a cell that are missing, and print what came of all of them."""
        world = OUT / "world"
        model = BASE if cell.model == "tiny" else OUT / "random90m_ending"
        if not (world / "train.jsonl").exists():
            make_world(world)
        if not (model / "model.safetensors").exists():
            make_ending_model(model)
        setting = self.best_setting(cell, model, world)
        done: list[dict[str, Any]] = self.report["cells"].setdefault(cell.name, [])
        while len(done) < rounds:
            seed = len(done)
            chosen = TRL_SETTINGS[setting]
            dtype = chosen.get("dtype", "float32")
            ours = run_ours(cell, model, world, steps or cell.steps, seed, dtype)
            theirs = run_trl(cell, model, world, steps or cell.trl_steps, seed, chosen)
            check_equal(cell, ours, theirs)
            done.append({"setting": setting, "ours": ours.report(), "trl": theirs.report()})
            self.save()
            print(f"{cell.name}, round {seed + 1}: {json.dumps(done[-1])}", flush=True)
        print_cell(cell, done)


def print_cell(cell: Cell, rounds: list[dict[str, Any]]) -> None:
    """Print the ratios of a cell, their spread, and that both sides learn alike."""
    for unit in ("trajectories_per_s", "trajectories_per_cpu_s"):
        ratios = sorted(one["ours"][unit] / one["trl"][unit] for one in rounds)
        ours, theirs = (statistics.median(one[side][unit] for one in rounds) for side in SIDES)
        print(
            f"{cell.name}: {unit} ours {ours:.1f}, TRL {theirs:.1f}, ratio "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
    if cell.reward is not None:
        ours, theirs = (statistics.median(one[side]["wall_s"] for one in rounds) for side in SIDES)
        print(
            f"{cell.name}: mean reward {cell.reward} of {SMOOTHED} steps after {ours:.0f} s, "
            f"TRL {theirs:.0f} s, ratio {theirs / ours:.2f}"
        )
    rewards = [statistics.mean(one[side]["reward"] for one in rounds) for side in SIDES]
    padding = statistics.median(
        one["trl"]["computed_tokens"] / one["ours"]["computed_tokens"] for one in rounds
    )
    bound = f", {padding:.2f} of TRL's computed tokens over ours" if cell.goal < 1 else ""
    print(
        f"{cell.name}: goal {cell.goal}{bound}; mean reward ours {rewards[0]:.3f}, TRL "
        f"{rewards[1]:.3f}",
        flush=True,
    )


SIDES = ("ours", "trl")


def main() -> None:
    """Measure the chosen cells."""
    parser = argparse.ArgumentParser(description="Measure trajectories a second against TRL.")
    parser.add_argument("--cells", default=",".join(CELLS), help="which, separated by commas")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")
    parser.add_argument("--steps", type=int, help="steps of each run; by cell if left out")
    parser.add_argument("--again", default="", help="cells whose rounds are forgotten first")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    make_environment()
    bench = Bench()
    for name in filter(None, arguments.again.split(",")):
        bench.report["cells"].pop(name, None)
    for name in arguments.cells.split(","):
        bench.measure(CELLS[name], arguments.rounds, arguments.steps)
    print(f"written to {REPORT}")


if __name__ == "__main__":
    main()
