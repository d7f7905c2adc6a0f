"""Adapters on a CPU engine: two products for all tokens of a step.

worker.py puts it in the place of vLLM's own, which serves many adapters at a time and copies
the matrices of the right one for every token.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


def serve_one_adapter() -> None:
    """Let layers with adapters compute this way; there is one, and all requests have it."""
    PunicaWrapperCPU.add_lora_linear = _add_adapter


def _add_adapter(
    self: PunicaWrapperCPU,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: tuple[torch.Tensor, ...],
    lora_b_stacked: tuple[torch.Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    **unused: Any,
) -> None:
    """Add x A' B' to each slice of y.

    Args:
        self: knows whether the requests of this step have the adapter.
        y: [T, O] what the layer itself makes of x; is changed.
        x: [T, I]
        lora_a_stacked: of each slice, [1, 1, rank, I].
        lora_b_stacked: of each slice, [1, 1, O of the slice, rank], times alpha / rank.
        scale: 1.
        output_slices: widths of the slices.
        unused: of other platforms.
    """
    if self.no_lora:
        return
    start = 0
    for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
        y[:, start : start + width] += (x @ a[0, 0].T) @ b[0, 0].T * scale
        start += width
