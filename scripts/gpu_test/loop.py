"""The whole loop, every service in its process, once for each variant.

__main__.py --Variant--> `run_variant`, which starts `agent-r1 train` on the random model. It calls
no tool by itself, so every turn is read as a search, and rewards are given by chance.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from agent_r1.cli.training.estimate import find_machine, memory_of_run, size_of, sum_up, with_layout
from agent_r1.config.estimate import total
from agent_r1.config.run import load_config
from agent_r1.runtime.files.state import split_lines
from agent_r1.runtime.gpus import read_gpus
from benchmarks.processes import PLUGINS, memory_of
from scripts.gpu_test.model import EXAMPLE
from scripts.gpu_test.parts import (
    ENDED,
    PASSED,
    Part,
    end,
    reason,
    start,
    tail,
    with_full_disk,
)

POLL_S = 0.25
SETS = ("hotpot_like", "wiki2_like", "musique_like")
SETTINGS: dict[str, dict[str, object]] = {
    "cuda": {
        "engine.device": "cuda",
        "rollout.gpu_memory_utilization": 0.3,
        "learner.groups_per_batch": 8,
        "learner.group_size": 8,
        "engine.max_tokens_per_microbatch": 4096,
        "engine.logprob_chunk_tokens": 256,
        "env.max_tokens_per_turn": 128,
    },
    "cpu": {
        "engine.device": "cpu",
        "rollout.kv_cache_gib": 0.2,
        "learner.groups_per_batch": 2,
        "learner.group_size": 2,
        "env.max_tokens_per_turn": 48,
    },
}


@dataclass(frozen=True)
class Variant:
    """One way to run the loop."""

    settings: Mapping[str, object]
    """What differs from the plain one."""
    gpus: int = 1
    """It needs; on a machine without GPUs, 2 are two processes on the cores."""
    on_cpu: bool = True
    resumes: bool = False
    """The run is stopped half-way, and resumed."""


SENT = {"learner.transport": "collective"}
ON_ONE_GPU = {"placement.rollout": [[0]], "placement.learner": [0]}
VARIANTS = {
    "plain": Variant({}),
    "file": Variant({"learner.transport": "file"}),
    "http": Variant({"learner.transport": "http"}),
    "collective": Variant(SENT),
    "nccl": Variant({**SENT, "learner.collective_backend": "nccl"}, gpus=2, on_cpu=False),
    "ipc": Variant({**SENT, **ON_ONE_GPU, "learner.collective_backend": "ipc"}, on_cpu=False),
    "zero3": Variant({"engine.zero_stage": 3, "engine.ranks": 2}, gpus=2),
    "tp2": Variant({"rollout.tensor_parallel_size": 2}, gpus=2, on_cpu=False),
    "offload": Variant({"engine.zero_stage": 1, "engine.offload": "optimizer"}),
    "lora": Variant({"model.lora.rank": 8}),
    "one_row": Variant({"engine.share_prefixes": True}),
    "resume": Variant({}, resumes=True),
    "v1": Variant({"rollout.model_runner": "v1"}),
    "shared": Variant(ON_ONE_GPU),
}


def settings_of(out: Path, run: Path, device: str, steps: int, variant: Variant) -> list[str]:
    """Return the values that replace those of tiny_world's configuration."""
    world = out / "world"
    values: dict[str, object] = {
        "run.id": f"gpu-test-{run.name}",
        "run.plugins": [str(PLUGINS)],
        "model.path": str(out / "model"),
        "model.dtype": "bfloat16",
        "data.train": [str(world / "train.jsonl")],
        "tools.search.corpus": str(world / "corpus.jsonl"),
        "env.tool_format": "bench_parts:EveryTurnSearches",
        "env.max_turns": 3,
        "learner.steps": steps,
        "engine.lr": 1e-5,
        "engine.warmup_steps": 0,
        "learner.checkpoint_every": steps,
        "evaluation.every": 0,
        "evaluation.max_questions": 8,
        **SETTINGS[device],
        **variant.settings,
    }
    sets = {f"evaluation.sets.{name}": str(world / f"eval_{name}.jsonl") for name in SETS}
    texts = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in {**values, **sets}.items()
    }
    rewards = 'reward.components={"bench_parts:chance" = 1.0}'
    return [*(f"{key}={text}" for key, text in texts.items()), rewards]


@dataclass
class Watch:
    """What the processes of a run took at most, looked at a few times a second."""

    host_gb: dict[str, float] = field(default_factory=dict)
    """By process, at the moment when their sum was largest."""
    gpu_before: float = 0.0
    gpu_rollout: float = 0.0
    """Most that was used before the learner was there, without what was used before the run."""
    gpu_peak: float = 0.0
    """Most that was used, without what was used before the run; bytes, as the others."""

    def look(self, root: psutil.Process) -> None:
        """Look once."""
        now = memory_of(root)
        if sum(now.values()) > sum(self.host_gb.values()):
            self.host_gb = now
        used = gpu_used() - self.gpu_before
        self.gpu_peak = max(self.gpu_peak, used)
        # The launcher starts the learner when the rollout servers are up, where they share a GPU.
        if "learner" not in now:
            self.gpu_rollout = max(self.gpu_rollout, used)

    @property
    def gpu_learner(self) -> float:
        """What came after the rollout servers were up."""
        return self.gpu_peak - self.gpu_rollout


def gpu_used() -> float:
    """Return the bytes that are used on the first GPU; 0 without one."""
    return float(next((gpu.used_bytes for gpu in read_gpus()), 0))


