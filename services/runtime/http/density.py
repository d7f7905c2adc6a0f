"""Limits on what a JSON body holds: its size in bytes says little about the time to read it.

`guard.py` asks before a body is read, because reading one holds the event loop to its end. Eight
MiB of `[],[],…` take seconds, and so does a message about millions of wrong values.
"""

from __future__ import annotations

MAX_VALUES = 250_000
"""Most values in one body, by its commas; the longest list of honest callers has the tokens of an
interaction."""
MAX_CONTAINERS = 50_000
"""Most lists and objects in one body, which cost ten times a number."""
MAX_KEYS = 100_000
"""Most keys in one body."""


def density_problem(body: bytes) -> str | None:
    """Return which limit a body breaks; None where it breaks none."""
    if _broken_limit(body) is None:  # texts hold such characters too, so that this is no less
        return None
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    texts = bare.count(b'"') // 2
    if texts > MAX_VALUES + MAX_KEYS:
        return f"{texts} texts; the limit is {MAX_VALUES} values"
    return _broken_limit(b"".join(bare.split(b'"')[::2]))


def _broken_limit(body: bytes) -> str | None:
    found = {
        "values": (body.count(b","), MAX_VALUES),
        "lists and objects": (body.count(b"[") + body.count(b"{"), MAX_CONTAINERS),
        "keys": (body.count(b":"), MAX_KEYS),
    }
    for name, (count, limit) in found.items():
        if count > limit:
            return f"{count} {name}; the limit is {limit}"
    return None
