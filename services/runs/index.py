"""Index of a run's stored trajectories: store.py --> SQLite --> rows by filter, order and text.

It lies in the user's cache, never in the run folder, may be deleted at any time, and is built file
by file: what has changed since is read again. Several processes may use it at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from agent_r1.runs.record import prompt_messages
from agent_r1.runs.store import (
    FLAT,
    StoredFile,
    StoredTrajectory,
    UnreadableError,
    flat_row,
    stored_files,
)
from agent_r1.runtime.files.private import private_folder
from agent_r1.runtime.imports import MissingPackageError
from agent_r1_proto.parts import shown_text

logger = logging.getLogger(__name__)

MAX_ROWS = 100
"""Most rows of a page."""
COMPONENT = "reward/"
"""Prefix of a reward component where a column may be named, as in metrics.jsonl."""
WRITE_S = 1.0
"""Time for which other processes wait, while this one adds files."""
CACHE_KIB = 64 * 1024
"""Pages of the index in memory; with SQLite's own 2 MiB, 100,000 rows take three times as long."""
LOCK_TIMEOUT_S = 60.0
"""Longest wait for another process that is writing the index."""
SCHEMA_VERSION = 2
"""Number of the schema below; an index of another one is built anew."""
SORTED = (
    *("step", "reward", "process_reward", "advantage", "first_version", "last_version"),
    *("staleness", "num_tokens", "num_sampled", "num_turns", "num_calls", "failed_calls"),
    *("started_at", "latency_ms"),
)
"""Columns by which rows are sorted and within which ranges are asked for, besides components."""
EQUAL = ("evaluation", "set", "task_id", "group_id", "status", "reason", "trained", "rollout_id")
"""Columns of which one value is asked for, besides `tool`."""


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


_TYPES = {"text": "TEXT", "int": "INTEGER", "float": "REAL", "bool": "INTEGER"}
_INDEXED = (
    *((name,) for name in SORTED if name != "step"),
    *((name,) for name in ("set", "status", "reason", "trained", "rollout_id", "file")),
    *(("step", "group_id", "sample_index"), ("task_id", "step"), ("evaluation", "task_id")),
    ("group_id",),
)
_SCHEMA = [
    "CREATE TABLE files (id INTEGER PRIMARY KEY, name TEXT UNIQUE, size INTEGER, mtime INTEGER, "
    "damage TEXT)",
    "CREATE TABLE trajectories (id INTEGER PRIMARY KEY AUTOINCREMENT, file INTEGER, row INTEGER, "
    + ", ".join(f'"{name}" {_TYPES[kind]}' for name, kind in FLAT.items())
    + ")",
    *(
        f"CREATE INDEX by_{'_'.join(names)} ON trajectories ({_quoted(names)})"
        for names in _INDEXED
    ),
    "CREATE TABLE components (name TEXT, value REAL, id INTEGER, PRIMARY KEY (name, value, id)) "
    "WITHOUT ROWID",
    "CREATE INDEX components_of ON components (id)",
    "CREATE TABLE tools (tool TEXT, id INTEGER, PRIMARY KEY (tool, id)) WITHOUT ROWID",
    "CREATE INDEX tools_of ON tools (id)",
    # Without content: the text is in the run folder. Rows of removed files stay, and match nothing.
    "CREATE VIRTUAL TABLE texts USING fts5 (text, content = '')",
]
# Each is a word of its own: these scripts write no spaces, and FTS5 would take a line for a word.
_IDEOGRAPH = re.compile("([\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff])")

_NO_DAMAGE = frozenset(
    {
        *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL, sqlite3.SQLITE_LOCKED),
        *(sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY),
    }
)
"""Errors of the place of an index, which building it anew would not mend."""
P = ParamSpec("P")
T = TypeVar("T")

Range = tuple[float | None, float | None]
"""Lowest and highest value, both included; None: no bound."""


@dataclass(frozen=True)
class Query:
    """A question for rows: all conditions hold for each."""

    equal: Mapping[str, str | int | bool | None] = field(default_factory=dict)
    """Values of columns of EQUAL or SORTED, or of `tool`; `evaluation` None: samples of steps."""
    between: Mapping[str, Range] = field(default_factory=dict)
    """Ranges of columns of SORTED, or of components (`reward/exact_match`)."""
    text: str = ""
    """Words that prompt, turns, calls or results hold; "in quotes", one after the other."""
    sort: str = "step"
    """Column of SORTED, or a component; rows without that component are left out."""
    descending: bool = True
    limit: int = MAX_ROWS
    offset: int = 0


