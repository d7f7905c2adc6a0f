"""Deltas: lossless changes from one weight version to another, as compressed XORs of their bytes.

learner (http.py) --`write_delta`--> one compressed frame per tensor --> `apply_delta` on rollout
servers (http.py), which hold the base

An optimizer step changes few bits of few bfloat16 weights. The XOR with the base is 0 elsewhere,
and with the bytes of equal significance side by side the zeros stand in long rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import zstandard

from agent_r1.weights.chunks import write_chunks
from agent_r1.weights.layout import DTYPES
from agent_r1_proto.weights import FileChunks, TensorEntry, WeightManifest

LEVEL = 3
"""Level of zstd: higher ones take several times as long for a tenth less."""
_LENGTH_BYTES = 8


def encode(base: npt.NDArray[np.uint8], new: npt.NDArray[np.uint8], width: int) -> bytes:
    """Return the frame that turns `base` into `new`.

    Args:
        base: [N * width] raw bytes of the values.
        new: as many.
        width: bytes of a value.
    """
    planes = np.bitwise_xor(base, new).reshape(-1, width).T
    return zstandard.ZstdCompressor(level=LEVEL).compress(np.ascontiguousarray(planes).data)


def decode(base: npt.NDArray[np.uint8], frame: bytes, width: int) -> npt.NDArray[np.uint8]:
    """Return the bytes that `encode` was given as `new`.

    Raises:
        ValueError: the frame is damaged, or is of values with another number of bytes.
    """
    try:
        raw = zstandard.ZstdDecompressor().decompress(frame, max_output_size=base.size)
    except zstandard.ZstdError as exc:
        raise ValueError(f"a frame of the delta cannot be decompressed: {exc}") from exc
    if len(raw) != base.size:
        raise ValueError(f"a frame of the delta has {len(raw)} bytes, and its base {base.size}")
    planes = np.frombuffer(raw, np.uint8).reshape(width, -1)
    return np.bitwise_xor(np.ascontiguousarray(planes.T).reshape(-1), base)


def write_delta(
    base: Path, new: Path, tensors: Sequence[TensorEntry], target: Path
) -> tuple[list[int], FileChunks]:
    """Write the delta from one snapshot to another.

    Args:
        base: a safetensors file with the same tensors in the same order.
        new: the safetensors file that the delta is to make.
        tensors: of both files, in their order.
        target: is written.

    Returns:
        The size of each tensor's frame, and the chunks of the file.

    Raises:
        ValueError: the files do not hold the same tensors.
    """
    frames: list[int] = []

    def encoded(old_file: BinaryIO, new_file: BinaryIO) -> Iterator[memoryview]:
        for entry in _stored(tensors):
            size, width = _size(entry)
            frame = encode(_read(old_file, size), _read(new_file, size), width)
            frames.append(len(frame))
            yield memoryview(frame)

    with base.open("rb") as old_file, new.open("rb") as new_file:
        if _read_header(old_file) != _read_header(new_file):
            raise ValueError(f"{base} and {new} do not hold the same tensors")
        chunks = write_chunks(target, encoded(old_file, new_file))
    return frames, chunks


def apply_delta(
    base: Path, delta: Path, frames: Sequence[int], manifest: WeightManifest, target: Path
) -> None:
    """Write the snapshot that a delta makes from its base, and verify it.

    Args:
        base: a safetensors file.
        delta: what `write_delta` wrote for it.
        frames: sizes of its frames.
        manifest: of the new snapshot.
        target: is written, bit by bit as the learner wrote it.

    Raises:
        ValueError: the delta does not make this snapshot of this base.
    """

    def decoded(old_file: BinaryIO, changes: BinaryIO) -> Iterator[memoryview]:
        yield memoryview(_read_header(old_file))
        for entry, frame_size in zip(_stored(manifest.tensors), frames, strict=True):
            size, width = _size(entry)
            yield decode(_read(old_file, size), changes.read(frame_size), width).data

    with base.open("rb") as old_file, delta.open("rb") as changes:
        if write_chunks(target, decoded(old_file, changes)) != manifest.chunks:
            raise ValueError("the delta makes other bytes than its manifest says")


def _stored(tensors: Sequence[TensorEntry]) -> list[TensorEntry]:
    return [entry for entry in tensors if entry.alias_of is None]


def _size(entry: TensorEntry) -> tuple[int, int]:
    """Return the bytes of a tensor and of one of its values."""
    width = DTYPES[entry.dtype][1]
    return math.prod(entry.shape) * width, width


def _read_header(file: BinaryIO) -> bytes:
    length = file.read(_LENGTH_BYTES)
    return length + file.read(int.from_bytes(length, "little"))


def _read(file: BinaryIO, size: int) -> npt.NDArray[np.uint8]:
    data = np.frombuffer(file.read(size), np.uint8)
    if data.size != size:
        raise ValueError(f"a snapshot ends {size - data.size} bytes too early")
    return data
