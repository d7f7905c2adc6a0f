"""Attention on GPUs of trajectories that lie in one row, packed or with shared prefixes.

layout.py --paths, spans--> `plan_flex` --BlockMask--> `flex_attend`, in every decoder layer

In both layouts a row is followed by those that continue it, before any other. So a row's key is
seen by itself and by the rows after it up to one end, and these ends are the whole mask. torch's
FlexAttention makes a kernel of it that leaves out what no row of a block of queries sees.

Dimension key: U = rows of a micro-batch, B = blocks of them, H = heads, G = heads of keys and
values, D = size of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK_ROWS = 128
"""Rows of queries and of keys that the kernel computes or leaves out together: torch's default."""
LEAST_HEAD_SIZE = 16
"""Least head size that the kernel's products take: torch._inductor.kernel.flex.flex_attention."""

Int64Array = npt.NDArray[np.int64]


def uses_flex(device: torch.device, rows: int) -> bool:
    """Return whether the rows of a micro-batch attend by FlexAttention.

    One block has nothing to leave out, and the kernel would be compiled once more for it: a
    dimension of 1 is a constant to the compiler.
    """
    return device.type == "cuda" and rows > BLOCK_ROWS


def plan_flex(paths: Int64Array, spans: Int64Array, device: torch.device) -> BlockMask:
    """Return who looks at whom in a micro-batch of more than one block.

    torch's `create_block_mask` finds the same blocks, in a mask of U x U.

    Args:
        paths: [sum of T] the row of every token, trajectory after trajectory.
        spans: [S, 2] the tokens of each trajectory's prefix, which others compute, and all its
            tokens.
        device: where the mask is used.
    """
    ends = last_rows(paths, spans)
    blocks = -(-len(ends) // BLOCK_ROWS)
    # No row stands after the last one, so none of a block that it would complete sees it.
    ends_BR = np.pad(ends, (0, blocks * BLOCK_ROWS - len(ends))).reshape(blocks, BLOCK_ROWS)
    starts = BLOCK_ROWS * np.arange(blocks)[:, None]
    before = np.tri(blocks, k=-1, dtype=np.bool_)
    full = before & (ends_BR.min(1) >= starts + BLOCK_ROWS)
    partial = (before & (ends_BR.max(1) > starts) & ~full) | np.eye(blocks, dtype=np.bool_)
    seen_until = torch.from_numpy(ends).to(device)

    def looks(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < seen_until[key])

    return BlockMask.from_kv_blocks(
        *_ordered(partial, device),
        *_ordered(full, device),
        BLOCK_SIZE=BLOCK_ROWS,
        mask_mod=looks,
        seq_lengths=(len(ends), len(ends)),
    )


def last_rows(paths: Int64Array, spans: Int64Array) -> Int64Array:
    """Return [U] the end of the rows that see each row: of the last that continues it."""
    ends = np.zeros(int((spans[:, 1] - spans[:, 0]).sum()), np.int64)
    for path in np.split(paths, np.cumsum(spans[:-1, 1])):
        ends[path] = np.maximum(ends[path], path[-1] + 1)
    return ends


def _ordered(
    chosen: npt.NDArray[np.bool_], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [1, 1, B] how many blocks of keys are chosen, and [1, 1, B, B] which, those first."""
    counts, order = chosen.sum(1), np.argsort(~chosen, axis=1, kind="stable")
    return tuple(  # pyright: ignore[reportReturnType]
        torch.from_numpy(array.astype(np.int32))[None, None].to(device) for array in (counts, order)
    )


def flex_attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: BlockMask,
    scaling: float | None,
) -> torch.Tensor:
    """Return [1, H, U, D] what each row finds.

    Args:
        query: [1, H, U, D].
        key: [1, G, U, D].
        value: [1, G, U, D].
        plan: who looks at whom.
        scaling: of the scores.
    """
    return _kernel()(query, key, value, block_mask=plan, scale=scaling, enable_gqa=True)


@functools.cache
def _kernel() -> Callable[..., torch.Tensor]:
    # One kernel for every number of rows: one for each would soon be more than torch compiles, and
    # without a kernel, FlexAttention writes down all scores.
    return torch.compile(flex_attention, dynamic=True)
