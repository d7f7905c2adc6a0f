"""What will not fit is refused before it begins, by value, need and remedy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from agent_r1.learner.config import EngineConfig
from agent_r1.learner.engine.ranks.join import check_machine
from agent_r1.rollout.weights.http import require_room_for_versions
from agent_r1_service.files import room
from agent_r1_service.files.room import require_room, require_shared_memory

MIB = 2**20


def free(number_of_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type(shutil.disk_usage("/"))(number_of_bytes, 0, number_of_bytes)
    monkeypatch.setattr(room.shutil, "disk_usage", lambda _: usage)


def test_a_tenth_more_than_the_need_must_be_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "not" / "there" / "yet"
    free(1_100_000_000, monkeypatch)
    require_room("2 things", folder, 1_000_000_000, "buy a disk")
    free(1_099_999_999, monkeypatch)
    refusal = "yet has 1.10 GB free, and 2 things need 1.10 GB; free space there, or buy a disk"
    with pytest.raises(ValueError, match=refusal):
        require_room("2 things", folder, 1_000_000_000, "buy a disk")


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


def test_the_shared_memory_of_a_container_is_too_small_for_several_ranks_with_gpus(
    monkeypatch: pytest.MonkeyPatch,
):
    free(64 * MIB, monkeypatch)  # Docker's default
    with pytest.raises(ValueError, match=r"/dev/shm has 67\.11 MB free, and 2 .*shm_size"):
        require_shared_memory("2 processes")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ValueError, match="2 learner ranks need"):
        check_machine(EngineConfig(ranks=2, device="cuda"), range(2))
    check_machine(EngineConfig(ranks=1, device="cuda"), range(1))
    check_machine(EngineConfig(ranks=2, device="cpu"), range(2))
