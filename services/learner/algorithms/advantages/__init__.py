"""An advantage estimator: its parameters, what it needs, and what it takes and returns.

train_samples.py --AdvantageBatch--> an AdvantageEstimator of this folder --Advantages--> back

Dimension key: N = trajectories of one batch, T = tokens of one trajectory, P = the tokens of one
trajectory where its credit mask is True ("packed"), G = group size.

A trajectory of several lineages has a row for each one that is trained: N then counts rows, and
credit never passes from one to another, and a group counts a trajectory once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from agent_r1.runtime.config import StrictConfig

SHARED_PARAMETERS = ("gamma", "lam", "normalize_std", "turn_coef")
"""Parameters that are keys of `[learner]`; others are its `advantage_options`."""


class LineageRow(NamedTuple):
    """A row that is one lineage of a trajectory."""

    trajectory: int
    """Number of the trajectory in the batch."""
    name: str
    """Name of the lineage, which no other one of the trajectory has."""
    outcome: float
    """Part of its token rewards that is the trajectory's outcome, which each of its lineages has
    and the trajectory has earned once."""
    begins: bool
    """Whether it begins with the prompt of the task, as one row of every trajectory may."""


@dataclass(frozen=True)
class AdvantageBatch:
    """Rewards of one batch of trajectories, token by token, and what estimators compare them to.

    All numbers are finite.
    """

    group_ids: Sequence[int]
    """[N] trajectories with equal ids answer the same prompt."""
    token_rewards: Sequence[npt.NDArray[np.floating]]
    """[N][T] reward of each token: process rewards on the token that closes a call, the outcome
    on the last sampled token, minus the KL penalty when it is part of the reward; 0.0 where
    credit_masks is False."""
    credit_masks: Sequence[npt.NDArray[np.bool_]]
    """[N][T] the tokens advantages are computed over, at least one: the sampled ones; with
    `advantage_mask = false`, every token after the prompt."""
    values: Sequence[npt.NDArray[np.floating]] | None = None
    """[N][T] the critic's value of the state in which token t is chosen; read where credit_masks is
    True. None unless the estimator `needs_critic`."""
    greedy_rewards: Sequence[npt.NDArray[np.floating]] | None = None
    """[N][P'] rewards of the credited tokens of the greedy answer to the same prompt, made as
    token_rewards are but for the KL penalty. None unless the estimator `needs_greedy_baseline`."""
    turn_starts: Sequence[npt.NDArray[np.int64]] = ()
    """[N][K] the first sampled token of each turn of the model, rising. A turn ends where the next
    one starts."""
    state_keys: Sequence[Sequence[str]] = ()
    """[N][K] names the state in which the turn was taken; "" is a state like no other. All
    trajectories of a group take their first turn in the same state."""
    lineages: Sequence[LineageRow] | None = None
    """[N] which part of a trajectory each row is; those of one trajectory stand side by side, its
    first lineage first. None: every row is a trajectory."""


class Advantages(NamedTuple):
    """Result of an estimator."""

    advantages: list[npt.NDArray[np.float32]]
    """[N][T] exactly 0.0 outside the credit mask."""
    returns: list[npt.NDArray[np.float32]] | None = None
    """[N][T] what the critic learns to predict, 0.0 outside the credit mask; None without one."""
    value_masks: list[npt.NDArray[np.bool_]] | None = None
    """[N][T] the tokens at which the critic learns; None: at every credited one."""
    metrics: Mapping[str, float] = {}
    """Numbers that the estimator reports of the batch, by metric name."""


class AdvantageEstimator(StrictConfig, ABC):
    """Turns the rewards of a batch into advantages: its fields are its parameters.

    One of `SHARED_PARAMETERS` has the value of the key of `[learner]` with that name; others are
    given under `learner.advantage_options`.
    """

    needs_critic: ClassVar[bool] = False
    """A critic is trained beside the policy, and batches have `values`."""
    needs_greedy_baseline: ClassVar[bool] = False
    """One greedy answer is asked for beside each group, and batches have `greedy_rewards`."""
    compares_group: ClassVar[bool] = False
    """The trajectories of a group are compared, so that one alone has no advantage."""
    credit: ClassVar[Literal["token", "turn", "trajectory"]] = "token"
    """Unit that has one advantage, the same on all of its credited tokens."""
    zero_when_equal: ClassVar[bool] = False
    """Advantages are exactly 0 in a group of equal rewards."""

    @abstractmethod
    def __call__(self, batch: AdvantageBatch) -> Advantages:
        """Return the advantages of a batch."""
