"""Embedded and Elasticsearch BM25 agree on the real corpora: same passages, same recall."""

from __future__ import annotations

import gzip
import json
import sys
import uuid
from pathlib import Path

import pytest
from elasticsearch import Elasticsearch

from agent_r1.tools.search.backend import Found
from agent_r1.tools.search.batching import normalize_query
from agent_r1.tools.search.elasticsearch_bm25 import open_index as open_elasticsearch
from agent_r1.tools.search.elasticsearch_build import build_index
from agent_r1.tools.search.elasticsearch_client import ElasticsearchServer
from agent_r1.tools.search.tantivy_bm25 import open_index as open_embedded

pytestmark = [pytest.mark.elasticsearch, pytest.mark.slow]

CORPORA = ("hotpotqa", "2wikimultihopqa", "musique")
TOP_K = 5
DEPTHS = (2, TOP_K, 10)
BATCH = 64
WAIT_S = 120.0
OVERLAP_GOAL = 0.94
RECALL_BOUND = 0.01


async def elasticsearch_ids(
    server: ElasticsearchServer, name: str, queries: list[str]
) -> list[list[str]]:
    backend = open_elasticsearch(server, name)
    await backend.start()
    try:
        answers = []
        for first in range(0, len(queries), BATCH):
            batch = queries[first : first + BATCH]
            answers += await backend.search(batch, max(DEPTHS), lambda: WAIT_S)
    finally:
        await backend.close()
    ids = []
    for answer in answers:
        assert isinstance(answer, Found)
        ids.append([hit.passage.id for hit in answer.hits])
    return ids


def recall(found: list[list[str]], gold: list[set[str]], depth: int = TOP_K) -> float:
    """Mean share of a question's gold passages among the first that were found."""
    shares = [
        len(wanted.intersection(ids[:depth])) / len(wanted)
        for ids, wanted in zip(found, gold, strict=True)
    ]
    return sum(shares) / len(shares)


async def test_embedded_and_elasticsearch_find_the_same_passages(
    elasticsearch_url: str, real_data_dir: Path, tmp_path: Path
):
    server = ElasticsearchServer(elasticsearch_url)
    overlaps: list[float] = []
    for corpus_name in CORPORA:
        corpus = real_data_dir / f"{corpus_name}_corpus.jsonl.gz"
        with gzip.open(real_data_dir / f"{corpus_name}_dev.jsonl.gz", "rt") as lines:
            questions = [json.loads(line) for line in lines]
        queries = [normalize_query(question["question"]) for question in questions]
        gold = [set(question["supporting_ids"]) for question in questions]
        embedded = [
            [hit.passage.id for hit in hits]
            for hits in open_embedded(corpus, tmp_path / corpus_name).search(queries, max(DEPTHS))
        ]
        name = f"test-{uuid.uuid4().hex[:12]}"
        built = build_index(server, corpus, name)
        try:
            elastic = await elasticsearch_ids(server, name, queries)
        finally:
            with Elasticsearch(elasticsearch_url) as client:
                client.indices.delete(index=built.index)
        overlaps += [
            len(set(ours[:TOP_K]) & set(theirs[:TOP_K])) / TOP_K
            for ours, theirs in zip(embedded, elastic, strict=True)
        ]
        recalls = [(recall(embedded, gold, at), recall(elastic, gold, at)) for at in DEPTHS]
        overlap = sum(overlaps[-len(questions) :]) / len(questions)
        found = f"{corpus_name}: {len(questions)} questions, {overlap:.3f}, {recalls}\n"
        sys.stdout.write(found)  # a table of docs/benchmarks.md
        assert abs(recall(embedded, gold) - recall(elastic, gold)) <= RECALL_BOUND, corpus_name
    assert sum(overlaps) / len(overlaps) >= OVERLAP_GOAL
