"""The learner against padded plain PyTorch.

    make bench CASE=learner ARGS="--loads 1 25 50 long_prompt --rounds 5"
    make bench CASE=learner ARGS="--device cuda --layout packed"

"ours" is a training step of the engine, from samples to new weights. "other" takes the same step on
the same samples as a plain loop would: each micro-batch padded to its longest trajectory, logits at
every position, PPO's loss, AdamW. Its micro-batches have the best of several sizes. Before anything
is measured, both gradients are compared. Figures are tokens a CPU second, which other work on the
machine disturbs least; beside both stands the share of the speed at which one thread of this
machine multiplies large matrices. On a GPU, both sides compute in bfloat16, and figures are tokens
a second; the plain loop steps its bfloat16 weights.

Loads: 1, 25, 50, the trajectories of those steps of `make demo`, 16 groups x 8, recorded;
long_prompt, a random model of 10 million parameters and a group of 8 with a prompt of 500 tokens
and answers of 20 to 200; groups, for a GPU, a random model of Qwen2.5-0.5B's shape and 4 groups of
8 with prompts of 1,000 tokens and answers of 100 to 600.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from agent_r1.learner.config import EngineConfig
from agent_r1.learner.engine.interface import LossSpec, TrainSample
from agent_r1.learner.engine.policy_engine import DeepSpeedPolicyEngine
from agent_r1.learner.engine.ranks.messages import EngineSetup
from agent_r1.runtime.config import Dtype, ModelConfig
from agent_r1.weights.snapshot import write_snapshot
from benchmarks.harness import Row, alternate, compare, read_options, write_report
from benchmarks.models import BASE, count_weights, measure_limits, random_model
from benchmarks.samples import as_sampled, random_samples, sample_of

RECORDED = Path(__file__).with_name("tiny_world_batches.npz")
VOCABULARY = 848
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


@dataclass(frozen=True)
class Load:
    """A model and the samples of one step."""

    model: Path
    samples: list[TrainSample]
    goal: str
    device: str
    layout: str

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


def make_load(name: str, device: str, layout: str) -> Load:
    """Return a load by its name; its model is written where it is missing."""
    if name == "long_prompt":
        model, samples, goal = random_model("10m"), group(0, 500, (20, 200)), "≥ 3"
    elif name == "groups":
        samples = [sample for seed in range(4) for sample in group(seed, 1000, (100, 600))]
        model, goal = random_model("0.5b"), "≥ 1"
    else:
        model, samples, goal = BASE, recorded_samples(name), "≥ 1.5"
    return Load(model, samples, goal, device, layout)


def group(seed: int, prompt: int, answers: tuple[int, int]) -> list[TrainSample]:
    """Return a group of 8 with a prompt of so many tokens, and answers between two lengths."""
    lengths = prompt + np.random.default_rng(seed).integers(answers[0], answers[1] + 1, 8)
    return random_samples(lengths.tolist(), VOCABULARY, prompt_tokens=prompt, seed=seed)


def recorded_samples(step: str) -> list[TrainSample]:
    """Return the trajectories of a step of tiny_world."""
    file, rng = np.load(RECORDED), np.random.default_rng(1)
    ends = np.cumsum(file[f"lengths_{step}"].astype(np.int64))[:-1]
    tokens = file[f"tokens_{step}"].astype(np.int32)
    mask = np.unpackbits(file[f"mask_{step}"])[: len(tokens)].astype(np.bool_)
    rows = zip(np.split(tokens, ends), np.split(mask, ends), strict=True)
    return [sample_of(*row, rng) for row in rows]


def make_engine(load: Load, **settings: Any) -> DeepSpeedPolicyEngine:
    """Return the engine as a run has it."""
    values = {"device": load.device, "lr": LR, "max_tokens_per_microbatch": 4096}
    table = EngineConfig.model_validate(values | LAYOUTS[load.layout] | settings)
    longest = max(sample.num_tokens for sample in load.samples)
    model = ModelConfig(path=str(load.model), max_context=longest, dtype=load.dtype)
    return DeepSpeedPolicyEngine(EngineSetup.of(model, table))


class PlainLoop:
    """Padded plain PyTorch."""

    def __init__(self, load: Load) -> None:
        dtype = getattr(torch, load.dtype)
        self.model: Any = AutoModelForCausalLM.from_pretrained(load.model, dtype=dtype)
        self.model.to(load.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.0)
        self.size = SIZES[0]
        self._load = load

    def backward(self) -> None:
        """Add up the gradient of all micro-batches."""
        for start in range(0, len(self._load.samples), self.size):
            self._loss(self._load.samples[start : start + self.size]).backward()

    def _loss(self, samples: list[TrainSample]) -> torch.Tensor:
        def padded(name: str) -> torch.Tensor:
            rows = [torch.from_numpy(getattr(sample, name)) for sample in samples]
            return pad_sequence(rows, batch_first=True).to(self._load.device)

        ids = padded("token_ids").long()
        lengths = torch.tensor([sample.num_tokens for sample in samples], device=ids.device)
        real = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        logits = self.model(ids, attention_mask=real, use_cache=False).logits[:, :-1]
        log_p = torch.log_softmax(logits.float(), -1).gather(2, ids[:, 1:, None])[:, :, 0]
        ratio = torch.exp(log_p - padded("rollout_logprobs")[:, 1:])
        advantage = padded("advantages")[:, 1:]
        loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        return torch.where(padded("loss_mask")[:, 1:], loss, 0.0).sum() / self._load.trained

    def step(self) -> None:
        """Take one optimizer step."""
        self.optimizer.zero_grad()
        self.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def distance_of_gradients(load: Load, plain: PlainLoop) -> float:
    """Return the norm of the difference of both gradients, relative to the plain one's."""
    engine = make_engine(load, **SHOWS_GRADIENT)
    plain.backward()
    with tempfile.TemporaryDirectory() as scratch:
        weights: list[dict[str, torch.Tensor]] = []
        for version in (0, 1):
            folder = Path(scratch) / str(version)
            write_snapshot(folder, "bench", version, engine.weights())
            weights.append(load_file(folder / "model.safetensors"))
            if version == 0:
                engine.train_batch(load.samples, LossSpec())
    difference = norm = 0.0
    for name, parameter in plain.model.named_parameters():
        ours = (weights[0][name].double() - weights[1][name].double()) / 1e6
        assert parameter.grad is not None
        difference += float((ours - parameter.grad.double().cpu()).square().sum())
        norm += float(parameter.grad.double().square().sum())
    return (difference / norm) ** 0.5


