"""The mathematics of training: advantage estimators and losses, each with its paper.

train_samples.py --rewards--> ADVANTAGES --advantages--> POLICY_LOSSES, called by the engine. Pure
functions of arrays and tensors: no Redis, no HTTP, no DeepSpeed. A new one is one file in
`advantages/` or `losses/` and one line in a table here; a user's own is named `module:function`.
See docs/add-an-algorithm.md.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from agent_r1.learner.algorithms.advantages import AdvantageEstimator
from agent_r1.learner.algorithms.advantages.gae import gae_advantages
from agent_r1.learner.algorithms.advantages.gigpo import gigpo_advantages
from agent_r1.learner.algorithms.advantages.grpo import grpo_advantages
from agent_r1.learner.algorithms.advantages.mt_grpo import mt_grpo_advantages
from agent_r1.learner.algorithms.advantages.reinforce_pp import reinforce_pp_advantages
from agent_r1.learner.algorithms.advantages.reinforce_pp_baseline import (
    reinforce_pp_baseline_advantages,
)
from agent_r1.learner.algorithms.advantages.remax import remax_advantages
from agent_r1.learner.algorithms.advantages.rloo import rloo_advantages
from agent_r1.learner.algorithms.advantages.turn_gae import turn_gae_advantages
from agent_r1.runtime.user_code import check_call, import_named

if TYPE_CHECKING:
    from agent_r1.learner.algorithms.losses import PolicyLossFunction

ADVANTAGES: dict[str, AdvantageEstimator] = {
    "gae": gae_advantages,
    "grpo": grpo_advantages,
    "rloo": rloo_advantages,
    "reinforce_pp": reinforce_pp_advantages,
    "reinforce_pp_baseline": reinforce_pp_baseline_advantages,
    "remax": remax_advantages,
    "turn_gae": turn_gae_advantages,
    "mt_grpo": mt_grpo_advantages,
    "gigpo": gigpo_advantages,
}
"""Every estimator by the name `learner.advantage` takes."""

# Names, not functions: losses import torch, which checking a configuration should not wait for.
POLICY_LOSSES: dict[str, str] = {
    "ppo": "agent_r1.learner.algorithms.losses.ppo:ppo_loss",
    "gspo": "agent_r1.learner.algorithms.losses.gspo:gspo_loss",
    "cispo": "agent_r1.learner.algorithms.losses.cispo:cispo_loss",
    "reinforce": "agent_r1.learner.algorithms.losses.reinforce:reinforce_loss",
}
"""Every policy loss by the name `learner.policy_loss` takes, as `module:function`."""


def find_advantage(name: str) -> AdvantageEstimator:
    """Return the estimator that `learner.advantage` names.

    Args:
        name: one of `ADVANTAGES`, or `module:function` on the import path.

    Raises:
        ValueError: there is none of this name, it cannot be imported, or it takes other arguments.
    """
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    function = _import_function(name, "learner.advantage", ADVANTAGES)
    check_call(function, "batch", "options", name=f'learner.advantage ("{name}")')
    return cast(AdvantageEstimator, function)


def find_policy_loss(name: str) -> PolicyLossFunction:
    """Return the loss that `learner.policy_loss` names.

    Args:
        name: one of `POLICY_LOSSES`, or `module:function` on the import path.

    Raises:
        ValueError: there is none of this name, it cannot be imported, or it takes other arguments.
    """
    function = _import_function(POLICY_LOSSES.get(name, name), "learner.policy_loss", POLICY_LOSSES)
    check_call(function, "inputs", "options", name=f'learner.policy_loss ("{name}")')
    return cast("PolicyLossFunction", function)


def is_zero_without_advantage(name: str) -> bool:
    """Whether a policy loss has no gradient where the advantage is 0, so that it may be left out.

    All of `POLICY_LOSSES` are so. A user's own is taken at its word: the function has an attribute
    `zero_without_advantage` that is True.

    Raises:
        ValueError: as `find_policy_loss` does.
    """
    if name in POLICY_LOSSES:
        return True
    return getattr(find_policy_loss(name), "zero_without_advantage", False) is True


def check_equal_groups(policy_loss: str) -> None:
    """Check that groups of equal rewards, whose advantages are 0, teach a policy loss nothing.

    Raises:
        ValueError: it may have a gradient there, or is not to be had, as in `find_policy_loss`.
    """
    if not is_zero_without_advantage(policy_loss):
        raise ValueError(
            "learner.drop_equal_groups = true leaves out groups whose advantages are all 0, and "
            f'learner.policy_loss ("{policy_loss}") does not say that it has no gradient there; '
            "set the function's attribute zero_without_advantage = True if it has none, or set "
            "drop_equal_groups = false"
        )


def is_per_token(name: str) -> bool:
    """Whether a policy loss looks at each token by itself, and so never at a whole trajectory.

    A user's own is given whole trajectories, as `LossInputs.sequences` says.
    """
    return name in POLICY_LOSSES and name != "gspo"


def _import_function(name: str, key: str, known: Iterable[str]) -> Any:
    """Import `module:function`; `key` and the `known` names are for messages."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        names = sorted(known)
        nearest = difflib.get_close_matches(name, names, n=1)
        hint = f'did you mean "{nearest[0]}"? Else choose' if nearest else "choose"
        raise ValueError(
            f'{key} ("{name}") is unknown; {hint} one of {", ".join(names)}, or name your own '
            "as module:function"
        )
    function = import_named(name, f'{key} ("{name}")')
    if not callable(function):
        raise ValueError(
            f'{key} ("{name}"): {attribute} is a {type(function).__name__}; it must be a function'
        )
    return function
