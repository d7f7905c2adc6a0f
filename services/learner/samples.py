"""From rewarded groups to what the loss sees: train.py --Group--> TrainSample --> engine.

Rewards become token rewards (process rewards on the token that closes a call, the outcome on the
last sampled token), the chosen estimator turns them into advantages. Pure.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from agent_r1.learner.algorithms import AdvantageBatch, find_estimator
from agent_r1.learner.config import LearnerTable
from agent_r1.learner.engine import LossSpec, TrainSample
from agent_r1.learner.groups import Group
from agent_r1_proto.rewards import ScoredTrajectory


def token_rewards(scored: ScoredTrajectory, outcome: float) -> npt.NDArray[np.float64]:
    """Place the rewards of a trajectory on its tokens.

    Args:
        scored: the trajectory with its process rewards.
        outcome: its outcome reward.

    Returns:
        [T] process reward on the sampled token that closes its call, outcome on the last sampled
        token, 0.0 elsewhere.

    Raises:
        ValueError: the trajectory has no reward, or no sampled token to put it on.
    """
    trajectory = scored.trajectory
    sampled = np.flatnonzero(trajectory.action_mask)
    if scored.reward is None or not len(sampled):
        raise ValueError(f"trajectory {trajectory.rollout_id} cannot be trained on")
    rewards = np.zeros(len(trajectory.token_ids), dtype=np.float64)
    for call in trajectory.calls():
        rewards[call.end_token_index] += call.process_reward or 0.0
    rewards[sampled[-1]] += outcome
    return rewards


def outcome_rewards(group: Group, *, shuffle: bool) -> list[float]:
    """Return the outcome reward of each survivor of a group.

    Args:
        group: a complete group.
        shuffle: hand the same rewards out in an order drawn from the group's id: the control
            experiment in which nothing can be learned from them.
    """
    rewards = [scored.reward.total for scored in group.survivors if scored.reward is not None]
    if shuffle:
        random.Random(f"shuffled-rewards-{group.group_id}").shuffle(rewards)
    return rewards


def build_samples(
    groups: Sequence[Group], table: LearnerTable
) -> tuple[list[TrainSample], list[float]]:
    """Compute advantages for a batch of groups and build the samples to train on.

    Args:
        groups: the batch, each group with its survivors.
        table: names the estimator and the sampling temperature.

    Returns:
        One sample per surviving trajectory, by group and sample, and for each the mean advantage
        over its sampled tokens.
    """
    survivors = [(group.group_id, scored) for group in groups for scored in group.survivors]
    outcomes = [
        outcome
        for group in groups
        for outcome in outcome_rewards(group, shuffle=table.shuffle_rewards)
    ]
    batch = AdvantageBatch(
        group_ids=[group_id for group_id, _ in survivors],
        token_rewards=[
            token_rewards(scored, outcome)
            for (_, scored), outcome in zip(survivors, outcomes, strict=True)
        ],
        action_masks=[scored.trajectory.action_mask for _, scored in survivors],
    )
    estimate = find_estimator(table.advantage)
    advantages = estimate(batch, normalize_std=table.normalize_std)
    samples: list[TrainSample] = []
    for (_, scored), advantage in zip(survivors, advantages, strict=True):
        trajectory = scored.trajectory
        loss_mask = trajectory.action_mask.copy()
        loss_mask[0] = False
        samples.append(
            TrainSample(
                token_ids=trajectory.token_ids,
                loss_mask=loss_mask,
                rollout_logprobs=trajectory.rollout_logprobs,
                advantages=advantage,
                temperature=trajectory.temperature,
            )
        )
    means = [
        float(advantage[mask].mean())
        for advantage, mask in zip(advantages, batch.action_masks, strict=True)
    ]
    return samples, means


def loss_spec(table: LearnerTable) -> LossSpec:
    """Return the loss that the configuration describes."""
    return LossSpec(
        kind="ppo",
        clip_low=table.clip_low,
        clip_high=table.clip_high,
        dual_clip=table.dual_clip,
        kl_coef=table.kl_coef,
        kl_estimator=table.kl_estimator,
        entropy_coef=table.entropy_coef,
        aggregation=table.aggregation,
        optimizer_steps=table.optimizer_steps_per_batch,
        drop_zero_advantages=table.drop_zero_advantages,
    )
