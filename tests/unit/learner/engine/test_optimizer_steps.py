"""How a batch is cut into optimizer steps: what is skipped, what is run forward only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.learner.algorithms.losses import LossInputs, LossOptions, PolicyLoss
from agent_r1.learner.config import EngineConfig
from agent_r1.learner.engine.interface import LossSpec, TrainSample
from agent_r1.learner.engine.microbatches import has_gradient, plan_batch
from agent_r1.learner.engine.ranks.messages import RankBatch, TokenBatch
from agent_r1.learner.engine.schedule import LearningRates

LENGTH = 6
ADVANTAGE = np.full(LENGTH, 0.5, np.float32)


def sample(*, trained: bool = True, advantage: bool = True, valued: bool = False) -> TrainSample:
    """Six tokens, the last four sampled."""
    mask = np.arange(LENGTH) >= 2
    zeros = np.zeros(LENGTH, np.float32)
    value_fields: dict[str, Any] = (
        {"value_mask": mask, "returns": zeros, "old_values": zeros} if valued else {}
    )
    return TrainSample(
        token_ids=np.arange(LENGTH, dtype=np.int32),
        loss_mask=mask & trained,
        rollout_logprobs=zeros,
        advantages=ADVANTAGE if advantage else zeros,
        **value_fields,
    )


def plan(
    samples: Sequence[TrainSample], spec: LossSpec, ranks: int = 1, **rates: Any
) -> list[RankBatch]:
    table = EngineConfig(lr=1.0, ranks=ranks, max_tokens_per_microbatch=2 * LENGTH)
    return plan_batch(samples, spec, table, LearningRates(table, 100, **rates), 0)


def indices(batches: Sequence[TokenBatch]) -> list[int]:
    return sorted(i for batch in batches for i in batch.indices)


def test_a_step_without_a_trained_token_is_left_out():
    samples = [sample(trained=False), sample(trained=False), sample(), sample(trained=False)]
    (order,) = plan(samples, LossSpec(optimizer_steps=2))
    assert [indices(step.microbatches) for step in order.steps] == [[2]]
    (nothing,) = plan(samples[:2], LossSpec(optimizer_steps=2))
    assert nothing.steps == []


def test_there_are_no_more_steps_than_samples():
    (order,) = plan([sample(), sample()], LossSpec(optimizer_steps=5))
    assert [indices(step.microbatches) for step in order.steps] == [[0], [1]]


def test_a_filtered_trajectory_still_teaches_the_critic():
    samples = [sample(trained=False, valued=True), sample(valued=True)]
    (order,) = plan(samples, LossSpec(optimizer_steps=2), critic_lr=2.0)
    assert [(step.lr, step.critic_lr) for step in order.steps] == [(None, 2.0), (1.0, 2.0)]
    assert [indices(step.value_batches) for step in order.steps] == [[0], [1]]


def test_the_critics_warm_up_leaves_the_policy_alone():
    (order,) = plan([sample(valued=True)], LossSpec(trains_policy=False), critic_lr=2.0)
    assert [(step.lr, step.microbatches) for step in order.steps] == [(None, [])]
    assert list(order.policy_batches()) == []


def test_trajectories_without_an_advantage_are_run_forward_only():
    samples = [sample(advantage=False), sample(), sample(trained=False)]
    (order,) = plan(samples, LossSpec())
    assert [indices(step.microbatches) for step in order.steps] == [[1]]
    assert [indices(step.measured) for step in order.steps] == [[0]]
    # They count in the denominator: 8 tokens are trained, 4 of them in each.
    assert order.steps[0].microbatches[0].weights == pytest.approx([1 / 8] * 4)


@pytest.mark.parametrize("spec", [LossSpec(kl_coef=0.1), LossSpec(entropy_coef=0.1)])
def test_a_term_beside_the_policy_loss_has_a_gradient_without_an_advantage(spec: LossSpec):
    assert has_gradient(sample(advantage=False), spec)


def own_loss(inputs: LossInputs, options: LossOptions) -> PolicyLoss:
    never = torch.zeros_like(inputs.logprobs, dtype=torch.bool)
    return PolicyLoss(-inputs.logprobs, never, torch.ones_like(inputs.logprobs))


def declared_loss(inputs: LossInputs, options: LossOptions) -> PolicyLoss:
    return own_loss(inputs, options)


declared_loss.zero_without_advantage = True  # pyright: ignore[reportFunctionMemberAccess]


def test_a_loss_of_the_users_is_left_out_only_where_it_says_so():
    idle = sample(advantage=False)
    assert has_gradient(idle, LossSpec(policy_loss=f"{__name__}:own_loss"))
    assert not has_gradient(idle, LossSpec(policy_loss=f"{__name__}:declared_loss"))
    assert not has_gradient(idle, LossSpec(policy_loss="gspo"))


def test_demonstrations_without_a_token_to_learn_are_refused():
    with pytest.raises(ValueError, match="none of the tokens of 1 samples counts"):
        plan([sample(), sample(trained=False)], LossSpec(kind="nll", optimizer_steps=2))


quick = settings(max_examples=50, deadline=None)
SAMPLES = st.lists(
    st.builds(sample, trained=st.booleans(), advantage=st.booleans(), valued=st.booleans()),
    min_size=1,
    max_size=6,
)


@quick
@given(SAMPLES, st.integers(1, 5), st.integers(1, 3), st.booleans())
def test_every_rank_has_equally_much_to_do_and_every_trained_sample_is_run_once(
    samples: list[TrainSample], steps: int, ranks: int, trains_policy: bool
):
    spec = LossSpec(optimizer_steps=steps, trains_policy=trains_policy)
    orders = plan(samples, spec, ranks, critic_lr=1.0)
    shapes = [
        [
            (len(s.microbatches), len(s.measured), len(s.value_batches), s.lr, s.critic_lr)
            for s in order.steps
        ]
        for order in orders
    ]
    assert all(shape == shapes[0] for shape in shapes)
    # A step that is taken has a backward pass on every rank, and one that is not has none.
    for microbatches, measured, value_batches, lr, critic_lr in shapes[0]:
        assert (microbatches > 0) == (lr is not None)
        assert measured == 0 or lr is not None
        assert (value_batches > 0) == (critic_lr is not None)
        assert lr is not None or critic_lr is not None
    run = [batch for order in orders for batch in order.policy_batches()]
    expected = [i for i, s in enumerate(samples) if trains_policy and s.loss_mask.any()]
    assert indices(run) == expected
    values = [batch for order in orders for step in order.steps for batch in step.value_batches]
    assert indices(values) == [i for i, s in enumerate(samples) if s.value_mask is not None]


@quick
@given(SAMPLES, st.integers(1, 5))
def test_the_weights_of_a_step_that_is_taken_sum_to_1(samples: list[TrainSample], steps: int):
    kept = [dataclasses.replace(s, advantages=ADVANTAGE) for s in samples]
    (order,) = plan(kept, LossSpec(optimizer_steps=steps), critic_lr=1.0)
    for step in order.steps:
        if step.lr is not None:
            total = sum(float(batch.weights.sum()) for batch in step.microbatches)
            assert total == pytest.approx(1.0)
