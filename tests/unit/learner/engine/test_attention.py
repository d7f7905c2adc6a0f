"""Attention in blocks: who is computed together, and how much of it is padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agent_r1.learner.engine.attention import plan_blocks


def scores(prefixes: list[int], own: int) -> tuple[int, int]:
    """How many scores are computed of trajectories with so many rows of their own, and needed."""
    spans = np.array([[prefix, prefix + own] for prefix in prefixes])
    paths, used = [], 0
    for prefix in prefixes:
        paths.append(np.concatenate((np.arange(prefix), used + np.arange(own))))
        used += own
    plan = plan_blocks(np.concatenate(paths), spans, torch.device("cpu"))
    computed = [b.queries.numel() * b.keys.shape[1] for b in plan.blocks]
    return sum(computed), int((spans[:, 1] * own).sum())


@pytest.mark.parametrize("longest", [200, 3000])
def test_a_long_path_does_not_pad_the_short_ones(longest: int):
    # A history that grows: in one block, each path is padded to the longest, to twice what is
    # needed. Two sizes a doubling pad a path by less than 1.42, here by about half of that.
    prefixes = list(range(longest // 20, longest, longest // 20))
    computed, needed = scores(prefixes, own=20)
    assert computed < 1.25 * needed