def cache_folder() -> Path:
    """Return the folder of the indexes, for their owner alone."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "agent-r1" / "runs"


def _mending(
    ask: Callable[Concatenate[RunIndex, P], T],
) -> Callable[Concatenate[RunIndex, P], T]:
    """Let a question build a damaged index anew, once: only a read finds damage of later pages."""

    @wraps(ask)
    def asked(self: RunIndex, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return ask(self, *args, **kwargs)
        except sqlite3.DatabaseError as exc:
            self.replace(exc)
        with self.usable():
            self.refresh()
            return ask(self, *args, **kwargs)

    return asked


class RunIndex:
    """The index of one run folder; use it in one thread at a time.

    A damaged one is built anew.

    Args:
        run_folder: of the run.
        cache: folder of the indexes; the user's by default.

    Raises:
        ValueError: here and in every method, the folder cannot be used.
    """

    def __init__(self, run_folder: Path, cache: Path | None = None) -> None:
        self._run_folder = run_folder.resolve()
        folder = cache or cache_folder()
        digest = hashlib.blake2b(str(self._run_folder).encode(), digest_size=8).hexdigest()
        self.path = folder / f"{self._run_folder.name}-{digest}.sqlite"
        """File of the index."""
        self._files: dict[str, StoredFile] = {}
        self._unreadable: dict[str, str] = {}
        with self.usable():
            private_folder(folder)
            try:
                self._db = self._connect()
            except sqlite3.DatabaseError as exc:
                self.replace(exc)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def __enter__(self) -> RunIndex:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Building

    def refresh(
        self, limit_s: float | None = None, is_first: Callable[[StoredFile], bool] | None = None
    ) -> int:
        """Read the files that are new or have changed, the newest first.

        A damaged file is logged and left out; `damaged` names it. One that cannot be read now is
        read the next time.

        Args:
            limit_s: time after which the rest waits for the next call; None: all are read.
            is_first: tells the files that are read before all others.

        Returns:
            The number of files that are left.
        """
        try:
            return self._refresh(limit_s, is_first)
        except sqlite3.DatabaseError as exc:
            self.replace(exc)
        with self.usable():
            return self._refresh(limit_s, is_first)

    def _refresh(self, limit_s: float | None, is_first: Callable[[StoredFile], bool] | None) -> int:
        started = time.monotonic()
        self._unreadable = {}
        self._files = {file.path.name: file for file in reversed(stored_files(self._run_folder))}
        stamps = {name: stamp for name, file in self._files.items() if (stamp := _stamp(file))}
        known = {name: (size, mtime) for name, size, mtime in self._all(_KNOWN_FILES)}
        waiting = [name for name in known if name not in stamps]
        waiting += [name for name, stamp in stamps.items() if known.get(name) != stamp]
        if is_first is not None:
            waiting.sort(key=lambda name: name in self._files and not is_first(self._files[name]))
        left = iter(waiting)
        taken = 0
        while taken < len(waiting) and (limit_s is None or time.monotonic() - started < limit_s):
            until = time.monotonic() + WRITE_S
            with self._writing():  # many files at once: each commit merges the words of all rows
                for name in left:
                    self._take(name, stamps.get(name))
                    taken += 1
                    if time.monotonic() > until:
                        break
        return len(waiting) - taken

    def _take(self, name: str, stamp: tuple[int, int] | None) -> None:
        """Put a file's trajectories in place of those known of it; none for a removed file."""
        known = self._one(f"{_KNOWN_FILES} WHERE name = ?", name)
        if known is not None and known[1:] == stamp:
            return  # another process was faster
        old = "SELECT id FROM trajectories WHERE file = (SELECT id FROM files WHERE name = ?)"
        for table in ("components", "tools", "trajectories"):
            self._db.execute(f"DELETE FROM {table} WHERE id IN ({old})", (name,))
        self._db.execute("DELETE FROM files WHERE name = ?", (name,))
        if stamp is None:
            return
        file = self._files[name]
        added = self._db.execute("INSERT INTO files VALUES (NULL, ?, ?, ?, '')", (name, *stamp))
        self._db.execute("SAVEPOINT file")
        try:
            for number, record in enumerate(file.records()):
                row = flat_row(record, file.evaluation)
                self._add(added.lastrowid, number, row, searched_text(record))
        except FileNotFoundError:  # the learner has removed it since
            self._db.execute("DELETE FROM files WHERE name = ?", (name,))
        except MissingPackageError:
            raise
        except UnreadableError as exc:
            self._unreadable[name] = str(exc)
            self._db.execute("ROLLBACK TO file")
            self._db.execute("DELETE FROM files WHERE name = ?", (name,))
        except _DAMAGE as exc:
            is_named = str(file.path) in str(exc)  # otherwise it is JSON of another shape
            damage = str(exc) if is_named else f"{file.path} is damaged ({exc!r}); remove it"
            logger.warning("%s", damage)
            self._db.execute("ROLLBACK TO file")
            self._db.execute("UPDATE files SET damage = ? WHERE name = ?", (damage, name))
        self._db.execute("RELEASE file")

    def _add(self, file: int | None, number: int, row: Mapping[str, Any], text: str) -> None:
        values = [row[name] for name in FLAT]
        places = ", ".join("?" * (len(values) + 2))
        insert = f"INSERT INTO trajectories (file, row, {_quoted(FLAT)}) VALUES ({places})"
        key = self._db.execute(insert, (file, number, *values)).lastrowid
        measured = [(n, v, key) for n, v in row["components"].items() if v is not None]
        self._db.executemany("INSERT INTO components VALUES (?, ?, ?)", measured)
        self._db.executemany("INSERT INTO tools VALUES (?, ?)", [(t, key) for t in row["tools"]])
        self._db.execute("INSERT INTO texts (rowid, text) VALUES (?, ?)", (key, _spaced(text)))

    # Questions

    def damaged(self) -> list[str]:
        """Return what is wrong with the files that are left out, a sentence for each."""
        known = [text for (text,) in self._all("SELECT damage FROM files WHERE damage != ''")]
        return [*self._unreadable.values(), *known]

    @_mending
    def rows(self, query: Query) -> list[dict[str, Any]]:
        """Return a page of rows: FLAT, `components`, `tools`, and `file` and `row` for `read`.

        Raises:
            ValueError: a column is unknown, or more than MAX_ROWS are asked for.
        """
        sql, values = _select(query)
        return self._rows([key for (key,) in self._all(sql, *values)])

    @_mending
    def groups(
        self, steps: Range, *, limit: int = MAX_ROWS, offset: int = 0
    ) -> list[dict[str, Any]]:
        """Return groups of samples, the newest first: task, size, and rewards of each.

        Args:
            steps: first and last step.
            limit: most groups.
            offset: groups before them.
        """
        _check_page(limit, offset)
        names = ("step", "group_id", "task_id", "set", "size", "mean", "lowest", "highest")
        sql = (
            'SELECT step, group_id, min(task_id), min("set"), count(*), avg(reward), min(reward), '
            "max(reward) FROM trajectories WHERE evaluation IS NULL AND step BETWEEN ? AND ? "
            "GROUP BY step, group_id ORDER BY step DESC, group_id DESC LIMIT ? OFFSET ?"
        )
        values = (*_bounds(steps), limit, offset)
        return [dict(zip(names, row, strict=True)) for row in self._all(sql, *values)]

    @_mending
    def flipped(
        self, before: str, after: str, *, limit: int = MAX_ROWS, offset: int = 0
    ) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return the questions whose reward differs between two evaluations, the worst first.

        Args:
            before: name of an evaluation.
            after: name of another one.
            limit: most pairs.
            offset: pairs before them.

        Returns:
            The rows of each question, as `rows` returns them.
        """
        _check_page(limit, offset)
        pairs = self._all(
            "SELECT a.id, b.id FROM trajectories a JOIN trajectories b ON b.evaluation = ? AND "
            'b.task_id = a.task_id AND b."set" IS a."set" AND '
            "b.sample_index = a.sample_index AND b.reward <> a.reward "
            "WHERE a.evaluation = ? ORDER BY b.reward - a.reward, a.id LIMIT ? OFFSET ?",
            *(after, before, limit, offset),
        )
        found = iter(self._rows([key for pair in pairs for key in pair]))
        return list(zip(found, found, strict=True))

    @_mending
    def values(self, column: str) -> list[Any]:
        """Return the values that a column of EQUAL has, or the names of tools and components.

        Args:
            column: of EQUAL, or `tool`, or `component`.

        Raises:
            ValueError: it is unknown.
        """
        if column in ("tool", "component"):
            sql = _DISTINCT.format("tool" if column == "tool" else "name", f"{column}s")
        else:
            _require(column, EQUAL)
            sql = _DISTINCT.format(f'"{column}"', "trajectories")
        return [value for (value,) in self._all(sql)]

    def read(self, row: Mapping[str, Any]) -> StoredTrajectory:
        """Return the trajectory of a row.

        Raises:
            ValueError: its file is gone or damaged.
        """
        try:
            return self._files[row["file"]].read(row["row"])
        except (KeyError, FileNotFoundError) as exc:
            raise ValueError(
                f"{row['file']} is no longer in {self._run_folder}; look again"
            ) from exc

    def _rows(self, keys: Sequence[int]) -> list[dict[str, Any]]:
        """Return the rows of some keys, in their order."""
        if not keys:
            return []
        inside = f"WHERE t.id IN ({', '.join('?' * len(keys))})"
        components, tools = defaultdict[int, dict[str, float]](dict), defaultdict[int, list](list)
        for key, name, value in self._all(
            f"SELECT t.id, t.name, t.value FROM components t {inside}", *keys
        ):
            components[key][name] = value
        for key, tool in self._all(f"SELECT t.id, t.tool FROM tools t {inside}", *keys):
            tools[key].append(tool)
        names = ("id", "file", "row", *FLAT)
        found: dict[int, dict[str, Any]] = {}
        for values in self._all(f"{_SELECT} {inside}", *keys):
            row = dict(zip(names, values, strict=True))
            row |= {"components": components[row["id"]], "tools": tools[row["id"]]}
            found[row["id"]] = row | {"trained": bool(row["trained"])}
        return [found[key] for key in keys]

    # SQLite

    def replace(self, damage: sqlite3.DatabaseError) -> None:
        """Open an empty index in the place of a damaged one.

        Raises:
            ValueError: it is not damaged: its folder cannot be used.
        """
        with self.usable():
            code = getattr(damage, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
            if isinstance(damage, sqlite3.ProgrammingError) or code & 0xFF in _NO_DAMAGE:
                raise damage
            logger.warning("the index is damaged and built anew path=%s: %s", self.path, damage)
            self._db.close()
            for suffix in ("", "-wal", "-shm"):
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
            self._db = self._connect()

    @contextmanager
    def usable(self) -> Iterator[None]:
        """Say what to do where the folder of the index cannot be used.

        Raises:
            ValueError: it cannot.
        """
        try:
            yield
        except sqlite3.ProgrammingError:
            raise  # our own mistake
        except (sqlite3.DatabaseError, OSError) as exc:
            raise ValueError(
                f"the index {self.path} cannot be used ({exc}); free space there, or set "
                "XDG_CACHE_HOME to a folder on this machine that you can write to"
            ) from exc

    def _connect(self) -> sqlite3.Connection:
        self._db = sqlite3.connect(
            self.path, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        with self.path.with_name(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # for this alone SQLite does not wait
            self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        with self._writing():
            if self._one("PRAGMA user_version") == (SCHEMA_VERSION,):
                return self._db
            for name in ("files", "trajectories", "components", "tools", "texts"):
                self._db.execute(f"DROP TABLE IF EXISTS {name}")
            for statement in _SCHEMA:
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        return self._db

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with suppress(sqlite3.Error):  # a full disk has ended it already
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _all(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._db.execute(sql, values).fetchall()

    def _one(self, sql: str, *values: Any) -> tuple[Any, ...] | None:
        return self._db.execute(sql, values).fetchone()


# Values that are missing, of another type, or larger than SQLite's; not a damaged index.
_DAMAGE = (ValueError, TypeError, LookupError, AttributeError, OverflowError)
_DAMAGE += (sqlite3.InterfaceError, sqlite3.ProgrammingError)
_KNOWN_FILES = "SELECT name, size, mtime FROM files"
# From value to value: DISTINCT would read every row of the index.
_DISTINCT = (
    "WITH RECURSIVE found (seen) AS (SELECT min({0}) FROM {1} UNION ALL "
    "SELECT (SELECT min({0}) FROM {1} WHERE {0} > seen) FROM found WHERE seen IS NOT NULL) "
    "SELECT seen FROM found WHERE seen IS NOT NULL"
)
_ROW = "t.id, f.name, t.row, " + ", ".join(f't."{name}"' for name in FLAT)
_SELECT = f"SELECT {_ROW} FROM trajectories t JOIN files f ON f.id = t.file"


def _select(query: Query) -> tuple[str, list[Any]]:
    """Return the statement that finds the keys of a page, and its values."""
    _check_page(query.limit, query.offset)
    where: list[str] = []
    values: list[Any] = []

    def add(condition: str, *of_it: Any) -> None:
        where.append(condition)
        values.extend(of_it)

    order, source = f't."{query.sort}"', "SELECT t.id FROM trajectories t"
    if query.sort.startswith(COMPONENT):
        # In this order: the component's values are read in theirs.
        source = "SELECT t.id FROM components c CROSS JOIN trajectories t ON t.id = c.id"
        order = "c.value"
        add("c.name = ?", query.sort.removeprefix(COMPONENT))
    else:
        _require(query.sort, SORTED)
    for column, value in query.equal.items():
        if column == "tool":
            add("t.id IN (SELECT id FROM tools WHERE tool = ?)", value)
        else:
            _require(column, (*EQUAL, *SORTED))
            add(f't."{column}" IS ?', value)
    for column, bounds in query.between.items():
        if column.startswith(COMPONENT):
            condition = (
                "t.id IN (SELECT id FROM components WHERE name = ? AND value BETWEEN ? AND ?)"
            )
            add(condition, column.removeprefix(COMPONENT), *_bounds(bounds))
        else:
            _require(column, SORTED)
            add(f't."{column}" BETWEEN ? AND ?', *_bounds(bounds))
    if query.text.strip():
        add("t.id IN (SELECT rowid FROM texts WHERE texts MATCH ?)", _match(query.text))
    direction = "DESC" if query.descending else "ASC"
    conditions = f" WHERE {' AND '.join(where)}" if where else ""
    page = f" ORDER BY {order} {direction}, t.id {direction} LIMIT ? OFFSET ?"
    return source + conditions + page, [*values, query.limit, query.offset]


def _check_page(limit: int, offset: int) -> None:
    if not 0 < limit <= MAX_ROWS or offset < 0:
        raise ValueError(
            f"a page of {limit} rows from row {offset} must have 1 to {MAX_ROWS} rows, from row 0 "
            "on; ask for the next page"
        )


def _require(column: str, known: Sequence[str]) -> None:
    if column not in known:
        raise ValueError(
            f"{column!r} is no column to ask by; name one of {', '.join(known)}, or a component as "
            f"{COMPONENT}NAME where an order or a range is asked for"
        )


def _bounds(bounds: Range) -> tuple[float, float]:
    low, high = bounds
    return -float("inf") if low is None else low, float("inf") if high is None else high


def _match(text: str) -> str:
    """Return what a person looks for in the syntax of FTS5: words, and phrases in quotes."""
    words = text.replace("\0", " ")
    phrases = [a or b for a, b in re.findall(r'"([^"]+)"|([^\s"]+)', words)]
    return " ".join(f'"{_spaced(phrase)}"' for phrase in phrases) or '""'


def _spaced(text: str) -> str:
    return _IDEOGRAPH.sub(r" \1 ", text)


def searched_text(record: Mapping[str, Any]) -> str:
    """Return what a search looks through: prompt, turns, calls, results, the extracted answer."""
    found = [record["task_id"], record["reason"], (record.get("reward") or {}).get("prediction")]
    found += [message.shown() for message in prompt_messages(record)]
    for turn in record["turns"]:
        found.append(turn["text"])
        for call in turn["calls"]:
            found += [call["tool"], json.dumps(call["arguments"], ensure_ascii=False)]
            found += [call.get("text", ""), call.get("error", "")]
        for reply in turn.get("replies") or ():
            found.append(shown_text(reply["content"]))
    return "\n".join(filter(None, found))


def _stamp(file: StoredFile) -> tuple[int, int] | None:
    try:
        status = file.path.stat()
    except FileNotFoundError:  # the learner has removed it since
        return None
    return status.st_size, status.st_mtime_ns
