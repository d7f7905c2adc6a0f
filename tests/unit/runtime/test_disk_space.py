"""What will not fit is refused before it begins, by value, need and remedy."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from agent_r1.runtime.files import disk_space
from agent_r1.runtime.files.disk_space import require_room, require_shared_memory
from agent_r1.runtime.files.writing import DiskFullError, report_full_disk
from tests.support.disk import free


def test_a_tenth_more_than_the_need_must_be_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "not" / "there" / "yet"
    free(1_100_000_000, monkeypatch)
    require_room("2 things", folder, 1_000_000_000, "buy a disk")
    free(1_099_999_999, monkeypatch)
    refusal = "yet has 1.10 GB free, and 2 things need 1.10 GB; free space there, or buy a disk"
    with pytest.raises(ValueError, match=refusal):
        require_room("2 things", folder, 1_000_000_000, "buy a disk")


def test_the_shared_memory_of_a_container_is_too_small(monkeypatch: pytest.MonkeyPatch):
    free(64 * 2**20, monkeypatch)  # Docker's default
    with pytest.raises(ValueError, match=r"/dev/shm has 67\.11 MB free, and 2 .*shm_size"):
        require_shared_memory("2 processes")


def test_a_disk_without_inodes_is_full_whatever_its_free_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real = os.statvfs(tmp_path)
    # The place of f_favail, inodes that a user may still take, is the eighth.
    none_left = os.statvfs_result([*real[:7], 0, *real[8:]])
    monkeypatch.setattr(disk_space.os, "statvfs", lambda _: none_left)
    assert "no inodes" in disk_space.free_text(tmp_path)
    with pytest.raises(ValueError, match="no inodes"):
        disk_space.require_room("2 checkpoints", tmp_path, 1, "lower learner.keep_last")
    with (
        pytest.raises(DiskFullError, match=r"MiB are free, but no inodes.*df -i"),
        report_full_disk("metrics.jsonl", tmp_path),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
