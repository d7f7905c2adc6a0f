"""The name under which a service reads a stream: `StreamConsumer` first reads what it left."""

from __future__ import annotations

import hashlib
import os
import socket
import uuid
from pathlib import Path


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
