"""One `agent-r1` process below an actor: it ends with the actor, however the actor ends.

serve.py, learner.py --arguments--> subreaper.py --> `agent-r1 ...`. What it prints goes to the log
of the actor.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from agent_r1.launch import subreaper


class Process:
    """A process that was started; make it with `start`."""

    def __init__(self, process: asyncio.subprocess.Process, stop_timeout_s: float) -> None:
        self._process = process
        self._stop_timeout_s = stop_timeout_s

    @classmethod
    async def start(
        cls,
        arguments: Sequence[str],
        *,
        stop_timeout_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> Process:
        """Start `agent-r1 ARGUMENTS`.

        Args:
            arguments: of the command.
            stop_timeout_s: time it gets to end when it is told to, or when the actor is gone.
            environment: set on top of the actor's.
        """
        # -P: the folder that the actor is in must not shadow installed packages.
        command = [sys.executable, "-P", "-m", "agent_r1.cli.main", *arguments]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, subreaper.__file__, "--parent", str(os.getpid())),
            *("--grace-s", str(stop_timeout_s), "--"),
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
        )
        return cls(process, stop_timeout_s)

    @property
    def status(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait until it ends; return its exit status."""
        return await self._process.wait()

    async def stop(self) -> int:
        """Let it end in order, or kill it after the time it gets; return its exit status."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._stop_timeout_s):
                return await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGQUIT)  # the subreaper kills all below it
            return await self._process.wait()
