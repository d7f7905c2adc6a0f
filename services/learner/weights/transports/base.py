"""What every transport says of a version that it has published."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """A version that servers can take."""

    location: str
    """Of its manifest."""
    size_bytes: int
    """What a server takes that holds the version before: its delta where there is one, else the
    snapshot."""
