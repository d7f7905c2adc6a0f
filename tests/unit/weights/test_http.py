"""Weights over HTTP: whether there is room for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.weights.http import require_room_for_versions
from tests.support.disk import free


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
