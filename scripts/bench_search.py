"""Measures search on Elasticsearch, and adds it to runs/bench/tools.json.

    python scripts/bench_search.py --url URL --data FOLDER [--rounds 5] [--skip-parity]

Needs an Elasticsearch 8.19 (--url or ELASTICSEARCH_URL) and the folder of the real corpora (--data
or AGENT_R1_REAL_DATA). It makes one index per corpus, named bench-CORPUS, and keeps it.

Parity: recall@2, @5 and @10 of the gold passages and the mean overlap of the top 5, embedded
against Elasticsearch, over all development questions.

Speed: searches a second with as many callers as a training batch has samples in flight. "ours" is
the search tool: batches, single flight, cache, the defaults of its table. "other" is the plain
asynchronous client with one request per call, and the same query body. Rounds alternate; every
round of ours starts with an empty cache; the ratio is the median over rounds. Once every query
comes 8 times, as the samples of a group ask it, 16 groups at a time; once every query is different.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench_tools import entry, print_entries, write_entries
from elasticsearch import AsyncElasticsearch

from agent_r1.tools.search.backend import Found
from agent_r1.tools.search.batching import normalize_query
from agent_r1.tools.search.config import SearchConfig
from agent_r1.tools.search.elasticsearch_bm25 import open_index as open_elasticsearch
from agent_r1.tools.search.elasticsearch_build import build_index
from agent_r1.tools.search.elasticsearch_client import ElasticsearchServer
from agent_r1.tools.search.tantivy_bm25 import open_index as open_embedded
from agent_r1.tools.search.tool import open_search_tool

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "runs" / "bench"
CORPORA = ("hotpotqa", "2wikimultihopqa", "musique")
SPEED_CORPUS = "hotpotqa"
DEPTHS = (2, 5, 10)
OVERLAP_DEPTH = 5
BATCH = 64
GROUP_SIZE = 8
CALLERS = 128
CALLS = 1024
TOP_K = 5
TIMEOUT_S = 60.0
GOAL_REPEATED = 3.0
GOAL_DISTINCT = 1.5
GOAL_OVERLAP = 0.94
GOAL_RECALL = 0.01

Ask = Callable[[str], Awaitable[int]]


def read_questions(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the questions of one file."""
    with gzip.open(folder / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


async def search_elasticsearch(
    server: ElasticsearchServer, name: str, queries: list[str]
) -> list[list[str]]:
    """Return the ids found for each query, best first."""
    backend = open_elasticsearch(server, name)
    await backend.start()
    ids: list[list[str]] = []
    try:
        for first in range(0, len(queries), BATCH):
            batch = queries[first : first + BATCH]
            for answer in await backend.search(batch, max(DEPTHS), lambda: TIMEOUT_S):
                if not isinstance(answer, Found):
                    raise answer
                ids.append([hit.passage.id for hit in answer.hits])
    finally:
        await backend.close()
    return ids


def recall(found: Iterable[Sequence[str]], gold: Iterable[set[str]], depth: int) -> float:
    """Return the mean share of a question's gold passages among its first `depth`."""
    return statistics.fmean(
        len(wanted.intersection(ids[:depth])) / len(wanted)
        for ids, wanted in zip(found, gold, strict=True)
    )


def measure_parity(server: ElasticsearchServer, data: Path) -> list[dict[str, Any]]:
    """Compare the two backends on every corpus."""
    overlaps: list[float] = []
    worst = 0.0
    depth = OVERLAP_DEPTH
    for corpus_name in CORPORA:
        questions = read_questions(data, f"{corpus_name}_dev")
        queries = [normalize_query(question["question"]) for question in questions]
        gold = [set(question["supporting_ids"]) for question in questions]
        corpus = data / f"{corpus_name}_corpus.jsonl.gz"
        index = open_embedded(corpus, OUT / "search-index" / corpus_name)
        embedded = [[hit.passage.id for hit in hits] for hits in index.search(queries, max(DEPTHS))]
        build_index(server, corpus, f"bench-{corpus_name}")
        elastic = asyncio.run(search_elasticsearch(server, f"bench-{corpus_name}", queries))
        overlap = [
            len(set(ours[:depth]) & set(theirs[:depth])) / depth
            for ours, theirs in zip(embedded, elastic, strict=True)
        ]
        overlaps += overlap
        print(
            f"{corpus_name}: {len(questions)} questions, {index.num_passages} passages, overlap of "
            f"the top {depth} {statistics.fmean(overlap):.4f}"
        )
        for at in DEPTHS:
            ours, theirs = recall(embedded, gold, at), recall(elastic, gold, at)
            print(f"  recall@{at:<2}  embedded {ours:.4f}  elasticsearch {theirs:.4f}")
            if at == depth:
                worst = max(worst, abs(ours - theirs))
    mean = statistics.fmean(overlaps)
    return [
        entry("search/overlap_top5", mean, 1.0, GOAL_OVERLAP, "higher"),
        entry("search/recall5_difference_max", worst, 0.0, GOAL_RECALL, "lower", ratio=worst),
    ]


async def time_calls(ask: Ask, queries: Sequence[str]) -> float:
    """Ask everything with `CALLERS` at a time; return searches a second."""
    waiting = iter(queries)

    async def caller() -> None:
        for query in waiting:
            if await ask(query) == 0:
                raise RuntimeError(f"nothing was found for {query!r}")

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return len(queries) / (time.perf_counter() - began)


async def time_ours(server: ElasticsearchServer, index: str, queries: Sequence[str]) -> float:
    """Measure the search tool."""
    table = SearchConfig.model_validate(
        {"backend": "elasticsearch", "elasticsearch_url": server.url, "index": index}
    )
    tool = await asyncio.to_thread(open_search_tool, "search", table)
    await tool.start()

    async def ask(query: str) -> int:
        return len((await tool.find(query, TOP_K, TIMEOUT_S)).hits)

    try:
        return await time_calls(ask, queries)
    finally:
        await tool.stop()


async def time_other(server: ElasticsearchServer, index: str, queries: Sequence[str]) -> float:
    """Measure one request per call."""
    async with AsyncElasticsearch(server.url, request_timeout=TIMEOUT_S) as client:

        async def ask(query: str) -> int:
            answer = await client.search(
                index=index,
                query={"match": {"contents": {"query": query}}},
                size=TOP_K,
                track_total_hits=False,
                source={"includes": ["title", "text"]},
            )
            return len(answer["hits"]["hits"])

        return await time_calls(ask, queries)


def measure_speed(server: ElasticsearchServer, data: Path, rounds: int) -> list[dict[str, Any]]:
    """Compare searches a second with and without batches, single flight and cache."""
    index = f"bench-{SPEED_CORPUS}"
    build_index(server, data / f"{SPEED_CORPUS}_corpus.jsonl.gz", index)
    questions = [
        question["question"]
        for part in ("dev", "train")
        for question in read_questions(data, f"{SPEED_CORPUS}_{part}")
    ]
    distinct = list(dict.fromkeys(questions))[:CALLS]
    if len(distinct) < CALLS:
        raise SystemExit(f"{len(distinct)} different questions are too few; {CALLS} are needed")
    repeated = [query for query in distinct[: CALLS // GROUP_SIZE] for _ in range(GROUP_SIZE)]
    results: list[dict[str, Any]] = []
    for name, queries, goal in (
        ("search/repeated_8x", repeated, GOAL_REPEATED),
        ("search/distinct", distinct, GOAL_DISTINCT),
    ):
        ours: list[float] = []
        other: list[float] = []
        asyncio.run(time_other(server, index, queries))  # warms the server for both
        for number in range(rounds):
            sides = [(time_ours, ours), (time_other, other)]
            for measure, values in sides if number % 2 == 0 else reversed(sides):
                values.append(asyncio.run(measure(server, index, queries)))
            print(f"{name} round {number + 1}: {ours[-1]:.0f} and {other[-1]:.0f} searches/s")
        ratio = statistics.median(a / b for a, b in zip(ours, other, strict=True))
        middle = statistics.median(ours), statistics.median(other)
        results.append(entry(name, *middle, goal, "higher", ratio=ratio))
    return results


def main() -> None:
    """Measure, print, and write the results; exit 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description="Measure search on Elasticsearch.")
    parser.add_argument("--url", default=os.environ.get("ELASTICSEARCH_URL"))
    parser.add_argument("--data", type=Path, default=os.environ.get("AGENT_R1_REAL_DATA"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip-parity", action="store_true")
    arguments = parser.parse_args()
    if arguments.url is None or arguments.data is None:
        parser.error("--url and --data are needed (or ELASTICSEARCH_URL and AGENT_R1_REAL_DATA)")
    server = ElasticsearchServer.from_environment(
        os.environ, url=arguments.url, request_timeout_s=TIMEOUT_S
    )
    data = Path(arguments.data)
    OUT.mkdir(parents=True, exist_ok=True)
    results = [] if arguments.skip_parity else measure_parity(server, data)
    results += measure_speed(server, data, arguments.rounds)
    write_entries(results)
    sys.exit(0 if print_entries(results) else 1)


if __name__ == "__main__":
    main()
