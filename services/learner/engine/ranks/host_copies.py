"""Copies of a GPU's weights in page-locked memory of the machine.

engine.py, rank 0 --weights on the GPU--> `HostCopies` --tensors in host memory--> pushes, exports

Most of a copy into new memory is the system finding pages for it; torch keeps page-locked memory
that is let go, and gives it to the next version. It rounds such memory up to a power of two, so
weights share large blocks. docs/gpu.md has the rates.
"""

from __future__ import annotations

import math

import torch

BLOCK = 1 << 30
"""Bytes of a block, a power of two."""
ALIGNMENT = 64
"""Bytes to whose multiples tensors are aligned, a cache line."""


class HostCopies:
    """Places in host memory for the tensors of one version.

    Args:
        expected: bytes of all tensors, as far as known; no block is larger than what is left of it
            and one tensor needs.
        page_locked: take memory that a GPU copies to; needs one.
    """

    def __init__(self, expected: int, *, page_locked: bool = True) -> None:
        self._left = expected
        self._page_locked = page_locked
        self._room = torch.empty(0, dtype=torch.uint8)

    def copy(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a copy in host memory."""
        room = self._take(weight.nbytes).view(weight.dtype).view(weight.shape)
        return room.copy_(weight)

    def _take(self, size: int) -> torch.Tensor:
        aligned = math.ceil(size / ALIGNMENT) * ALIGNMENT
        if len(self._room) < aligned:
            block = max(aligned, min(BLOCK, self._left))
            self._room = torch.empty(block, dtype=torch.uint8, pin_memory=self._page_locked)
        self._left -= aligned
        place, self._room = self._room[:size], self._room[aligned:]
        return place
