"""Policy, value and SFT losses: worked by hand, and which tokens get gradient as properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.learner.algorithms import POLICY_LOSSES, find_policy_loss
from agent_r1.learner.algorithms.aggregation import aggregation_weights
from agent_r1.learner.algorithms.losses import LossInputs, LossOptions, PolicyLoss
from agent_r1.learner.algorithms.losses.cispo import cispo_loss
from agent_r1.learner.algorithms.losses.gspo import gspo_loss
from agent_r1.learner.algorithms.losses.nll import weighted_nll
from agent_r1.learner.algorithms.losses.ppo import ppo_loss
from agent_r1.learner.algorithms.losses.reinforce import reinforce_loss
from agent_r1.learner.algorithms.losses.value import clipped_value_loss
from agent_r1.learner.objective import PRESETS

# The first gradient of a process takes longer than hypothesis allows one example.
unhurried = settings(deadline=None)
# A token: row of its trajectory, log-probability, log of the ratio, advantage.
TOKENS = st.lists(
    st.tuples(
        st.integers(0, 3), st.floats(-8, -0.01), st.floats(-1, 1), st.floats(-4, 4, width=32)
    ),
    min_size=1,
    max_size=12,
)


def make_inputs(
    log_ratios: list[float],
    advantages: list[float],
    *,
    logprobs: list[float] | None = None,
    sequences: list[int] | None = None,
) -> LossInputs:
    """Tokens in float64 whose log-probabilities take gradient; 4 trajectories."""
    current = torch.tensor(logprobs or log_ratios, dtype=torch.float64, requires_grad=True)
    old = current.detach() - torch.tensor(log_ratios, dtype=torch.float64)
    rows = torch.tensor(sequences or [0] * len(log_ratios))
    return LossInputs(current, old, torch.tensor(advantages, dtype=torch.float64), rows, 4)


def gradient(inputs: LossInputs, loss: PolicyLoss, weights: list[float] | None = None):
    """Gradient of the (weighted) sum of losses with respect to the log-probabilities."""
    factors = torch.tensor(weights or [1.0] * len(loss.loss), dtype=torch.float64)
    (found,) = torch.autograd.grad((loss.loss * factors).sum(), inputs.logprobs)
    return found


def loss_at(ratio: float, advantage: float, dual_clip: float | None = None) -> PolicyLoss:
    """PPO's loss of one token whose probability ratio is `ratio`; bounds 0.8 and 1.3."""
    options = LossOptions(clip_low=0.2, clip_high=0.3, dual_clip=dual_clip)
    return ppo_loss(make_inputs([math.log(ratio)], [advantage]), options)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.2, 2.0, -2.4, False),  # inside both bounds
        (1.5, 2.0, -2.6, True),  # good token, already 1.3 times likelier: no further
        (0.5, 2.0, -1.0, False),  # good token made unlikelier: max(-1, -1.6)
        (0.5, -2.0, 1.6, True),  # bad token, already below 0.8: no further
        (1.5, -2.0, 3.0, False),  # bad token made likelier: max(3, 2.6)
        (1.5, 0.0, 0.0, False),
    ],
)
def test_ppo_by_hand(ratio: float, advantage: float, loss: float, clipped: bool):
    result = loss_at(ratio, advantage)
    assert result.loss.item() == pytest.approx(loss, abs=1e-6)
    assert result.clipped.item() is clipped
    assert result.ratio.item() == pytest.approx(ratio)
    assert not result.ratio.requires_grad


def test_dual_clip_bounds_a_bad_token_only():
    # A = -2, ratio 10: max(20, 2.6) = 20, at most -3 * -2 = 6
    bounded = loss_at(10.0, -2.0, dual_clip=3.0)
    assert bounded.loss.item() == pytest.approx(6.0)
    assert bounded.clipped.item() is True
    assert loss_at(10.0, 2.0, dual_clip=3.0).loss.item() == pytest.approx(-2.6)


