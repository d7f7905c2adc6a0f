"""Attention of trajectories that lie in one row, and may share the prefixes that they begin with.

layout.py --paths, spans--> `plan_attention` --AttentionPlan--> `attend`, in every decoder layer

A prefix stands once among the rows of a micro-batch. Each trajectory asks with its own rows, those
after its prefix, and the rows of its whole path answer. Everything else in a decoder works row by
row. So a prefix is computed once, forward and backward, with the gradients of all that share it.
Packed trajectories have no prefix. flex.py does the same on GPUs.

Dimension key: U = rows of a micro-batch, S = its trajectories, T = tokens of one, H = heads,
G = heads of keys and values, D = size of a head; in a block, n = trajectories, Q = most own rows of
one, K = most tokens of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, PretrainedConfig

from agent_r1.learner.config import Layout
from agent_r1.learner.engine.flex import LEAST_HEAD_SIZE, flex_attend, plan_flex, uses_flex

ROW_ATTENTION = "one_row"
"""The name under which transformers finds `attend`."""
SMALLEST_BLOCK = 16
"""Own rows of a trajectory; those with fewer are padded to it."""

SIZES_PER_DOUBLING = 4
"""Sizes of blocks per doubling: own rows are padded by less than a fifth."""
PATHS_PER_DOUBLING = 2
"""Sizes of blocks with prefixes per doubling: paths are padded by less than a half, and by a fifth
on average."""

LAYOUT_KEYS: dict[Layout, str] = {"packed": "packing", "shared": "share_prefixes"}
CHECK_ROWS = 390
MOST_DISTANCE = 0.03
"""Largest distance between two ways to compute the same in bfloat16, relative to the norm; about
0.005 is usual."""

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class AttentionBlock:
    """Trajectories with about as many own rows and about as long paths, padded to one shape."""

    queries: torch.Tensor
    """[n, Q] their own rows; 0 after the last."""
    keys: torch.Tensor
    """[n, K] the rows of their paths; 0 after the last."""
    mask: torch.Tensor | None
    """[n, 1, Q, K] True where a row looks; None where no path has a prefix: at all up to itself."""


@dataclass(frozen=True)
class BlockPlan:
    """Attention plan for the rows of one micro-batch, trajectory by trajectory."""

    blocks: list[AttentionBlock]
    answers: torch.Tensor
    """[U] where the answer to each row stands among the queries of all blocks, end to end."""


AttentionPlan = BlockPlan | BlockMask


def plan_attention(paths: Int64Array, spans: Int64Array, device: torch.device) -> AttentionPlan:
    """Say which rows of a micro-batch look at which, in the form that its device computes."""
    if uses_flex(device, int((spans[:, 1] - spans[:, 0]).sum())):
        return plan_flex(paths, spans, device)
    return plan_blocks(paths, spans, device)


def plan_blocks(paths: Int64Array, spans: Int64Array, device: torch.device) -> BlockPlan:
    """Cut the trajectories of a micro-batch into blocks.

    Args:
        paths: [sum of T] the row of every token, trajectory after trajectory.
        spans: [S, 2] the tokens of each trajectory's prefix, which others compute, and all its
            tokens.
        device: where the blocks are used.
    """
    rows = np.split(paths, np.cumsum(spans[:-1, 1]))
    prefixes, own = spans[:, 0], spans[:, 1] - spans[:, 0]
    sizes = np.ceil(SIZES_PER_DOUBLING * np.log2(np.maximum(own, SMALLEST_BLOCK)))
    # 0 where there is no prefix: there, the path is as long as its own rows.
    lengths = np.where(prefixes == 0, 0, np.ceil(PATHS_PER_DOUBLING * np.log2(spans[:, 1])))
    kinds = np.stack([sizes, lengths], 1)
    answers = np.zeros(int(own.sum()), np.int64)
    blocks: list[AttentionBlock] = []
    start = 0
    for kind in np.unique(kinds[own > 0], axis=0):
        members = np.flatnonzero((kinds == kind).all(1) & (own > 0))
        queries = _pad([rows[i][prefixes[i] :] for i in members])
        keys = _pad([rows[i] for i in members])
        for line, i in enumerate(members):
            first = start + line * queries.shape[1]
            answers[queries[line, : own[i]]] = np.arange(first, first + own[i])
        start += queries.size
        mask = None
        if kind[1] > 0:
            newest = prefixes[members, None] + np.arange(queries.shape[1])
            looks = np.arange(keys.shape[1]) <= newest[:, None, :, None]
            mask = torch.from_numpy(looks).to(device)
        blocks.append(
            AttentionBlock(
                torch.from_numpy(queries).to(device), torch.from_numpy(keys).to(device), mask
            )
        )
    return BlockPlan(blocks, torch.from_numpy(answers).to(device))


def _pad(rows: Sequence[Int64Array]) -> Int64Array:
    padded = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    return padded


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    plan: AttentionPlan,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Return [1, U, H, D] what each row finds; has the form that transformers calls.

    Args:
        module: the layer's attention.
        query: [1, H, U, D].
        key: [1, G, U, D].
        value: [1, G, U, D].
        attention_mask: None.
        scaling: of the scores.
        sliding_window: None; a layer that looks back only so far is refused.
        plan: who looks at whom.
        others: what other kinds of attention are told.

    Raises:
        ValueError: there is a sliding window.
    """
    if sliding_window is not None:
        raise ValueError(f"its layers look back {sliding_window} tokens only")
    if isinstance(plan, BlockMask):
        return flex_attend(query, key, value, plan, scaling).transpose(1, 2), None
    heads, groups = query.shape[1], key.shape[1]
    # Many trajectories add to the gradient of one key: in bfloat16 the small ones would be lost.
    asked, keys, values = _rows(query), _rows(key).float(), _rows(value).float()
    found: list[torch.Tensor] = []
    for block in plan.blocks:
        answer = functional.scaled_dot_product_attention(
            _pick(asked, block.queries, heads),
            _pick(keys, block.keys, groups).to(key.dtype).repeat_interleave(heads // groups, 1),
            _pick(values, block.keys, groups).to(value.dtype).repeat_interleave(heads // groups, 1),
            attn_mask=block.mask,
            is_causal=block.mask is None,
            scale=scaling,
        )
        found.append(answer.transpose(1, 2).flatten(2).flatten(0, 1))
    answers = functional.embedding(plan.answers, torch.cat(found))
    return answers.unflatten(-1, (heads, -1))[None], None


def _rows(states: torch.Tensor) -> torch.Tensor:
    """Return [U, heads * D] of [1, heads, U, D]."""
    return states[0].transpose(0, 1).flatten(1)


def _pick(rows: torch.Tensor, chosen: torch.Tensor, heads: int) -> torch.Tensor:
    """Return [n, heads, C, D] the chosen [n, C] rows."""
    # The gradient of an embedding is added up far faster on a CPU than that of other indexing.
    return functional.embedding(chosen, rows).unflatten(-1, (heads, -1)).transpose(1, 2)


AttentionInterface.register(ROW_ATTENTION, attend)


def check_kernel(
    config: PretrainedConfig, layout: Layout, dtype: torch.dtype, device: torch.device
) -> None:
    """Compare FlexAttention on this device, forward and backward, with the blocks of CPUs.

    Args:
        config: of the model.
        layout: that of the run; where its attention is not FlexAttention, nothing is compared.
        dtype: of the weights.
        device: where the model will run.

    Raises:
        ValueError: it does not run, or gives other results.
    """
    if layout == "padded" or not uses_flex(device, CHECK_ROWS):
        return
    try:
        _compare_kernel(config, dtype, device)
    except (RuntimeError, ValueError) as exc:
        key = LAYOUT_KEYS[layout]
        raise ValueError(
            f"engine.{key} = true needs FlexAttention, which does not work for this model on "
            f"{device}: {exc}; set engine.{key} = false"
        ) from exc


def _compare_kernel(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    if size < LEAST_HEAD_SIZE:
        raise ValueError(f"its heads have size {size}, and the least is {LEAST_HEAD_SIZE}")
    # The second of three trajectories has 150 of its rows in common with the first.
    paths = np.concatenate([np.arange(200), np.arange(150), np.arange(200, CHECK_ROWS)])
    spans = np.array([[0, 200], [150, 250], [0, 90]])
    random = torch.Generator(device).manual_seed(0)
    query, key, value, grad = (
        torch.randn(1, count, CHECK_ROWS, size, dtype=dtype, device=device, generator=random)
        for count in (heads, groups, groups, heads)
    )
    results: list[list[torch.Tensor]] = []
    for plan in (plan_flex(paths, spans, device), plan_blocks(paths, spans, device)):
        q, k, v = inputs = [states.clone().requires_grad_() for states in (query, key, value)]
        found, _ = attend(nn.Identity(), q, k, v, None, plan=plan)
        results.append([found.detach(), *torch.autograd.grad(found, inputs, grad.transpose(1, 2))])
    for ours, theirs in zip(*results, strict=True):
        distance = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
        if not distance <= MOST_DISTANCE:  # or it is not a number
            raise ValueError(
                f"results differ by {distance:.2g} of their norm, and {MOST_DISTANCE} is allowed"
            )
