"""What provides bubblewrap: set-up fetches it, finds it, or says what to do."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_r1.sandbox import bubblewrap
from agent_r1.setup import native_libraries


def without_bwrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)


def test_set_up_leaves_a_bwrap_of_the_system_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(native_libraries, "fetch_with_apt", lambda *_: pytest.fail("fetched"))
    native_libraries.ensure_bwrap(tmp_path)


def test_set_up_fetches_a_missing_bwrap_into_the_environment(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    def fetch(folder: Path, package: str, pattern: str) -> Path:
        assert (package, pattern) == ("bubblewrap", "bin/bwrap")
        (folder / "bwrap").symlink_to("/bin/true")
        return folder / "bwrap"

    without_bwrap(monkeypatch)
    monkeypatch.setattr(native_libraries, "fetch_with_apt", fetch)
    native_libraries.ensure_bwrap(tmp_path)
    assert (tmp_path / "bwrap").exists()
    assert "warning" not in capsys.readouterr().out


def test_a_copy_that_was_interrupted_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    packages = tmp_path / "packages"
    packages.mkdir()
    unpack = 'mkdir -p "$3/bin" && cd "$3/bin" && printf "#!/bin/sh\\n" > bwrap && chmod +x bwrap'
    for name, says in (("apt-get", "touch bubblewrap.deb"), ("dpkg-deb", unpack)):
        (packages / name).write_text(f"#!/bin/sh\n{says}\n")
        (packages / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{packages}:/bin")
    found = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "bwrap" else found(name))

    def stop_halfway(source: Path, target: Path) -> None:
        target.write_text("#!/bin")
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(shutil, "copy", stop_halfway)
        with pytest.raises(KeyboardInterrupt):
            native_libraries.ensure_bwrap(tmp_path / "bin")
    assert not (tmp_path / "bin" / "bwrap").exists()
    (tmp_path / "bin" / "bwrap").write_text("#!/bin")  # what an earlier release left behind
    native_libraries.ensure_bwrap(tmp_path / "bin")
    assert [one.name for one in (tmp_path / "bin").iterdir()] == ["bwrap"]
    assert (tmp_path / "bin" / "bwrap").read_text() == "#!/bin/sh\n"


@pytest.mark.parametrize("fetched", [None, "broken"])
def test_set_up_goes_on_without_bwrap_and_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fetched: str | None,
):
    def fetch(folder: Path, package: str, pattern: str) -> Path | None:
        if fetched is None:
            return None
        (folder / "bwrap").write_text("not a program")
        return folder / "bwrap"

    without_bwrap(monkeypatch)
    monkeypatch.setattr(native_libraries, "fetch_with_apt", fetch)
    native_libraries.ensure_bwrap(tmp_path)
    assert "apt-get install bubblewrap" in capsys.readouterr().out
    assert not (tmp_path / "bwrap").exists()


def test_the_bwrap_of_the_environment_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    without_bwrap(monkeypatch)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "bwrap"
    program.write_text("")
    program.chmod(0o755)
    assert bubblewrap.find_bwrap(None) == str(program)


def test_a_missing_bwrap_names_the_remedies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    without_bwrap(monkeypatch)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(ValueError, match=r"make setup.*apt-get install bubblewrap"):
        bubblewrap.find_bwrap(None)


def test_a_configured_bwrap_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no-bwrap.*is not an executable file"):
        bubblewrap.find_bwrap(str(tmp_path / "no-bwrap"))


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("bwrap: No permissions to create new namespace", "security_opt"),
        ("bwrap: setting up uid map: Permission denied", "unprivileged_userns_clone"),
        ("bwrap: Unknown option --size", "0.8 or newer"),
        ("", "it printed nothing"),
    ],
)
def test_a_refusal_is_told_with_its_remedy(said: str, remedy: str):
    text = bubblewrap.explain_refusal(said)
    assert said in text
    assert remedy in text


def test_root_without_capabilities_is_told_to_be_another_user(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    def read(self: Path, **_: Any) -> str:
        return "Name:\tpython\nCapEff:\t00000000a80425fb\n"  # Docker's default for root

    monkeypatch.setattr(Path, "read_text", read)
    with pytest.raises(ValueError, match=r"root without CAP_SYS_ADMIN.*another user"):
        bubblewrap.gives_own_users(container=False)
    assert bubblewrap.gives_own_users(container=True)
