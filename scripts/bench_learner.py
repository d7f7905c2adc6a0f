"""Measures the learner against padded plain PyTorch, and writes runs/bench/learner.json.

    python scripts/bench_learner.py [--loads tiny_world_1,long_prompt] [--rounds 5]
    python scripts/bench_learner.py --device cuda [--layout packed]

"ours" is a training step of the engine, from samples to new weights. "other" takes the same step on
the same samples as a plain loop would: each micro-batch padded to its longest trajectory, logits at
every position, PPO's loss, AdamW. Its micro-batches have the best of several sizes. Before anything
is measured, both gradients are compared. Rounds alternate; a ratio is the median over rounds, of
CPU seconds, which other work on the machine disturbs least. Beside both stands the share of the
speed at which one thread of this machine multiplies large matrices. On a GPU, both sides compute in
bfloat16, and a ratio is of wall-clock seconds; the plain loop steps its bfloat16 weights.

Loads:

- tiny_world_1, _25, _50: the trajectories of those steps of `make demo`, 16 groups x 8, recorded;
- long_prompt: a random model of 10 million parameters, and a group of 8 with a prompt of 500 tokens
  and answers of 20 to 200, nothing alike after the prompt;
- groups_05b, for a GPU: a random model of Qwen2.5-0.5B's shape, and 4 groups of 8 with prompts of
  1,000 tokens and answers of 100 to 600.

Advantages are random, so that no trajectory is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_rollout import BASE
from bench_tools import entry, print_entries
from machine_limits import measure_limits
from model_shapes import QWEN
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from agent_r1.learner.config import EngineConfig
from agent_r1.learner.engine.interface import LossSpec, TrainSample
from agent_r1.learner.engine.policy_engine import DeepSpeedPolicyEngine
from agent_r1.learner.engine.ranks.messages import EngineSetup
from agent_r1.runtime.config import Dtype, ModelConfig

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "runs" / "bench"
RECORDED = Path(__file__).parent / "bench_data" / "tiny_world_batches.npz"
SIZES = (4, 8, 16, 32)
"""Trajectories of a micro-batch that the plain loop tries."""
LR = 1e-6
SHOWS_GRADIENT = {"max_grad_norm": 1e9, "adam_eps": 1e6, "lr": 1e12}
"""AdamW's first step is lr * g / (|g| + eps): with these, 1e6 times the gradient."""
MOST_DISTANCE = {"float32": 1e-4, "bfloat16": 0.2}
"""Between the two gradients, relative to their norm. bfloat16 rounds each at every layer; that of a
wrong attention is about as far away as its norm."""
LAYOUTS: dict[str, dict[str, bool]] = {
    "shared": {"share_prefixes": True},
    "packed": {"packing": True},
    "padded": {"share_prefixes": False},
}
SPEC = LossSpec()


@dataclass(frozen=True)
class Load:
    """A model and the samples of one step."""

    name: str
    model: Path
    samples: list[TrainSample]
    goal: float
    device: str = "cpu"
    layout: str = "shared"

    @property
    def dtype(self) -> Dtype:
        """Of the weights of both sides."""
        return "float32" if self.device == "cpu" else "bfloat16"

    @property
    def tokens(self) -> int:
        """All tokens of the samples."""
        return sum(sample.num_tokens for sample in self.samples)

    @property
    def trained(self) -> int:
        """Those that count in the loss."""
        return sum(int(sample.loss_mask.sum()) for sample in self.samples)


@dataclass
class Spent:
    """Seconds of one step."""

    wall_s: float
    cpu_s: float


def measure(step: Callable[[], object]) -> Spent:
    """Time one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return Spent(time.perf_counter() - wall, time.process_time() - cpu)


# Loads


def make_load(name: str) -> Load:
    """Return a load by its name; its model is written where it is missing."""
    if name == "groups_05b":
        samples = [sample for seed in range(4) for sample in long_group(seed, 1000, (100, 600))]
        return Load(name, random_model("random05b_model", QWEN), samples, 1.0)
    if name != "long_prompt":
        return Load(name, BASE, recorded_samples(name.removeprefix("tiny_world_")), 1.5)
    return Load(name, random_model("random10m_model", SMALL), long_group(0, 500, (20, 200)), 3.0)


SMALL = {
    "hidden_size": 320,
    "num_hidden_layers": 8,
    "intermediate_size": 880,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "vocab_size": 848,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
"""Of 10 million parameters, with the tiny base's vocabulary."""


def random_model(name: str, shape: Mapping[str, Any]) -> Path:
    """Return the folder of a random model; it is written where it is missing."""
    model = OUT / name
    if not model.exists():
        torch.manual_seed(0)
        Qwen2ForCausalLM(Qwen2Config(**shape)).save_pretrained(model)
    return model