def train(
    arguments: Sequence[str], log: Path, watch: Watch, timeout_s: float, stop: Path | None
) -> str:
    """Run `agent-r1 train`; return "passed" or what went wrong.

    Args:
        arguments: after `train`.
        log: gets what it prints.
        watch: gets its memory.
        timeout_s: after which it is ended.
        stop: end it in order as soon as this file of metrics has a line; that passes.
    """
    command = [str(Path(sys.executable).with_name("agent-r1")), "train", *arguments]
    deadline = time.monotonic() + timeout_s
    with log.open("ab") as output:
        process = start(command, output)
        try:
            while process.poll() is None:
                if stop is not None and read_steps(stop):
                    process.send_signal(signal.SIGINT)
                    stop = None
                if time.monotonic() > deadline:
                    end(process)
                    return f"not done after {timeout_s:.0f} s"
                with suppress(psutil.Error):  # it has just ended
                    watch.look(psutil.Process(process.pid))
                time.sleep(POLL_S)
        except KeyboardInterrupt as exc:
            end(process)
            return reason(exc)
        except BaseException:
            end(process)
            raise
    return PASSED if process.returncode == 0 else f"agent-r1 train ended with {process.returncode}"


def compare_memory(
    config: Path, settings: Sequence[str], device: str, watch: Watch
) -> list[dict[str, Any]]:
    """Return what was measured beside what `agent-r1 check` says, in GB."""
    resolved = with_layout(load_config(config, settings).config)
    machine = find_machine(resolved, None)
    found = sum_up(resolved, size_of(resolved.model.path, None, resolved.model.lora), None, machine)
    if device == "cuda":
        pairs = {
            "learner": (watch.gpu_learner, total(found.learner)),
            "rollout": (watch.gpu_rollout, total(found.rollout)),
        }
    else:
        measured = sum(watch.host_gb.values()) * 1e9
        pairs = {"all processes": (measured, memory_of_run(resolved, found.learner, found.rollout))}
    return [
        {
            "what": what,
            "measured_gb": round(measured / 1e9, 3),
            "estimated_gb": round(estimated / 1e9, 3),
            "error": round(estimated / measured - 1, 3),
        }
        for what, (measured, estimated) in pairs.items()
        if measured > 0
    ]


def read_steps(file: Path) -> list[dict[str, Any]]:
    """Return the whole lines of metrics.jsonl; [] where there is none."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    lines = split_lines(text[: text.rfind("\n") + 1])
    return [step for line in lines if (step := _step_of(line)) is not None]


def _step_of(line: str) -> dict[str, Any] | None:
    """Return a step; None for a line that a full disk cut short."""
    try:
        return json.loads(line)
    except ValueError:
        return None


MEDIANS = (
    "time/step_s",
    "time/rollout_s",
    "time/learn_s",
    "time/push_s",
    "push/wait_s",
    "push/gather_s",
    "push/write_s",
    "push/fetch_s",
    "push/pause_s",
    "push/canary_s",
    "push/size_bytes",
    "throughput/tokens_per_s",
    "learn/tokens_per_s",
    "tools/calls_mean",
)
LARGEST = ("canary/floor", "canary/dlogp_mean", "canary/dlogp_max", "logprob/abs_diff_mean")


def figures(steps: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
    """Return the medians of a step, the first left out, and the largest differences."""
    warm = steps[1:] or steps
    return {
        **{name: _of(statistics.median, warm, name) for name in MEDIANS},
        **{name: _of(max, steps, name) for name in LARGEST},
    }


def _of(summarize: Any, steps: Sequence[Mapping[str, float]], name: str) -> float | None:
    values = [step[name] for step in steps if name in step]
    return summarize(values) if values else None


def run_variant(name: str, out: Path, device: str, steps: int, timeout_s: float) -> Part:
    """Run the loop in one way.

    Args:
        name: of the variant.
        out: folder with the model and the world; the run gets one below it.
        device: "cuda" or "cpu".
        steps: of the learner.
        timeout_s: for all of it.
    """
    variant, run = VARIANTS[name], out / name
    run.mkdir()
    settings = settings_of(out, run, device, steps, variant)
    sets = [f"--set={text}" for text in settings]
    config, folder, log = EXAMPLE / "run.toml", run / "run", run / "train.log"
    metrics, watch = folder / "metrics.jsonl", Watch(gpu_before=gpu_used())
    first = [str(config), "--run-dir", str(folder), *sets]
    started = time.monotonic()
    outcome = train(first, log, watch, timeout_s, metrics if variant.resumes else None)
    if variant.resumes and not outcome.startswith(ENDED) and read_steps(metrics):
        before = len(read_steps(metrics))
        left = timeout_s - (time.monotonic() - started)
        outcome = train(["--resume", str(folder)], log, watch, left, None)
        if outcome == PASSED and not before < len(read_steps(metrics)) == steps:
            outcome = f"{before} steps before the stop, {len(read_steps(metrics))} of {steps} after"
    lines = read_steps(metrics)
    found = figures(lines)
    if outcome == PASSED and not found["tools/calls_mean"]:
        outcome = "no turn called the tool"
    part = Part(f"loop: {name}", outcome, {"steps": len(lines), **found})
    part.seconds = round(time.monotonic() - started, 1)
    part.outcome = with_full_disk(outcome, run)
    try:  # a run that ended before its first step took less than it would have
        part.memory = compare_memory(config, settings, device, watch) if lines else []
    except (OSError, ValueError) as exc:  # what was found before is worth more
        part.figures["memory"] = f"cannot be compared: {exc}"
    part.figures |= {f"host_gb/{who}": round(size, 3) for who, size in watch.host_gb.items()}
    logs = [log, *sorted((folder / "logs").glob("*.log"))]
    part.tails = {f"{name}/{file.name}": tail(file) for file in logs}
    return part
