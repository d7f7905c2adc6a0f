"""What the end-to-end tests share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small world's corpus and questions."""
    folder = tmp_path_factory.mktemp("world")
    script = REPOSITORY / "examples" / "tiny_world" / "generate.py"
    subprocess.run(
        [sys.executable, str(script), "--seed", "5", "--out", str(folder), "--no-sft"], check=True
    )
    return folder
