"""The norms of a CPU engine: vLLM has kernels for them, but takes PyTorch's there.

weight_transfer.py makes them known in every process of vLLM, engine_process.py asks for them.
"""

from __future__ import annotations

import torch
from vllm import ir

NORMS = "agent_r1_cpu"
"""Name under which vLLM knows the implementations below."""


def _fits(*tensors: torch.Tensor | None) -> bool:
    """Whether vLLM's own kernels, which read plain rows of float32, can take these tensors."""
    return all(t is not None and t.dtype == torch.float32 and t.is_contiguous() for t in tensors)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> torch.Tensor:
    """Return [T, D] the rows of x, scaled to a root mean square of 1, times [D] weight."""
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, epsilon)
    return out


def fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add [T, D] x to the residual and return its norm and the sum, both in place."""
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


def register_norms() -> None:
    """Make the norms known to vLLM, which has these kernels but takes PyTorch's on a CPU."""
    if NORMS in ir.ops.rms_norm.impls:
        return
    ir.ops.rms_norm.register_impl(
        NORMS,
        supports_args=lambda x, weight, epsilon, variance_size=None: (
            variance_size is None and _fits(x, weight)
        ),
    )(rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(
        NORMS,
        supports_args=lambda x, x_residual, weight, epsilon, variance_size=None: (
            variance_size is None and _fits(x, x_residual, weight)
        ),
        inplace=True,
    )(fused_add_rms_norm)
