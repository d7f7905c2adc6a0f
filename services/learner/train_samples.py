"""Samples for the loss, from rewarded groups: train.py --Group--> TrainSample --> engine.

Rewards become token rewards (process rewards on the token that closes a call or a turn, the outcome
on the last trained token of each lineage), and the chosen estimator turns them into advantages.
Runs in the engine's thread: some objectives need the learner's own log-probabilities, the
reference's or the critic's values first.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from agent_r1.learner.algorithms import make_advantage
from agent_r1.learner.algorithms.advantages import AdvantageBatch, Advantages, LineageRow
from agent_r1.learner.algorithms.advantages.packing import gather
from agent_r1.learner.algorithms.importance import keeps_sequence, truncated_weights
from agent_r1.learner.algorithms.process_rewards import normalize_process_rewards
from agent_r1.learner.config import LearnerConfig
from agent_r1.learner.engine.interface import FloatArray, LossSpec, PolicyEngine, TrainSample
from agent_r1.learner.groups import Group
from agent_r1.learner.stop_rules import RunFailedError
from agent_r1_proto.rewards import ScoredTrajectory
from agent_r1_proto.trajectory import Trajectory, Turn

BoolArray = npt.NDArray[np.bool_]
FloatArray64 = npt.NDArray[np.float64]
AnyArray = npt.NDArray[Any]


@dataclass
class Prepared:
    """One batch, ready for the engine."""

    samples: list[TrainSample]
    """One per surviving trajectory, by group and sample."""
    advantages: list[float]
    """[S] mean advantage over the sampled tokens of each."""
    entropies: list[FloatArray] | None = None
    """[S][T] entropy at each trained token, nats, where the learner computed log-probabilities."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers of what the filters left out, and what the corrections came to."""


def process_rewards(scored: ScoredTrajectory) -> npt.NDArray[np.float64]:
    """Return [T] the process reward of each call on the sampled token that closes it, and that of
    each turn on its last one; excluded lineages have none."""
    rewards = np.zeros(len(scored.trajectory.token_ids), dtype=np.float64)
    for turn in scored.trajectory.trained_turns():
        rewards[turn.end - 1] += turn.process_reward or 0.0
        for call in turn.calls:
            rewards[call.end_token_index] += call.process_reward or 0.0
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


def response_mask(scored: ScoredTrajectory) -> BoolArray:
    """Return [T] True on every token from the first trained one of its segment, tool text included.

    A rewritten history is what the policy is asked with, as a prompt is.
    """
    trajectory = scored.trajectory
    mask = np.zeros(len(trajectory.token_ids), dtype=np.bool_)
    trained = trajectory.trained_mask()
    for start, end in trajectory.segment_bounds():
        sampled = np.flatnonzero(trained[start:end])
        if len(sampled):
            mask[start + sampled[0] : end] = True
    return mask


def build_samples(
    groups: Sequence[Group], config: LearnerConfig, engine: PolicyEngine | None = None
) -> Prepared:
    """Compute advantages for a batch of groups and build the samples to train on.

    Args:
        groups: the batch, each group with its survivors.
        config: the objective.
        engine: computes log-probabilities and values where the objective needs them; None is
            enough for objectives that need neither.

    Raises:
        RunFailedError: a number is not finite; the trajectories are named.
        ValueError: the estimator gave something else than one advantage a token.
    """
    batch = _Batch(groups, config)
    if engine is not None:
        batch.ask(engine)
    return batch.prepare()


