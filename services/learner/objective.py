"""Objective of the learner: its independent keys, and presets over them.

`learner.algorithm` names a preset; every key the preset sets can be given its own value beside it.
config.py joins these keys with the engine's; train_samples.py and the engine read them. Imports no
torch.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from agent_r1.learner.algorithms import ADVANTAGES, POLICY_LOSSES, find_advantage
from agent_r1.learner.algorithms.advantages import SHARED_PARAMETERS, AdvantageEstimator
from agent_r1.runtime.config import StrictConfig
from agent_r1.runtime.user_code import CODE_PATTERN

PositiveFloat = Annotated[float, Field(gt=0)]
PositiveInt = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"]
KlEstimator = Literal["k1", "k2", "k3", "abs"]
Algorithm = Literal[
    "ppo",
    "grpo",
    "dr_grpo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "rloo",
    "remax",
    "turn_ppo",
    "mt_grpo",
    "gigpo",
    "dapo",
    "gspo",
    "cispo",
]

RATIO_LOSSES = ("ppo", "gspo", "cispo")
"""Losses whose own ratio corrects for samples of older weights, where it starts at the rollout's
log-probabilities."""

PRESETS: dict[str, dict[str, Any]] = {
    "ppo": {"advantage": "gae"},
    "grpo": {"advantage": "grpo"},
    "dr_grpo": {"advantage": "grpo", "normalize_std": False, "aggregation": "fixed_length"},
    "reinforce_pp": {"advantage": "reinforce_pp"},
    "reinforce_pp_baseline": {"advantage": "reinforce_pp_baseline"},
    "rloo": {"advantage": "rloo"},
    "remax": {"advantage": "remax"},
    "turn_ppo": {"advantage": "turn_gae"},
    "mt_grpo": {"advantage": "mt_grpo"},
    "gigpo": {"advantage": "gigpo"},
    "dapo": {
        "advantage": "grpo",
        "clip_high": 0.28,
        "drop_equal_groups": True,
        "drop_overlong": True,
    },
    "gspo": {
        "advantage": "grpo",
        "policy_loss": "gspo",
        "aggregation": "sequence_mean",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
    },
    # MiniMax-M1, arXiv:2506.13585: no lower bound, and an upper one that it does not state; weights
    # of at most 4 to 8 do equally well in ScaleRL, arXiv:2510.13786.
    "cispo": {"advantage": "grpo", "policy_loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
}
"""Keys that each algorithm sets; one that a preset does not name has its default."""


class ObjectiveConfig(StrictConfig):
    """Advantage, policy loss, masks, KL, aggregation and filters."""

    algorithm: Algorithm = "grpo"
    """Preset over the keys below; each of them can be given its own value."""
    advantage: str = "grpo"
    """Advantage estimator: gae, grpo, rloo, reinforce_pp, reinforce_pp_baseline, remax, turn_gae,
    mt_grpo, gigpo, or `module:Class` found through `run.plugins`."""
    advantage_options: dict[str, JsonValue] = {}
    """Parameters of an `advantage` of your own, by name; the others have the keys below."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount per action token; gae, reinforce_pp and remax read it. For turn_gae and gigpo it is
    the discount per turn."""
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0
    """GAE's lambda, for gae and turn_gae."""
    normalize_std: bool = True
    """Divide the advantages of grpo, mt_grpo and gigpo by the sample std of what is compared; False
    is Dr. GRPO."""
    turn_coef: Annotated[float, Field(ge=0)] = 1.0
    """Weight of a turn's own advantage beside that of its trajectory, for mt_grpo and gigpo."""
    process_rewards: Literal["none", "batch", "trajectory"] = "none"
    """Scaling of process rewards before the outcome is added: `batch` and `trajectory` divide them
    by the largest absolute reverse cumulative sum of the batch (as PRIME does) or of each
    trajectory."""
    advantage_mask: bool = True
    """Compute advantages over sampled tokens only; False computes them over every token after the
    prompt, tool text included: the paper's ablation."""
    loss_mask: bool = True
    """Train on sampled tokens only; False trains on every token after the prompt, tool text
    included: the paper's ablation."""
    shuffle_rewards: bool = False
    """Control experiment: train on each group's rewards in random order; metrics stay true."""

    policy_loss: str = "ppo"
    """Policy loss: ppo, gspo, cispo, reinforce, or `module:function` found through
    `run.plugins`."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The probability ratio is clipped below at 1 - clip_low; 1 is no bound."""
    clip_high: PositiveFloat = 0.2
    """The probability ratio is clipped above at 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Upper bound on the loss of a negative advantage, in units of it; None is no bound. Read by
    policy_loss ppo and gspo."""
    aggregation: Aggregation = "token_mean"
    """Aggregation of token losses: token_mean, the mean over all trained tokens of the optimizer
    batch; sequence_mean, the mean of the trajectories' means; sequence_sum, the mean of their sums;
    fixed_length, the mean of their sums over `fixed_length`."""
    fixed_length: PositiveInt = 1024
    """Length, in tokens, that aggregation `fixed_length` divides by."""
    kl: Literal["none", "loss", "reward"] = "none"
    """Place of the KL to the reference (the configured model): the loss, or the reward, where it is
    taken off each token that the advantage mask leaves; none keeps no reference."""
    kl_coef: PositiveFloat = 1e-3
    """Weight of that KL."""
    kl_estimator: KlEstimator = "k3"
    """Per-token estimator of that KL. k1 goes into the reward only: its gradient as a loss is 0 on
    average."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""

    importance_cap: PositiveFloat | Literal["auto", "none"] = "auto"
    """Truncated importance sampling: token losses are weighted by the learner's probability over
    the rollout's, capped at this value. auto does so, with a cap of 2, where the policy loss would
    leave that ratio out: where its own ratio starts at the learner's log-probabilities (more than
    one optimizer step, kl reward, importance_low or importance_high, loss_mask false), or, with
    max_staleness > 0, where it has no ratio (reinforce) or is your own. none never does."""
    importance_low: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """A trajectory whose mean ratio (geometric, learner to rollout) is below is not trained on."""
    importance_high: Annotated[float, Field(gt=1)] | None = None
    """A trajectory whose mean ratio is above is not trained on; None is no bound."""

    drop_equal_groups: bool = False
    """Dynamic sampling: replace groups whose rewards are all equal by new prompts, at most
    `groups_per_batch` of them a step. Only where equal ones teach nothing: with advantage grpo or
    rloo, without KL, entropy bonus and scaled process rewards, and with a policy_loss that has no
    gradient where the advantage is 0."""
    drop_overlong: bool = False
    """Do not train on trajectories that a limit cut (TRUNCATED); the group's other trajectories
    are still compared with them."""
    drop_zero_advantages: bool = True
    """Run trajectories whose advantages are all 0 forward only: their gradient is exactly 0. They
    count in the loss's denominator and in every metric. Ignored while a KL or entropy term is on,
    and for a policy_loss of your own that does not say it has no gradient there."""

    critic_path: str | None = None
    """Model directory the critic's backbone starts from; None is model.path. For advantage
    gae and turn_gae."""
    critic_lr: PositiveFloat = 1e-5
    """Learning rate of the critic after warm-up. It follows the schedule of `lr`, from the first
    step of the run on."""
    critic_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """First learner steps, in which only the critic learns; the policy's learning-rate schedule
    begins after them."""
    value_clip: PositiveFloat | None = 0.5
    """The critic's loss counts a value at most so far from the one before the batch; None is no
    bound."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return PRESETS.get(values.get("algorithm", "grpo"), {}) | values

    @field_validator("importance_cap", mode="before")
    @classmethod
    def _read_null_cap(cls, value: Any) -> Any:
        # Only a config.json can say null, and the one of version 0.1.0 meant no weights by it.
        return "none" if value is None else value

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for key, known in (("advantage", ADVANTAGES), ("policy_loss", POLICY_LOSSES)):
            value = getattr(self, key)
            if value not in known and not re.match(CODE_PATTERN, value):
                raise ValueError(
                    f'learner.{key} ("{value}") is unknown; choose one of {", ".join(known)}, or '
                    "name your own as module:name"
                )
        return self

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        known = ADVANTAGES.get(self.advantage)
        if self.policy_loss == "gspo" and known is not None and known.credit != "trajectory":
            named = [name for name, one in ADVANTAGES.items() if one.credit == "trajectory"]
            raise ValueError(
                f'learner.policy_loss "gspo" weighs whole trajectories and learner.advantage '
                f'"{self.advantage}" gives every token its own; use policy_loss = "ppo", or one '
                f"of the advantages {', '.join(named)}"
            )
        if self.kl == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                'learner.kl_estimator "k1" in the loss (learner.kl = "loss") has a gradient of 0 '
                'on average, so it would hold nothing; use "k2" or "k3", or set kl = "reward"'
            )
        if self.policy_loss in ("cispo", "reinforce"):
            self._refuse("dual_clip", because=f'policy_loss "{self.policy_loss}"')
        if known is not None:
            if not known.needs_critic:
                self._refuse("critic_path", "critic_lr", "critic_warmup_steps", "value_clip")
            read = known.model_fields
            self._refuse("advantage_options", *(n for n in SHARED_PARAMETERS if n not in read))
        if self.aggregation != "fixed_length":
            self._refuse("fixed_length", because=f'aggregation "{self.aggregation}"')
        if self.kl == "none":
            self._refuse("kl_coef", "kl_estimator", because='kl "none"')
        return self

    @model_validator(mode="after")
    def _check_equal_groups(self) -> Self:
        """Refuse to drop groups of equal rewards where those teach something."""
        if not self.drop_equal_groups:
            return self
        silent = [name for name, one in ADVANTAGES.items() if one.zero_when_equal]
        if self.advantage not in silent:
            raise ValueError(
                "learner.drop_equal_groups = true leaves out groups whose rewards are all equal, "
                f'and those teach with learner.advantage "{self.advantage}", which need not be 0 '
                "there; set drop_equal_groups = false, or use one of the advantages "
                f"{', '.join(silent)}"
            )
        if self.kl == "reward":
            raise ValueError(
                "learner.drop_equal_groups = true looks at rewards before the KL is taken off "
                '(learner.kl = "reward"), and that differs within a group; set drop_equal_groups = '
                'false or kl = "none"'
            )
        for key, value, off in (("kl", self.kl, "none"), ("entropy_coef", self.entropy_coef, 0.0)):
            if value != off:
                raise ValueError(
                    "learner.drop_equal_groups = true leaves out groups whose rewards are all "
                    f"equal, and those teach with learner.{key} = {json.dumps(value)}, whose term "
                    "of the loss has a gradient on every token; set drop_equal_groups = false or "
                    f"{key} = {json.dumps(off)}"
                )
        if self.process_rewards != "none":
            raise ValueError(
                "learner.drop_equal_groups = true looks at rewards before process rewards are "
                f'scaled (learner.process_rewards = "{self.process_rewards}"), and groups that are '
                'equal before need not be so after; set one of them to false or "none"'
            )
        return self

    @model_validator(mode="after")
    def _check_masks(self) -> Self:
        if not self.loss_mask and self.advantage_mask:
            raise ValueError(
                "learner.loss_mask = false trains on tool text, whose advantages learner."
                "advantage_mask = true leaves at 0, so nothing would change; set advantage_mask = "
                "false too"
            )
        known = ADVANTAGES.get(self.advantage)
        one_number = known is not None and known.credit != "token"
        same_rewards = self.kl != "reward"
        if self.loss_mask and not self.advantage_mask and one_number and same_rewards:
            raise ValueError(
                f'learner.advantage_mask = false changes nothing with advantage "{self.advantage}" '
                "(one number a trajectory or turn) as long as learner.loss_mask is true; set "
                'loss_mask = false too, or use advantage "gae" or "reinforce_pp"'
            )
        return self

    def _refuse(self, *keys: str, because: str | None = None) -> None:
        """Refuse values that nothing would read."""
        because = because or f'advantage "{self.advantage}"'
        for key in keys:
            default = type(self).model_fields[key].default
            if getattr(self, key) != default:
                raise ValueError(
                    f"learner.{key} ({getattr(self, key)}) is not used with {because}; remove it"
                )

    @property
    def advantage_parameters(self) -> dict[str, Any]:
        """Parameters that `make_advantage` gives the estimator."""
        return {name: getattr(self, name) for name in SHARED_PARAMETERS} | self.advantage_options

    @property
    def estimator(self) -> type[AdvantageEstimator]:
        """Class that `advantage` names; the base class while it cannot be found.

        A start of the learner refuses what cannot be found; commands may look before.
        """
        try:
            return find_advantage(self.advantage)
        except ValueError:
            return AdvantageEstimator

    @property
    def has_critic(self) -> bool:
        """Return whether a critic is trained beside the policy."""
        return self.estimator.needs_critic

    @property
    def has_greedy_baseline(self) -> bool:
        """Return whether one greedy answer is asked for beside each group."""
        return self.estimator.needs_greedy_baseline
