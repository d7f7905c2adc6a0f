"""Run files of the examples: their keys fit together."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.config.checks import _table_problems
from agent_r1.config.run import load_config

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / "examples").rglob("run.toml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.parent.relative_to(ROOT)))
def test_the_tables_of_an_example_allow_a_run(file: Path):
    # What an agent is shown may not be installed here.
    options = ["agent.show=[]"] if "\n[agent]\n" in file.read_text(encoding="utf-8") else []
    assert list(_table_problems(load_config(file, options).config, "train")) == []
