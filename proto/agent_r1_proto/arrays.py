"""Array fields of messages: numpy in memory, few bytes on the wire, lists in JSON.

Values travel little-endian. A mask is packed eight to a byte, lowest bit first. Integers take the
fewest bytes that hold the largest of them: token ids of most vocabularies take 2 or 3, not 4; in 3,
the lower two bytes of all values come first, then their third bytes. An array that is 0 wherever a
mask is False sends only the other values (`SentWhere`). Where sequences begin alike, the later ones
send only what follows (`SentOnce`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ArrayKind:
    """Type of an array field, in memory (`dtype`) and on the wire."""

    dtype: np.dtype[Any]

    def check(self, value: object) -> Array:
        """Return `value` as a read-only one-dimensional array of this dtype.

        Raises:
            ValueError: the value has another dtype kind or more than one dimension.
        """
        array = np.asarray(value)
        if array.ndim != 1:
            raise ValueError(f"array has {array.ndim} dimensions; expected 1 ([T])")
        if array.size == 0:
            array = array.astype(self.dtype)
        if array.dtype != self.dtype:
            same_kind = np.can_cast(array.dtype, self.dtype, casting="same_kind")
            integral = array.dtype.kind in "iu" and self.dtype.kind == "i"
            if not (same_kind or integral):
                raise ValueError(f"array dtype {array.dtype} cannot be stored as {self.dtype}")
            converted = array.astype(self.dtype)
            if integral and not np.array_equal(converted, array):
                raise ValueError(f"array values do not fit {self.dtype}")
            array = converted
        elif array.flags.writeable:
            array = array.copy()
        array.setflags(write=False)
        return array

    def width(self, array: Array) -> int:
        """Return the bytes that each value takes on the wire; for a mask, those of 8 values."""
        if self.dtype.kind != "i" or array.size == 0 or int(array.min()) < 0:
            return self.dtype.itemsize
        return max(1, (int(array.max()).bit_length() + 7) // 8)

    def to_bytes(self, array: Array, width: int) -> bytes:
        """Encode an array in `width` bytes a value."""
        if self.dtype.kind == "b":
            return np.packbits(array, bitorder="little").tobytes()
        if width == self.dtype.itemsize:
            return array.astype(self.dtype.newbyteorder("<"), copy=False).tobytes()
        if width == 3:
            return array.astype("<u2").tobytes() + (array >> 16).astype(np.uint8).tobytes()
        return array.astype(f"<u{width}").tobytes()

    def from_bytes(self, data: bytes, length: int, width: int) -> Array:
        """Decode `length` values of `width` bytes.

        Raises:
            ValueError: the number of bytes does not fit; no value has so many bytes.
        """
        is_mask = self.dtype.kind == "b"
        if not 1 <= width <= self.dtype.itemsize:
            raise ValueError(f"array field has {width} bytes a value; {self.dtype} has fewer")
        expected = (length + 7) // 8 if is_mask else length * width
        if len(data) != expected:
            raise ValueError(
                f"array field has {len(data)} bytes; {length} values need {expected} bytes"
            )
        if is_mask:
            packed = np.frombuffer(data, np.uint8)
            return np.unpackbits(packed, count=length, bitorder="little").view(np.bool_)
        if width == self.dtype.itemsize:
            little = self.dtype.newbyteorder("<")
            return np.frombuffer(data, little).astype(self.dtype, copy=False)
        if width == 3:
            high = np.frombuffer(data, np.uint8, offset=2 * length).astype(self.dtype)
            return (high << 16) | np.frombuffer(data, "<u2", count=length)
        return np.frombuffer(data, f"<u{width}").astype(self.dtype)


INT32 = ArrayKind(np.dtype(np.int32))
FLOAT32 = ArrayKind(np.dtype(np.float32))
BOOL = ArrayKind(np.dtype(np.bool_))


@dataclass(frozen=True)
class SentWhere:
    """Marks an array field that is 0 wherever the mask field `mask` beside it is False."""

    mask: str


@dataclass(frozen=True)
class SentOnce:
    """Marks an array field of sequences end to end; the field `starts` beside it says where those
    after the first begin. What one begins with like an earlier one is not sent again."""

    starts: str


def _array_to_list(array: Array) -> list[Any]:
    return array.tolist()


Int32Array = Annotated[
    npt.NDArray[np.int32],
    BeforeValidator(INT32.check),
    PlainSerializer(_array_to_list, when_used="json"),
    WithJsonSchema({"type": "array", "items": {"type": "integer"}, "x-wire": "int32 bytes"}),
    INT32,
]
Float32Array = Annotated[
    npt.NDArray[np.float32],
    BeforeValidator(FLOAT32.check),
    PlainSerializer(_array_to_list, when_used="json"),
    WithJsonSchema({"type": "array", "items": {"type": "number"}, "x-wire": "float32 bytes"}),
    FLOAT32,
]
BoolArray = Annotated[
    npt.NDArray[np.bool_],
    BeforeValidator(BOOL.check),
    PlainSerializer(_array_to_list, when_used="json"),
    WithJsonSchema({"type": "array", "items": {"type": "boolean"}, "x-wire": "packed bits"}),
    BOOL,
]
