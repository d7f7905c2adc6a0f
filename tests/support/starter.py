"""The folder that `agent-r1 init` writes, for tests that use it in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agent_r1.cli.main import main


def write_starter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the folder; its module is imported anew, and is forgotten after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.delitem(sys.modules, "task", raising=False)
    folder = tmp_path / "my_task"
    assert main(["init", str(folder)]) == 0
    return folder
