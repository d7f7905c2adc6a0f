"""Searches a second on Elasticsearch: the search tool against one request for each call.

    make bench CASE=search ARGS="--rounds 5"

Needs an Elasticsearch 8.19 (ELASTICSEARCH_URL) and the folder of the real corpora
(AGENT_R1_REAL_DATA). It makes the index bench-hotpotqa, and keeps it. As many callers as a training
batch has samples in flight ask at once. "ours" is the search tool: batches, single flight, cache,
the defaults of its table; "other" is the plain asynchronous client with the same query body. Every
round of ours starts with an empty cache. Once every query comes 8 times, as the samples of a group
ask it, 16 groups at a time; once every query is different.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from elasticsearch import AsyncElasticsearch

from agent_r1.tools.search.config import SearchConfig
from agent_r1.tools.search.elasticsearch_build import build_index
from agent_r1.tools.search.elasticsearch_client import ElasticsearchServer
from agent_r1.tools.search.tool import open_search_tool
from benchmarks.harness import alternate, compare, read_options, write_report

CORPUS = "hotpotqa"
INDEX = f"bench-{CORPUS}"
CALLERS = 128
CALLS = 1024
GROUP_SIZE = 8
TOP_K = 5
TIMEOUT_S = 60.0


def read_questions(folder: Path) -> list[str]:
    """Return the different questions of the corpus, as many as are asked."""
    questions: dict[str, None] = {}
    for part in ("dev", "train"):
        with gzip.open(folder / f"{CORPUS}_{part}.jsonl.gz", "rt", encoding="utf-8") as lines:
            questions |= {json.loads(line)["question"]: None for line in lines}
    return list(questions)[:CALLS]


async def rate(ask: Callable[[str], Awaitable[int]], queries: Sequence[str]) -> float:
    """Ask everything with `CALLERS` at a time; return searches a second."""
    waiting = iter(queries)

    async def caller() -> None:
        for query in waiting:
            if await ask(query) == 0:
                raise RuntimeError(f"nothing was found for {query!r}")

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return len(queries) / (time.perf_counter() - began)


async def rate_of_ours(url: str, queries: Sequence[str]) -> float:
    """Measure the search tool."""
    table = {"backend": "elasticsearch", "elasticsearch_url": url, "index": INDEX}
    config = SearchConfig.model_validate(table)
    tool = await asyncio.to_thread(open_search_tool, "search", config)
    await tool.start()

    async def ask(query: str) -> int:
        return len((await tool.find(query, TOP_K, TIMEOUT_S)).hits)

    try:
        return await rate(ask, queries)
    finally:
        await tool.stop()


async def rate_of_other(url: str, queries: Sequence[str]) -> float:
    """Measure one request per call."""
    async with AsyncElasticsearch(url, request_timeout=TIMEOUT_S) as client:

        async def ask(query: str) -> int:
            answer = await client.search(
                index=INDEX,
                query={"match": {"contents": {"query": query}}},
                size=TOP_K,
                track_total_hits=False,
                source={"includes": ["title", "text"]},
            )
            return len(answer["hits"]["hits"])

        return await rate(ask, queries)


def main() -> None:
    """Make the index and measure."""
    options = read_options(__doc__, rounds=5)
    url, data = os.environ.get("ELASTICSEARCH_URL"), os.environ.get("AGENT_R1_REAL_DATA")
    if not (url and data):
        sys.exit("search needs ELASTICSEARCH_URL and AGENT_R1_REAL_DATA (docs/search.md)")
    server = ElasticsearchServer.from_environment(os.environ, url=url, request_timeout_s=TIMEOUT_S)
    build_index(server, Path(data) / f"{CORPUS}_corpus.jsonl.gz", INDEX)
    distinct = read_questions(Path(data))
    repeated = [query for query in distinct[: CALLS // GROUP_SIZE] for _ in range(GROUP_SIZE)]
    rows = []
    for what, queries, goal in (("8 times", repeated, "≥ 3"), ("once", distinct, "≥ 1.5")):
        sides = {
            name: partial(lambda measure, asked: asyncio.run(measure(url, asked)), one, queries)
            for name, one in (("ours", rate_of_ours), ("other", rate_of_other))
        }
        sides["other"]()  # warms the server for both
        found = alternate(sides, options.rounds)
        rows.append(compare(f"searches/s, every query {what}", found["ours"], found["other"], goal))
    write_report("search", rows)


if __name__ == "__main__":
    main()
