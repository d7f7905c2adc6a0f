"""Linear layers by oneDNN: values and gradients are those of PyTorch's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from agent_r1.learner.engine.linear import use_fast_products


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(7,), (1, 5), (2, 3, 4), (0,)])
def test_values_and_gradients_are_those_of_a_linear_layer(shape: tuple[int, ...], bias: bool):
    torch.manual_seed(0)
    own = nn.Sequential(nn.Linear(6, 9, bias=bias))
    fast = copy.deepcopy(own)
    use_fast_products(fast)
    results = []
    for module in (own, fast):
        torch.manual_seed(1)
        rows = torch.randn(*shape, 6, requires_grad=True)
        found = module(rows)
        (found * torch.randn(*shape, 9)).sum().backward()
        results.append([found, rows.grad, *(p.grad for p in module.parameters())])
    for expected, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_a_frozen_layer_passes_the_gradient_on():
    layer = nn.Linear(6, 9)
    use_fast_products(layer)
    rows = torch.randn(7, 6, requires_grad=True)
    layer.requires_grad_(False)
    layer(rows).sum().backward()
    # The gradient of a sum is each column's sum of the weight, for every row.
    expected = layer.weight.sum(0).expand(7, 6)
    torch.testing.assert_close(rows.grad, expected, atol=1e-5, rtol=1e-5)
    assert layer.weight.grad is None
    assert layer.bias.grad is None


def test_names_and_values_of_weights_stay():
    module = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    use_fast_products(module)
    assert {name: value.tolist() for name, value in module.state_dict().items()} == {
        name: value.tolist() for name, value in before.items()
    }


def test_bfloat16_rows_are_multiplied_as_before():
    torch.manual_seed(0)
    own = nn.Linear(6, 9, dtype=torch.bfloat16)
    fast = copy.deepcopy(own)
    use_fast_products(nn.Sequential(fast))
    rows = torch.randn(4, 6, dtype=torch.bfloat16)
    assert torch.equal(fast(rows), own(rows))
