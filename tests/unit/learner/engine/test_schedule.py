"""Learning-rate schedules, by hand."""

from __future__ import annotations

import pytest

from agent_r1.learner.config import EngineConfig
from agent_r1.learner.engine.schedule import LearningRates, learning_rate


def rates(total: int | None = 9, **settings) -> list[float]:
    table = EngineConfig.model_validate({"lr": 1.0, **settings})
    return [learning_rate(table, step, total) for step in range(9)]


def test_warm_up_rises_to_the_rate_and_stays():
    assert rates(None, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_linear_falls_to_the_end():
    expected = [1 - step / 8 for step in range(9)]
    assert rates(lr_schedule="linear") == pytest.approx(expected)


def test_linear_after_warm_up_keeps_the_floor():
    # 3 steps of warm-up, then from 1.0 at step 3 to 0.5 at step 8
    expected = [1 / 3, 2 / 3, 1.0, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5]
    assert rates(lr_schedule="linear", warmup_steps=3, min_lr_ratio=0.5) == pytest.approx(expected)


def test_cosine_is_half_way_in_the_middle():
    values = rates(lr_schedule="cosine")
    assert values[0] == 1.0
    assert values[4] == pytest.approx(0.5)
    assert values[8] == pytest.approx(0.0)


def test_a_step_beyond_the_plan_keeps_the_last_rate():
    table = EngineConfig(lr=1.0, lr_schedule="linear", min_lr_ratio=0.1)
    assert learning_rate(table, 100, 9) == pytest.approx(0.1)


def test_a_critic_falls_from_its_own_rate_and_the_policy_from_the_step_it_is_first_trained_in():
    table = EngineConfig(lr=1.0, lr_schedule="linear", warmup_steps=1)
    rates = LearningRates(table, 5, critic_lr=10.0, policy_starts=2)
    # 1 step of warm-up, then down to 0: the critic over steps 1 to 4, the policy over 3 and 4.
    assert [rates.critic(step) for step in range(5)] == pytest.approx([10, 10, 20 / 3, 10 / 3, 0])
    assert [rates.policy(step) for step in (2, 3, 4)] == pytest.approx([1, 1, 0])


def test_offload_needs_sharding():
    with pytest.raises(ValueError, match=r"offload .* needs zero_stage >= 1"):
        EngineConfig(offload="optimizer")
    with pytest.raises(ValueError, match="needs zero_stage = 3"):
        EngineConfig(offload="all", zero_stage=2)
