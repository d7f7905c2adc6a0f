"""The mathematics of training: advantage estimators and losses, each with its paper.

train_samples.py --rewards--> ADVANTAGES --advantages--> POLICY_LOSSES, called by the engine. Pure
functions of arrays and tensors: no Redis, no HTTP, no DeepSpeed. A new one is one file in
`advantages/` or `losses/` and one line in a table here; a user's own estimator is named
`module:Class`, a user's own loss `module:function`. See docs/add-an-algorithm.md.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from agent_r1.learner.algorithms.advantages import SHARED_PARAMETERS, AdvantageEstimator
from agent_r1.learner.algorithms.advantages.gae import Gae
from agent_r1.learner.algorithms.advantages.gigpo import Gigpo
from agent_r1.learner.algorithms.advantages.grpo import Grpo
from agent_r1.learner.algorithms.advantages.mt_grpo import MtGrpo
from agent_r1.learner.algorithms.advantages.reinforce_pp import ReinforcePP
from agent_r1.learner.algorithms.advantages.reinforce_pp_baseline import ReinforcePPBaseline
from agent_r1.learner.algorithms.advantages.remax import Remax
from agent_r1.learner.algorithms.advantages.rloo import Rloo
from agent_r1.learner.algorithms.advantages.turn_gae import TurnGae
from agent_r1.runtime.files.state import check_object
from agent_r1.runtime.user_code import check_call, import_named, kind_of

if TYPE_CHECKING:
    from agent_r1.learner.algorithms.losses import PolicyLossFunction

ADVANTAGES: dict[str, type[AdvantageEstimator]] = {
    "gae": Gae,
    "grpo": Grpo,
    "rloo": Rloo,
    "reinforce_pp": ReinforcePP,
    "reinforce_pp_baseline": ReinforcePPBaseline,
    "remax": Remax,
    "turn_gae": TurnGae,
    "mt_grpo": MtGrpo,
    "gigpo": Gigpo,
}
"""Estimators by the name that `learner.advantage` takes."""

# Names, not functions: losses import torch, which checking a configuration should not wait for.
POLICY_LOSSES: dict[str, str] = {
    "ppo": "agent_r1.learner.algorithms.losses.ppo:ppo_loss",
    "gspo": "agent_r1.learner.algorithms.losses.gspo:gspo_loss",
    "cispo": "agent_r1.learner.algorithms.losses.cispo:cispo_loss",
    "reinforce": "agent_r1.learner.algorithms.losses.reinforce:reinforce_loss",
}
"""Policy losses by the name that `learner.policy_loss` takes, as `module:function`."""


def find_advantage(name: str) -> type[AdvantageEstimator]:
    """Return the estimator that `learner.advantage` names.

    Args:
        name: one of `ADVANTAGES`, or `module:Class` on the import path.

    Raises:
        ValueError: there is none of this name, it cannot be imported, or it is no estimator.
    """
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    key = f'learner.advantage ("{name}")'
    found: object = _import_own(name, "learner.advantage", ADVANTAGES)
    if not _is_estimator(found):
        raise ValueError(
            f"{key} is {kind_of(found)}; it must be a class derived from "
            "agent_r1.learner.algorithms.advantages.AdvantageEstimator, whose __call__(batch) "
            "returns Advantages"
        )
    check_call(found.__call__, "self", "batch", name=f"{key}.__call__")
    return found


def _is_estimator(found: object) -> TypeGuard[type[AdvantageEstimator]]:
    is_kind = isinstance(found, type) and issubclass(found, AdvantageEstimator)
    return is_kind and not inspect.isabstract(cast(object, found))


def make_advantage(name: str, parameters: Mapping[str, Any]) -> AdvantageEstimator:
    """Return the estimator that `learner.advantage` names, with its parameters.

    Args:
        name: as for `find_advantage`.
        parameters: by name; of `SHARED_PARAMETERS` the estimator takes those it has.

    Raises:
        ValueError: as for `find_advantage`, or a parameter is unknown, missing or wrong.
    """
    kind = find_advantage(name)
    fields = kind.model_fields
    taken = {n: v for n, v in parameters.items() if n in fields or n not in SHARED_PARAMETERS}
    try:
        return check_object(kind, taken)
    except ValueError as exc:
        raise ValueError(
            f'learner.advantage ("{name}") has the parameters {", ".join(fields) or "none"}, and '
            f"learner.advantage_options do not fit them: {exc}"
        ) from exc


def find_policy_loss(name: str) -> PolicyLossFunction:
    """Return the loss that `learner.policy_loss` names.

    Args:
        name: one of `POLICY_LOSSES`, or `module:function` on the import path.

    Raises:
        ValueError: there is none of this name, it cannot be imported, or it takes other arguments.
    """
    key = f'learner.policy_loss ("{name}")'
    function = _import_own(POLICY_LOSSES.get(name, name), "learner.policy_loss", POLICY_LOSSES)
    if not callable(function):
        raise ValueError(f"{key} is {kind_of(function)}; it must be a function")
    check_call(function, "inputs", "options", name=key)
    return cast("PolicyLossFunction", function)


def is_zero_without_advantage(name: str) -> bool:
    """Return whether a policy loss has no gradient where the advantage is 0: it may be left out.

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
    """Return whether a policy loss looks at each token by itself, never at a whole trajectory.

    A user's own is given whole trajectories, as `LossInputs.sequences` says.
    """
    return name in POLICY_LOSSES and name != "gspo"


def _import_own(name: str, key: str, known: Iterable[str]) -> Any:
    """Import `module:name`; `key` and the `known` names are for messages."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        names = sorted(known)
        nearest = difflib.get_close_matches(name, names, n=1)
        hint = f'did you mean "{nearest[0]}"? Else choose' if nearest else "choose"
        raise ValueError(
            f'{key} ("{name}") is unknown; {hint} one of {", ".join(names)}, or name your own '
            "as module:name"
        )
    return import_named(name, f'{key} ("{name}")')
