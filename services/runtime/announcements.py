"""How the launcher learns that a service is up: a file that the service writes.

A service writes `{announce_dir}/{name}.json` once it answers; launch/supervisor.py waits for it and
reads the URL there.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from agent_r1.runtime.files.writing import write_atomically


def write_announcement(folder: Path, name: str, url: str) -> None:
    """Write `{folder}/{name}.json`, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    announcement = {"name": name, "url": url, "pid": os.getpid()}
    write_atomically(folder / f"{name}.json", json.dumps(announcement))


def withdraw_announcement(folder: Path, name: str) -> None:
    """Remove `{folder}/{name}.json`: the service leaves on purpose and is not to be restarted."""
    (folder / f"{name}.json").unlink(missing_ok=True)
