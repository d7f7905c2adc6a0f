"""File systems with as much free space as a test says."""

from __future__ import annotations

import shutil

import pytest

from agent_r1.runtime.files import disk_space


def free(number_of_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every file system have so much free space, as files/disk_space.py sees it."""
    usage = type(shutil.disk_usage("/"))(number_of_bytes, 0, number_of_bytes)
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda _: usage)
