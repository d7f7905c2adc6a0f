"""Files in which services announce themselves to the launcher, and names that stay with them.

A service writes `{announce_dir}/{name}.json` once it answers; launch/supervisor.py waits for it and
reads the URL there.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import uuid
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


def make_consumer_name(service: str, announce_dir: Path | None) -> str:
    """Return a name that no other living process of the run has.

    A launcher gives each of its services a folder of its own, which stays when it restarts one. So
    a service that died finds what it held at once, before anything new.

    Args:
        service: begins the name.
        announce_dir: folder of the service; None where no launcher restarts it.
    """
    host = socket.gethostname()
    if announce_dir is None:
        return f"{service}-{host}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    folder = hashlib.sha256(str(announce_dir.resolve()).encode()).hexdigest()[:12]
    return f"{service}-{host}-{folder}"
