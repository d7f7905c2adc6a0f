"""A tool whose code keeps the event loop is named with the line that does."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from agent_r1.tools.loop_watch import watch_loop


class Sayings:
    """What was said, and an event for each."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.said = threading.Semaphore(0)

    def __call__(self, text: str) -> None:
        self.texts.append(text)
        self.said.release()


async def test_a_line_that_blocks_is_named_and_so_is_its_end():
    sayings = Sayings()
    async with watch_loop("slow", blocked_s=0.2, say=sayings):
        assert sayings.said.acquire(timeout=10)  # keeps the loop until it is said
        assert await asyncio.to_thread(sayings.said.acquire, timeout=10)
    first, second = sayings.texts
    assert first.startswith("tools.slow has kept its event loop for 0.2 s (")
    assert Path(__file__).name in first
    assert "asyncio.to_thread" in first
    assert second == "tools.slow answers again"


async def test_waiting_blocks_nothing():
    sayings = Sayings()
    async with watch_loop("quick", blocked_s=0.2, say=sayings):
        # As long as three times the limit, in which the loop is free.
        assert not await asyncio.to_thread(sayings.said.acquire, timeout=0.6)
    assert sayings.texts == []


def test_the_watch_ends_with_its_block():
    async def run() -> None:
        async with watch_loop("t", blocked_s=0.2, say=lambda _: None):
            await asyncio.sleep(0)

    asyncio.run(run())
    deadline = time.monotonic() + 10
    while any(one.name == "loop-watch" for one in threading.enumerate()):
        assert time.monotonic() < deadline, pytest.fail("the thread goes on")
        threading.Event().wait(0.01)
