"""Products with weights, in float32 on a CPU, by oneDNN.

PyTorch multiplies float32 matrices with MKL, which takes no AVX-512 on processors of AMD and is
half as fast there. oneDNN comes with PyTorch too.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn


def multiply(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return rows [..., I] times weight [O, I] transposed, plus bias [O]: [..., O]; no gradient."""
    if uses_one_dnn(rows):
        return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return nn.functional.linear(rows, weight, bias)


def uses_one_dnn(tensor: torch.Tensor) -> bool:
    """Return whether products of a tensor with weights are oneDNN's."""
    on_cpu = tensor.device.type == "cpu" and tensor.dtype == torch.float32
    return on_cpu and tensor.numel() > 0 and torch.backends.mkldnn.is_available()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        return multiply(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        grad_rows = multiply(grad, weight.t(), None).view(rows.shape)
        grad_weight = None
        if ctx.needs_input_grad[1]:  # else it is frozen, and only what is below is trained
            grad_weight = multiply(grad.t(), rows.flatten(0, -2).t(), None)
        return grad_rows, grad_weight, grad.sum(0) if ctx.needs_input_grad[2] else None


class _Linear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not uses_one_dnn(input):
            return super().forward(input)
        return cast(torch.Tensor, _Product.apply(input, self.weight, self.bias))


def use_fast_products(model: nn.Module) -> None:
    """Let the linear layers of a model multiply by oneDNN where that is for them."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = _Linear
