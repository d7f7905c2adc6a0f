"""What every advantage estimator takes and returns.

train_samples.py --AdvantageBatch, AdvantageOptions--> an estimator here --Advantages--> back

Dimension key: N = trajectories of one batch, T = tokens of one trajectory, P = the tokens of one
trajectory where its credit mask is True ("packed"), G = group size.

A trajectory of several lineages has a row for each one that is trained: N then counts rows, and
credit never passes from one to another, and a group counts a trajectory once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt


class LineageRow(NamedTuple):
    """A row that is one lineage of a trajectory."""

    trajectory: int
    """Number of the trajectory in the batch."""
    name: str
    """Of the lineage, as no other one of the trajectory is called."""
    outcome: float
    """What its token rewards have of the trajectory's outcome, which each of its lineages has and
    the trajectory has earned once."""
    begins: bool
    """It begins with the prompt of the task, as one row of every trajectory may."""


@dataclass(frozen=True)
class AdvantageBatch:
    """Rewards of one batch of trajectories, token by token, and what estimators compare them to.

    Raises:
        ValueError: counts or shapes differ, a mask is empty, a reward lies outside its mask, or a
            number is not finite.
    """

    group_ids: Sequence[int]
    """[N] trajectories with equal ids answer the same prompt."""
    token_rewards: Sequence[npt.NDArray[np.floating]]
    """[N][T] reward of each token: process rewards on the token that closes a call, the outcome
    on the last sampled token, minus the KL penalty when it is part of the reward; 0.0 where
    credit_masks is False."""
    credit_masks: Sequence[npt.NDArray[np.bool_]]
    """[N][T] the tokens advantages are computed over: the sampled ones; with
    `advantage_mask = false`, every token after the prompt."""
    values: Sequence[npt.NDArray[np.floating]] | None = None
    """[N][T] the critic's value of the state in which token t is chosen; read where credit_masks is
    True. None without a critic."""
    greedy_rewards: Sequence[npt.NDArray[np.floating]] | None = None
    """[N][P'] rewards of the credited tokens of the greedy answer to the same prompt, made as
    token_rewards are but for the KL penalty. None when there are no greedy answers."""
    turn_starts: Sequence[npt.NDArray[np.int64]] | None = None
    """[N][K] the first sampled token of each turn of the model, rising. A turn ends where the next
    one starts. None where nobody asked for turns."""
    state_keys: Sequence[Sequence[str]] | None = None
    """[N][K] names the state in which the turn was taken; "" is a state like no other. All
    trajectories of a group take their first turn in the same state."""
    lineages: Sequence[LineageRow] | None = None
    """[N] which part of a trajectory each row is; those of one trajectory stand side by side, its
    first lineage first. None: every row is a trajectory."""

    def __post_init__(self) -> None:
        self._check_counts()
        for i, (rewards, mask) in enumerate(
            zip(self.token_rewards, self.credit_masks, strict=True)
        ):
            _check_trajectory(i, rewards, mask)
            if self.values is not None:
                _check_values(i, self.values[i], mask)
            if self.greedy_rewards is not None:
                _check_greedy(i, self.greedy_rewards[i])
            if self.turn_starts is not None:
                _check_turns(i, self.turn_starts[i], mask)
            if self.turn_starts is not None and self.state_keys is not None:
                _check_keys(i, len(self.turn_starts[i]), len(self.state_keys[i]))

    def _check_counts(self) -> None:
        counts = {
            "group ids": len(self.group_ids),
            "reward arrays": len(self.token_rewards),
            "credit masks": len(self.credit_masks),
        }
        if self.values is not None:
            counts["value arrays"] = len(self.values)
        if self.greedy_rewards is not None:
            counts["greedy reward arrays"] = len(self.greedy_rewards)
        if self.turn_starts is not None:
            counts["lists of turns"] = len(self.turn_starts)
        if self.state_keys is not None:
            counts["lists of state keys"] = len(self.state_keys)
        if self.lineages is not None:
            counts["lineages"] = len(self.lineages)
        if len(set(counts.values())) != 1:
            found = ", ".join(f"{count} {name}" for name, count in counts.items())
            raise ValueError(f"an advantage batch has {found}; there must be one per trajectory")
        if not self.group_ids:
            raise ValueError("an advantage batch has 0 trajectories; it needs at least 1")


def _check_trajectory(
    i: int, rewards: npt.NDArray[np.floating], mask: npt.NDArray[np.bool_]
) -> None:
    if mask.ndim != 1 or mask.dtype != np.bool_:
        raise ValueError(
            f"trajectory {i} has a credit mask of shape {mask.shape} and type {mask.dtype}; it "
            "must be [T] of bool"
        )
    if rewards.shape != mask.shape:
        raise ValueError(
            f"trajectory {i} has rewards of shape {rewards.shape} and a credit mask of shape "
            f"{mask.shape}; they must be equal"
        )
    if not mask.any():
        raise ValueError(
            f"trajectory {i} has no token in its credit mask ({len(mask)} tokens, all False); "
            "leave it out of the batch"
        )
    _check_finite(i, "a reward", rewards)
    outside = np.flatnonzero((rewards != 0.0) & ~mask)
    if len(outside):
        t = outside[0]
        raise ValueError(
            f"trajectory {i} has a reward ({rewards[t]}) on token {t}, which is outside its credit "
            "mask; put it on the sampled token that caused it"
        )


def _check_values(i: int, values: npt.NDArray[np.floating], mask: npt.NDArray[np.bool_]) -> None:
    if values.shape != mask.shape:
        raise ValueError(
            f"trajectory {i} has values of shape {values.shape} and a credit mask of shape "
            f"{mask.shape}; they must be equal"
        )
    _check_finite(i, "a value", np.where(mask, values, 0.0))


def _check_greedy(i: int, rewards: npt.NDArray[np.floating]) -> None:
    if rewards.ndim != 1 or not len(rewards):
        raise ValueError(
            f"trajectory {i} has greedy rewards of shape {rewards.shape}; they must be [P] with at "
            "least one token"
        )
    _check_finite(i, "a greedy reward", rewards)


def _check_turns(i: int, starts: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_]) -> None:
    first = int(np.argmax(mask))
    inside = len(starts) and starts[0] == first and starts[-1] < len(mask) and mask[starts].all()
    if not inside or np.any(np.diff(starts) <= 0):
        raise ValueError(
            f"trajectory {i} has turns that start at {list(starts)}; they must rise from its first "
            f"credited token ({first}), each on a credited one"
        )


def _check_keys(i: int, num_turns: int, num_keys: int) -> None:
    if num_keys != num_turns:
        raise ValueError(
            f"trajectory {i} has {num_keys} state keys for {num_turns} turns; give one per turn"
        )


def _check_finite(i: int, what: str, numbers: npt.NDArray[np.floating]) -> None:
    broken = np.flatnonzero(~np.isfinite(numbers))
    if len(broken):
        t = broken[0]
        source = "the critic" if what == "a value" else "the reward components"
        raise ValueError(
            f"trajectory {i} has {what} of {numbers[t]} on token {t}; it must be finite: look at "
            f"{source}"
        )


@dataclass(frozen=True)
class AdvantageOptions:
    """Settings of the estimators; each reads those its formula has."""

    gamma: float = 1.0
    """Discount per packed token, from 0 to 1: GAE, REINFORCE++ and ReMax; per turn: turn-level GAE
    and GiGPO."""
    lam: float = 1.0
    """Lambda of GAE, from 0 (bootstrapped) to 1 (reward-to-go minus value)."""
    normalize_std: bool = True
    """GRPO, MT-GRPO and GiGPO: divide by the group's sample std; False is Dr. GRPO."""
    turn_coef: float = 1.0
    """MT-GRPO and GiGPO: weight of the advantage of turns beside that of trajectories."""

    def __post_init__(self) -> None:
        for name, value in (("gamma", self.gamma), ("lam", self.lam)):
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} ({value}) must be from 0 to 1; 1 discounts nothing")


class Advantages(NamedTuple):
    """Result of an estimator."""

    advantages: list[npt.NDArray[np.float32]]
    """[N][T] exactly 0.0 outside the credit mask."""
    returns: list[npt.NDArray[np.float32]] | None = None
    """[N][T] what the critic learns to predict, 0.0 outside the credit mask; None without one."""
    value_masks: list[npt.NDArray[np.bool_]] | None = None
    """[N][T] the tokens at which the critic learns; None: at every credited one."""
    metrics: Mapping[str, float] = {}
    """What the estimator reports of the batch, by metric name."""


class AdvantageEstimator(Protocol):
    """Turns rewards into advantages."""

    def __call__(self, batch: AdvantageBatch, options: AdvantageOptions, /) -> Advantages:
        """Return the advantages of a batch.

        Raises:
            ValueError: the batch lacks what the estimator reads (values, greedy rewards).
        """
        ...
