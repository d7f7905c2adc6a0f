"""`agents attach`: the command that it starts for attempts."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.cli.services.attach import _find_program
from agent_r1.config.sources import ConfigError


def test_files_of_a_command_are_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "examples").mkdir()
    script = tmp_path / "examples" / "attach.sh"
    script.write_text("#!/bin/sh\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="make the file executable"):
        _find_program(["examples/attach.sh"])
    script.chmod(0o700)
    command = ["examples/attach.sh", "examples/attach.sh", "--model", "a/b"]
    assert _find_program(command) == [str(script), str(script), "--model", "a/b"]
    with pytest.raises(ConfigError, match=r"COMMAND \(no-such-program\)"):
        _find_program(["no-such-program"])