class _Batch:
    """The trajectories of one batch on their way to samples."""

    def __init__(self, groups: Sequence[Group], config: LearnerConfig) -> None:
        self._config = config
        self._groups = groups
        self._scored = [scored for group in groups for scored in group.survivors]
        self._metrics: dict[str, float] = {}
        self._values: list[FloatArray] | None = None
        self._entropies: list[FloatArray] | None = None
        self._penalties: list[FloatArray] | None = None
        self._greedy = [group.greedy for group in groups if group.greedy is not None]
        self._credit_masks = [self._credit_mask(scored) for scored in self._scored]
        self._rows = list(_rows(self._scored, self._credit_masks))
        self._samples = [self._bare_sample(scored) for scored in self._scored]

    def _credit_mask(self, scored: ScoredTrajectory) -> BoolArray:
        if self._config.advantage_mask:
            return scored.trajectory.trained_mask()
        return response_mask(scored)

    def _bare_sample(self, scored: ScoredTrajectory) -> TrainSample:
        trajectory = scored.trajectory
        loss_mask = trajectory.trained_mask() if self._config.loss_mask else response_mask(scored)
        loss_mask[0] = False
        return TrainSample(
            token_ids=trajectory.token_ids,
            loss_mask=loss_mask,
            rollout_logprobs=trajectory.rollout_logprobs,
            advantages=np.zeros(len(loss_mask), np.float32),
            temperature=trajectory.temperature,
            name=trajectory.rollout_id,
            segment_starts=trajectory.segment_starts,
        )

    def _update(self, index: int, **changes: object) -> None:
        self._samples[index] = replace(self._samples[index], **changes)  # pyright: ignore

    # What the engine knows

    def ask(self, engine: PolicyEngine) -> None:
        """Compute what the objective needs before the first optimizer step."""
        config = self._config
        asked = self._samples
        if config.kl == "reward" and not config.advantage_mask:  # tool text is penalized as well
            masks = [mask | s.loss_mask for mask, s in zip(self._credit_masks, asked, strict=True)]
            asked = [replace(s, loss_mask=mask) for s, mask in zip(asked, masks, strict=True)]
        if config.needs_learner_logprobs:
            found = engine.predictions(asked)
            self._entropies = [one.entropies for one in found]
            self._take_learner_logprobs([one.logprobs for one in found])
        if config.kl == "reward":
            self._take_penalties(engine.token_logprobs(asked, "reference"))
        if config.has_critic:
            for index, mask in enumerate(self._credit_masks):
                learned = mask.copy()
                learned[0] = False
                zeros = np.zeros(len(mask), np.float32)
                self._update(index, value_mask=learned, returns=zeros, old_values=zeros)
            self._values = engine.token_values(self._samples)
            _refuse_not_finite("value", self._scored, self._values)

    def _take_learner_logprobs(self, learner_logprobs: list[FloatArray]) -> None:
        _refuse_not_finite("learner log-probability", self._scored, learner_logprobs)
        config = self._config
        differences: list[FloatArray] = []
        weights: list[FloatArray] = []
        cap = config.largest_weight
        dropped = 0
        for index, (scored, learner) in enumerate(zip(self._scored, learner_logprobs, strict=True)):
            sample = self._samples[index]
            sampled = scored.trajectory.action_mask & sample.loss_mask
            # What was not sampled has no rollout log-probability: its ratio starts at 1.
            rollout = np.where(sampled, scored.trajectory.rollout_logprobs, learner)
            differences.append(np.abs(learner - rollout)[sampled])
            self._update(index, old_logprobs=learner, rollout_logprobs=rollout)
            if cap is not None:
                factors = truncated_weights(learner, rollout, cap)
                weights.append(factors[sampled])
                self._update(index, importance_weights=factors)
            high = math.inf if config.importance_high is None else config.importance_high
            if not keeps_sequence(learner[sampled], rollout[sampled], config.importance_low, high):
                dropped += 1
                self._update(index, loss_mask=np.zeros_like(sample.loss_mask))
        flat = np.concatenate(differences)
        self._metrics["logprob/abs_diff_mean"] = float(flat.mean())
        self._metrics["logprob/abs_diff_max"] = float(flat.max())
        if cap is not None:
            factors = np.concatenate(weights)
            self._metrics["importance/mean"] = float(factors.mean())
            self._metrics["importance/capped_share"] = float(np.mean(factors >= np.float32(cap)))
        if config.importance_low > 0 or config.importance_high is not None:
            self._metrics["filter/importance"] = float(dropped)

    def _take_penalties(self, ref_logprobs: list[FloatArray]) -> None:
        # torch takes seconds to import; whoever only reads this module should not wait for it.
        import torch

        from agent_r1.learner.algorithms.kl import kl_per_token

        config = self._config
        self._penalties = []
        for mask, sample, reference in zip(
            self._credit_masks, self._samples, ref_logprobs, strict=True
        ):
            assert sample.old_logprobs is not None
            kl = kl_per_token(
                torch.from_numpy(sample.old_logprobs),
                torch.from_numpy(reference),
                config.kl_estimator,
            ).numpy()
            self._penalties.append(np.where(mask, kl, 0.0))
        sampled = [
            kl[s.trajectory.trained_mask()]
            for kl, s in zip(self._penalties, self._scored, strict=True)
        ]
        self._metrics["reward/kl"] = float(np.concatenate(sampled).mean())

    # Advantages

    def _token_rewards(self) -> tuple[list[FloatArray64], list[float], list[FloatArray64] | None]:
        """Return [S][T] the rewards of samples, [S] the outcome in them, and those of the greedy
        answers, one per group."""
        config = self._config
        outcomes = [
            outcome
            for group in self._groups
            for outcome in outcome_rewards(group, shuffle=config.shuffle_rewards)
        ]
        greedy = self._greedy
        outcomes += [scored.reward.total for scored in greedy if scored.reward is not None]
        everyone = [*self._scored, *greedy]
        # Scaled together, so that a sample and a greedy answer of equal worth stay equal.
        rewards = normalize_process_rewards(
            [process_rewards(scored) for scored in everyone],
            config.process_rewards,
            [scored.trajectory.lineage_bounds() for scored in everyone],
        )
        for row, scored, outcome in zip(rewards, everyone, outcomes, strict=True):
            for last in _last_tokens(scored.trajectory):
                row[last] += outcome
        own, compared = rewards[: len(self._scored)], rewards[len(self._scored) :]
        if self._penalties is not None:
            own = [row - config.kl_coef * kl for row, kl in zip(own, self._penalties, strict=True)]
        return own, outcomes, compared if config.has_greedy_baseline else None

    def _greedy_rows(self, rewards: list[FloatArray64]) -> list[FloatArray64]:
        """Return [N][P'] what each row is compared with: the greedy answer's lineage of that name,
        or its first one."""
        masks = [self._credit_mask(scored) for scored in self._greedy]
        rows = list(_rows(self._greedy, masks))
        packed = gather(_cut(rewards, rows), _cut(masks, rows))
        of_group: list[dict[str, FloatArray64]] = [{} for _ in self._greedy]
        for row, numbers in zip(rows, packed, strict=True):
            of_group[row.sample][row.name] = numbers
        of_sample = [g for g, group in enumerate(self._groups) for _ in group.survivors]
        found = [of_group[of_sample[row.sample]] for row in self._rows]
        return [
            named.get(row.name, next(iter(named.values())))
            for row, named in zip(self._rows, found, strict=True)
        ]

    def _advantages(self) -> Advantages:
        config, rows = self._config, self._rows
        rewards, outcomes, greedy = self._token_rewards()
        group_ids = [group.group_id for group in self._groups for _ in group.survivors]
        turns = [[t for t in self._turns(r.sample) if r.start <= t.start < r.end] for r in rows]
        several = any(scored.trajectory.lineages for scored in self._scored)
        batch = AdvantageBatch(
            group_ids=[group_ids[r.sample] for r in rows],
            token_rewards=_cut(rewards, rows),
            credit_masks=_cut(self._credit_masks, rows),
            values=None if self._values is None else _cut(self._values, rows),
            greedy_rewards=None if greedy is None else self._greedy_rows(greedy),
            turn_starts=[
                np.array([t.start - r.start for t in of_row], np.int64)
                for r, of_row in zip(rows, turns, strict=True)
            ],
            state_keys=[[turn.state_key for turn in of_row] for of_row in turns],
            lineages=[LineageRow(r.sample, r.name, outcomes[r.sample], r.start == 0) for r in rows]
            if several
            else None,
        )
        result = make_advantage(config.advantage, config.advantage_parameters)(batch)
        _check_result(result, batch, config.advantage)
        result = result._replace(
            advantages=self._join(result.advantages),
            returns=None if result.returns is None else self._join(result.returns),
            value_masks=None if result.value_masks is None else self._join(result.value_masks),
        )
        _refuse_not_finite("advantage", self._scored, result.advantages)
        return result

    def _turns(self, sample: int) -> list[Turn]:
        return self._scored[sample].trajectory.turns

    def _join(self, arrays: Sequence[AnyArray]) -> list[AnyArray]:
        """Return [S][T] what there is of each row; nothing where no row is."""
        joined = [np.zeros(mask.shape, arrays[0].dtype) for mask in self._credit_masks]
        for row, array in zip(self._rows, arrays, strict=True):
            joined[row.sample][row.start : row.end] = array
        return joined

    def prepare(self) -> Prepared:
        """Return the samples with their advantages."""
        result = self._advantages()
        self._metrics |= result.metrics
        overlong = 0
        for index, (scored, advantages) in enumerate(
            zip(self._scored, result.advantages, strict=True)
        ):
            self._update(index, advantages=advantages)
            if self._values is not None:
                assert result.returns is not None  # see _check_result
                self._update(index, returns=result.returns[index], old_values=self._values[index])
            if result.value_masks is not None:
                self._update(index, value_mask=result.value_masks[index])
            if self._config.drop_overlong and scored.trajectory.status == "TRUNCATED":
                overlong += 1
                nothing = np.zeros_like(self._samples[index].loss_mask)
                self._update(index, loss_mask=nothing)
        if self._config.drop_overlong:
            self._metrics["filter/overlong"] = float(overlong)
        means = [
            float(advantages[scored.trajectory.trained_mask()].mean())
            for scored, advantages in zip(self._scored, result.advantages, strict=True)
        ]
        return Prepared(self._samples, means, self._entropies, self._metrics)


