"""The SQL tool on a real PostgreSQL: a server of the test's own, with Debian's programs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from agent_r1.tools.base import CallContext, ToolUnavailableError
from agent_r1.tools.sql import SqlQuery
from tests.support.postgres import Postgres, find_program, postgres_server

pytestmark = pytest.mark.skipif(
    find_program("initdb") is None, reason="needs Debian's package postgresql"
)
CONTEXT = CallContext(rollout_id="r", turn=0, tool_context=None, timeout_s=60.0)


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with postgres_server() as running:
        running.sql(
            "CREATE TABLE city (name text, people int);"
            "INSERT INTO city SELECT 'c' || i, i FROM generate_series(1, 20) i;"
            "CREATE SEQUENCE counter; CREATE ROLE reader LOGIN;"
            # It may write: what keeps it from that must not be its rights alone.
            "GRANT ALL ON city, counter TO reader; GRANT ALL ON SCHEMA public TO reader"
        )
        yield running


@pytest.fixture
async def tool(server: Postgres) -> AsyncIterator[SqlQuery]:
    made = SqlQuery(server.url("reader"), max_rows=2, timeout_s=2.0)
    await made.open("r", None)
    yield made
    await made.close("r")


async def ask(tool: SqlQuery, query: str) -> str:
    return (await tool.call({"query": query}, CONTEXT)).text()


async def test_rows_come_with_their_types_and_a_limit(tool: SqlQuery):
    text = await ask(tool, "SELECT * FROM city ORDER BY people")
    assert text == "name | people\nc1 | 1\nc2 | 2\n(the first 2 rows; there are more)"
    assert await ask(tool, "SELECT name FROM city WHERE name LIKE 'c20%'") == "name\nc20"
    result = await tool.call({"query": "SELECT 1.5::numeric AS n, ARRAY[1, 2] AS a"}, CONTEXT)
    assert result.data == {"columns": ["n", "a"], "rows": [["1.5", [1, 2]]]}
    # A result that would fill the memory is never read.
    await ask(tool, "SELECT repeat('x', 1000) FROM generate_series(1, 100000)")


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM city",
        "SELECT 1; DELETE FROM city",
        "COMMIT; DELETE FROM city",
        "COMMIT",
        "SET TRANSACTION READ WRITE",
        "SET default_transaction_read_only = off",
        "SELECT set_config('transaction_read_only', 'off', false)",
        "WITH gone AS (DELETE FROM city RETURNING 1) SELECT * FROM gone",
        "SELECT nextval('counter')",
        "DO $$ BEGIN COMMIT; DELETE FROM city; END $$",
        "COPY city TO '/tmp/city.txt'",
        "SELECT 1 FROM nowhere",
        "",
    ],
)
async def test_a_role_that_may_write_cannot(server: Postgres, tool: SqlQuery, query: str):
    with pytest.raises(ValueError, match=r"\w"):
        await ask(tool, query)
    assert await ask(tool, "SELECT count(*) AS n FROM city") == "n\n20"
    assert server.sql("SELECT count(*), (SELECT is_called FROM counter) FROM city") == "20|f"


@pytest.mark.parametrize(
    "query",
    ["SELECT pg_sleep(60)", "SELECT set_config('statement_timeout', '0', false), pg_sleep(60)"],
)
async def test_the_server_ends_a_query_that_takes_too_long(
    server: Postgres, tool: SqlQuery, query: str
):
    with pytest.raises(ValueError, match="took longer than 2 s"):
        await ask(tool, query)
    others = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND pid <> "
    assert server.sql(f"{others} pg_backend_pid()") == "0"


async def test_a_superuser_is_refused(server: Postgres):
    with pytest.raises(ValueError, match="superuser"):
        await SqlQuery(server.url()).open("r", None)


async def test_a_server_that_is_away_is_an_outage_and_one_that_is_back_answers(
    server: Postgres, tool: SqlQuery
):
    assert await ask(tool, "SELECT 1 AS one") == "one\n1"
    server.stop()
    try:
        with pytest.raises(ToolUnavailableError, match="went away"):
            await ask(tool, "SELECT 1 AS one")
        with pytest.raises(ToolUnavailableError, match="no connection"):
            await SqlQuery(server.url("reader")).open("other", None)
    finally:
        server.start()
    assert await ask(tool, "SELECT 1 AS one") == "one\n1"