def recorded_samples(step: str) -> list[TrainSample]:
    """Return the trajectories of a step of tiny_world."""
    file = np.load(RECORDED)
    ends = np.cumsum(file[f"lengths_{step}"].astype(np.int64))
    tokens = file[f"tokens_{step}"].astype(np.int32)
    mask = np.unpackbits(file[f"mask_{step}"])[: len(tokens)].astype(np.bool_)
    parts = zip(np.split(tokens, ends[:-1]), np.split(mask, ends[:-1]), strict=True)
    return with_advantages(list(parts))


def long_group(seed: int, prompt_tokens: int, answers: tuple[int, int]) -> list[TrainSample]:
    """Return a group of 8 that have a long prompt in common and nothing else.

    Args:
        seed: of all that is random.
        prompt_tokens: of the prompt.
        answers: fewest and most tokens of an answer.
    """
    rng = np.random.default_rng(seed)
    prompt = rng.integers(3, 848, prompt_tokens).astype(np.int32)
    parts: list[tuple[Any, Any]] = []
    for _ in range(8):
        answer = rng.integers(3, 848, rng.integers(answers[0], answers[1] + 1)).astype(np.int32)
        mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
        parts.append((np.concatenate((prompt, answer)), mask))
    return with_advantages(parts)


def with_advantages(parts: Sequence[tuple[Any, Any]]) -> list[TrainSample]:
    """Return samples with random advantages."""
    rng = np.random.default_rng(1)
    return [
        TrainSample(
            token_ids=ids,
            loss_mask=mask,
            rollout_logprobs=np.zeros(len(ids), np.float32),
            advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
        )
        for ids, mask in parts
    ]


# The two sides


def make_engine(load: Load, **settings: Any) -> DeepSpeedPolicyEngine:
    """Return the engine as a run has it."""
    values = {"device": load.device, "lr": LR, "max_tokens_per_microbatch": 4096}
    table = EngineConfig.model_validate(values | LAYOUTS[load.layout] | settings)
    longest = max(sample.num_tokens for sample in load.samples)
    model = ModelConfig(path=str(load.model), max_context=longest, dtype=load.dtype)
    return DeepSpeedPolicyEngine(EngineSetup.of(model, table))


class PlainLoop:
    """Padded plain PyTorch."""

    def __init__(self, load: Load, size: int) -> None:
        dtype = getattr(torch, load.dtype)
        self.model: Any = AutoModelForCausalLM.from_pretrained(load.model, dtype=dtype)
        self.model.to(load.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.0)
        self.size = size
        self._load = load
        self._rows = [
            {
                "ids": torch.from_numpy(sample.token_ids.astype(np.int64)),
                "mask": torch.from_numpy(sample.loss_mask),
                "old": torch.from_numpy(sample.rollout_logprobs),
                "advantage": torch.from_numpy(sample.advantages),
            }
            for sample in load.samples
        ]

    def backward(self) -> None:
        """Add up the gradient of all micro-batches."""
        for start in range(0, len(self._rows), self.size):
            rows = self._rows[start : start + self.size]
            batch = {
                name: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], True)
                for name in rows[0]
            }
            lengths = torch.tensor([len(row["ids"]) for row in rows])
            real = torch.arange(batch["ids"].shape[1]) < lengths[:, None]
            batch = {name: values.to(self._load.device) for name, values in batch.items()}
            real = real.to(self._load.device)
            logits = self.model(batch["ids"], attention_mask=real, use_cache=False).logits[:, :-1]
            log_p = torch.log_softmax(logits.float(), -1).gather(2, batch["ids"][:, 1:, None])[
                :, :, 0
            ]
            ratio = torch.exp(log_p - batch["old"][:, 1:])
            advantage = batch["advantage"][:, 1:]
            loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
            (torch.where(batch["mask"][:, 1:], loss, 0.0).sum() / self._load.trained).backward()

    def step(self) -> None:
        """Take one optimizer step."""
        self.optimizer.zero_grad()
        self.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def with_ratios_near_1(load: Load) -> Load:
    """Return the load with the model's own log-probabilities, a little off, as the rollout's."""
    rng = np.random.default_rng(2)
    engine = make_engine(load)
    samples = [
        dataclasses.replace(
            sample, rollout_logprobs=(own + rng.normal(0, 0.02, len(own))).astype(np.float32)
        )
        for sample, own in zip(load.samples, engine.token_logprobs(load.samples), strict=True)
    ]
    return dataclasses.replace(load, samples=samples)


def distance_of_gradients(load: Load, plain: PlainLoop) -> float:
    """Return the norm of the difference of both gradients, relative to the plain one's."""
    engine = make_engine(load, **SHOWS_GRADIENT)
    plain.backward()
    with tempfile.TemporaryDirectory() as scratch:
        weights: list[dict[str, torch.Tensor]] = []
        for version in (0, 1):
            folder = Path(scratch) / str(version)
            engine.write_snapshot(folder, "bench", version)
            weights.append(load_file(folder / "model.safetensors"))
            if version == 0:
                engine.train_batch(load.samples, SPEC)
    difference = norm = 0.0
    for name, parameter in plain.model.named_parameters():
        ours = (weights[0][name].double() - weights[1][name].double()) / 1e6
        assert parameter.grad is not None
        difference += float((ours - parameter.grad.double().cpu()).square().sum())
        norm += float(parameter.grad.double().square().sum())
    return (difference / norm) ** 0.5


