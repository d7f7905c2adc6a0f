"""The learner on agents' sessions: prefixes computed once, against separate rows.

    make bench CASE=forests ARGS="--kinds tree rewritten sub_agents --losses gspo --rounds 3"

Trains the policy on sessions that tests/support/forests.py records. "ours" is the layout "shared";
"other" computes every sequence by itself, packed, which is no slower than padded. Before that, the
gradients of policy and critic in both layouts are compared, on the tiny base. Figures are tokens of
the sessions a CPU second. The model has two layers of the shape of "90m": how much faster a layer
is does not depend on how many there are.

Beside the ratio stands the share of the tokens that is computed. "bytes" is what a session takes in
Redis for each token that was sampled.

Kinds: tree, a session of 12 branches at two levels after 4 turns, with a system prompt of 600
tokens; rewritten, one of 16 turns, with 1,000 tokens, whose client keeps only the newest tool
result; sub_agents, a group of 4 attempts at a task, in which 3 agents work for a main one, with
3,000 tokens each.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from agent_r1.learner.config import EngineConfig
from agent_r1.learner.engine.interface import LossSpec, TrainSample
from agent_r1.learner.engine.model_files import CRITIC_FILE, POLICY_FILE, WEIGHT
from agent_r1.learner.engine.policy_engine import DeepSpeedPolicyEngine
from agent_r1.learner.engine.ranks.messages import CriticSetup, EngineSetup
from agent_r1.runtime.config import ModelConfig
from agent_r1_proto.messages import encode_entry
from agent_r1_proto.trajectory import Trajectory
from benchmarks.harness import Row, alternate, compare, read_options, write_report
from benchmarks.learner import LAYOUTS, SHOWS_GRADIENT
from benchmarks.models import BASE, random_model
from benchmarks.samples import as_sampled
from tests.support.forests import Sizes, grow, samples_of

LOADS = {
    "tree": (Sizes(prompt=600, turns=4), 1),
    "rewritten": (Sizes(prompt=1000, turns=16), 1),
    "sub_agents": (Sizes(prompt=3000, turns=3, sub_turns=1), 4),
}
"""Of each kind: how much is said, and sessions of a group."""
LOSSES = {
    "ppo": LossSpec(),
    "gspo": LossSpec(policy_loss="gspo", aggregation="sequence_mean"),
}
MOST_DISTANCE = 1e-5
"""Between gradients, relative to their norm."""
GOAL = "≥ 4"
LR = 1e-6


def make_engine(model: Path, layout: str, **settings: Any) -> DeepSpeedPolicyEngine:
    """Return an engine as a run has it; with a critic where its gradient is wanted."""
    table = EngineConfig.model_validate({"device": "cpu", "lr": LR} | LAYOUTS[layout] | settings)
    config = ModelConfig(path=str(model), max_context=4096, dtype="float32")
    critic = CriticSetup(config, table.lr) if settings else None
    return DeepSpeedPolicyEngine(EngineSetup.of(config, table, critic=critic))


def gradients(layout: str, samples: list[TrainSample], loss: LossSpec) -> list[Any]:
    """Return the gradients of the tiny base and of its critic, times 1e6."""
    engine = make_engine(BASE, layout, **SHOWS_GRADIENT)
    states: list[list[dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for version in (0, 1):
            folder = Path(scratch) / str(version)
            engine.save_state(folder)
            states.append([load_file(folder / name) for name in (POLICY_FILE, CRITIC_FILE)])
            if version == 0:
                engine.train_batch(samples, loss)
    return [
        np.concatenate(
            [
                (before[key].astype(np.float64) - after[key]).ravel()
                for key in sorted(before)
                if key.endswith(f".{WEIGHT}")
            ]
        )
        for before, after in zip(*states, strict=True)
    ]


def distance_of_gradients(samples: list[TrainSample], loss: LossSpec) -> float:
    """Return how far the gradients of both layouts differ, by their norm; the larger of the two."""
    ours, others = (gradients(layout, samples, loss) for layout in ("shared", "packed"))
    pairs = zip(ours, others, strict=True)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


def measure(kind: str, loss: LossSpec, rounds: int) -> Row:
    """Compare gradients, then speeds.

    Raises:
        SystemExit: the gradients differ.
    """
    trajectories = asyncio.run(grow(kind, *LOADS[kind]))
    samples = samples_of(trajectories)
    distance = distance_of_gradients(as_sampled(samples, make_engine(BASE, "shared"), 0.02), loss)
    if not distance <= MOST_DISTANCE:
        sys.exit(f"{kind}: the gradients differ by {distance:.1e} of their norm")
    model = random_model("90m_2")
    ours, other = (make_engine(model, layout) for layout in ("shared", "packed"))
    samples = [replace(sample, value_mask=None) for sample in as_sampled(samples, ours, 0.02)]
    tokens = sum(sample.num_tokens for sample in samples)

    def rate(engine: DeepSpeedPolicyEngine) -> float:
        started = time.process_time()
        engine.train_batch(samples, loss)
        return tokens / (time.process_time() - started)

    computed = ours.train_batch(samples, loss)["batch/computed_tokens"]
    found = alternate({"ours": lambda: rate(ours), "other": lambda: rate(other)}, rounds)
    row = compare(f"{kind}, {loss.policy_loss}", found["ours"], found["other"], GOAL)
    row |= {"tokens": tokens, "segments": sum(sample.num_segments for sample in samples)}
    row |= {"computed": computed / tokens, "gradients differ by": distance}
    return row | {"bytes": bytes_per_token(trajectories)}


def bytes_per_token(trajectories: list[Trajectory]) -> float:
    """Return the bytes in a stream for each token that was sampled."""
    sizes = [sum(map(len, encode_entry(one).values())) for one in trajectories]
    return sum(sizes) / sum(one.num_action_tokens for one in trajectories)


def main() -> None:
    """Measure the kinds."""
    options = read_options(__doc__, kinds=tuple(LOADS), losses=tuple(LOSSES), rounds=3)
    write_report(
        "forests",
        [
            measure(kind, LOSSES[loss], options.rounds)
            for kind in options.kinds
            for loss in options.losses
        ],
    )


if __name__ == "__main__":
    main()
