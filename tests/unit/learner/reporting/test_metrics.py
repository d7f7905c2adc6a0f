"""The numbers of a step, by hand; samples and their token rewards."""

from __future__ import annotations

import numpy as np
import pytest

from agent_r1.learner.config import LearnerConfig
from agent_r1.learner.groups import Group, Slot, total_reward
from agent_r1.learner.reporting.metrics import batch_metrics, reward_delay_s
from agent_r1.learner.train_samples import build_samples, loss_spec, process_rewards
from agent_r1_proto.rewards import ScoredTrajectory
from agent_r1_proto.trajectory import ToolCallRecord
from tests.support.builders import rollout_task, scored


def group(group_id: int, *results: ScoredTrajectory) -> Group:
    slots = [Slot(issued_at=0.0, final=True, result=result) for result in results]
    return Group(group_id, results[0].trajectory.rollout.task, 0, slots)


def member(group_id: int, index: int, total: float, **changes: object) -> ScoredTrajectory:
    rollout = rollout_task(group_id=group_id, sample_index=index)
    return scored(rollout, total=total, **changes)  # pyright: ignore[reportArgumentType]


def call(status: str, reward: float | None = None, at: int = 4) -> ToolCallRecord:
    return ToolCallRecord(
        end_token_index=at,
        tool="search",
        status=status,  # pyright: ignore[reportArgumentType]
        latency_ms=10.0,
        process_reward=reward,
    )


def test_groups_of_one_have_no_share_of_equal_rewards():
    alone, both = group(0, member(0, 0, 1.0)), group(1, member(1, 0, 1.0), member(1, 1, 0.0))
    assert "group/equal_reward_share" not in batch_metrics(
        [alone], [1.0], newest_version=0, max_staleness=0
    )
    values = batch_metrics([alone, both], [1.0, 0.5, -0.5], newest_version=0, max_staleness=0)
    assert values["group/equal_reward_share"] == 0.0


def test_the_numbers_of_two_groups():
    groups = [
        group(0, member(0, 0, 1.0), member(0, 1, 0.0, num_sampled=7)),
        group(1, member(1, 0, 1.0), member(1, 1, 1.0, policy_version=3, status="TRUNCATED")),
    ]
    values = batch_metrics(groups, [0.5, -0.5, 0.0, 0.0], newest_version=4, max_staleness=3)
    assert values["reward/mean"] == 0.75
    # Population standard deviation of 1, 0, 1, 1: sqrt(3/16).
    assert values["reward/std"] == pytest.approx(0.43301, abs=1e-5)
    assert (values["reward/min"], values["reward/max"]) == (0.0, 1.0)
    assert values["reward/em"] == 0.75
    assert values["group/equal_reward_share"] == 0.5
    assert values["advantage/mean"] == 0.0
    assert values["advantage/max"] == 0.5
    # Sampled 3, 7, 3, 3 of 5, 9, 5, 5 tokens.
    assert values["response/length_mean"] == 4.0
    assert values["trajectory/length_mean"] == 6.0
    assert values["mask/share"] == pytest.approx(16 / 24)
    assert values["staleness/max"] == 4.0
    assert values["staleness/late_share"] == 0.75  # three of age 4, one of age 1; 3 are allowed
    assert values["staleness/mean"] == pytest.approx((4 + 4 + 4 + 1) / 4)
    assert values["trajectory/truncated_share"] == 0.25
    assert values["tools/calls_mean"] == 0.0
    assert "tools/error_share" not in values


def test_versions_of_the_models_that_scored_are_counted():
    old, new = {"reward_model": "v1", "judge": "m"}, {"reward_model": "v2", "judge": "m"}
    groups = [
        group(0, member(0, 0, 1.0, versions=old), member(0, 1, 0.0, versions=old)),
        group(1, member(1, 0, 1.0, versions=new), member(1, 1, 0.0)),
    ]
    values = batch_metrics(groups, [0.0] * 4, newest_version=0, max_staleness=0)
    assert {n: v for n, v in values.items() if n.startswith("versions/")} == {
        "versions/reward_model": 2.0,
        "versions/judge": 1.0,
    }


