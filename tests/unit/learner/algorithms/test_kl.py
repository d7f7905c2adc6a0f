"""KL estimators: worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from agent_r1.learner.algorithms.kl import kl_per_token


@pytest.mark.parametrize(
    ("estimator", "expected"),
    # d = log 2: k1 = 0.69315, k2 = 0.69315^2 / 2 = 0.24023, k3 = 1/2 + 0.69315 - 1 = 0.19315
    [("k1", 0.69315), ("abs", 0.69315), ("k2", 0.24023), ("k3", 0.19315)],
)
def test_kl_estimators_by_hand(estimator, expected: float):
    value = kl_per_token(torch.tensor([math.log(2.0)]), torch.tensor([0.0]), estimator)
    assert value.item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    # d = -log 2: k3 = 2 - 0.69315 - 1 = 0.30685
    [("k1", -0.69315), ("abs", 0.69315), ("k2", 0.24023), ("k3", 0.30685)],
)
def test_kl_of_an_unlikelier_token_by_hand(estimator, expected: float):
    value = kl_per_token(torch.tensor([-math.log(2.0)]), torch.tensor([0.0]), estimator)
    assert value.item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimators_are_unbiased(estimator):
    # p = (0.7, 0.3), q = (0.4, 0.6): KL = 0.7 ln(0.7/0.4) + 0.3 ln(0.3/0.6) = 0.18379
    p, q = torch.tensor([0.7, 0.3]), torch.tensor([0.4, 0.6])
    estimate = (p * kl_per_token(p.log(), q.log(), estimator)).sum()
    assert estimate.item() == pytest.approx(0.18379, abs=1e-5)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    # d = -100: only k3 is bounded, since only k3 has an exp()
    [("k1", -100.0), ("abs", 100.0), ("k2", 5000.0), ("k3", 10.0)],
)
def test_only_k3_is_bounded(estimator, expected: float):
    far = kl_per_token(torch.tensor([-100.0]), torch.tensor([0.0]), estimator)
    assert far.item() == expected


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_equal_policies_have_no_kl(estimator):
    same = torch.tensor([-1.5])
    assert kl_per_token(same, same, estimator).item() == 0.0


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.0), ("k2", 0.26308)])
def test_only_k1_has_no_gradient_on_average(estimator, expected: float):
    # Tokens sampled by p = (0.7, 0.3) itself, q = (0.4, 0.6). With s the first logit, the gradients
    # of log p are 0.3 and -0.7; k1: 0.7 * 0.3 - 0.3 * 0.7 = 0. k2 has the gradient of the KL:
    # 0.7 * ln(0.7/0.4) * 0.3 - 0.3 * ln(0.3/0.6) * 0.7 = 0.21 * (0.55962 + 0.69315) = 0.26308
    logits = torch.tensor([0.7, 0.3]).log().requires_grad_()
    logprobs = torch.log_softmax(logits, 0)
    reference = torch.tensor([0.4, 0.6]).log()
    sampled = torch.tensor([0.7, 0.3])
    (sampled * kl_per_token(logprobs, reference, estimator)).sum().backward()
    assert logits.grad is not None
    assert logits.grad[0].item() == pytest.approx(expected, abs=1e-5)
