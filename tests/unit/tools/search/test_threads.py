"""ThreadedBackend: a blocking index searches in threads and leaves the event loop free."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

from agent_r1.tools.search.backend import Found, Hit
from agent_r1.tools.search.corpus import Passage
from agent_r1.tools.search.tantivy_bm25 import ThreadedBackend

TIMEOUT_S = 10.0
HIT = Hit(Passage(id="p", title="t", text="x"), 1.0)


class BlockingIndex:
    fingerprint = "abc"

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        self.entered.set()
        assert self.gate.wait(TIMEOUT_S)
        return [[HIT] * top_k for _ in queries]


async def test_searching_leaves_the_event_loop_free_and_closing_waits_for_it():
    index: Any = BlockingIndex()
    backend = ThreadedBackend(index)
    await backend.start()
    task = asyncio.create_task(backend.search(["a", "b"], 2, lambda: TIMEOUT_S))
    assert await asyncio.to_thread(index.entered.wait, TIMEOUT_S)
    await asyncio.sleep(0)  # the loop turns while the thread searches
    assert not task.done()
    index.gate.set()
    assert await asyncio.wait_for(task, TIMEOUT_S) == [Found([HIT, HIT])] * 2
    await backend.close()
    assert backend.fingerprint == "abc"
