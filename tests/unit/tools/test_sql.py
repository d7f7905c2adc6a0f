"""The SQL tool on SQLite: what it answers, and what no query can do."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue

from agent_r1.tools.base import CallContext, ToolUnavailableError
from agent_r1.tools.sql import SqlQuery

CONTEXT = CallContext(rollout_id="r", turn=0, tool_context=None, timeout_s=60.0)


def make_database(path: Path, *names: str) -> Path:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE city (name TEXT, people INTEGER)")
    connection.executemany("INSERT INTO city VALUES (?, ?)", [(n, len(n)) for n in names])
    connection.commit()
    connection.close()
    return path


async def ask(tool: SqlQuery, query: str) -> str:
    result = await tool.call({"query": query}, CONTEXT)
    return result.text()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return make_database(tmp_path / "shop.sqlite", "Rome", "Paris", "Oslo")


@pytest.fixture
async def tool(file: Path) -> Any:
    made = SqlQuery(f"sqlite:///{file}", max_rows=2, timeout_s=0.5)
    await made.open("r", None)
    yield made
    await made.close("r")


async def test_rows_are_a_table_for_the_model_and_data_for_rewards(tool: SqlQuery):
    result = await tool.call({"query": "SELECT name, people FROM city ORDER BY name"}, CONTEXT)
    assert result.text() == "name | people\nOslo | 4\nParis | 5\n(the first 2 rows; there are more)"
    assert result.data == {"columns": ["name", "people"], "rows": [["Oslo", 4], ["Paris", 5]]}
    assert await ask(tool, "SELECT name FROM city WHERE name LIKE 'R%'") == "name\nRome"
    assert await ask(tool, "SELECT NULL AS x WHERE 1 = 0") == "x\n(no rows)"


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM city",
        "INSERT INTO city VALUES ('x', 1)",
        "DROP TABLE city",
        "PRAGMA query_only = OFF",
        "ATTACH DATABASE '/tmp/other.sqlite' AS other",
        "VACUUM INTO '/tmp/copy.sqlite'",
        "SELECT 1; DELETE FROM city",
        "WITH x AS (SELECT 1) DELETE FROM city",
        "SELECT load_extension('x')",
        "SELECT length(hex(zeroblob(100000000)))",
        "SELECT * FROM gone",
        "nonsense",
        "",
    ],
)
async def test_nothing_but_a_query_is_answered_and_nothing_changes(tool: SqlQuery, query: str):
    with pytest.raises(ValueError, match=r"\w"):
        await ask(tool, query)
    assert await ask(tool, "SELECT count(*) AS n FROM city") == "n\n3"


async def test_a_query_that_takes_too_long_is_ended(tool: SqlQuery):
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"
    with pytest.raises(ValueError, match=r"took longer than 0\.5 s"):
        await ask(tool, endless)
    assert await ask(tool, "SELECT 1 AS one") == "one\n1"


async def test_each_task_names_its_database(tmp_path: Path):
    for name in ("north", "south"):
        make_database(tmp_path / f"{name}.sqlite", name)
    tool = SqlQuery(f"sqlite:///{tmp_path}/{{database}}.sqlite")
    for name in ("north", "south"):
        await tool.open("r", {"database": name})
        assert await ask(tool, "SELECT name FROM city") == f"name\n{name}"
        await tool.close("r")
    wrongs: list[JsonValue] = [None, {}, {"database": "../north"}, {"database": 3}]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="names no database"):
            await tool.open("r", wrong)
    with pytest.raises(ToolUnavailableError, match="unable to open database file"):
        await tool.open("r", {"database": "gone"})


def test_other_databases_are_refused():
    with pytest.raises(ValueError, match="can keep only PostgreSQL and SQLite"):
        SqlQuery("mysql://host/db")
    with pytest.raises(ValueError, match=r"max_rows \(0\)"):
        SqlQuery("sqlite:///x.sqlite", max_rows=0)


async def test_another_branch_has_a_connection_of_its_own_to_the_same_database(tmp_path: Path):
    make_database(tmp_path / "north.sqlite", "Oslo")
    tool = SqlQuery(f"sqlite:///{tmp_path}/{{database}}.sqlite")
    await tool.open("first", {"database": "north"})
    await tool.fork("first", "r")
    await tool.close("first")
    assert await ask(tool, "SELECT name FROM city") == "name\nOslo"
    await tool.close("r")
