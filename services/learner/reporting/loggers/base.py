"""Interface of a logger: what it is told of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunFacts:
    """A run, as the services that keep many runs show it."""

    id: str
    """`run.id`."""
    folder: Path
    """Run folder."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Configuration of the run, without secrets."""

    @property
    def unique_id(self) -> str:
        """A name that a resumed run has again, and no other run: many are called "run"."""
        digest = hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()[:8]
        return f"{self.id}-{digest}"
