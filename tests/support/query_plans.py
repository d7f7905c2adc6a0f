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
    """Return the steps of the plans of SELECT statements that read all rows of a large table.

    A list without a filter reads the index of its order, up to the end of its page. With one, that
    would read the rows that do not match too.
    """
    found: list[str] = []
    asked = [one for one in set(statements) if one.startswith(("SELECT", "WITH"))]
    assert any(" WHERE " in one for one in asked), "these are no statements of the index"
    for statement in asked:
        # SQLite traces an infinity by a name that it does not read.
        plan = database.execute(f"EXPLAIN QUERY PLAN {statement.replace('Inf', '9e999')}")
        in_order = " WHERE " not in statement and " ORDER BY " in statement
        for *_, step in plan:
            reads_all = step.startswith("SCAN") and not step.startswith((*SMALL, MATCH))
            if reads_all and not (in_order and " USING " in step):
                found.append(f"{step}: {statement}")
    return found