def test_gspo_by_hand():
    # trajectory 0: log-ratios 0.1 and 0.3, mean 0.2, s = exp(0.2) = 1.22140; A = 2, bounds 0.8 and
    # 1.3: -2 * 1.22140. Trajectory 2: s = exp(-0.4) = 0.67032, A = -1: max(0.67032, 0.8).
    inputs = make_inputs([0.1, -0.4, 0.3], [2.0, -1.0, 2.0], sequences=[0, 2, 0])
    result = gspo_loss(inputs, LossOptions(clip_low=0.2, clip_high=0.3))
    assert result.loss.tolist() == pytest.approx([-2.44281, 0.8, -2.44281], abs=1e-5)
    assert result.clipped.tolist() == [False, True, False]
    assert result.ratio.tolist() == pytest.approx([1.22140, 0.67032, 1.22140], abs=1e-5)
    # d(-A s p / sg(p)) / d log p = -A s, and nothing where the bound decides
    assert gradient(inputs, result).tolist() == pytest.approx([-2.44281, 0.0, -2.44281], abs=1e-5)


def test_gspo_clips_a_whole_trajectory():
    # s = 1.22140 is above 1.2, although the first token's own ratio, exp(0.1) = 1.105, is not
    inputs = make_inputs([0.1, 0.3], [2.0, 2.0])
    result = gspo_loss(inputs, LossOptions(clip_high=0.2))
    assert result.loss.tolist() == pytest.approx([-2.4, -2.4])
    assert gradient(inputs, result).tolist() == [0.0, 0.0]


def test_cispo_by_hand():
    # ratio 1.5, bound 1.3, p = 0.6, A = 2: -1.3 * 2 * ln 0.6 = 1.32815; gradient -1.3 * 2.
    # ratio 0.5, bound 0.8, p = 0.6, A = -1: 0.8 * ln 0.6 = -0.40866; gradient 0.8.
    inputs = make_inputs(
        [math.log(1.5), math.log(0.5)], [2.0, -1.0], logprobs=[math.log(0.6), math.log(0.6)]
    )
    result = cispo_loss(inputs, LossOptions(clip_low=0.2, clip_high=0.3))
    assert result.loss.tolist() == pytest.approx([1.32815, -0.40866], abs=1e-5)
    assert result.clipped.tolist() == [True, True]
    assert gradient(inputs, result).tolist() == pytest.approx([-2.6, 0.8])


def test_cispo_keeps_a_gradient_where_ppo_clips():
    inputs = make_inputs([math.log(1.5)], [2.0])
    options = LossOptions(clip_high=0.3)
    assert gradient(inputs, ppo_loss(inputs, options)).tolist() == [0.0]
    assert gradient(inputs, cispo_loss(inputs, options)).tolist() == pytest.approx([-2.6])


def test_the_cispo_preset_bounds_weights_above_only():
    preset = PRESETS["cispo"]
    options = LossOptions(clip_low=preset["clip_low"], clip_high=preset["clip_high"])
    # Ratios 0.05 and 4.5 weigh what they are, 7 weighs 5; the gradient is minus the weight.
    inputs = make_inputs([math.log(0.05), math.log(4.5), math.log(7.0)], [1.0] * 3)
    result = cispo_loss(inputs, options)
    assert gradient(inputs, result).tolist() == pytest.approx([-0.05, -4.5, -5.0])
    assert result.clipped.tolist() == [False, False, True]


def test_reinforce_by_hand():
    # -A log p = -2 ln 0.5 = 1.38629, whatever the ratio
    inputs = make_inputs([math.log(1.5)], [2.0], logprobs=[math.log(0.5)])
    result = reinforce_loss(inputs, LossOptions())
    assert result.loss.item() == pytest.approx(1.38629, abs=1e-5)
    assert result.clipped.tolist() == [False]
    assert result.ratio.item() == pytest.approx(1.5)
    assert gradient(inputs, result).tolist() == [-2.0]


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
@unhurried
@given(tokens=TOKENS)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name: str, tokens):
    rows, logprobs, _, advantages = map(list, zip(*tokens, strict=True))
    inputs = make_inputs([0.0] * len(tokens), advantages, logprobs=logprobs, sequences=rows)
    result = find_policy_loss(name)(inputs, LossOptions())
    torch.testing.assert_close(gradient(inputs, result), -inputs.advantages)
    assert not result.clipped.any()


