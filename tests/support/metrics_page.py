"""The names that docs/metrics-file.md explains."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics-file.md"
OF_USERS = re.compile(r"^(reward|calls|eval)/")
"""Areas in which users' components, tools and sets have names."""


def explained_names() -> set[str]:
    """Return the names in the first column of the page's tables."""
    cells = re.findall(r"^\| (`.*?) \|", PAGE.read_text(), re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def unexplained(names: set[str]) -> set[str]:
    """Return those of the names in a line of metrics.jsonl that the page does not have."""
    return {name for name in names - explained_names() if not OF_USERS.match(name)}
