"""Weights over HTTP: whether there is room for them, and files still on their way."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from agent_r1.weights.download import PartialFile
from agent_r1.weights.http import ServedFiles, require_room_for_versions
from agent_r1_proto.weights import FileChunks
from tests.support.disk import free

CHUNKS = [b"0123", b"4567", b"89"]


@pytest.fixture
def partial(tmp_path: Path) -> PartialFile:
    """A file of ten bytes in chunks of four, of which nothing has come."""
    digests = [hashlib.sha256(chunk).hexdigest() for chunk in CHUNKS]
    return PartialFile(tmp_path / "file", 10, FileChunks(size_bytes=4, sha256=digests), "wait")


def test_a_rollout_server_needs_room_for_two_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    left = tmp_path / "agent_r1_weights_of_one_that_was_killed"
    left.mkdir()
    (left / "lock").touch()
    free(2_200_000_000, monkeypatch)  # two versions of 500 million values of 2 bytes, and a tenth
    require_room_for_versions(tmp_path, 500_000_000, "bfloat16")
    assert not left.exists()  # it might have been what takes the room
    with pytest.raises(ValueError, match=r"has 2\.20 GB free, and two weight versions of 2\.00 GB"):
        require_room_for_versions(tmp_path, 500_000_000, "float32")
    with pytest.raises(ValueError, match=r"need 4\.40 GB; .*or set rollout\.weights_dir"):
        require_room_for_versions(None, 500_000_000, "float32")


def test_a_file_on_its_way_holds_what_its_chunks_cover(partial: PartialFile):
    assert not partial.write(0, b"0124")  # damaged
    assert partial.write(0, CHUNKS[0])
    assert partial.write(2, CHUNKS[2])
    assert partial.holds(0, 4)
    assert partial.holds(8, 10)
    # One byte of the chunk that is missing, a range beyond the end, and one of no bytes.
    assert not any(partial.holds(*one) for one in ((0, 5), (7, 9), (4, 8), (9, 11), (2, 2)))
    assert partial.write(1, CHUNKS[1])
    assert partial.holds(0, 10)
    assert partial.path.read_bytes() == b"".join(CHUNKS)


def test_ranges_that_have_not_come_are_not_served(partial: PartialFile):
    partial.write(0, CHUNKS[0])
    app, files = FastAPI(), ServedFiles()
    files.add_weights_route(app)
    files.add(7, "file", path=partial.path, holds=partial.holds)
    client = TestClient(app)

    def get(wanted: str) -> tuple[int, bytes]:
        answer = client.get("/weights/files/7/file", headers={"range": wanted} if wanted else {})
        return answer.status_code, answer.content if answer.status_code == 206 else b""

    assert get("bytes=0-3") == (206, CHUNKS[0])  # the last byte belongs to the range
    assert [get(one) for one in ("bytes=0-4", "bytes=4-7", "")] == [(404, b"")] * 3
    files.remove(7)
    assert get("bytes=0-3") == (404, b"")
