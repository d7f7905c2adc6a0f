"""What is tried on a GPU in a process of its own; without one, each stage is made to fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agent_r1.setup import gpu_probe
from agent_r1.setup.gpu_probe import probe

HERE = Path(sys.executable)


def program(folder: Path, *lines: str) -> Path:
    """Return a stand-in for Python, which does what a script says."""
    path = folder / "python"
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    path.chmod(0o755)
    return path


def test_the_torch_of_this_environment_is_tried_in_another_process() -> None:
    import torch

    found = probe(HERE)
    assert found.facts["torch"] == {"version": torch.__version__, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        assert found.error == ""
    else:
        assert found.failed == "cuda"
        assert "CUDA" in found.error or "NVIDIA" in found.error


def test_the_last_line_says_why_a_stage_failed(tmp_path: Path) -> None:
    found = probe(
        program(
            tmp_path,
            """echo '{"torch": {"version": "2.13.0", "cuda": "13.0"}}'""",
            "echo 'RuntimeError: The NVIDIA driver on your system is too old' >&2; exit 1",
        )
    )
    assert found.failed == "cuda"
    assert found.error == "RuntimeError: The NVIDIA driver on your system is too old"
    assert found.facts["torch"]["cuda"] == "13.0"


def test_a_driver_that_ends_the_process_is_a_failure(tmp_path: Path) -> None:
    found = probe(program(tmp_path, "kill -SEGV $$"))
    assert found.failed == "torch"
    assert found.error == "exit status -11"


def test_a_driver_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_probe, "PROBE_TIMEOUT_S", 0.5)
    found = probe(program(tmp_path, """echo '{"torch": {}}'; exec sleep 60"""))
    assert found.failed == "cuda"
    assert "nothing happened for" in found.error


def test_an_interpreter_that_is_missing_is_a_failure(tmp_path: Path) -> None:
    assert probe(tmp_path / "python").failed == "torch"
