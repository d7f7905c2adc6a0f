"""BatchedSearch: when batches form, equal queries share one search, what is kept."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

import pytest

from agent_r1.tools.search.backend import Found, Hit
from agent_r1.tools.search.batching import BatchedSearch, normalize_query
from agent_r1.tools.search.corpus import Passage

TIMEOUT_S = 10.0
LONG_GATHER_S = 3600.0


def found(query: str, top_k: int) -> Found:
    return Found([Hit(Passage(id=query, title=query, text=f"top {top_k}"), 1.0)])


class FakeBackend:
    """Records every batch; waits for `gate`."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[str], int]] = []
        self.time_left: list[Callable[[], float]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()

    async def search(
        self, queries: Sequence[str], top_k: int, time_left_s: Callable[[], float]
    ) -> list[Found | Exception]:
        self.batches.append((list(queries), top_k))
        self.time_left.append(time_left_s)
        self.entered.set()
        await asyncio.wait_for(self.gate.wait(), TIMEOUT_S)
        if "broken" in queries:
            raise OSError("disk gone")
        answers: list[Found | Exception] = []
        for query in queries:
            if query == "odd":
                answers.append(KeyError("odd"))
            elif query == "half":
                answers.append(dataclasses.replace(found(query, top_k), partial="1 of 2 shards"))
            else:
                answers.append(found(query, top_k))
        return answers


@pytest.fixture
async def backend() -> FakeBackend:
    return FakeBackend()


async def answers(search: BatchedSearch, queries: list[str], top_k: int = 3) -> list[str]:
    many = await asyncio.gather(*(search.find(query, top_k, TIMEOUT_S) for query in queries))
    return [one.hits[0].passage.id for one in many]


async def test_queries_of_one_moment_go_in_batches_of_at_most_max_batch(backend: FakeBackend):
    search = BatchedSearch(backend.search, max_batch=2)
    assert await answers(search, ["a", "b", "c"]) == ["a", "b", "c"]
    assert [queries for queries, _ in backend.batches] == [["a", "b"], ["c"]]


async def test_a_query_waits_gather_s_for_others(backend: FakeBackend):
    search = BatchedSearch(backend.search, gather_s=0.05)
    first = asyncio.create_task(search.find("a", 3, TIMEOUT_S))
    await asyncio.sleep(0)  # several turns of the loop are less than 50 ms
    await asyncio.sleep(0)
    assert backend.batches == []
    second = asyncio.create_task(search.find("b", 3, TIMEOUT_S))
    await asyncio.gather(first, second)
    assert backend.batches == [(["a", "b"], 3)]


async def test_a_full_batch_does_not_wait(backend: FakeBackend):
    search = BatchedSearch(backend.search, max_batch=2, gather_s=LONG_GATHER_S)
    assert await asyncio.wait_for(answers(search, ["a", "b"]), TIMEOUT_S) == ["a", "b"]
    assert backend.batches == [(["a", "b"], 3)]


async def test_what_arrives_while_all_requests_run_goes_together(backend: FakeBackend):
    backend.gate.clear()
    search = BatchedSearch(backend.search, max_running=1)
    first = asyncio.create_task(search.find("a", 3, TIMEOUT_S))
    await asyncio.wait_for(backend.entered.wait(), TIMEOUT_S)
    rest = [asyncio.create_task(search.find(query, 3, TIMEOUT_S)) for query in "bcd"]
    await asyncio.sleep(0)
    backend.gate.set()
    await asyncio.gather(first, *rest)
    assert backend.batches == [(["a"], 3), (["b", "c", "d"], 3)]


async def test_equal_queries_in_flight_and_later_ones_cost_one_search(backend: FakeBackend):
    search = BatchedSearch(backend.search)
    assert await answers(search, ["a", "a", "a"]) == ["a", "a", "a"]
    assert await answers(search, ["a"]) == ["a"]
    assert backend.batches == [(["a"], 3)]
    counts = search.counts
    assert (counts.asked, counts.joined, counts.cached, counts.searched) == (4, 2, 1, 1)


async def test_spellings_of_one_query_cost_one_search(backend: FakeBackend):
    search = BatchedSearch(backend.search)
    await answers(search, ["Caf\u00e9  Paris", " cafe\u0301 paris\n"])
    assert backend.batches == [(["caf\u00e9 paris"], 3)]


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("  Who\twas\nAda? ", "who was ada?"),
        ("\u00c9cole", "\u00e9cole"),
        # str.lower gives a final sigma here; the analyzers lower letter by letter.
        ("\u039f\u03a3", "\u03bf\u03c3"),
        # str.lower makes two letters of it, Lucene another single one: left to the analyzer.
        ("\u0130zmir", "\u0130zmir"),
    ],
)
def test_a_normalized_query_is_what_the_analyzers_read(text: str, normalized: str):
    assert normalize_query(text) == normalized
    assert normalize_query(normalized) == normalized


