"""`agent_r1.tools.sql:SqlQuery`: the model asks a database in SQL, and can change nothing.

A session tool: each trajectory has a connection of its own, to the database that its task names.
What holds the model back is the database itself: on PostgreSQL a read-only transaction, a time
limit of the server and a cursor; on SQLite a file opened for reading and an authorizer.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from pydantic import JsonValue
from pydantic_core import to_jsonable_python

from agent_r1.runtime.imports import import_extra
from agent_r1.tools.base import Arguments, CallContext, Tool, ToolUnavailableError
from agent_r1_proto.parts import TextPart
from agent_r1_proto.tools import ToolResult

DATABASE_FIELD = "{database}"
_DATABASE_NAME = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")
_SQLITE_MAY = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
_SQLITE_CHECK_EVERY = 1000
"""Instructions of SQLite's machine between two looks at the clock."""
_LONGEST_VALUE = 1_000_000
"""Bytes of one value that SQLite may make: a query must not fill the memory."""


@dataclass
class _Session:
    url: str
    connection: Any
    """A connection of SQLAlchemy."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Calls of one turn may come together, and a connection does one thing at a time."""


class SqlQuery(Tool):
    """Answers SQL queries on PostgreSQL or SQLite.

    Args:
        url: of the database, as SQLAlchemy writes it: `postgresql+psycopg://reader@host/shop` or
            `sqlite:////data/shop.sqlite`. With `{database}` in it, each task names its own:
            `tool_context = {"database": "shop"}`.
        max_rows: most rows of an answer.
        timeout_s: longest a query may take, in seconds.
        description: what the model reads about the tool, such as the tables there are.

    Raises:
        ValueError: the URL is not one of PostgreSQL or SQLite, or SQLAlchemy is not installed.
    """

    name = "sql_query"
    parameters = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "One SELECT statement."}},
        "required": ["query"],
        "additionalProperties": False,
    }
    sessions = True

    def __init__(
        self,
        url: str,
        max_rows: int = 50,
        timeout_s: float = 5.0,
        description: str = "Runs a query on an SQL database and returns the rows.",
    ) -> None:
        self._sqlalchemy = import_extra("sqlalchemy", "sql", type(self).__name__)
        if max_rows < 1 or timeout_s <= 0:
            raise ValueError(f"max_rows ({max_rows}) and timeout_s ({timeout_s:g}) must be > 0")
        self.description = description
        self._url = url
        self._max_rows = max_rows
        self._timeout_s = timeout_s
        self._sessions: dict[str, _Session] = {}
        dialect = self._sqlalchemy.make_url(url.replace(DATABASE_FIELD, "x")).get_backend_name()
        if dialect not in ("postgresql", "sqlite"):
            raise ValueError(
                f"url is one of {dialect}, and this tool can keep only PostgreSQL and SQLite from "
                "being changed; use one of them, or write a tool of your own"
            )
        self._is_sqlite = dialect == "sqlite"

    async def open(self, rollout_id: str, tool_context: JsonValue) -> None:
        """Connect to the database of the task.

        Raises:
            ToolUnavailableError: it cannot be reached.
            ValueError: the task names no database, or the role may do more than read.
        """
        await self._open(rollout_id, self._url_of(tool_context))

    async def fork(self, rollout_id: str, fork_id: str) -> None:
        """Connect once more: what only reads leaves nothing behind in its connection."""
        await self._open(fork_id, self._sessions[rollout_id].url)

    async def _open(self, rollout_id: str, url: str) -> None:
        self._sessions[rollout_id] = _Session(url, await asyncio.to_thread(self._connect, url))

    async def close(self, rollout_id: str) -> None:
        """Close the connection."""
        session = self._sessions.pop(rollout_id, None)
        if session is not None:
            async with session.lock:
                await asyncio.to_thread(self._disconnect, session.connection)

    async def call(self, arguments: Arguments, context: CallContext) -> ToolResult:
        """Answer a query with its rows: as a table for the model, and as data for rewards.

        Raises:
            ToolUnavailableError: the database has gone away.
            ValueError: the query is wrong, would change something, or takes too long.
        """
        session = self._sessions[context.rollout_id]
        timeout_s = min(self._timeout_s, context.timeout_s)
        async with session.lock:
            columns, rows = await asyncio.to_thread(
                self._query, session.connection, str(arguments["query"]), timeout_s
            )
        shown = rows[: self._max_rows]
        data = to_jsonable_python({"columns": columns, "rows": shown}, fallback=str)
        return ToolResult(parts=[TextPart(text=self._table(columns, rows))], data=data)

    def _url_of(self, tool_context: JsonValue) -> str:
        if DATABASE_FIELD not in self._url:
            return self._url
        named = tool_context.get("database") if isinstance(tool_context, dict) else None
        if not isinstance(named, str) or not _DATABASE_NAME.match(named):
            raise ValueError(
                f"the task's tool_context ({tool_context!r:.200}) names no database for "
                f'{DATABASE_FIELD} in url; give it {{"database": "NAME"}}'
            )
        return self._url.replace(DATABASE_FIELD, named)

    def _connect(self, url: str) -> Any:
        create = self._sqlalchemy.create_engine
        try:
            if not self._is_sqlite:
                engine = create(url, poolclass=self._sqlalchemy.NullPool)
                options = {"postgresql_readonly": True, "stream_results": True}
                connection = engine.connect().execution_options(**options)
                self._require_reader(connection)
                return connection
            path = self._sqlalchemy.make_url(url).database
            connection = create("sqlite://", creator=lambda: _open_sqlite(path)).connect()
            # Only now: SQLAlchemy asks a new connection for more than that.
            connection.connection.driver_connection.set_authorizer(_authorize)
            return connection
        except self._sqlalchemy.exc.DBAPIError as exc:
            raise ToolUnavailableError(f"no connection to the database: {exc.orig}") from exc

    def _require_reader(self, connection: Any) -> None:
        """Refuse a role that can write files or run programs from a query that only reads."""
        with connection.begin():
            query = "SELECT rolsuper FROM pg_roles WHERE rolname = current_user"
            is_superuser = connection.exec_driver_sql(query).scalar()
        if is_superuser:
            connection.close()
            raise ValueError(
                "url logs in as a superuser of PostgreSQL, whose queries can write files; use a "
                "role that has SELECT on the tables and nothing else"
            )

    def _disconnect(self, connection: Any) -> None:
        engine = connection.engine
        connection.close()
        engine.dispose()

    def _query(
        self, connection: Any, query: str, timeout_s: float
    ) -> tuple[list[str], list[tuple[Any, ...]]]:
        errors = self._sqlalchemy.exc
        started = time.monotonic()
        try:
            with connection.begin() as transaction:
                self._limit_time(connection, timeout_s)
                # Without parameters the driver leaves a % in the query alone.
                plain = {"no_parameters": True}
                asked = connection.exec_driver_sql(query, execution_options=plain)
                with closing(asked) as result:
                    columns = list(result.keys())
                    rows = [tuple(row) for row in result.fetchmany(self._max_rows + 1)]
                transaction.rollback()
            return columns, rows
        except errors.DBAPIError as exc:
            if exc.connection_invalidated:
                raise ToolUnavailableError(f"the database went away: {exc.orig}") from exc
            if time.monotonic() - started >= timeout_s:
                raise ValueError(
                    f"the query took longer than {timeout_s:g} s; ask for less"
                ) from exc
            raise ValueError(str(exc.orig).partition("\n")[0]) from exc
        except errors.ResourceClosedError as exc:
            raise ValueError("the statement returns no rows; write a SELECT") from exc

    def _limit_time(self, connection: Any, timeout_s: float) -> None:
        if self._is_sqlite:
            deadline = time.monotonic() + timeout_s
            raw: sqlite3.Connection = connection.connection.driver_connection
            raw.set_progress_handler(lambda: time.monotonic() > deadline, _SQLITE_CHECK_EVERY)
        else:
            # The first query of the transaction: it cannot be made a writing one after that.
            limit = f"SELECT set_config('statement_timeout', '{round(1000 * timeout_s)}', true)"
            connection.exec_driver_sql(limit, execution_options={"stream_results": False})

    def _table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
        if not rows:
            return f"{' | '.join(columns)}\n(no rows)"
        shown = [" | ".join("NULL" if v is None else str(v) for v in row) for row in rows]
        lines = [" | ".join(columns), *shown[: self._max_rows]]
        if len(rows) > self._max_rows:
            lines.append(f"(the first {self._max_rows} rows; there are more)")
        return "\n".join(lines)


def _open_sqlite(path: str) -> sqlite3.Connection:
    """Open a file for reading."""
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, check_same_thread=False)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
    return connection


def _authorize(action: int, *_: object) -> int:
    """Allow queries and nothing else: no other file, no setting, no transaction."""
    return sqlite3.SQLITE_OK if action in _SQLITE_MAY else sqlite3.SQLITE_DENY
