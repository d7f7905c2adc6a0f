"""Arrays on the wire: few bytes, the same values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1_proto.arrays import BOOL, FLOAT32, INT32, ArrayKind


def encoded(kind: ArrayKind, values: object) -> bytes:
    array = kind.check(values)
    return kind.to_bytes(array, kind.width(array))


@given(
    st.integers(0, 31).flatmap(
        lambda bits: (
            st.lists(st.integers(-(2**bits), 2**bits - 1)) | st.lists(st.integers(0, 2**bits - 1))
        )
    )
)
def test_int32_bytes_round_trip(values: list[int]):
    array = INT32.check(np.array(values, dtype=np.int64))
    width = INT32.width(array)
    decoded = INT32.from_bytes(INT32.to_bytes(array, width), len(values), width)
    assert decoded.tolist() == values
    assert decoded.dtype == np.int32


@given(st.lists(st.booleans()))
def test_masks_take_one_bit_a_token_and_round_trip(values: list[bool]):
    data = encoded(BOOL, np.array(values, dtype=np.bool_))
    assert len(data) == (len(values) + 7) // 8
    assert BOOL.from_bytes(data, len(values), 1).tolist() == values


@pytest.mark.parametrize(
    ("values", "data"),
    [
        ([], b""),
        ([0, 255], b"\x00\xff"),
        ([1, 256], b"\x01\x00\x00\x01"),
        # 0x010203 and 4: the lower two bytes of both, then their third bytes
        ([0x010203, 4], b"\x03\x02\x04\x00\x01\x00"),
        ([2**24], b"\x00\x00\x00\x01"),
        ([-1], b"\xff\xff\xff\xff"),
    ],
)
def test_integers_take_the_fewest_bytes_that_hold_them(values: list[int], data: bytes):
    assert encoded(INT32, values) == data


def test_arrays_are_little_endian_on_the_wire():
    assert encoded(FLOAT32, [1.0]) == b"\x00\x00\x80\x3f"
    # bits 0 and 2 of the first byte: 1 + 4
    assert encoded(BOOL, np.array([True, False, True])) == b"\x05"


def test_a_value_beyond_int32_is_refused():
    with pytest.raises(ValueError, match="do not fit int32"):
        INT32.check([2**31])
