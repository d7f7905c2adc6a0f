"""Chunks: written and hashed in one pass, whatever the sizes of what is written."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.weights import chunks
from agent_r1.weights.chunks import check_chunks, hash_chunks, write_chunks
from tests.support.snapshot_files import chunks_of

CHUNK = 8


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", CHUNK)


@given(parts=st.lists(st.binary(max_size=3 * CHUNK), max_size=6))
def test_a_file_holds_its_parts_and_is_described_by_its_chunks(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]
):
    path = tmp_path_factory.mktemp("chunks") / "file"
    content = b"".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", CHUNK)
        written = write_chunks(path, (memoryview(part) for part in parts))
        assert path.read_bytes() == content
        assert written == hash_chunks(path) == chunks_of(content, CHUNK)


def test_what_the_disk_takes_in_pieces_is_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pwrite = os.pwrite
    monkeypatch.setattr(chunks.os, "pwrite", lambda fd, data, at: pwrite(fd, data[:3], at))
    write_chunks(tmp_path / "file", [memoryview(b"0123456789")])
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_parts_are_taken_as_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A delta is decoded part by part: never is more of it in memory than threads take."""
    taken, most = 0, 0
    lock, pwrite = threading.Lock(), os.pwrite

    def write(descriptor: int, data: memoryview, start: int) -> int:
        nonlocal taken
        with lock:
            taken -= 1
        return pwrite(descriptor, data, start)

    def parts():
        nonlocal taken, most
        for _ in range(100):
            with lock:
                taken += 1
                most = max(most, taken)
            yield memoryview(bytes(CHUNK))

    monkeypatch.setattr(chunks.os, "pwrite", write)
    write_chunks(tmp_path / "file", parts())
    assert 1 <= most <= chunks._AHEAD + 1


@pytest.mark.parametrize(
    ("content", "start"), [(b"0123456789aBcdefghij", 8), (b"0123456789abcdef", 16), (b"", 0)]
)
def test_the_first_chunk_that_differs_is_named(tmp_path: Path, content: bytes, start: int):
    file = tmp_path / "file"
    file.write_bytes(content)
    wanted = chunks_of(b"0123456789abcdefghij", CHUNK)
    with pytest.raises(ValueError, match=rf"the 8 bytes from {start} have another sha256"):
        check_chunks(file, wanted)
    file.write_bytes(b"0123456789abcdefghij")
    check_chunks(file, wanted)
