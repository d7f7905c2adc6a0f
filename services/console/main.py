"""The console as a service: from a folder of runs, or a learner, to its pages over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from agent_r1.console.app import create_app
from agent_r1.console.runs import Runs
from agent_r1.runs.remote import Mirror
from agent_r1.runtime.config import ListenConfig
from agent_r1.runtime.http.serving import serve_app
from agent_r1.runtime.http.token import RunToken

NAME = "console"


def serve(
    source: Path | Mirror,
    listen: ListenConfig,
    token: RunToken | None,
    on_up: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        source: folder of the runs, or the mirror of a learner's.
        listen: address.
        token: the run token; None is for this machine alone.
        on_up: gets the URL.

    Raises:
        ValueError: the address cannot be bound, or is open to other machines without a token.
    """

    async def nothing() -> None:
        """Nothing of a console has to end in order."""

    mirror = source if isinstance(source, Mirror) else None
    folder = source if isinstance(source, Path) else source.folder
    app = create_app(Runs(folder, mirror), token)
    serving = serve_app(
        app,
        name=NAME,
        listen=listen,
        token=token,
        announce_dir=None,
        before_stop=nothing,
        on_up=on_up,
        asks_for_token=True,
    )
    with nullcontext() if mirror is None else mirror.following():
        asyncio.run(serving)
