"""The console as a service: from the folder of the runs to its pages over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from agent_r1.console.app import create_app
from agent_r1.console.runs import Runs
from agent_r1.runtime.config import ListenConfig
from agent_r1.runtime.http.serving import serve_app
from agent_r1.runtime.http.token import RunToken

NAME = "console"


def serve(
    folder: Path, listen: ListenConfig, token: RunToken | None, on_up: Callable[[str], None]
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        folder: of the runs.
        listen: address.
        token: the run token; None is for this machine alone.
        on_up: gets the URL.

    Raises:
        ValueError: the address cannot be bound, or is open to other machines without a token.
    """

    async def nothing() -> None:
        """Nothing of a console has to end in order."""

    asyncio.run(
        serve_app(
            create_app(Runs(folder), token),
            name=NAME,
            listen=listen,
            token=token,
            announce_dir=None,
            before_stop=nothing,
            on_up=on_up,
            asks_for_token=True,
        )
    )
