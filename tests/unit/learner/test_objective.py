"""Presets, and which keys of the objective go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from agent_r1.learner.algorithms import ADVANTAGES, POLICY_LOSSES, check_equal_groups
from agent_r1.learner.algorithms.advantages import AdvantageBatch
from agent_r1.learner.config import LearnerConfig
from agent_r1.learner.objective import PRESETS, Algorithm


def test_presets_name_what_is_in_the_tables():
    for preset in PRESETS.values():
        assert preset["advantage"] in ADVANTAGES
        assert preset.get("policy_loss", "ppo") in POLICY_LOSSES
    assert set(PRESETS) == set(get_args(Algorithm))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fills_what_it_names_and_can_be_written_out(name: str):
    table = LearnerConfig.model_validate({"algorithm": name})
    found = table.model_dump()
    assert {key: found[key] for key in PRESETS[name]} == PRESETS[name]
    # config.json of a run holds every key; reading it again changes nothing.
    assert LearnerConfig.model_validate_json(table.model_dump_json()) == table


def test_a_key_of_its_own_wins_over_the_preset():
    table = LearnerConfig(algorithm="dapo", clip_high=0.4)
    assert (table.clip_high, table.drop_overlong) == (0.4, True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"algorithm": "ppo", "policy_loss": "gspo"}, '"gspo" weighs .* learner.advantage "gae"'),
        (
            {"algorithm": "reinforce_pp", "policy_loss": "gspo"},
            '"gspo" weighs .* learner.advantage "reinforce_pp"',
        ),
        ({"algorithm": "grpo", "gamma": 0.9}, r'gamma \(0.9\) is not used with advantage "grpo"'),
        ({"algorithm": "grpo", "critic_lr": 1.0}, r'critic_lr .* not used with advantage "grpo"'),
        ({"algorithm": "rloo", "normalize_std": False}, "normalize_std .* not used with"),
        ({"kl_coef": 0.5}, r'kl_coef \(0.5\) is not used with kl "none"'),
        ({"fixed_length": 9}, r'fixed_length \(9\) is not used with aggregation "token_mean"'),
        ({"loss_mask": False}, "loss_mask = false .* set advantage_mask = false too"),
        ({"advantage_mask": False}, "advantage_mask = false changes nothing with"),
        ({"algorithm": "rloo", "group_size": 1}, r'group_size \(1\) must be >= 2 .* "rloo"'),
        (
            {"kl": "loss", "kl_estimator": "k1"},
            r'"k1" in the loss .* gradient of 0 on average.* use "k2" or "k3"',
        ),
        (
            {"algorithm": "cispo", "dual_clip": 3.0},
            'dual_clip .* not used with policy_loss "cispo"',
        ),
        ({"policy_loss": "reinforce", "dual_clip": 3.0}, 'dual_clip .* policy_loss "reinforce"'),
        ({"importance_cap": 0}, "importance_cap"),
        ({"advantage": "grop"}, r'advantage \("grop"\) is unknown; choose one of gae'),
        ({"policy_loss": "pppo"}, r'policy_loss \("pppo"\) is unknown'),
    ],
)
def test_what_does_not_go_together_is_an_error_that_names_both(
    values: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        LearnerConfig.model_validate(values)


def test_a_null_cap_of_an_earlier_version_is_no_cap():
    assert LearnerConfig.model_validate({"importance_cap": None}).importance_cap == "none"


TEACHING = [name for name in (*ADVANTAGES, "mine:advantages") if name not in ("grpo", "rloo")]


@pytest.mark.parametrize("advantage", TEACHING)
def test_groups_of_equal_rewards_are_not_dropped_where_they_teach(advantage: str):
    with pytest.raises(ValueError, match=rf'those teach with learner.advantage "{advantage}"'):
        LearnerConfig.model_validate({"advantage": advantage, "drop_equal_groups": True})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kl": "reward"}, r'before the KL is taken off \(learner.kl = "reward"\)'),
        ({"process_rewards": "batch"}, "before process rewards are scaled"),
        ({"kl": "loss"}, 'those teach with learner.kl = "loss", .* or kl = "none"'),
        ({"entropy_coef": 0.01}, r"learner.entropy_coef = 0.01, .* or entropy_coef = 0.0"),
        ({"algorithm": "dapo", "entropy_coef": 0.01}, "learner.entropy_coef = 0.01"),
    ],
)
def test_equal_is_what_the_advantage_compares(values: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        LearnerConfig.model_validate({"drop_equal_groups": True, **values})


@pytest.mark.parametrize("advantage", ["grpo", "rloo"])
@pytest.mark.parametrize("policy_loss", [*POLICY_LOSSES, "mine:loss"])
def test_groups_of_equal_rewards_may_be_dropped_where_they_teach_nothing(
    advantage: str, policy_loss: str
):
    values = {"advantage": advantage, "policy_loss": policy_loss, "drop_equal_groups": True}
    LearnerConfig.model_validate(values)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_advantages_that_are_0_in_a_group_of_equal_rewards(name: str):
    # The first group's rewards are both 2, given in turn 1 and 2, or in turn 2 alone. Centered
    # rewards are 0 on its 5 tokens, -1/2 on 2 tokens and 1/2 on 5: their mean is 1.5 / 12, no 0.
    rewards = [[1.0, 1.0], [0.0, 0.0, 2.0], [0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0]]
    batch = AdvantageBatch(
        group_ids=[0, 0, 1, 1],
        token_rewards=list(map(np.array, rewards)),
        credit_masks=[np.ones(len(row), np.bool_) for row in rewards],
        values=[np.full(len(row), 0.25) for row in rewards],
        greedy_rewards=[np.array([0.5])] * 4,
        turn_starts=[np.array([0, 1])] * 4,
        state_keys=[["", "a"]] * 4,
    )
    found = ADVANTAGES[name]()(batch).advantages
    teaches = [bool(np.any(advantages)) for advantages in found]
    assert any(teaches[2:])
    assert any(teaches[:2]) == (not ADVANTAGES[name].zero_when_equal)


def test_a_loss_of_ones_own_says_that_equal_groups_teach_it_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "own_losses.py").write_text(
        "def silent(inputs, options): ...\n\ndef loud(inputs, options): ...\n\n"
        "silent.zero_without_advantage = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    check_equal_groups("own_losses:silent")
    check_equal_groups("ppo")
    with pytest.raises(ValueError, match=r'"own_losses:loud"\) does not say that it has no grad'):
        check_equal_groups("own_losses:loud")


def test_cispo_bounds_its_weights_above_only():
    table = LearnerConfig(algorithm="cispo")
    # Weights from 1 - 1 = 0 to 1 + 4 = 5.
    assert (table.clip_low, table.clip_high) == (1.0, 4.0)


def test_ablations_of_the_paper_are_allowed():
    LearnerConfig(algorithm="ppo", advantage_mask=False)
    LearnerConfig(algorithm="ppo", advantage_mask=False, loss_mask=False)
    LearnerConfig(algorithm="grpo", advantage_mask=False, loss_mask=False)
    LearnerConfig(algorithm="grpo", advantage_mask=False, kl="reward")  # tool text is penalized


def test_functions_of_the_users_are_names():
    table = LearnerConfig(advantage="mine:advantages", policy_loss="mine.losses:loss", group_size=1)
    assert table.advantage == "mine:advantages"


def test_a_greedy_answer_takes_a_slot_of_its_own():
    assert LearnerConfig(algorithm="remax", group_size=3).slots_per_group == 4
    assert LearnerConfig(algorithm="ppo", group_size=1).slots_per_group == 1
