"""A rank other than 0: a process that joins rank 0 and carries out its commands until it is ended.

rank_group.py (rank 0) --Invitation on stdin, then commands--> here --> RankEngine (rank_engine.py)

It ends when its stdin closes, so it never outlives rank 0, however that ended.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import threading
import traceback
from typing import Any

import torch.distributed as dist

from agent_r1.learner.engine.interface import EngineError
from agent_r1.learner.engine.rank_group import (
    BUILD,
    Invitation,
    build_engine,
    gather_on_first,
    join,
    reach_store,
)

logger = logging.getLogger(__name__)


def serve_commands(rank: int, store: Any, invitation: Invitation) -> None:
    """Join the ranks and carry out rank 0's commands until the process is ended."""
    control = join(rank, store, invitation.config)
    engine: Any = None
    while True:
        received: list[Any] = [None]
        dist.scatter_object_list(received, None, src=0, group=control)
        method, arguments, gathers = received[0]
        if method == BUILD:
            engine = build_engine(rank, *arguments)
            continue
        result = getattr(engine, method)(*arguments)
        if gathers:
            gather_on_first(result, rank, invitation.config.ranks, control)


def _end_with_parent() -> None:
    """Wait until rank 0 closes our stdin, which it also does by dying; then end at once."""
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    """Be a worker rank."""
    # Ctrl-C reaches the whole process group; rank 0 decides when we end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    invitation: Invitation = pickle.load(sys.stdin.buffer)
    sys.path[:] = invitation.import_path
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logging.basicConfig(
        level=invitation.log_level,
        format=f"%(asctime)s %(levelname)s rank={invitation.rank} %(name)s %(message)s",
    )
    store = reach_store(invitation)
    try:
        serve_commands(invitation.rank, store, invitation)
    except Exception as exc:  # noqa: BLE001 - the boundary of a rank: rank 0 reports it
        logger.error("learner rank failed: %s", traceback.format_exc())
        text = str(exc) if isinstance(exc, EngineError) else f"{type(exc).__name__}: {exc}"
        store.set(f"error/{invitation.rank}", text)
        os._exit(1)


if __name__ == "__main__":
    main()