class _Row(NamedTuple):
    """Tokens [start, end) of a sample, through which credit passes."""

    sample: int
    start: int
    end: int
    name: str


def _rows(scored: Sequence[ScoredTrajectory], credit_masks: Sequence[BoolArray]) -> Iterator[_Row]:
    """Yield the lineages that are credited; a trajectory without lineages is one."""
    for i, (one, mask) in enumerate(zip(scored, credit_masks, strict=True)):
        names = [lineage.name for lineage in one.trajectory.lineages] or [""]
        for k, (start, end) in enumerate(one.trajectory.lineage_bounds()):
            if mask[start:end].any():
                nth = names[:k].count(names[k])
                yield _Row(i, start, end, f"{names[k]} {nth}")


def _cut(arrays: Sequence[AnyArray], rows: Sequence[_Row]) -> list[AnyArray]:
    return [arrays[row.sample][row.start : row.end] for row in rows]


def _last_tokens(trajectory: Trajectory) -> Iterator[int]:
    """Yield the last trained token of each lineage that has one."""
    trained = trajectory.trained_mask()
    for start, end in trajectory.lineage_bounds():
        inside = np.flatnonzero(trained[start:end])
        if len(inside):
            yield start + int(inside[-1])


def _refuse_not_finite(
    what: str, scored: Sequence[ScoredTrajectory], numbers: Sequence[npt.NDArray[np.floating]]
) -> None:
    bad = [
        s.trajectory.rollout_id
        for s, values in zip(scored, numbers, strict=True)
        if not np.all(np.isfinite(values))
    ]
    if bad:
        raise RunFailedError(
            f"the step was refused: a {what} is not finite in {len(bad)} of {len(scored)} "
            f"trajectories ({', '.join(bad)}); nothing was trained on them; look at them in "
            "trajectories/, and at the reward components"
        )


