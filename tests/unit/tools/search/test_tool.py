"""The search tool: what the model reads, what ToolEnv gets, and Search-R1's /retrieve."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent_r1.tools.app import ToolService, create_app
from agent_r1.tools.base import CallContext, ToolUnavailableError
from agent_r1.tools.search.backend import Found, Hit
from agent_r1.tools.search.config import SearchConfig
from agent_r1.tools.search.corpus import Passage
from agent_r1.tools.search.retrieve import add_retrieve
from agent_r1.tools.search.tool import SearchTool

CONTEXT = CallContext(rollout_id="r/0/0/0/0", turn=0, tool_context=None, timeout_s=1.0)
CORPUS = Path("corpus.jsonl")


class FakeBackend:
    fingerprint = "0123456789abcdef"

    def __init__(self, num_passages: int = 2) -> None:
        self.num_passages = num_passages
        self.started = False
        self.closed = False

    async def start(self) -> None:
        self.started = True

    async def search(
        self, queries: Sequence[str], top_k: int, time_left_s: Callable[[], float]
    ) -> list[Found | Exception]:
        if "outage" in queries:
            raise ConnectionError("refused")
        return [
            Found(
                [
                    Hit(Passage(id=f"p{n}", title=f"T{n}", text=f"about {query}"), 2.0 - n)
                    for n in range(min(top_k, self.num_passages))
                ],
                partial="1 of 2 shards did not answer" if "half" in query else None,
            )
            for query in queries
        ]

    async def close(self) -> None:
        self.closed = True


@contextlib.asynccontextmanager
async def started(backend: FakeBackend | None = None, **settings: Any) -> AsyncIterator[SearchTool]:
    table = SearchConfig(corpus=CORPUS, **settings)
    tool = SearchTool("search", table, backend or FakeBackend())
    await tool.start()
    try:
        yield tool
    finally:
        await tool.stop()


async def test_passages_are_numbered_and_data_lists_ids_and_scores():
    async with started() as tool:
        result = await tool.call({"query": "ada"}, CONTEXT)
    assert result.status == "ok"
    assert result.text() == "[1] T0\nabout ada\n\n[2] T1\nabout ada"
    assert result.data == [
        {"id": "p0", "title": "T0", "score": 2.0},
        {"id": "p1", "title": "T1", "score": 1.0},
    ]


async def test_template_separator_and_top_k_are_settings():
    async with started(
        passage_template="{id}: {text} ({score:.1f})", separator=" | ", top_k=1
    ) as tool:
        result = await tool.call({"query": "ada"}, CONTEXT)
    assert result.text() == "p0: about ada (2.0)"


async def test_braces_in_a_passage_are_text():
    async with started() as tool:
        result = await tool.call({"query": "{number} {x}"}, CONTEXT)
    assert "about {number} {x}" in result.text()


async def test_an_answer_without_a_part_of_the_index_is_marked_in_data_only():
    async with started() as tool:
        whole = await tool.call({"query": "ada"}, CONTEXT)
        partial = await tool.call({"query": "half ada"}, CONTEXT)
        assert tool.counters()["partial"] == 1
    assert partial.text() == whole.text().replace("ada", "half ada")
    assert isinstance(partial.data, list)
    assert partial.data[0] == {
        "id": "p0",
        "title": "T0",
        "score": 2.0,
        "partial": "1 of 2 shards did not answer",
    }


async def test_nothing_found_in_a_part_of_the_index_is_an_outage():
    async with started(FakeBackend(num_passages=0)) as tool:
        with pytest.raises(ToolUnavailableError, match="nothing was found, and 1 of 2 shards"):
            await tool.call({"query": "half ada"}, CONTEXT)


async def test_a_long_answer_is_cut_to_max_chars_and_marked():
    async with started(max_chars=16) as tool:
        result = await tool.call({"query": "ada"}, CONTEXT)
    assert result.text() == "[1] T0\nabout ad…"  # 15 characters and the mark


async def test_no_match_is_said():
    async with started(FakeBackend(num_passages=0), empty_text="Nothing.") as tool:
        result = await tool.call({"query": "ada"}, CONTEXT)
    assert (result.status, result.text(), result.data) == ("ok", "Nothing.", [])


async def test_empty_and_overlong_queries_are_answered_with_an_error():
    async with started(max_query_chars=10) as tool:
        empty = await tool.call({"query": "  "}, CONTEXT)
        long = await tool.call({"query": "x" * 11}, CONTEXT)
        fits = await tool.call({"query": "x" * 10}, CONTEXT)
    assert (empty.status, long.status, fits.status) == ("error", "error", "ok")
    assert "the query has 11 characters; the limit is 10" in long.text()


async def test_a_failing_backend_is_an_outage_not_an_answer():
    async with started() as tool:
        with pytest.raises(ToolUnavailableError, match="'bm25' failed: ConnectionError: refused"):
            await tool.call({"query": "outage"}, CONTEXT)


async def test_version_names_the_corpus_and_stop_closes_the_backend():
    backend = FakeBackend()
    async with started(backend) as tool:
        assert backend.started
        assert tool.spec().version == "1+0123456789ab"
    assert backend.closed


@contextlib.asynccontextmanager
async def client(**settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    table = SearchConfig(corpus=CORPUS, **settings)
    tool = SearchTool("search", table, FakeBackend())
    app = create_app(ToolService(tool))
    add_retrieve(app, tool)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://tool") as found,
    ):
        yield found


async def test_retrieve_answers_as_search_r1_servers_do():
    async with client() as http:
        response = await http.post(
            "/retrieve", json={"queries": ["a", "b"], "topk": 1, "return_scores": True}
        )
    assert response.json() == {
        "result": [
            [{"document": {"id": "p0", "contents": '"T0"\nabout a'}, "score": 2.0}],
            [{"document": {"id": "p0", "contents": '"T0"\nabout b'}, "score": 2.0}],
        ]
    }


async def test_retrieve_without_scores_lists_documents_and_takes_the_tools_top_k():
    async with client(top_k=2) as http:
        response = await http.post("/retrieve", json={"queries": ["a"]})
    assert response.json() == {
        "result": [
            [
                {"id": "p0", "contents": '"T0"\nabout a'},
                {"id": "p1", "contents": '"T1"\nabout a'},
            ]
        ]
    }


async def test_retrieve_takes_what_search_r1s_trainer_sends():
    # search_r1/llm_agent/generation.py posts the searches of a whole batch, none when nobody
    # searches; their servers read topk 0 as their default.
    async with client(top_k=1) as http:
        none = await http.post("/retrieve", json={"queries": [], "topk": 3, "return_scores": True})
        many = await http.post("/retrieve", json={"queries": [f"q{n}" for n in range(1000)]})
        zero = await http.post("/retrieve", json={"queries": ["a"], "topk": 0})
        null = await http.post("/retrieve", json={"queries": ["a"], "topk": None})
    assert none.json() == {"result": []}
    assert [one[0]["contents"] for one in many.json()["result"]] == [
        f'"T0"\nabout q{n}' for n in range(1000)
    ]
    assert len(zero.json()["result"][0]) == len(null.json()["result"][0]) == 1


async def test_retrieve_is_strict_and_reports_outages():
    async with client() as http:
        wrong = await http.post("/retrieve", json={"queries": ["a"], "top_k": 3})
        outage = await http.post("/retrieve", json={"queries": ["outage"]})
        many = await http.post("/retrieve", json={"queries": list(range(200_000))})
    # The first wrong value ends the reading: a message about each would take seconds.
    assert many.json()["detail"].count("should be a valid string") == 1
    assert wrong.status_code == 422
    assert "top_k: Extra inputs are not permitted" in wrong.json()["detail"]
    assert outage.status_code == 503


async def test_retrieve_is_described_with_its_body_its_answer_and_what_can_go_wrong():
    async with client() as http:
        described = (await http.get("/openapi.json")).json()
        wrong = await http.post("/retrieve", json={"queries": ["a"], "topk": True})
    post = described["paths"]["/retrieve"]["post"]
    body = post["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    answer = post["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
    assert (body[-15:], answer[-13:]) == ("RetrieveRequest", "RetrieveReply")
    assert {"413", "422", "503"} <= post["responses"].keys()
    assert "/call" in described["paths"]
    assert described["paths"]["/call"]["post"]["requestBody"]
    assert (wrong.status_code, "topk: Input should be a valid integer" in wrong.text) == (422, True)