async def test_another_top_k_is_another_search(backend: FakeBackend):
    search = BatchedSearch(backend.search)
    first, second = await asyncio.gather(
        search.find("a", 3, TIMEOUT_S), search.find("a", 5, TIMEOUT_S)
    )
    assert [one.hits[0].passage.text for one in (first, second)] == ["top 3", "top 5"]
    assert backend.batches == [(["a"], 3), (["a"], 5)]


async def test_the_least_recently_used_answer_is_dropped_first(backend: FakeBackend):
    search = BatchedSearch(backend.search, cache_size=2)
    for query in ("a", "b", "a", "c", "a", "b"):  # c drops b, not a
        await search.find(query, 3, TIMEOUT_S)
    assert [queries for queries, _ in backend.batches] == [["a"], ["b"], ["c"], ["b"]]


async def test_cache_size_zero_searches_again(backend: FakeBackend):
    search = BatchedSearch(backend.search, cache_size=0)
    await search.find("a", 3, TIMEOUT_S)
    await search.find("a", 3, TIMEOUT_S)
    assert len(backend.batches) == 2


async def test_a_failed_batch_fails_its_queries_and_is_not_remembered(backend: FakeBackend):
    search = BatchedSearch(backend.search)
    outcomes = await asyncio.gather(
        search.find("broken", 3, TIMEOUT_S), search.find("a", 3, TIMEOUT_S), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [OSError, OSError]
    assert await answers(search, ["a"]) == ["a"]


async def test_a_query_that_fails_alone_leaves_the_others_of_its_batch(backend: FakeBackend):
    search = BatchedSearch(backend.search)
    odd, fine = await asyncio.gather(
        search.find("odd", 3, TIMEOUT_S), search.find("a", 3, TIMEOUT_S), return_exceptions=True
    )
    assert isinstance(odd, KeyError)
    assert isinstance(fine, Found)
    assert len(backend.batches) == 1


async def test_a_partial_answer_is_given_counted_and_not_remembered(backend: FakeBackend):
    search = BatchedSearch(backend.search)
    for _ in range(2):
        assert (await search.find("half", 3, TIMEOUT_S)).partial == "1 of 2 shards"
    assert len(backend.batches) == 2
    assert search.counts.partial == 2


async def test_the_most_patient_caller_sets_the_time_of_a_search(backend: FakeBackend):
    backend.gate.clear()
    search = BatchedSearch(backend.search)
    first = asyncio.create_task(search.find("a", 3, 100.0))
    await asyncio.wait_for(backend.entered.wait(), TIMEOUT_S)
    assert 90.0 < backend.time_left[0]() <= 100.0
    second = asyncio.create_task(search.find("a", 3, 1000.0))
    await asyncio.sleep(0)
    assert 990.0 < backend.time_left[0]() <= 1000.0
    backend.gate.set()
    await asyncio.gather(first, second)


async def test_a_query_nobody_waits_for_is_not_searched(backend: FakeBackend):
    backend.gate.clear()
    search = BatchedSearch(backend.search)
    busy = asyncio.create_task(search.find("a", 3, TIMEOUT_S))
    await asyncio.wait_for(backend.entered.wait(), TIMEOUT_S)
    late = asyncio.create_task(search.find("late", 3, 0.0))
    await asyncio.sleep(0)
    backend.gate.set()
    await busy
    with pytest.raises(TimeoutError, match="gave up before"):
        await asyncio.wait_for(late, TIMEOUT_S)
    assert backend.batches == [(["a"], 3)]


async def test_a_caller_that_gives_up_does_not_cancel_the_others(backend: FakeBackend):
    backend.gate.clear()
    search = BatchedSearch(backend.search)
    impatient = asyncio.create_task(search.find("a", 3, TIMEOUT_S))
    patient = asyncio.create_task(search.find("a", 3, TIMEOUT_S))
    await asyncio.wait_for(backend.entered.wait(), TIMEOUT_S)
    impatient.cancel()
    backend.gate.set()
    assert (await asyncio.wait_for(patient, TIMEOUT_S)).hits[0].passage.id == "a"
    assert impatient.cancelled() or impatient.cancelling()
    assert len(backend.batches) == 1


async def test_closing_ends_what_runs(backend: FakeBackend):
    backend.gate.clear()
    search = BatchedSearch(backend.search)
    caller = asyncio.create_task(search.find("a", 3, TIMEOUT_S))
    await asyncio.wait_for(backend.entered.wait(), TIMEOUT_S)
    waiting = asyncio.create_task(search.find("b", 3, TIMEOUT_S))
    await asyncio.sleep(0)
    await asyncio.wait_for(search.close(), TIMEOUT_S)
    ends = await asyncio.gather(caller, waiting, return_exceptions=True)
    assert [str(end) for end in ends] == ["the search is closed"] * 2