def _check_result(result: Advantages, batch: AdvantageBatch, name: str) -> None:
    """Refuse what a user's own estimator must not return."""
    if batch.values is not None and result.returns is None:
        raise ValueError(
            f"learner.advantage ({name}) needs a critic and returned no `returns`; return what the "
            "critic learns to predict"
        )
    if len(result.advantages) != len(batch.credit_masks):
        raise ValueError(
            f"learner.advantage ({name}) returned {len(result.advantages)} arrays for "
            f"{len(batch.credit_masks)} trajectories; it must return one each"
        )
    for i, (advantages, mask) in enumerate(zip(result.advantages, batch.credit_masks, strict=True)):
        if advantages.shape != mask.shape:
            raise ValueError(
                f"learner.advantage ({name}) returned {advantages.shape} advantages for trajectory "
                f"{i} of {mask.shape} tokens; it must return one a token"
            )
        if np.any(advantages[~mask] != 0.0):
            raise ValueError(
                f"learner.advantage ({name}) gave trajectory {i} an advantage outside its credit "
                "mask; it must be 0.0 there"
            )


def loss_spec(config: LearnerConfig, step: int = 0) -> LossSpec:
    """Return the loss that the configuration describes.

    Args:
        config: the objective.
        step: learner steps taken before this one; the first `critic_warmup_steps` train the
            critic only.
    """
    return LossSpec(
        kind="policy",
        policy_loss=config.policy_loss,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        kl_coef=config.kl_coef if config.kl == "loss" else 0.0,
        kl_estimator=config.kl_estimator,
        entropy_coef=config.entropy_coef,
        aggregation=config.aggregation,
        fixed_length=config.fixed_length,
        value_clip=config.value_clip,
        optimizer_steps=config.optimizer_steps_per_batch,
        drop_zero_advantages=config.drop_zero_advantages,
        trains_policy=step >= config.critic_warmup_steps,
        steps_before=step * config.optimizer_steps_per_batch,
    )
