"""Troubles of a Redis, in words: not there, frozen, read-only, full, a wrong password.

The launcher's watch, checks before a start and the commands that read a live run ask here.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Any, cast

from redis import exceptions as redis_errors
from redis.asyncio import Redis

LOOK_TIMEOUT_S = 2.0
CLOSE_TIMEOUT_S = 2.0
_PROBE_LIFE_MS = 1


@dataclass(frozen=True)
class RedisTrouble:
    """Reason why a Redis is of no use now."""

    kind: str
    what: str
    """A clause without its subject, which is the Redis."""
    remedy: str

    def of(self, subject: str) -> str:
        """Return the whole sentence; `subject` names the Redis."""
        return f"{subject} {self.what}; {self.remedy}"


_START = "start Redis there, or correct redis.url"
_BY_CODE = {
    "READONLY": RedisTrouble(
        "read_only",
        "is read-only: it is the replica of another server",
        "make it the primary (`REPLICAOF NO ONE`), or let redis.url name the primary",
    ),
    "NOREPLICAS": RedisTrouble(
        "no_replicas",
        "takes no writes: too few replicas are in reach (min-replicas-to-write)",
        "bring its replicas back, or lower min-replicas-to-write there",
    ),
    "OOM": RedisTrouble(
        "full",
        "is full: it has used all of its maxmemory",
        "raise maxmemory there, or delete what other programs keep in it",
    ),
    "MISCONF": RedisTrouble(
        "not_saving",
        "takes no writes: it cannot save its data to its disk",
        "free space there, or correct its `dir` (its log says more)",
    ),
    "LOADING": RedisTrouble("loading", "is loading its data", "wait until it has"),
    "MASTERDOWN": RedisTrouble(
        "read_only", "is a replica that has lost its primary", "bring the primary back"
    ),
    "CLUSTERDOWN": RedisTrouble(
        "cluster", "belongs to a cluster that is down", "use one Redis server that is no cluster"
    ),
    "MOVED": RedisTrouble(
        "cluster", "is a node of a cluster", "use one Redis server that is no cluster"
    ),
    "NOPERM": RedisTrouble(
        "no_permission",
        "does not let this user write keys that begin with agent_r1:",
        "give the user these keys and all commands (`ACL SETUSER`), or name another user",
    ),
}
_PASSWORD = RedisTrouble(
    "password",
    "refuses the password, and does not answer without the right one",
    "give the server the one that the run has (`CONFIG SET requirepass`), or end the run, set the "
    "right one (AGENT_R1_REDIS_PASSWORD, redis.password_file or the file's URL) and resume: a "
    "process keeps the one that it was started with",
)
_CROWDED = RedisTrouble(
    "crowded",
    "takes no more connections: it has as many as its maxclients",
    "raise maxclients there, or end some of its clients",
)
_CODE = re.compile(rf"(?:^|-|error: [('\"]*)({'|'.join(_BY_CODE)})\b")
"""Place of an error's code: first, or behind what a script or a pipeline says of it."""
PASSING = frozenset({"READONLY", "NOREPLICAS", "OOM", "MISCONF", "LOADING", "MASTERDOWN"}) | {
    "CLUSTERDOWN"
}
"""Codes that a server may stop giving while a run waits: nothing is wrong with the request."""
NOT_REDIS = (redis_errors.InvalidResponse, AttributeError, TypeError, ValueError)
"""Errors that the client raises at answers of something else."""


def error_code(exc: Exception) -> str | None:
    """Return the code that Redis gave an error; None for one that is not in the table."""
    found = _CODE.search(str(exc))
    if found is not None:
        return found[1]
    kinds: dict[type[Exception], str] = {
        redis_errors.ReadOnlyError: "READONLY",
        redis_errors.OutOfMemoryError: "OOM",
        redis_errors.BusyLoadingError: "LOADING",
        redis_errors.NoPermissionError: "NOPERM",
    }
    return next((code for kind, code in kinds.items() if isinstance(exc, kind)), None)


def trouble_of(exc: Exception) -> RedisTrouble:
    """Return what an error of a Redis client means."""
    code = error_code(exc)
    if code is not None:
        return _BY_CODE[code]
    if "max number of clients" in str(exc):
        return _CROWDED
    if isinstance(exc, redis_errors.AuthenticationError):
        return _PASSWORD
    if isinstance(exc, NOT_REDIS):
        what = f"is not Redis: something else answers there ({_short(exc)})"
        return RedisTrouble("not_redis", what, "correct redis.url")
    if isinstance(exc, (TimeoutError, redis_errors.TimeoutError)):
        return RedisTrouble(
            "silent",
            "does not answer: it takes connections, and is frozen or busy",
            "look at its process (`kill -CONT` continues a stopped one) and at its machine",
        )
    if isinstance(exc, (redis_errors.ConnectionError, OSError)):
        return RedisTrouble("away", f"does not answer: no connection ({_short(exc)})", _START)
    return RedisTrouble("refuses", f"refuses to write ({_short(exc)})", "read its log")


def _short(exc: Exception) -> str:
    return " ".join(str(exc).split())[:120] or type(exc).__name__


async def find_trouble(
    url: str, key: str, timeout_s: float = LOOK_TIMEOUT_S
) -> RedisTrouble | None:
    """Write a key that expires at once; return what keeps a run from working, None if it can.

    Args:
        url: of the Redis.
        key: that is written: `Keys.probe` of the run.
        timeout_s: longest wait.
    """
    client: Any = cast(Any, Redis).from_url(url)
    try:
        # One limit over all of it: the client itself tries again.
        async with asyncio.timeout(timeout_s):
            await client.set(key, b"", px=_PROBE_LIFE_MS)
    except (redis_errors.RedisError, OSError, *NOT_REDIS) as exc:
        return trouble_of(exc)
    finally:
        await close_client(client)
    return None


async def close_client(client: Any) -> None:
    """Close a Redis client, and keep a cancellation waiting meanwhile.

    redis-py closes each connection in a task of its own. A cancellation that comes before these
    have begun would leave the connections open.
    """
    closing = asyncio.ensure_future(client.aclose())
    try:
        await asyncio.wait({closing})
    except asyncio.CancelledError:
        await asyncio.wait({closing}, timeout=CLOSE_TIMEOUT_S)
        raise
    closing.result()