@unhurried
@given(tokens=TOKENS)
def test_gspo_per_token_has_the_gradient_of_the_sequence_ratio(tokens):
    rows, logprobs, log_ratios, _ = map(list, zip(*tokens, strict=True))
    by_row = [1.5, -0.5, 2.0, -3.0]
    advantages = [by_row[row] for row in rows]
    inputs = make_inputs(log_ratios, advantages, logprobs=logprobs, sequences=rows)
    options = LossOptions(clip_low=0.3, clip_high=0.4)
    counts = [rows.count(row) for row in range(4)]
    weights = aggregation_weights(counts, "sequence_mean")
    per_token = gradient(inputs, gspo_loss(inputs, options), [weights[row] for row in rows])
    # the loss as the paper writes it: one ratio per sequence, gradient through the mean
    total = torch.zeros((), dtype=torch.float64)
    for row in set(rows):
        tokens_of_row = torch.tensor(rows) == row
        ratio = torch.exp((inputs.logprobs - inputs.old_logprobs)[tokens_of_row].mean())
        clipped = torch.clamp(ratio, 0.7, 1.4)
        loss = torch.maximum(-by_row[row] * ratio, -by_row[row] * clipped)
        total = total + loss / len(set(rows))
    (direct,) = torch.autograd.grad(total, inputs.logprobs)
    torch.testing.assert_close(per_token, direct, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ["ppo", "gspo"])
@unhurried
@given(tokens=TOKENS, dual_clip=st.none() | st.floats(1.1, 3))
def test_a_clipped_token_has_no_gradient_and_others_have(name: str, tokens, dual_clip):
    rows, logprobs, log_ratios, advantages = map(list, zip(*tokens, strict=True))
    inputs = make_inputs(log_ratios, advantages, logprobs=logprobs, sequences=rows)
    result = find_policy_loss(name)(inputs, LossOptions(dual_clip=dual_clip))
    found = gradient(inputs, result)
    assert torch.all(found[result.clipped] == 0.0)
    expected = -inputs.advantages * result.ratio
    torch.testing.assert_close(found[~result.clipped], expected[~result.clipped])


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_an_extreme_ratio_stays_finite(name: str):
    # A = -1, log-ratio 10,000, limited to 20
    inputs = make_inputs([1e4], [-1.0], logprobs=[-0.5])
    result = find_policy_loss(name)(inputs, LossOptions())
    assert result.ratio.item() == pytest.approx(math.exp(20.0))
    assert math.isfinite(result.loss.item())
    assert torch.isfinite(gradient(inputs, result)).all()


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_micro_batch_without_trained_tokens_has_no_losses(name: str):
    nothing = torch.zeros(0, requires_grad=True)
    inputs = LossInputs(nothing, nothing, nothing, torch.zeros(0, dtype=torch.int64), 2)
    assert find_policy_loss(name)(inputs, LossOptions()).loss.shape == (0,)


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "slope"),
    [
        (1.0, 0.2, 2.0, 0.845, 0.0),  # towards 2, clipped at 0.7: 0.5 * max(1, 1.3^2)
        (1.0, 0.2, 0.0, 0.5, 1.0),  # away from 0: 0.5 * max(1, 0.7^2)
        (0.4, 0.2, 1.0, 0.18, -0.6),  # within 0.5 of the old value: 0.5 * 0.6^2
    ],
)
def test_value_loss_by_hand(value: float, old: float, target: float, loss: float, slope: float):
    values = torch.tensor([value], requires_grad=True)
    found = clipped_value_loss(values, torch.tensor([old]), torch.tensor([target]), clip=0.5)
    assert found.loss.item() == pytest.approx(loss)
    # Clipped is what has no gradient, not what moved far.
    assert found.clipped.tolist() == [slope == 0.0]
    found.loss.sum().backward()
    assert values.grad is not None
    assert values.grad.item() == pytest.approx(slope)


def test_value_loss_without_a_clip_is_half_the_squared_error():
    one, two = torch.tensor([1.0]), torch.tensor([2.5])
    # 0.5 * 1.5^2
    found = clipped_value_loss(one, -one, two, clip=None)
    assert (found.loss.item(), found.clipped.item()) == (pytest.approx(1.125), False)


def test_weighted_nll_by_hand():
    # tokens of probability 1/2 and 1/4, the second at half weight: ln 2 and 0.5 ln 4 = ln 2
    losses = weighted_nll(torch.tensor([0.5, 0.25]).log(), torch.tensor([1.0, 0.5]))
    assert losses.tolist() == pytest.approx([math.log(2), math.log(2)])