def test_tool_calls_are_counted_per_trajectory():
    calls = [call("ok"), call("error"), call("malformed"), call("ok")]
    groups = [group(0, member(0, 0, 1.0, calls=calls), member(0, 1, 0.0))]
    values = batch_metrics(groups, [0.0, 0.0], newest_version=0, max_staleness=0)
    assert values["tools/calls_mean"] == 2.0
    assert values["tools/calls_max"] == 4.0
    assert values["calls/search"] == 1.5  # three of four were answered, over two trajectories
    assert values["tools/error_share"] == 0.5
    assert values["tools/latency_ms_mean"] == 10.0


def test_process_rewards_are_added_to_the_outcome():
    record = member(0, 0, 1.0, calls=[call("ok", 0.25), call("ok", None), call("error", -0.125)])
    assert total_reward(record) == 1.125
    (turn,) = record.trajectory.turns
    turn = turn.model_copy(update={"process_reward": 0.5})
    assert total_reward(member(0, 0, 1.0, turns=[turn])) == 1.625


def test_process_rewards_lie_on_the_token_that_closes_the_call():
    record = member(0, 0, 1.0, calls=[call("ok", 0.25, at=2), call("ok", 0.5, at=4)])
    assert process_rewards(record).tolist() == [0.0, 0.0, 0.25, 0.0, 0.5]


def test_samples_carry_advantages_on_sampled_tokens_only():
    table = LearnerConfig(group_size=2, groups_per_batch=1)
    groups = [group(0, member(0, 0, 1.0), member(0, 1, 0.0))]
    prepared = build_samples(groups, table)
    samples, means = prepared.samples, prepared.advantages
    # By hand: rewards 1, 0; mean 0.5, sample std sqrt(1/2); 0.5 / 0.70711 = 0.70711.
    assert means == pytest.approx([0.70711, -0.70711], abs=1e-4)
    expected = np.array([0, 0, 0.70711, 0.70711, 0.70711])
    assert samples[0].advantages == pytest.approx(expected, abs=1e-4)
    assert samples[0].loss_mask.tolist() == [False, False, True, True, True]


def test_equal_rewards_have_no_advantage():
    table = LearnerConfig(group_size=2, groups_per_batch=1)
    groups = [group(0, member(0, 0, 0.3), member(0, 1, 0.3))]
    prepared = build_samples(groups, table)
    samples, means = prepared.samples, prepared.advantages
    assert means == [0.0, 0.0]
    assert not any(sample.advantages.any() for sample in samples)


def test_a_trajectory_without_a_prompt_never_trains_on_its_first_token():
    table = LearnerConfig(group_size=2, groups_per_batch=1)
    groups = [group(0, member(0, 0, 1.0, prompt_length=0), member(0, 1, 0.0))]
    samples = build_samples(groups, table).samples
    assert samples[0].loss_mask.tolist() == [False, True, True]


def test_the_loss_is_what_the_table_says():
    table = LearnerConfig(clip_low=0.1, clip_high=0.3, dual_clip=3.0, kl="loss", kl_coef=0.01)
    spec = loss_spec(table)
    assert (spec.clip_low, spec.clip_high, spec.dual_clip, spec.kl_coef) == (0.1, 0.3, 3.0, 0.01)


def test_the_delay_of_a_reward_runs_from_the_end_of_its_trajectory():
    record = member(0, 0, 1.0, started_at=100.0, latency_ms=2000.0).replace(scored_at=102.5)
    early = member(0, 1, 1.0, started_at=100.0, latency_ms=2000.0).replace(scored_at=101.0)
    assert reward_delay_s([group(0, record, early)]) == 0.25
    assert reward_delay_s([group(0, member(0, 0, 1.0))]) == 0.0
