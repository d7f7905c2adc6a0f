"""Query plans of the index of trajectories: what of them walks a table without an index."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

SMALL = ("SCAN files", "SCAN found", "SCAN CONSTANT ROW", "SCAN main.texts_config")
"""Files have a row a step, and each look compares them with the folder; `found` are the values of a
column, each once; FTS5 keeps a handful of settings."""
MATCH = "SCAN texts VIRTUAL TABLE INDEX 0:M"
"""FTS5's word for a search through its own index."""


def table_scans(database: sqlite3.Connection, statements: Iterable[str]) -> list[str]:
    """Return the steps of the plans of SELECT statements that read all rows of a large table."""
    plans = {
        step
        for statement in set(statements)
        if statement.startswith(("SELECT", "WITH"))
        # SQLite traces an infinity by a name that it does not read.
        for *_, step in database.execute(f"EXPLAIN QUERY PLAN {statement.replace('Inf', '9e999')}")
    }
    assert any("SEARCH" in step for step in plans), "these are no statements of the index"
    scans = [step for step in plans if step.startswith("SCAN") and " USING " not in step]
    return [step for step in scans if not step.startswith((*SMALL, MATCH))]
