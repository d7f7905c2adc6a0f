"""A file is written whole or not at all, and a full disk is reported in one form."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from agent_r1.runtime.files.writing import (
    DiskFullError,
    replace_directory,
    replace_file,
    report_full_disk,
    require_space,
    write_atomically,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_text_and_bytes_replace_what_was_there_and_leave_nothing_else(tmp_path: Path):
    path = tmp_path / "state.json"
    write_atomically(path, "old")
    write_atomically(path, "grün")
    assert path.read_bytes() == b"gr\xc3\xbcn"
    write_atomically(path, b"\xff")
    assert path.read_bytes() == b"\xff"
    assert names(tmp_path) == ["state.json"]


def test_a_file_is_as_open_to_others_as_any_or_as_it_is_asked_to_be(tmp_path: Path):
    def mode(name: str) -> int:
        return stat.S_IMODE((tmp_path / name).stat().st_mode)

    (tmp_path / "any").write_text("")
    write_atomically(tmp_path / "open", "")
    assert mode("open") == mode("any")
    (tmp_path / "secret").write_text("")  # one that is open to others already
    write_atomically(tmp_path / "secret", "", mode=0o600)
    assert mode("secret") == 0o600


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    path = tmp_path / "state.json"
    write_atomically(path, "old")

    def write_half() -> None:
        with replace_file(path) as file:
            file.write(b"half")
            raise KeyError("the source of the lines")

    with pytest.raises(KeyError):
        write_half()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["state.json"]


def test_a_full_disk_is_said_to_be_full_and_the_old_file_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "state.json"
    write_atomically(path, "old")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", no_space)
        with pytest.raises(
            DiskFullError,
            match=r"^the disk is full: state\.json \(.*/state\.json\) cannot be written, and "
            r".* MiB are free; what was complete before is kept\. Free space there$",
        ):
            write_atomically(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["state.json"]


def test_another_error_than_a_full_disk_is_not_renamed(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "missing" / "file", "text")


def test_the_message_of_the_file_itself_is_kept(tmp_path: Path):
    with (
        pytest.raises(DiskFullError, match="the disk is full: inner "),
        report_full_disk("outer", tmp_path),
        report_full_disk("inner", tmp_path),
    ):
        no_space()


def test_what_cannot_fit_is_refused_with_need_and_remedy_in_one_sentence(tmp_path: Path):
    require_space("a checkpoint", tmp_path / "new" / "folder", 1, "wait")
    with pytest.raises(
        DiskFullError,
        # 2**60 bytes are 2**40 MiB
        match=r"the disk is full: a checkpoint \(.*\) needs about 1099511627776\.0 MiB, and .* "
        r"Free space there, or wait$",
    ):
        require_space("a checkpoint", tmp_path / "new" / "folder", 2**60, "wait")


def test_a_full_disk_is_an_error_of_the_operating_system(tmp_path: Path):
    # So that whoever answers OSErrors in a way of his own answers this one too.
    with (
        pytest.raises(OSError, match="the disk is full") as caught,
        report_full_disk("x", tmp_path),
    ):
        no_space()
    assert caught.value.errno == errno.ENOSPC


def fill(directory: Path, text: str) -> None:
    with replace_directory(directory) as staging:
        (staging / "file").write_text(text)


def test_a_directory_takes_the_place_of_the_one_before(tmp_path: Path):
    for text in ("old", "new"):
        fill(tmp_path / "index", text)
    assert (tmp_path / "index" / "file").read_text() == "new"
    assert names(tmp_path) == ["index"]


def test_a_directory_that_cannot_be_put_in_place_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    directory = tmp_path / "index"
    fill(directory, "old")
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.suffix == ".tmp":
            no_space()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="No space left"):
        fill(directory, "new")
    assert (directory / "file").read_text() == "old"
    assert names(tmp_path) == ["index"]
