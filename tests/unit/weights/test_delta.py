"""Deltas are lossless: whatever the bits of base and new weights, the same bits come out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.weights.delta import apply_delta, decode, encode, write_delta
from tests.support.snapshot_files import chunks_of, flip_byte, write_snapshot

# Sign and exponent of a float32: 0x7F80 and 0xFF80 begin the infinities, what lies above them NaNs.
SPECIAL = [0x00000000, 0x80000000, 0x7FC00001, 0xFFC12345, 0x7F800001, 0x7F800000, 0x00000001]
BITS = st.sampled_from(SPECIAL) | st.integers(0, 2**32 - 1)


def raw(values: list[int]) -> npt.NDArray[np.uint8]:
    return np.array(values, np.uint32).view(np.uint8)


@given(pairs=st.lists(st.tuples(BITS, BITS), max_size=40), width=st.sampled_from([2, 4]))
def test_every_pair_of_bits_comes_out_as_it_went_in(pairs: list[tuple[int, int]], width: int):
    base, new = raw([a for a, _ in pairs]), raw([b for _, b in pairs])
    made = decode(base, encode(base, new, width), width)
    assert made.tobytes() == new.tobytes()


def test_few_changed_bits_make_a_small_frame():
    base = np.random.default_rng(0).integers(0, 256, 1_000_000, dtype=np.uint8)
    new = base.copy()
    new[::2000] ^= 1  # 500 of 500,000 bfloat16 values: at most some 3 bytes each, and the frame
    assert len(encode(base, new, 2)) < 2_000


def tensors(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    special = np.array(SPECIAL, np.uint32).view(np.float32)
    return {
        "embedding": rng.standard_normal((30, 7)).astype(np.float32),
        "special": special if seed else special[::-1].copy(),
        "scalar": np.array(float(seed), np.float32),
        "empty": np.zeros((0, 3), np.float32),
    }


def halves(seed: int) -> dict[str, Any]:
    """Those tensors in bfloat16, the upper half of each number's bits: NaNs stay what they are."""
    upper = {name: (value.view(np.uint32) >> 16) for name, value in tensors(seed).items()}
    return {
        name: torch.from_numpy(np.asarray(bits).astype(np.uint16)).view(torch.bfloat16)
        for name, bits in upper.items()
    }


@pytest.mark.parametrize("tensors", [tensors, halves])
def test_a_snapshot_is_made_of_its_base_bit_by_bit(
    tmp_path: Path, tensors: Callable[[int], dict[str, Any]]
):
    base = write_snapshot(tmp_path / "v1", tensors(0), 1, {"head": "embedding"})
    new = write_snapshot(tmp_path / "v2", tensors(1), 2, {"head": "embedding"})
    delta, made = tmp_path / "delta", tmp_path / "made"
    frames, chunks = write_delta(Path(base.location), Path(new.location), new.tensors, delta)
    assert sum(frames) == delta.stat().st_size
    assert chunks == chunks_of(delta.read_bytes())
    apply_delta(Path(base.location), delta, frames, new, made)
    assert made.read_bytes() == Path(new.location).read_bytes()


def test_another_base_or_a_damaged_delta_is_noticed(tmp_path: Path):
    base = write_snapshot(tmp_path / "v1", tensors(0), 1, {})
    new = write_snapshot(tmp_path / "v2", tensors(1), 2, {})
    other = write_snapshot(tmp_path / "v3", tensors(3), 3, {})
    delta, made = tmp_path / "delta", tmp_path / "made"
    frames, _ = write_delta(Path(base.location), Path(new.location), new.tensors, delta)
    with pytest.raises(ValueError, match="makes other bytes"):
        apply_delta(Path(other.location), delta, frames, new, made)
    flip_byte(delta, delta.stat().st_size)
    with pytest.raises(ValueError, match="cannot be decompressed"):
        apply_delta(Path(base.location), delta, frames, new, made)


def test_files_with_other_tensors_have_no_delta(tmp_path: Path):
    base = write_snapshot(tmp_path / "v1", tensors(0), 1, {})
    new = write_snapshot(tmp_path / "v2", {"embedding": np.zeros(3, np.float32)}, 2, {})
    with pytest.raises(ValueError, match="do not hold the same tensors"):
        write_delta(Path(base.location), Path(new.location), new.tensors, tmp_path / "delta")
