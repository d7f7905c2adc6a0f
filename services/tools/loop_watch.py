"""Watch over the event loop of a tool's process: says whose code keeps it.

app.py watches while the tool runs; what is found goes to standard error behind `NOTICE_PREFIX`,
which the launcher shows in the terminal.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from agent_r1.runtime.exit_status import NOTICE_PREFIX
from agent_r1.runtime.user_code import line_of_stack

BLOCKED_S = 5.0
"""Longest that the loop may be kept before it is said."""
BEATS = 10
"""Looks at the loop within that time."""


def _say(text: str) -> None:
    print(f"{NOTICE_PREFIX}{text}", file=sys.stderr, flush=True)  # noqa: T201 - for the launcher


@asynccontextmanager
async def watch_loop(
    tool: str, *, blocked_s: float = BLOCKED_S, say: Callable[[str], None] = _say
) -> AsyncIterator[None]:
    """Say when this thread's event loop stands still, and when it goes on, while the block lasts.

    Args:
        tool: its name, for the message.
        blocked_s: longest that the loop may be kept.
        say: is told, from another thread.
    """
    watch = _Watch(tool, blocked_s, say)
    beating = asyncio.create_task(watch.beat())
    thread = threading.Thread(target=watch.run, name="loop-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        watch.over.set()
        beating.cancel()


class _Watch:
    def __init__(self, tool: str, blocked_s: float, say: Callable[[str], None]) -> None:
        self.over = threading.Event()
        self._tool, self._say = tool, say
        self._blocked_s, self._beat_s = blocked_s, blocked_s / BEATS
        self._loop_thread = threading.get_ident()
        self._beats = 0

    async def beat(self) -> None:
        while True:
            self._beats += 1
            await asyncio.sleep(self._beat_s)

    def run(self) -> None:
        """Look again and again; looks are counted, since the whole process may be suspended."""
        seen = missed = 0
        while not self.over.wait(self._beat_s):
            if seen == self._beats:
                missed += 1
                if missed == BEATS:
                    self._say(self._blocked())
                continue
            if missed >= BEATS:
                self._say(f"tools.{self._tool} answers again")
            seen, missed = self._beats, 0

    def _blocked(self) -> str:
        frame = sys._current_frames().get(self._loop_thread)
        where = "" if frame is None else line_of_stack(frame)
        return (
            f"tools.{self._tool} has kept its event loop for {self._blocked_s:g} s{where}: it "
            "answers nothing meanwhile, and counts as gone when its announcement expires; move "
            "blocking work into asyncio.to_thread"
        )
