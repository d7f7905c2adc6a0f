"""The kernel of gpu_probe.py, in a file of its own: Triton reads the source of what it compiles."""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports] - not installed with the build for CPUs
import triton.language as tl  # pyright: ignore[reportMissingImports]

BLOCK = 256


@triton.jit
def _add(x_pointer, y_pointer, out_pointer, size, BLOCK: tl.constexpr):
    """Add two vectors, a block of them in each program."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    x = tl.load(x_pointer + offsets, mask=inside)
    y = tl.load(y_pointer + offsets, mask=inside)
    tl.store(out_pointer + offsets, x + y, mask=inside)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return x + y, [N], computed by a kernel of Triton."""
    out = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), BLOCK),)
    _add[grid](x, y, out, x.numel(), BLOCK=BLOCK)  # pyright: ignore[reportIndexIssue]
    return out
