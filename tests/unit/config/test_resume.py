"""The keys that a resumed run may be given again, and the page that lists them."""

from __future__ import annotations

import re
from pathlib import Path

from agent_r1.config.resume import MAY_DIFFER, may_differ
from agent_r1.config.run import Config
from agent_r1.config.sources import known_keys

PAGE = Path(__file__).resolve().parents[3] / "docs" / "checkpoints.md"


def test_every_pattern_names_a_key_and_objective_data_and_tools_stay():
    keys = [".".join(key) for key in known_keys(Config)]
    for pattern in (p for patterns in MAY_DIFFER.values() for p in patterns):
        regex = re.escape(pattern).replace(r"\*", ".*")
        assert any(re.fullmatch(regex, key) for key in keys), pattern
    for key in ("engine.lr", "learner.algorithm", "env.system_prompt", "reward.components.f1"):
        assert not may_differ(key)
    for key in ("run.seed", "data.shuffle", "tools.search.type", "model.max_context"):
        assert not may_differ(key)


def test_the_page_lists_every_key():
    section = PAGE.read_text().partition("## What may change")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| (\w.*?) \| (`.*?) \|$", section, re.M))
    assert {name: tuple(re.findall("`(.*?)`", keys)) for name, keys in rows.items()} == MAY_DIFFER