def rate(load: Load, step: Callable[[], object]) -> float:
    """Return the tokens a second of one step; of CPU time, without a GPU."""
    clock = time.process_time if load.device == "cpu" else time.perf_counter
    started = clock()
    step()
    if load.device != "cpu":
        torch.cuda.synchronize()
    return load.tokens / (clock() - started)


def share_of_limit(load: Load, tokens: float, tokens_per_s: float) -> float:
    """Return the share of this machine's best speed that products with weights have.

    Args:
        load: Its model.
        tokens: That the decoder computes, forward and backward.
        tokens_per_s: All tokens of the load a second.
    """
    weights = count_weights(load.model)
    operations = 6.0 * (weights.layers * tokens + weights.head * load.trained)
    return operations * tokens_per_s / load.tokens / measure_limits().flops_per_s


def measure(name: str, load: Load, rounds: int) -> Row:
    """Compare gradients, then speeds.

    Raises:
        SystemExit: the gradients differ.
    """
    load = dataclasses.replace(load, samples=as_sampled(load.samples, make_engine(load), 0.02))
    plain = PlainLoop(load)
    distance = distance_of_gradients(load, plain)
    if not distance <= MOST_DISTANCE[load.dtype]:
        sys.exit(f"{name}: the gradients differ by {distance:.1e} of their norm")
    tried: dict[int, float] = {}
    for plain.size in (size for size in SIZES if size <= len(load.samples)):
        tried[plain.size] = rate(load, plain.step)
    plain.size = max(tried, key=lambda size: tried[size])
    engine = make_engine(load)

    def train() -> dict[str, float]:
        return engine.train_batch(load.samples, LossSpec())

    computed = train()["batch/computed_tokens"]
    sides = {"ours": lambda: rate(load, train), "other": lambda: rate(load, plain.step)}
    found = alternate(sides, rounds)
    row = compare(name, found["ours"], found["other"], load.goal)
    row |= {"tokens": load.tokens, "computed": int(computed), "gradients differ by": distance}
    if load.device == "cpu":
        for side, tokens in (("ours", computed), ("other", load.tokens)):
            share = share_of_limit(load, tokens, statistics.median(found[side]))
            row[f"GEMM share, {side}"] = share
    return row


def main() -> None:
    """Measure the loads."""
    loads = ("1", "25", "50", "long_prompt")
    options = read_options(__doc__, loads=loads, rounds=5, device="cpu", layout="shared")
    names = ("groups",) if options.device == "cuda" and options.loads == loads else options.loads
    rows: list[Row] = []
    for name in names:
        load = make_load(name, options.device, options.layout)
        rows.append(measure(name, load, options.rounds))
    write_report("learner", rows)


if __name__ == "__main__":
    main()
