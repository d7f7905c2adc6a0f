"""Policy loss, KL estimators and aggregation: worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from agent_r1.learner.algorithms.aggregation import batch_share
from agent_r1.learner.algorithms.kl import kl_per_token
from agent_r1.learner.algorithms.losses.nll import weighted_nll
from agent_r1.learner.algorithms.losses.ppo import PolicyLoss, clipped_policy_loss


def loss_at(ratio: float, advantage: float, dual_clip: float | None = None) -> PolicyLoss:
    """Loss of one token whose probability ratio is `ratio`; bounds 0.8 and 1.3."""
    return clipped_policy_loss(
        torch.tensor([math.log(ratio)]),
        torch.tensor([0.0]),
        torch.tensor([advantage]),
        clip_low=0.2,
        clip_high=0.3,
        dual_clip=dual_clip,
    )


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
def test_clipped_loss_by_hand(ratio: float, advantage: float, loss: float, clipped: bool):
    result = loss_at(ratio, advantage)
    assert result.loss.item() == pytest.approx(loss, abs=1e-6)
    assert result.clipped.item() is clipped
    assert result.ratio.item() == pytest.approx(ratio)


def test_dual_clip_bounds_a_bad_token_only():
    # A = -2, ratio 10: max(20, 2.6) = 20, at most -3 * -2 = 6
    bounded = loss_at(10.0, -2.0, dual_clip=3.0)
    assert bounded.loss.item() == pytest.approx(6.0)
    assert bounded.clipped.item() is True
    assert loss_at(10.0, 2.0, dual_clip=3.0).loss.item() == pytest.approx(-2.6)


def test_a_clipped_token_has_no_gradient_and_an_unclipped_one_has():
    logprobs = torch.tensor([math.log(1.5), 0.0], requires_grad=True)
    result = clipped_policy_loss(
        logprobs, torch.zeros(2), torch.tensor([2.0, 2.0]), clip_low=0.2, clip_high=0.3
    )
    result.loss.sum().backward()
    # at ratio 1 the gradient is that of -A log p
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, -2.0]


def test_an_extreme_ratio_stays_finite():
    result = clipped_policy_loss(
        torch.tensor([0.0]), torch.tensor([-1e4]), torch.tensor([-1.0]), clip_low=0.2, clip_high=0.2
    )
    assert result.loss.item() == pytest.approx(math.exp(20.0))


@pytest.mark.parametrize(
    ("estimator", "expected"),
    # d = log 2: k1 = 0.69315, k2 = 0.69315^2 / 2 = 0.24023, k3 = 1/2 + 0.69315 - 1 = 0.19315
    [("k1", 0.69315), ("k2", 0.24023), ("k3", 0.19315)],
)
def test_kl_estimators_by_hand(estimator, expected: float):
    value = kl_per_token(torch.tensor([math.log(2.0)]), torch.tensor([0.0]), estimator)
    assert value.item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimators_are_unbiased(estimator):
    # p = (0.7, 0.3), q = (0.4, 0.6): KL = 0.7 ln(0.7/0.4) + 0.3 ln(0.3/0.6) = 0.18379
    p, q = torch.tensor([0.7, 0.3]), torch.tensor([0.4, 0.6])
    estimate = (p * kl_per_token(p.log(), q.log(), estimator)).sum()
    assert estimate.item() == pytest.approx(0.18379, abs=1e-5)


def test_k3_is_bounded_and_equal_policies_have_no_kl():
    far = kl_per_token(torch.tensor([-100.0]), torch.tensor([0.0]), "k3")
    assert far.item() == 10.0
    for estimator in ("k1", "k2", "k3"):
        same = torch.tensor([-1.5])
        assert kl_per_token(same, same, estimator).item() == 0.0


def test_shares_of_any_cut_add_up_to_the_token_mean():
    losses = torch.tensor([1.0, 2.0, 3.0, 6.0])
    shares = [batch_share(losses[:1], 4), batch_share(losses[1:], 4), batch_share(losses[:0], 4)]
    assert sum(share.item() for share in shares) == pytest.approx(3.0)


def test_a_batch_without_a_trained_token_is_an_error():
    with pytest.raises(ValueError, match="token weight of 0"):
        batch_share(torch.zeros(0), 0)


def test_weighted_nll_by_hand():
    # tokens of probability 1/2 and 1/4, the second at half weight: ln 2 and 0.5 ln 4 = ln 2
    losses = weighted_nll(torch.tensor([0.5, 0.25]).log(), torch.tensor([1.0, 0.5]))
    assert losses.tolist() == pytest.approx([math.log(2), math.log(2)])
