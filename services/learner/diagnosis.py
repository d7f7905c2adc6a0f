"""Gradient similarity within an on-policy batch, and between two estimators.

`agent-r1 diagnose` --groups--> here --figures--> its report. At the policy that sampled the batch
every ratio is 1, so the gradient of a policy loss is that of -A log p, summed over the tokens that
count in the loss. Where most of a batch's gradient has one direction, all estimators take the same
step, and no comparison of methods can tell them apart.

Dimension key: S = trajectories of a batch, P = weights of the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import cast

import numpy as np
import torch

from agent_r1.learner.config import LearnerConfig
from agent_r1.learner.engine.interface import FloatArray, PolicyEngine, TrainSample
from agent_r1.learner.engine.layout import build_microbatch
from agent_r1.learner.engine.model import PolicyModule, load_causal_model
from agent_r1.learner.groups import Group, total_reward
from agent_r1.learner.train_samples import build_samples
from agent_r1.runtime.config import ModelConfig
from agent_r1_proto.rewards import ScoredTrajectory

MAX_GRADIENT_BYTES = 8 << 30
CHUNK_TOKENS = 1024


@dataclass(frozen=True)
class GradientFigures:
    """Figures of the gradients of one batch."""

    top_share: float
    """Share of the squared length of the trajectories' gradients that lies in one direction."""
    cosine: float
    """Cosine between the batch's gradients under the configured estimator and under turn-level
    GAE."""


def gradient_figures(
    groups: Sequence[Group],
    config: LearnerConfig,
    model: ModelConfig,
    turn_lam: float,
    torch_threads: int,
) -> list[GradientFigures]:
    """Compute the figures of each batch of `learner.groups_per_batch` groups.

    Turn-level GAE has no critic here: a state is worth the mean reward of the group's trajectories
    that were in it, so two trajectories part where their states do.

    Args:
        groups: on-policy groups.
        config: the objective; its estimator must need neither a critic nor log-probabilities.
        model: the policy that sampled them.
        turn_lam: lambda of turn-level GAE.
        torch_threads: CPU threads; 0 is one, since batches of one gain nothing from more.

    Raises:
        ValueError: the gradients of one batch do not fit into memory.
    """
    size = config.groups_per_batch
    batches = [groups[i : i + size] for i in range(0, len(groups) - size + 1, size)]
    torch.set_num_threads(torch_threads or 1)
    policy = PolicyModule(load_causal_model(model), CHUNK_TOKENS)
    weights = sum(parameter.numel() for parameter in policy.parameters())
    needed = 4 * weights * size * config.group_size
    if needed > MAX_GRADIENT_BYTES:
        raise ValueError(
            f"the gradients of {size * config.group_size} trajectories take {needed >> 30} GiB, "
            f"and diagnose holds at most {MAX_GRADIENT_BYTES >> 30}; lower "
            "learner.groups_per_batch, or use a smaller model"
        )
    return [_figures(policy, batch, config, turn_lam) for batch in batches]


def _figures(
    policy: PolicyModule, batch: Sequence[Group], config: LearnerConfig, turn_lam: float
) -> GradientFigures:
    changes = {"algorithm": "turn_ppo", "advantage": "turn_gae", "gamma": 1.0, "lam": turn_lam}
    turn_config = config.model_copy(update=changes)
    by_turn = build_samples(batch, turn_config, cast(PolicyEngine, StateMeans(batch)))
    gradients = trajectory_gradients(policy, build_samples(batch, config).samples)
    compared = sum_of_gradients(policy, by_turn.samples)
    total = gradients.sum(0)
    cosine = torch.nn.functional.cosine_similarity(total, compared, dim=0)
    return GradientFigures(top_share(gradients), float(cosine))


def top_share(gradients: torch.Tensor) -> float:
    """Return the share of the squared length of [S, P] gradients in their top direction.

    It is the largest eigenvalue of their Gram matrix over its trace; 1.0 where all are 0.
    """
    gram = (gradients @ gradients.T).double()
    trace = float(gram.trace())
    return float(torch.linalg.eigvalsh(gram)[-1]) / trace if trace > 0 else 1.0


def trajectory_gradients(policy: PolicyModule, samples: Sequence[TrainSample]) -> torch.Tensor:
    """Return [S, P] the gradient of each sample's -A log p, summed over its trained tokens."""
    return torch.stack([sum_of_gradients(policy, [sample]) for sample in samples])


def sum_of_gradients(policy: PolicyModule, samples: Sequence[TrainSample]) -> torch.Tensor:
    """Return [P] the gradient of -A log p, summed over the trained tokens of all samples."""
    policy.zero_grad()
    for segment in (segment for sample in samples for segment in sample.segments()):
        if not segment.advantages.any():
            continue
        batch = build_microbatch([segment], [0], layout="padded")
        logprobs, _ = policy(
            torch.from_numpy(batch.token_ids),
            torch.from_numpy(batch.positions),
            torch.from_numpy(batch.targets),
            torch.from_numpy(batch.temperatures),
        )
        advantages = torch.from_numpy(batch.advantages)
        chosen = logprobs[torch.from_numpy(batch.predictions)]
        (-advantages * chosen).sum().backward()
    return torch.cat(
        [
            (torch.zeros_like(p) if p.grad is None else p.grad).flatten().clone()
            for p in policy.parameters()
        ]
    )


class StateMeans:
    """Values without a critic: the mean reward of a group's trajectories in the same state.

    `EnvStep.state_key` names states. One that has no name, or that a single trajectory was in, is
    worth what the state before it was, so that a group without names has the mean of the group
    everywhere. It stands in for the engine where `build_samples` asks for values.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._scored = [scored for group in groups for scored in group.survivors]
        rewards: dict[tuple[int, str], list[float]] = defaultdict(list)
        for group in groups:
            for scored in group.survivors:
                for name in set(_states(scored)):
                    rewards[group.group_id, name].append(total_reward(scored))
        self._values: list[list[float]] = []
        for group in groups:
            for scored in group.survivors:
                values: list[float] = []
                for k, name in enumerate(_states(scored)):
                    met = rewards[group.group_id, name]
                    known = k == 0 or (name and len(met) > 1)
                    values.append(fmean(met) if known else values[-1])
                self._values.append(values)

    def token_values(self, samples: Sequence[TrainSample]) -> list[FloatArray]:
        """Return [S][T] the value of the state at the first token of each turn, and 0.0 elsewhere.

        Args:
            samples: of all survivors of the groups, in order.
        """
        values = [np.zeros(sample.num_tokens, np.float32) for sample in samples]
        for row, scored, values_K in zip(values, self._scored, self._values, strict=True):
            row[[turn.start for turn in scored.trajectory.turns]] = values_K
        return values


def _states(scored: ScoredTrajectory) -> list[str]:
    """Return what names the state in which each turn was taken; "" is a state without a name."""
    return ["start", *(turn.state_key for turn in scored.trajectory.turns[1:])]
