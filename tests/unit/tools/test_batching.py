"""BatchedSearch: batches form while the thread is busy, equal queries share one search."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from agent_r1.tools.backends.base import Hit
from agent_r1.tools.batching import BatchedSearch
from agent_r1.tools.corpus import Passage

TIMEOUT_S = 10.0


def hit(query: str, top_k: int) -> Hit:
    return Hit(Passage(id=query, title=query, text=f"top {top_k}"), 1.0)


class FakeBackend:
    """Records every batch; waits for `gate` in the thread."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[str], int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        self.batches.append((list(queries), top_k))
        self.entered.set()
        assert self.gate.wait(TIMEOUT_S)
        if "broken" in queries:
            raise OSError("disk gone")
        return [[hit(query, top_k)] for query in queries]


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


async def answers(search: BatchedSearch, queries: list[str], top_k: int = 3) -> list[str]:
    found = await asyncio.gather(*(search.hits(query, top_k) for query in queries))
    return [hits[0].passage.id for hits in found]


async def test_queries_of_one_moment_go_in_batches_of_at_most_max_batch(backend: FakeBackend):
    search = BatchedSearch(backend.search, max_batch=2)
    assert await answers(search, ["a", "b", "c"]) == ["a", "b", "c"]
    assert [queries for queries, _ in backend.batches] == [["a", "b"], ["c"]]
    search.close()


async def test_equal_queries_in_flight_and_later_ones_cost_one_search(backend: FakeBackend):
    search = BatchedSearch(backend.search)
    assert await answers(search, ["a", "a", "a"]) == ["a", "a", "a"]
    assert await answers(search, ["a"]) == ["a"]
    assert backend.batches == [(["a"], 3)]
    search.close()


async def test_another_top_k_is_another_search(backend: FakeBackend):
    search = BatchedSearch(backend.search)
    first, second = await asyncio.gather(search.hits("a", 3), search.hits("a", 5))
    assert (first[0].passage.text, second[0].passage.text) == ("top 3", "top 5")
    assert backend.batches == [(["a"], 3), (["a"], 5)]
    search.close()


async def test_the_least_recently_used_answer_is_dropped_first(backend: FakeBackend):
    search = BatchedSearch(backend.search, cache_size=2)
    for query in ("a", "b", "a", "c", "a", "b"):  # c drops b, not a
        await search.hits(query, 3)
    assert [queries for queries, _ in backend.batches] == [["a"], ["b"], ["c"], ["b"]]
    search.close()


async def test_cache_size_zero_searches_again(backend: FakeBackend):
    search = BatchedSearch(backend.search, cache_size=0)
    await search.hits("a", 3)
    await search.hits("a", 3)
    assert len(backend.batches) == 2
    search.close()


async def test_a_failed_batch_fails_its_queries_and_is_not_remembered(backend: FakeBackend):
    search = BatchedSearch(backend.search)
    outcomes = await asyncio.gather(
        search.hits("broken", 3), search.hits("a", 3), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [OSError, OSError]
    assert await answers(search, ["a"]) == ["a"]
    search.close()


async def test_a_caller_that_gives_up_does_not_cancel_the_others(backend: FakeBackend):
    backend.gate.clear()
    search = BatchedSearch(backend.search)
    impatient = asyncio.create_task(search.hits("a", 3))
    patient = asyncio.create_task(search.hits("a", 3))
    assert await asyncio.to_thread(backend.entered.wait, TIMEOUT_S)
    impatient.cancel()
    backend.gate.set()
    assert (await asyncio.wait_for(patient, TIMEOUT_S))[0].passage.id == "a"
    assert impatient.cancelled() or impatient.cancelling()
    assert len(backend.batches) == 1
    search.close()


async def test_searching_leaves_the_event_loop_free(backend: FakeBackend):
    backend.gate.clear()
    search = BatchedSearch(backend.search)
    task = asyncio.create_task(search.hits("a", 3))
    assert await asyncio.to_thread(backend.entered.wait, TIMEOUT_S)
    await asyncio.sleep(0)  # the loop turns while the thread searches
    assert not task.done()
    backend.gate.set()
    await asyncio.wait_for(task, TIMEOUT_S)
    search.close()