# Limits


def step_flops(load: Load, tokens: float, predictions: int) -> float:
    """Return the multiplications and additions of linear layers, forward and backward.

    Args:
        load: its model.
        tokens: that the decoder computes.
        predictions: that the head computes.
    """
    model = AutoModelForCausalLM.from_pretrained(load.model)
    head = model.lm_head.weight.numel()
    decoder = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n)
    return 6.0 * (decoder * tokens + head * predictions)


def bench(load: Load, rounds: int) -> dict[str, Any]:
    """Compare gradients, then speeds; return the report's entry."""
    load = with_ratios_near_1(load)
    plain = PlainLoop(load, SIZES[0])
    distance = distance_of_gradients(load, plain)
    if not distance <= MOST_DISTANCE[load.dtype]:
        sys.exit(f"{load.name}: the gradients differ by {distance:.1e} of their norm")
    tried: dict[int, float] = {}
    for size in SIZES:
        if size <= len(load.samples):
            plain.size = size
            spent = measure(plain.step)
            tried[size] = spent.cpu_s if load.device == "cpu" else spent.wall_s
    plain.size = min(tried, key=lambda size: tried[size])
    engine = make_engine(load)
    metrics = engine.train_batch(load.samples, SPEC)
    ours: list[Spent] = []
    other: list[Spent] = []
    for _ in range(rounds):
        ours.append(measure(lambda: engine.train_batch(load.samples, SPEC)))
        other.append(measure(plain.step))

    def median(spent: Sequence[Spent], what: str) -> float:
        return statistics.median(getattr(one, what) for one in spent)

    def ratio_of(what: str) -> float:
        pairs = zip(ours, other, strict=True)
        return statistics.median(getattr(b, what) / getattr(a, what) for a, b in pairs)

    one = entry(
        f"learner_{load.name}",
        load.tokens / median(ours, "wall_s"),
        load.tokens / median(other, "wall_s"),
        load.goal,
        "higher",
        ratio_of("cpu_s" if load.device == "cpu" else "wall_s"),
    )
    one |= {
        "layout": load.layout,
        "wall_ratio": ratio_of("wall_s"),
        "tokens": load.tokens,
        "trained_tokens": load.trained,
        "computed_tokens": int(metrics["batch/computed_tokens"]),
        "trained_tokens_per_s": load.trained / median(ours, "wall_s"),
        "ours_cpu_s": median(ours, "cpu_s"),
        "other_cpu_s": median(other, "cpu_s"),
        "plain_microbatch": plain.size,
        "gradient_distance": distance,
        "torch_threads": torch.get_num_threads(),
    }
    if load.device != "cpu":
        return one | {"device": torch.cuda.get_device_name()}
    limit = measure_limits().flops_per_s
    computed = step_flops(load, metrics["batch/computed_tokens"], load.trained)
    whole = step_flops(load, load.tokens, load.trained)
    return one | {
        "device": "cpu",
        "gemm_gflops_per_cpu_s": limit / 1e9,
        "gemm_share": computed / median(ours, "cpu_s") / limit,
        "other_gemm_share": whole / median(other, "cpu_s") / limit,
    }


def main() -> None:
    """Measure the loads and write the report."""
    parser = argparse.ArgumentParser(description="Measure the learner against plain PyTorch.")
    loads = "tiny_world_1,tiny_world_25,tiny_world_50,long_prompt"
    parser.add_argument("--loads", help=f"of {loads}, groups_05b; the last one on a GPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layout", choices=tuple(LAYOUTS), default="shared")
    arguments = parser.parse_args()
    names = arguments.loads or (loads if arguments.device == "cpu" else "groups_05b")
    OUT.mkdir(parents=True, exist_ok=True)
    entries: list[dict[str, Any]] = []
    for name in names.split(","):
        place = {"device": arguments.device, "layout": arguments.layout}
        entries.append(bench(dataclasses.replace(make_load(name), **place), arguments.rounds))
        print_entries(entries[-1:])
        print(
            "  CPU seconds a step {ours_cpu_s:.2f} and {other_cpu_s:.2f}; {computed_tokens} of "
            "{tokens} tokens computed; gradients differ by {gradient_distance:.0e}".format(
                **entries[-1]
            )
        )
        if "gemm_share" in entries[-1]:
            print(
                "  share of the GEMM limit {gemm_share:.0%} and {other_gemm_share:.0%}".format(
                    **entries[-1]
                )
            )
    (OUT / "learner.json").write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
