"""Copies of weights in blocks of host memory. That they are page-locked, only a GPU shows."""

import pytest
import torch

from agent_r1.learner.engine.ranks import host_copies
from agent_r1.learner.engine.ranks.host_copies import ALIGNMENT, HostCopies


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "BLOCK", 1024)


def copies_of(weights: list[torch.Tensor], expected: int) -> list[torch.Tensor]:
    copies = HostCopies(expected, page_locked=False)
    return [copies.copy(weight) for weight in weights]


def blocks_of(tensors: list[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of each block by its address."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def test_copies_are_equal_aligned_and_memory_of_their_own() -> None:
    weights = [
        torch.randn(3, 5),
        torch.randn(7).to(torch.bfloat16),
        torch.tensor(2.5),
        torch.empty(0, 4),
        torch.randn(4, 6).T,
        torch.arange(5),
    ]
    before = [weight.clone() for weight in weights]
    found = copies_of(weights, expected=sum(weight.nbytes for weight in weights))
    for weight in weights:
        weight.zero_()
    for copy, original in zip(found, before, strict=True):
        assert copy.dtype == original.dtype
        assert copy.is_contiguous()
        assert copy.data_ptr() % ALIGNMENT == 0 or copy.numel() == 0
        torch.testing.assert_close(copy, original, rtol=0, atol=0)


def test_tensors_share_blocks_and_a_large_one_has_its_own() -> None:
    weights = [torch.ones(size, dtype=torch.uint8) for size in (512, 512, 64, 2048, 64)]
    found = copies_of(weights, expected=3200)
    assert list(blocks_of(found).values()) == [1024, 1024, 2048, 64]


def test_blocks_are_no_larger_than_what_is_left() -> None:
    """An adapter of a few megabytes does not lock a gigabyte."""
    weights = [torch.ones(100, dtype=torch.uint8) for _ in range(3)]
    assert list(blocks_of(copies_of(weights, expected=300)).values()) == [300, 128]


def test_more_weights_than_were_expected_are_copied_too() -> None:
    weights = [torch.ones(100, dtype=torch.uint8) for _ in range(3)]
    assert list(blocks_of(copies_of(weights, expected=0)).values()) == [128, 128, 128]
