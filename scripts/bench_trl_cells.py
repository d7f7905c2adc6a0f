"""What bench_trl.py compares: its cells, and the settings of TRL that compete for each.

Both sides read this file, so it imports nothing that either environment lacks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

BETAS = (0.9, 0.95)
MAX_GRAD_NORM = 1.0
LATENCY_SEED = 20_250
TAIL_SCALE_S, TAIL_SHAPE, TAIL_LONGEST_S = 0.3, 1.2, 8.0
SMOOTHED = 3
MEAN_TURN_TOKENS = 48
"""Of the random model: its weights end a turn with a probability of 1 in so many, at any token."""


@dataclass(frozen=True)
class Cell:
    """One load: a model, a tool, and the size of a step."""

    name: str
    goal: float
    """Trajectories a second, ours over TRL's."""
    latency: str = "0"
    """How long a call of the tool takes: `0`, `200ms`, or the heavy `tail`."""
    model: str = "tiny"
    """`tiny` (examples/tiny_world) or `random90m`."""
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
    trial_questions: int | None = None
    """Questions of a step while TRL's settings compete; None is `questions`."""
    staleness: int = 0
    lr: float = 2e-4
    reward: float | None = None
    """Train until the mean reward of SMOOTHED steps reaches this, and compare the time until then
    instead of trajectories a second."""
    tokens_apart: float = 0.1
    """The two sides' loss tokens a trajectory may differ by this share; they sample differently."""

    @property
    def trajectories(self) -> int:
        """Trajectories of one step."""
        return self.questions * self.group_size


CELLS = {
    cell.name: cell
    for cell in (
        Cell("tool0", goal=3.0),
        Cell("tool200", goal=5.0, latency="200ms", trl_steps=3),
        Cell("tail", goal=5.0, latency="tail", steps=6, trl_steps=2),
        Cell("tail_async", goal=10.0, latency="tail", steps=8, trl_steps=2, staleness=2),
        Cell(
            "tail_reward",
            goal=5.0,
            latency="tail",
            steps=80,
            trl_steps=80,
            reward=0.8,
            tokens_apart=0.3,  # the two policies are not the same any more
        ),
        Cell(
            "random90m",
            goal=0.8,
            model="random90m",
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
    )
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


def latencies(kind: str) -> Iterator[float]:
    """Yield the seconds that call after call takes; both sides draw the same sequence."""
    rng = random.Random(LATENCY_SEED)
    while True:
        if kind == "tail":
            yield min(TAIL_SCALE_S * rng.paretovariate(TAIL_SHAPE), TAIL_LONGEST_S)
        else:
            yield 0.2 if kind == "200ms" else 0.0
