"""`dead_letters.jsonl`: what an ended run could not process."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from agent_r1.runtime.files.dead_letters import load_letters, save_letters
from agent_r1.runtime.files.writing import DiskFullError
from agent_r1_proto.dead_letters import MAX_LETTERS, DeadLetter


def letter(number: int) -> DeadLetter:
    return DeadLetter(
        letter_id=f"{number}-0",
        stream="agent_r1:run:scored",
        entry_id=f"{number}-1",
        reason="broken",
        failed_at=float(number),
        fields={b"payload": b"\x00\xff"},
    )


def test_letters_are_added_once_and_the_newest_are_kept(tmp_path: Path):
    save_letters(tmp_path, [letter(1), letter(0)])
    save_letters(tmp_path, [letter(n) for n in range(1, MAX_LETTERS + 1)])
    # 0 to 256 are one more than is kept: the oldest goes.
    assert load_letters(tmp_path) == [letter(n) for n in range(1, MAX_LETTERS + 1)]


def test_a_full_disk_leaves_the_letters_that_were_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save_letters(tmp_path, [letter(0)])

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(DiskFullError, match=r"dead_letters\.jsonl"):
        save_letters(tmp_path, [letter(1)])
    assert load_letters(tmp_path) == [letter(0)]
