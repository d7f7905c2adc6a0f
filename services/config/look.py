"""What a check finds about one thing: machine.py, redis_server.py --Look--> checks.py, doctor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    """One thing that was looked at, and what came of it."""

    name: str
    found: str
    """What is there, in a few words."""
    problems: Sequence[str] = ()
    """What keeps a command from working: value, limit and remedy."""
    notes: Sequence[str] = ()
    """What may be wrong, and stops nothing."""
