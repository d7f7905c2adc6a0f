"""From rewarded groups to samples: masks, advantages, corrections, filters, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from agent_r1.learner.algorithms import ADVANTAGES
from agent_r1.learner.algorithms.advantages import AdvantageBatch, Advantages
from agent_r1.learner.algorithms.advantages.gae import Gae
from agent_r1.learner.config import LearnerConfig
from agent_r1.learner.engine.interface import FloatArray, Model, Predictions, TrainSample
from agent_r1.learner.groups import Group, Slot, failure_reason, staleness, total_reward
from agent_r1.learner.objective import PRESETS
from agent_r1.learner.stop_rules import RunFailedError
from agent_r1.learner.train_samples import (
    BoolArray,
    Prepared,
    build_samples,
    loss_spec,
    outcome_rewards,
    process_rewards,
)
from agent_r1_proto.rewards import ScoredTrajectory
from agent_r1_proto.trajectory import ToolCallRecord, Turn
from tests.support.builders import rollout_task, scored, three_lineages, two_segments


def group(group_id: int, *rewards: float) -> Group:
    members: list[ScoredTrajectory] = [
        scored(rollout_task(group_id=group_id, sample_index=index), total=reward)
        for index, reward in enumerate(rewards)
    ]
    slots = [Slot(issued_at=0.0, result=member) for member in members]
    return Group(group_id, members[0].trajectory.rollout.task, 0, slots)


REWARDS = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


def test_rewards_stay_with_their_trajectories():
    assert outcome_rewards(group(0, *REWARDS), shuffle=False) == REWARDS


def test_shuffled_rewards_are_the_same_rewards_in_an_order_of_the_group():
    shuffled = [outcome_rewards(group(number, *REWARDS), shuffle=True) for number in (0, 0, 1)]
    assert [sorted(rewards) for rewards in shuffled] == [REWARDS] * 3
    assert shuffled[0] == shuffled[1]  # a resumed run hands out the same
    assert shuffled[0] != shuffled[2]
    assert shuffled[0] != REWARDS


def test_shuffled_advantages_follow_the_shuffled_rewards():
    table = LearnerConfig(group_size=8, groups_per_batch=1, normalize_std=False)
    control = table.model_copy(update={"shuffle_rewards": True})
    means = build_samples([group(0, *REWARDS)], control).advantages
    # mean of 0..7 is 3.5
    expected = [reward - 3.5 for reward in outcome_rewards(group(0, *REWARDS), shuffle=True)]
    assert means == pytest.approx(expected)


# Two turns around one tool response: prompt 2, sampled 2, tool 2, sampled 2 tokens.
ACTIONS = np.array([0, 0, 1, 1, 0, 0, 1, 1], bool)


def two_turns(index: int, total: float, **changes: Any) -> ScoredTrajectory:
    """A trajectory with tool text in its middle, sampled at log-probability -1."""
    fields: dict[str, Any] = {
        "num_sampled": 6,
        "action_mask": ACTIONS,
        "rollout_logprobs": np.where(ACTIONS, -1.0, 0.0).astype(np.float32),
    }
    return scored(rollout_task(sample_index=index), total=total, **(fields | changes))


def pair(*members: ScoredTrajectory, greedy: ScoredTrajectory | None = None) -> Group:
    slots = [Slot(issued_at=0.0, final=True, result=member) for member in members]
    if greedy is not None:
        slots.append(Slot(issued_at=0.0, final=True, result=greedy))
    task = members[0].trajectory.rollout.task
    return Group(0, task, 0, slots, has_greedy=greedy is not None)


class Scorer:
    """An engine that only answers: the same log-probability and value for every token."""

    def __init__(self, policy: float = -1.0, reference: float = -1.0, value: float = 0.0) -> None:
        self._logprobs = {"policy": policy, "reference": reference}
        self._value = value

    def token_logprobs(
        self, samples: Sequence[TrainSample], model: Model = "policy"
    ) -> list[FloatArray]:
        value = self._logprobs[model]
        return [np.where(s.loss_mask, value, 0.0).astype(np.float32) for s in samples]

    def predictions(self, samples: Sequence[TrainSample]) -> list[Predictions]:
        return [Predictions(one, abs(one)) for one in self.token_logprobs(samples)]

    def token_values(self, samples: Sequence[TrainSample]) -> list[FloatArray]:
        masks = [s.value_mask for s in samples]
        return [np.where(m, self._value, 0.0).astype(np.float32) for m in masks if m is not None]


def build(group: Group, scorer: Scorer | None = None, **keys: Any) -> Prepared:
    table = LearnerConfig.model_validate({"group_size": 2, "groups_per_batch": 1, **keys})
    return build_samples([group], table, scorer)  # pyright: ignore[reportArgumentType]


def test_the_mask_ablation_trains_and_credits_tool_text():
    group = pair(two_turns(0, 1.0), two_turns(1, 0.0))
    prepared = build(group, Scorer(policy=-2.0), loss_mask=False, advantage_mask=False)
    sample = prepared.samples[0]
    assert prepared.entropies is not None
    assert prepared.entropies[0].tolist() == [0.0, 0.0, *[2.0] * 6]
    assert sample.loss_mask.tolist() == [False, False, *[True] * 6]
    # rewards 1, 0: 0.5 / sqrt(1/2) on every token after the prompt
    assert sample.advantages[2:] == pytest.approx([0.70711] * 6, abs=1e-4)
    assert sample.old_logprobs is not None
    assert sample.old_logprobs[2:].tolist() == [-2.0] * 6
    # tool text was not sampled: its ratio starts at 1 and counts as no difference
    assert sample.rollout_logprobs.tolist() == [0, 0, -1, -1, -2, -2, -1, -1]


def test_gae_runs_over_sampled_tokens_or_over_all_after_the_prompt():
    group = pair(two_turns(0, 1.0), two_turns(1, 0.0))
    keys = {"algorithm": "ppo", "gamma": 0.5, "lam": 1.0}
    masked = build(group, Scorer(), **keys).samples[0]
    # values 0: returns are discounted rewards, 1 on the last of 4 sampled tokens
    assert masked.returns is not None
    assert masked.returns.tolist() == [0, 0, 0.125, 0.25, 0, 0, 0.5, 1]
    assert masked.value_mask is not None
    assert masked.value_mask.tolist() == ACTIONS.tolist()
    unmasked = build(group, Scorer(), advantage_mask=False, **keys).samples[0]
    assert unmasked.returns is not None
    assert unmasked.returns.tolist() == [0, 0, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1]
    assert unmasked.loss_mask.tolist() == ACTIONS.tolist()


def turned(index: int, total: float, *worth: float, key: str = "found") -> ScoredTrajectory:
    """`two_turns`, with a turn on each side of the tool text; the first got a process reward."""
    turns = [
        Turn(
            start=2, end=4, text="x", finish_reason="stop", process_reward=next(iter(worth), None)
        ),
        Turn(start=6, end=8, text="y", finish_reason="stop", state_key=key),
    ]
    return two_turns(index, total, turns=turns)


def test_the_reward_of_a_turn_lies_on_its_last_token():
    prepared = build(pair(turned(0, 1.0, 0.5), turned(1, 1.0)), advantage="grpo")
    # Totals 1.5 and 1, sampled deviation 1 / sqrt 2: the sum of both kinds of reward is compared.
    assert prepared.advantages == pytest.approx([0.70711, -0.70711], abs=1e-4)
    assert process_rewards(turned(0, 1.0, 0.5)).tolist() == [0, 0, 0, 0.5, 0, 0, 0, 0]


def test_turn_ppo_credits_turns_and_trains_its_critic_before_each():
    group = pair(turned(0, 1.0), turned(1, 0.0))
    prepared = build(group, Scorer(value=0.5), algorithm="turn_ppo", gamma=0.5)
    winner = prepared.samples[0]
    assert winner.value_mask is not None
    assert np.flatnonzero(winner.value_mask).tolist() == [2, 6]
    assert winner.returns is not None
    # Reward-to-go: 1 at the second turn, half of it at the first.
    assert winner.returns.tolist() == [0, 0, 0.5, 0, 0, 0, 1.0, 0]
    # Against the value, before whitening: 0 and 0.5; the other's -0.5 and -0.5.
    first, second = winner.advantages[2], winner.advantages[6]
    assert winner.advantages.tolist() == [0, 0, first, first, 0, 0, second, second]
    # Mean -.125; sample variance (.015625 + .390625 + 2 * .140625) / 3 = .229167, root .478714.
    assert [first, second] == pytest.approx([0.26112, 1.30558], abs=1e-4)


def test_gigpo_compares_the_states_that_the_environment_names():
    found = build(pair(turned(0, 1.0), turned(1, 0.0)), algorithm="gigpo")
    assert found.metrics["advantage/shared_states"] == 1.0
    # Trajectories and their turns differ alike: 1 / sqrt 2 deviations each.
    assert found.advantages == pytest.approx([1.41421, -1.41421], abs=1e-4)
    lost = build(pair(turned(0, 1.0), turned(1, 0.0, key="lost")), algorithm="gigpo")
    assert lost.metrics["advantage/shared_states"] == 0.0


class InOrder(Scorer):
    """An engine whose answers depend on the order of the asked tokens, and not on their places."""

    def token_logprobs(
        self, samples: Sequence[TrainSample], model: Model = "policy"
    ) -> list[FloatArray]:
        start = -1.0 if model == "policy" else -1.5
        return [in_order(s.loss_mask, start, 0.125) for s in samples]

    def token_values(self, samples: Sequence[TrainSample]) -> list[FloatArray]:
        return [in_order(s.value_mask, 0.5, -0.25) for s in samples if s.value_mask is not None]


def in_order(mask: BoolArray, start: float, step: float) -> FloatArray:
    numbers = start + step * (np.cumsum(mask) - 1)
    return np.where(mask, numbers, 0.0).astype(np.float32)


def cut_apart(member: ScoredTrajectory) -> ScoredTrajectory:
    """`turned`, cut before its second turn: a segment of 4 tokens, and one of all 8."""
    whole = member.trajectory
    first, second = whole.turns
    moved = second.model_copy(update={"start": 10, "end": 12})
    keeps = np.r_[0:4, 0:6, 6:8]
    sampled = np.isin(np.arange(12), [2, 3, 10, 11])
    span = whole.version_spans[0]
    cut = whole.replace(
        token_ids=whole.token_ids[keeps],
        action_mask=sampled,
        rollout_logprobs=np.where(sampled, -1.0, 0.0).astype(np.float32),
        segment_starts=[4],
        turns=[first, moved],
        version_spans=[
            span.model_copy(update={"start": 2, "end": 4}),
            span.model_copy(update={"start": 10, "end": 12}),
        ],
    )
    return member.replace(trajectory=cut)


@pytest.mark.parametrize("algorithm", sorted(PRESETS))
def test_a_trajectory_cut_into_segments_is_worth_what_it_was(algorithm: str):
    # The history is unchanged, so nothing may change but the place of the tokens.
    members = [turned(0, 1.0, 0.5), turned(1, 0.0), turned(2, 0.25)]
    cut = [cut_apart(members[0]), members[1], cut_apart(members[2])]
    keys = {"algorithm": algorithm, "group_size": 3, "importance_cap": 2.0}
    table = LearnerConfig.model_validate({**keys, "groups_per_batch": 1})
    greedy = turned(3, 0.5) if table.has_greedy_baseline else None
    whole = build(pair(*members, greedy=greedy), InOrder(), **keys)
    parts = build(pair(*cut, greedy=greedy), InOrder(), **keys)
    assert parts.advantages == whole.advantages
    assert parts.metrics == whole.metrics
    for part, one in zip(parts.samples, whole.samples, strict=True):
        assert part.token_ids[part.loss_mask].tolist() == one.token_ids[one.loss_mask].tolist()
        names = ["rollout_logprobs", "advantages", "old_logprobs", "importance_weights"]
        names += ["returns", "old_values", "value_mask"] if one.value_mask is not None else []
        for name in names:
            ours, theirs = getattr(part, name), getattr(one, name)
            if theirs is not None:
                assert ours[part.loss_mask].tolist() == theirs[one.loss_mask].tolist(), name
    assert [list(sample.segment_starts) for sample in parts.samples] == [[4], [], [4]]


class Critic(Scorer):
    """An engine that values every state 1, and that before the second segment 4."""

    def token_values(self, samples: Sequence[TrainSample]) -> list[FloatArray]:
        return [np.array([0, 0, 1, 1, 1, 0, 0, 0, 4, 1], np.float32) for _ in samples]


@pytest.mark.parametrize(
    ("lam", "returns"),
    [
        # reward 1 and process reward 0.5 on the last token, gamma 0.5: r + gamma V of the next
        # sampled token, which for token 4 is the first one of the next segment
        (0.0, [0, 0, 0.5, 0.5, 2.0, 0, 0, 0, 0.5, 1.5]),
        # the reward-to-go
        (1.0, [0, 0, 0.09375, 0.1875, 0.375, 0, 0, 0, 0.75, 1.5]),
    ],
)
def test_gae_goes_on_from_one_segment_to_the_next(lam: float, returns: list[float]):
    members = [scored(rollout_task(sample_index=i), total=1.0, **two_segments()) for i in (0, 1)]
    prepared = build(pair(*members), Critic(), algorithm="ppo", gamma=0.5, lam=lam)
    found = prepared.samples[0].returns
    assert found is not None
    assert found.tolist() == returns


def test_a_rewritten_history_is_no_tool_text():
    members = [scored(rollout_task(sample_index=i), **two_segments()) for i in (0, 1)]
    found = build(pair(*members), Scorer(), loss_mask=False, advantage_mask=False).samples[0]
    assert np.flatnonzero(found.loss_mask).tolist() == [2, 3, 4, 8, 9]


def test_the_kl_goes_into_the_reward_token_by_token():
    group = pair(two_turns(0, 1.0), two_turns(1, 1.0))
    keys = {"algorithm": "ppo", "kl": "reward", "kl_coef": 0.1, "kl_estimator": "k1"}
    prepared = build(group, Scorer(policy=-1.0, reference=-1.5), **keys)
    # k1 = -1 - -1.5 = 0.5 on each of 4 sampled tokens; the reward-to-go at the first is 1 - 0.2
    returns = prepared.samples[0].returns
    assert returns is not None
    assert returns[ACTIONS] == pytest.approx([0.8, 0.85, 0.9, 0.95])
    assert prepared.metrics["reward/kl"] == pytest.approx(0.5)
    assert loss_spec(LearnerConfig.model_validate(keys)).kl_coef == 0.0  # not twice


def test_without_the_advantage_mask_tool_text_is_penalized_as_well():
    group = pair(two_turns(0, 1.0), two_turns(1, 1.0))
    keys = {"algorithm": "ppo", "kl": "reward", "kl_coef": 0.1, "kl_estimator": "k1"}
    scorer = Scorer(policy=-1.0, reference=-1.5)
    sample = build(group, scorer, advantage_mask=False, **keys).samples[0]
    assert sample.returns is not None
    # 0.1 * 0.5 off each of the 6 tokens after the prompt; the reward-to-go at the first is 1 - 0.3
    assert sample.returns[2:] == pytest.approx([0.7, 0.75, 0.8, 0.85, 0.9, 0.95])
    assert sample.loss_mask.tolist() == ACTIONS.tolist()


def test_importance_weights_are_capped_and_reported():
    group = pair(two_turns(0, 1.0), two_turns(1, 0.0))
    prepared = build(group, Scorer(policy=0.0), importance_cap=2.0)
    # learner 0, rollout -1: ratio e, above the cap
    importance = prepared.samples[0].importance_weights
    assert importance is not None
    assert importance[ACTIONS].tolist() == [2.0] * 4
    assert prepared.metrics["importance/capped_share"] == 1.0
    assert prepared.metrics["logprob/abs_diff_max"] == 1.0


def first_factor(sample: TrainSample, learner: float) -> float:
    """What the first optimizer step weighs the loss of a sampled token by: ratio times weight."""
    old = sample.rollout_logprobs if sample.old_logprobs is None else sample.old_logprobs
    weight = np.ones_like(old) if sample.importance_weights is None else sample.importance_weights
    factors = np.exp(learner - old) * weight
    assert np.ptp(factors[ACTIONS]) == 0
    return float(factors[ACTIONS][0])


@pytest.mark.parametrize("max_staleness", [0, 4])
@pytest.mark.parametrize(
    "keys",
    [
        {"optimizer_steps_per_batch": 1},
        {"optimizer_steps_per_batch": 2},
        {"kl": "reward"},
        {"importance_low": 0.01},
        {"importance_high": 10.0},
        {"importance_cap": 3.0},
        {"policy_loss": "gspo"},
        {"policy_loss": "cispo", "optimizer_steps_per_batch": 2},
    ],
    ids=str,
)
def test_the_first_factor_of_the_loss_is_the_learners_probability_over_the_rollouts(
    keys: dict[str, Any], max_staleness: int
):
    group = pair(two_turns(0, 1.0), two_turns(1, 0.0))
    prepared = build(group, Scorer(policy=-3.0), max_staleness=max_staleness, **keys)
    # Sampled at -1, -3 for the learner: exp(-2).
    assert first_factor(prepared.samples[0], -3.0) == pytest.approx(0.135335, abs=1e-6)


@pytest.mark.parametrize("policy_loss", ["reinforce", "mine:loss"])
def test_a_loss_that_may_have_no_ratio_is_weighed_where_samples_may_be_old(policy_loss: str):
    group = pair(two_turns(0, 1.0), two_turns(1, 0.0))
    old, new = (
        build(group, Scorer(policy=-3.0), policy_loss=policy_loss, max_staleness=staleness)
        for staleness in (4, 0)
    )
    assert old.samples[0].importance_weights is not None
    assert old.samples[0].importance_weights[ACTIONS] == pytest.approx([0.135335] * 4, abs=1e-6)
    assert new.samples[0].importance_weights is None  # no forward pass more where nothing is old


def test_weights_on_their_own_are_at_most_2_and_can_be_turned_off():
    group = pair(two_turns(0, 1.0), two_turns(1, 0.0))
    keys = {"optimizer_steps_per_batch": 2, "max_staleness": 4}
    prepared = build(group, Scorer(policy=0.0), **keys)
    # learner 0, rollout -1: e, above 2
    assert first_factor(prepared.samples[0], 0.0) == 2.0
    assert prepared.metrics["importance/mean"] == 2.0
    off = build(group, Scorer(policy=0.0), importance_cap="none", **keys)
    assert off.samples[0].importance_weights is None
    assert "importance/mean" not in off.metrics


def test_a_trajectory_far_from_the_rollouts_policy_is_left_out_and_counted():
    group = pair(two_turns(0, 1.0), two_turns(1, 0.0))
    prepared = build(group, Scorer(policy=0.0), importance_high=2.0)
    assert prepared.metrics["filter/importance"] == 2.0
    assert not any(sample.loss_mask.any() for sample in prepared.samples)
    kept = build(group, Scorer(policy=0.0), importance_high=3.0)  # e = 2.718
    assert all(sample.loss_mask.any() for sample in kept.samples)


def test_overlong_trajectories_count_in_the_comparison_but_are_not_trained_on():
    group = pair(two_turns(0, 1.0), two_turns(1, 0.0, status="TRUNCATED"))
    prepared = build(group, drop_overlong=True, normalize_std=False)
    assert prepared.advantages == pytest.approx([0.5, -0.5])
    assert [bool(s.loss_mask.any()) for s in prepared.samples] == [True, False]
    assert prepared.metrics["filter/overlong"] == 1.0


def test_remax_compares_with_the_greedy_answer_which_is_not_trained_on():
    group = pair(two_turns(0, 1.0), two_turns(1, 0.0), greedy=two_turns(2, 0.25))
    prepared = build(group, algorithm="remax")
    assert prepared.advantages == pytest.approx([0.75, -0.25])


def called(index: int, total: float, process_reward: float) -> ScoredTrajectory:
    """A trajectory whose first turn ends in a call worth so much."""
    call = ToolCallRecord(
        end_token_index=3,
        tool="search",
        status="ok",
        latency_ms=1.0,
        process_reward=process_reward,
    )
    return two_turns(index, total, calls=[call])


@pytest.mark.parametrize("scope", ["none", "batch", "trajectory"])
@pytest.mark.parametrize("gamma", [0.5, 1.0])
def test_a_sample_like_the_greedy_answer_has_no_remax_advantage(scope: str, gamma: float):
    group = pair(called(0, 1.0, 4.0), two_turns(1, 0.0), greedy=called(2, 1.0, 4.0))
    prepared = build(group, algorithm="remax", process_rewards=scope, gamma=gamma)
    assert prepared.samples[0].advantages.tolist() == [0.0] * 8
    assert prepared.samples[1].advantages[ACTIONS].min() < 0


def test_a_greedy_answers_process_rewards_are_scaled_with_the_samples():
    group = pair(called(0, 1.0, 2.0), two_turns(1, 0.0), greedy=called(2, 1.0, 4.0))
    prepared = build(group, algorithm="remax", process_rewards="batch")
    # The largest return of process rewards is the greedy answer's 4: 2 becomes 0.5, 4 becomes 1.
    # Sample 0: G = 1.5, 1.5, 1, 1; the greedy answer: 2, 2, 1, 1.
    assert prepared.samples[0].advantages[ACTIONS].tolist() == [-0.5, -0.5, 0.0, 0.0]


def test_process_rewards_are_normalized_over_the_batch_before_the_outcome():
    members = [called(0, 1.0, 4.0), two_turns(1, 0.0)]
    raw = build(pair(*members), normalize_std=False)
    # 1 + 4 against 0: the mean is 2.5
    assert raw.advantages == pytest.approx([2.5, -2.5])
    # the largest return of process rewards is 4, so 4 becomes 1: 1 + 1 against 0
    scaled = build(pair(*members), normalize_std=False, process_rewards="batch")
    assert scaled.advantages == pytest.approx([1.0, -1.0])


def test_an_estimator_with_a_critic_says_what_the_critic_learns(monkeypatch: pytest.MonkeyPatch):
    class Forgetful(Gae):
        def __call__(self, batch: AdvantageBatch) -> Advantages:
            return Advantages(super().__call__(batch).advantages)

    monkeypatch.setitem(ADVANTAGES, "gae", Forgetful)
    group = pair(two_turns(0, 1.0), two_turns(1, 0.0))
    with pytest.raises(ValueError, match="needs a critic and returned no `returns`"):
        build(group, Scorer(), algorithm="ppo")


def test_a_critic_that_is_not_finite_refuses_the_step():
    group = pair(two_turns(0, 1.0), two_turns(1, 0.0))
    with pytest.raises(RunFailedError, match="a value is not finite in 2 of 2"):
        build(group, Scorer(value=float("nan")), algorithm="ppo")


def test_the_first_steps_of_ppo_can_train_the_critic_alone():
    table = LearnerConfig(algorithm="ppo", critic_warmup_steps=2)
    assert [loss_spec(table, step).trains_policy for step in range(4)] == [
        False,
        False,
        True,
        True,
    ]


# -- lineages: [0, 4) main, [4, 9) begun by it, [9, 11) excluded ----------------------------------


def lineages(index: int, total: float, **changes: Any) -> ScoredTrajectory:
    return scored(rollout_task(sample_index=index), total=total, **(three_lineages() | changes))


def test_excluded_tokens_leave_the_loss_mask_and_never_the_action_mask():
    sample = build(pair(lineages(0, 1.0), lineages(1, 0.0))).samples[0]
    assert np.flatnonzero(sample.loss_mask).tolist() == [2, 3, 6, 7, 8]
    assert np.flatnonzero(lineages(0, 1.0).trajectory.action_mask).tolist() == [2, 3, 6, 7, 8, 10]


def test_credit_never_passes_from_one_lineage_to_another():
    group = pair(lineages(0, 1.0), lineages(1, 0.0))
    sample = build(group, Scorer(), algorithm="ppo", gamma=0.5, lam=1.0).samples[0]
    # Values are 0, so returns are discounted rewards: the outcome of 1 on the last token of each
    # lineage, and 0.5 on token 6. 6: 0.5 + 0.25 x 1.
    assert sample.returns is not None
    assert sample.returns.tolist() == [0, 0, 0.5, 1, 0, 0, 0.75, 0.5, 1, 0, 0]
    assert sample.value_mask is not None
    assert np.flatnonzero(sample.value_mask).tolist() == [2, 3, 6, 7, 8]


def test_a_lineage_ends_with_value_0():
    group = pair(lineages(0, 1.0), lineages(1, 0.0))
    sample = build(group, Scorer(value=2.0), algorithm="ppo", gamma=1.0, lam=0.0).samples[0]
    # With lambda 0 the return is r + V of the next token: 2 within a lineage, 0 at its end.
    assert sample.returns is not None
    assert sample.returns[[2, 3]].tolist() == [2, 1]
    assert sample.returns[[6, 7, 8]].tolist() == [2.5, 2, 1]


@pytest.mark.parametrize(
    ("keys", "better"),
    [
        # 1 + 0.5 against 0: the outcome counts once. The mean is 0.75.
        ({"advantage": "grpo", "normalize_std": False}, 0.75),
        ({"advantage": "rloo"}, 1.5),
    ],
)
def test_a_group_counts_a_trajectory_once(keys: dict[str, Any], better: float):
    plain = [turn.model_copy(update={"process_reward": None}) for turn in three_lineages()["turns"]]
    group = pair(lineages(0, 1.0), lineages(1, 0.0, turns=plain))
    prepared = build(group, **keys)
    for sample, expected in zip(prepared.samples, (better, -better), strict=True):
        assert sample.advantages.tolist() == [expected if m else 0.0 for m in sample.loss_mask]
    assert prepared.advantages == [better, -better]


def test_turns_are_compared_within_their_lineage():
    worse = [turn.model_copy(update={"process_reward": None}) for turn in three_lineages()["turns"]]
    group = pair(lineages(0, 1.0), lineages(1, 1.0, turns=worse))
    sample = build(group, advantage="mt_grpo", normalize_std=False).samples[0]
    # Equal outcomes; the first turn of the second lineage has 0.5 against 0, so 0.25 more than the
    # mean. The main lineage has one turn, which is its last.
    assert sample.advantages.tolist() == [0, 0, 0, 0, 0, 0, 0.25, 0, 0, 0, 0]


def rewarded(index: int, total: float, *worth: float | None, **changes: Any) -> ScoredTrajectory:
    """Return `lineages` with process rewards of its four turns."""
    turns = [
        turn.model_copy(update={"process_reward": reward})
        for turn, reward in zip(three_lineages()["turns"], worth, strict=True)
    ]
    return lineages(index, total, turns=turns, **changes)


@pytest.mark.parametrize("scope", ["batch", "trajectory"])
def test_process_rewards_are_scaled_within_their_lineage(scope: str):
    # No return of a lineage is above 1, and the 9 of the excluded one counts nowhere. So they stay:
    # 1 on token 3 and on token 6, beside the outcome of 0.
    one, other = rewarded(0, 0.0, 1.0, 1.0, 0.0, 9.0), rewarded(1, 0.0, None, None, None, None)
    sample = build(
        pair(one, other), Scorer(), algorithm="ppo", gamma=0.0, process_rewards=scope
    ).samples[0]
    assert sample.returns is not None
    assert sample.returns.tolist() == [0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0]


def test_what_an_excluded_lineage_earned_counts_nowhere():
    assert total_reward(rewarded(0, 1.0, 0.5, 0.25, None, 9.0)) == 1.75


def test_the_last_turn_of_a_lineage_is_compared_with_those_of_the_same_name():
    group = pair(rewarded(0, 1.0, None, None, 0.5, None), rewarded(1, 1.0, None, None, None, None))
    sample = build(group, advantage="mt_grpo", normalize_std=False).samples[0]
    # 1.5 against 1 on the last turn of the second lineage, and equal elsewhere; turn_coef is 1.
    assert sample.advantages.tolist() == [0, 0, 0, 0, 0, 0, 0.25, 0.25, 0.25, 0, 0]


def test_a_sub_agent_does_not_begin_where_the_task_begins():
    fields = three_lineages()["lineages"]
    excluded = [fields[0].model_copy(update={"excluded": "scripted"}), *fields[1:]]
    group = pair(
        rewarded(0, 0.0, None, 1.0, None, None, lineages=excluded),
        rewarded(1, 0.0, None, None, None, None),
    )
    sample = build(group, advantage="gigpo", normalize_std=False).samples[0]
    # Totals 1 and 0, so 0.5 for the trajectory; its first turn shares no state with the other's.
    assert sample.advantages.tolist() == [0, 0, 0, 0, 0, 0, 0.5, 0.5, 0.5, 0, 0]


def test_the_same_agent_begun_twice_is_two_lineages():
    fields = three_lineages()
    fields["lineages"] = [fields["lineages"][0]] * 1 + [
        lineage.model_copy(update={"name": "search", "excluded": ""})
        for lineage in fields["lineages"][1:]
    ]
    sample = build(pair(lineages(0, 1.0, **fields), lineages(1, 0.0))).samples[0]
    assert np.flatnonzero(sample.advantages).tolist() == [2, 3, 6, 7, 8, 10]


def test_a_greedy_answer_is_met_lineage_by_lineage():
    group = pair(lineages(0, 1.0), lineages(1, 1.0), greedy=lineages(2, 1.0))
    sample = build(group, algorithm="remax").samples[0]
    assert sample.advantages.tolist() == [0.0] * 11


def test_a_lineage_without_trained_tokens_is_legal_and_a_trajectory_without_is_not():
    fields = three_lineages()
    excluded = [
        lineage.model_copy(update={"excluded": "scripted"}) for lineage in fields["lineages"]
    ]
    assert failure_reason(lineages(0, 1.0)) is None
    nothing = lineages(0, 1.0, lineages=excluded)
    assert failure_reason(nothing) == "every lineage is excluded (scripted)"


def test_staleness_is_that_of_the_oldest_trained_token():
    # Main is of version 4, the second lineage of 5, the excluded one of 1.
    assert staleness(lineages(0, 1.0).trajectory, 6) == 2


def test_a_batch_of_plain_trajectories_and_lineages_treats_the_plain_ones_as_ever():
    alone = build(pair(turned(0, 1.0, 0.5), turned(1, 0.0)), normalize_std=False)
    mixed = build(pair(turned(0, 1.0, 0.5), lineages(1, -0.5)), normalize_std=False)
    # Totals 1.5 and 0, both times: -0.5 and a process reward of 0.5.
    assert mixed.samples[0].advantages.tolist() == alone.samples[0].advantages.tolist()
