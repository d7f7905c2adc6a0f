"""The search tool on a real Elasticsearch: same answers as embedded, few requests, clear failures.

The test server has no X-Pack security, so credentials and TLS are those of a proxy in front of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import ssl
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from elasticsearch import Elasticsearch

from agent_r1.tools.base import CallContext, ToolUnavailableError
from agent_r1.tools.search.config import SearchConfig
from agent_r1.tools.search.elasticsearch_build import BuildOptions, build_index
from agent_r1.tools.search.elasticsearch_client import ElasticsearchServer
from agent_r1.tools.search.tool import SearchTool, open_search_tool
from tests.support.certificates import write_certificate
from tests.support.elasticsearch_front import Answer, Asked, Front, error_answer

pytestmark = pytest.mark.elasticsearch

WAIT_S = 30.0
POLL_S = 0.01
CONTEXT = CallContext(rollout_id="r/0/0/0/0", turn=0, tool_context=None, timeout_s=WAIT_S)
NUM_PASSAGES = 60
OVERLOAD = error_answer(429, "es_rejected_execution_exception", "queue is full")


def write_corpus(path: Path, word: str = "born") -> Path:
    passages = [
        {
            "id": f"p{n}",
            "title": f"Person {n}",
            "text": f"Person {n} was {word} in the town of Number{n}, the {n}'s city.",
        }
        for n in range(NUM_PASSAGES)
    ]
    path.write_text("".join(json.dumps(passage) + "\n" for passage in passages))
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl")


def delete_versions(client: Elasticsearch, name: str) -> None:
    for index in client.indices.get(index=f"{name}*"):
        client.indices.delete(index=index)


@pytest.fixture(scope="module")
def index(elasticsearch_url: str, corpus: Path) -> Iterator[str]:
    """An index every test of this module may read."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    build_index(ElasticsearchServer(elasticsearch_url), corpus, name)
    yield name
    with Elasticsearch(elasticsearch_url) as client:
        delete_versions(client, name)


@pytest.fixture
def name(elasticsearch_url: str) -> Iterator[str]:
    """A name of this test's own."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield name
    with Elasticsearch(elasticsearch_url) as client:
        delete_versions(client, name)


@pytest.fixture
def front(elasticsearch_url: str) -> Iterator[Front]:
    with Front(elasticsearch_url) as front:
        yield front


def table(url: str, index: str, **settings: Any) -> SearchConfig:
    values = {"backend": "elasticsearch", "elasticsearch_url": url, "index": index, **settings}
    return SearchConfig.model_validate(values)


@contextlib.asynccontextmanager
async def started(table: SearchConfig) -> AsyncIterator[SearchTool]:
    tool = await asyncio.to_thread(open_search_tool, "search", table)
    await tool.start()
    try:
        yield tool
    finally:
        await tool.stop()


async def ask(tool: SearchTool, query: str, timeout_s: float = WAIT_S) -> str:
    context = CallContext("r/0/0/0/0", 0, None, timeout_s)
    return (await tool.call({"query": query}, context)).text()


async def test_the_model_reads_the_same_text_as_with_the_embedded_index(
    elasticsearch_url: str, index: str, corpus: Path, tmp_path: Path
):
    queries = [f"Which person was born in Number{n}?" for n in range(NUM_PASSAGES)]
    embedded = SearchConfig(corpus=corpus, index_dir=tmp_path / "index", top_k=1)
    async with (
        started(table(elasticsearch_url, index, top_k=1)) as tool,
        started(embedded) as other,
    ):
        assert tool.spec().model_copy(update={"version": other.version}) == other.spec()
        for query in queries:
            ours, theirs = await asyncio.gather(ask(tool, query), ask(other, query))
            assert ours == theirs
        assert await ask(tool, "qqq") == await ask(other, "qqq") == "No passage matches this query."
        result = await tool.call({"query": "Number7"}, CONTEXT)
    assert isinstance(result.data, list)
    assert isinstance(result.data[0], dict)
    assert (result.data[0]["id"], result.data[0]["title"]) == ("p7", "Person 7")


@pytest.mark.parametrize(
    "query",
    ['"unbalanced', "a AND (b OR", "title:x^q~", '+-&&||!(){}[]^"~*?:\\/', "\x00", "漢字"],
)
async def test_no_text_is_query_syntax(elasticsearch_url: str, index: str, query: str):
    async with started(table(elasticsearch_url, index, top_k=1)) as tool:
        assert await ask(tool, query) == "No passage matches this query."
        assert "Number7," in await ask(tool, f"{query} number7")


async def test_scores_are_bm25(elasticsearch_url: str, tmp_path: Path, name: str):
    # By hand, k1 = 1.2, b = 0.75, N = 2, df = 1: idf = ln(1 + (2 - 1 + 0.5) / (1 + 0.5)) = ln 2.
    # Both documents have 2 words, so the length norm is 1: score = ln 2 * 2.2 * 1 / (1 + 1.2).
    corpus = tmp_path / "c.jsonl"
    corpus.write_text(
        '{"id": "a", "title": "x", "text": "word"}\n{"id": "b", "title": "x", "text": "other"}\n'
    )
    await asyncio.to_thread(build_index, ElasticsearchServer(elasticsearch_url), corpus, name)
    async with started(table(elasticsearch_url, name)) as tool:
        (hit,) = (await tool.find("word", 5, WAIT_S)).hits
    assert hit.score == pytest.approx(math.log(2), rel=1e-5)


async def test_concurrent_calls_share_requests_and_ask_for_no_more_than_they_need(
    front: Front, index: str
):
    settings = table(
        front.url, index, gather_ms=1000, max_search_batch=32, max_search_requests=1, top_k=3
    )
    async with started(settings) as tool:
        front.asked.clear()
        await asyncio.gather(*(ask(tool, f"person {n}") for n in range(64)))
        first, second = (asked.path for asked in front.asked)
        assert first == second
        assert re.fullmatch(rf"/{index}[\w.-]*/_msearch", first)
        lines = [json.loads(line) for line in front.asked[0].body.splitlines()]
    assert len(lines) == 64  # a header and a body each
    assert lines[1] == {
        "query": {"match": {"contents": {"query": "person 0"}}},
        "size": 3,
        "track_total_hits": False,
        "_source": ["title", "text"],
    }


async def test_equal_queries_are_searched_once_and_then_remembered(front: Front, index: str):
    async with started(table(front.url, index, gather_ms=50)) as tool:
        front.asked.clear()
        texts = await asyncio.gather(*(ask(tool, f" Person  {n % 4} ") for n in range(32)))
        again = await asyncio.gather(*(ask(tool, f"person {n % 4}") for n in range(32)))
        assert texts == again
        assert front.count("/_msearch") == 1
        assert len(front.asked[0].body.splitlines()) == 2 * 4
        counts = tool.counters()
    assert [counts[name] for name in ("asked", "joined", "cached", "searched")] == [64, 28, 32, 4]


async def test_an_overloaded_server_is_asked_again_until_it_answers(front: Front, index: str):
    async with started(table(front.url, index)) as tool:
        front.before = lambda asked: OVERLOAD if front.count("/_msearch") <= 3 else None
        front.asked.clear()
        assert "Number7," in await ask(tool, "number7")
    assert front.count("/_msearch") == 4


async def test_only_the_refused_queries_of_a_request_are_asked_again(front: Front, index: str):
    def refuse_second(asked: Asked, answer: Answer) -> Answer:
        if front.count("/_msearch") > 1:
            return answer
        body = answer.json()
        body["responses"][1] = OVERLOAD.json()
        return Answer.of(200, body)

    async with started(table(front.url, index, gather_ms=50, top_k=1)) as tool:
        front.asked.clear()
        front.after = refuse_second
        texts = await asyncio.gather(*(ask(tool, f"number{n}") for n in range(3)))
    assert ["Number0," in texts[0], "Number1," in texts[1], "Number2," in texts[2]] == [True] * 3
    sent = [asked.body.splitlines() for asked in front.asked]
    assert [len(lines) for lines in sent] == [6, 2]
    assert b"number1" in sent[1][1]


async def test_overload_that_lasts_is_an_outage_when_the_calls_time_is_up(front: Front, index: str):
    async with started(table(front.url, index)) as tool:
        front.before = lambda _: OVERLOAD
        began = time.monotonic()
        with pytest.raises(ToolUnavailableError, match=r"429: es_rejected.*queue is full"):
            await ask(tool, "number7", timeout_s=1.0)
        assert time.monotonic() - began < WAIT_S / 2
        front.before = lambda _: None
        assert "Number7," in await ask(tool, "number7")  # a failure is not remembered


async def test_a_request_that_takes_too_long_is_sent_again(front: Front, index: str):
    slow = threading.Event()

    def delay_first(asked: Asked) -> Answer | None:
        if front.count("/_msearch") == 1:
            slow.wait(WAIT_S)
        return None

    async with started(table(front.url, index, request_timeout_s=2.0)) as tool:
        front.asked.clear()
        front.before = delay_first
        assert "Number7," in await ask(tool, "number7")
        slow.set()
    assert front.count("/_msearch") == 2


async def test_a_bad_query_fails_alone(front: Front, index: str):
    def break_first(asked: Asked, answer: Answer) -> Answer:
        body = answer.json()
        body["responses"][0] = error_answer(400, "too_many_clauses", "maxClauseCount 1024").json()
        return Answer.of(200, body)

    async with started(table(front.url, index, gather_ms=50)) as tool:
        front.after = break_first
        odd, fine = await asyncio.gather(
            ask(tool, "number1"), ask(tool, "number2"), return_exceptions=True
        )
    assert isinstance(odd, ToolUnavailableError)
    assert "answers 400 to a query: too_many_clauses: maxClauseCount 1024" in str(odd)
    assert isinstance(fine, str)


async def test_shards_that_fail_are_flagged(front: Front, index: str):
    failure = {"shard": 1, "reason": {"type": "circuit_breaking_exception", "reason": "heap"}}

    def lose_a_shard(asked: Asked, answer: Answer) -> Answer:
        body = answer.json()
        for response in body.get("responses", []):
            response["_shards"] = {"total": 3, "failed": 1, "failures": [failure]}
        return Answer.of(200, body)

    async with started(table(front.url, index, top_k=1)) as tool:
        front.after = lose_a_shard
        result = await tool.call({"query": "number7"}, CONTEXT)
        with pytest.raises(ToolUnavailableError, match="nothing was found, and 1 of 3 shards"):
            await ask(tool, "qqq")
        assert tool.counters()["partial"] == 2
    assert "Number7," in result.text()
    assert isinstance(result.data, list)
    assert isinstance(result.data[0], dict)
    assert result.data[0]["partial"] == (
        "1 of 3 shards did not answer (circuit_breaking_exception: heap)"
    )


async def test_an_index_of_several_shards_ranks_as_one(
    elasticsearch_url: str, index: str, corpus: Path, name: str
):
    server, options = ElasticsearchServer(elasticsearch_url), BuildOptions(num_shards=3)
    await asyncio.to_thread(build_index, server, corpus, name, options)
    async with (
        started(table(elasticsearch_url, index)) as one,
        started(table(elasticsearch_url, name)) as three,
    ):
        for query in ("number7", "person 8"):
            found = [await tool.find(query, 1, WAIT_S) for tool in (one, three)]
            first, second = (answer.hits[0] for answer in found)
            assert first.passage == second.passage
            assert first.score == pytest.approx(second.score, rel=1e-5)


async def test_a_server_that_goes_away_is_an_outage_and_one_that_comes_back_answers(
    front: Front, index: str
):
    async with started(table(front.url, index)) as tool:
        await ask(tool, "number1")
        front.stop()
        began = time.monotonic()
        with pytest.raises(ToolUnavailableError, match=r"cannot be reached.*check host and port"):
            await ask(tool, "number2")
        assert time.monotonic() - began < WAIT_S / 2  # said, not waited out
        assert "Number1," in await ask(tool, "number1")  # remembered
        front.start()
        assert "Number2," in await ask(tool, "number2")


async def test_a_service_keeps_its_version_of_the_index_and_the_next_one_takes_the_new(
    elasticsearch_url: str, tmp_path: Path, name: str
):
    server = ElasticsearchServer(elasticsearch_url)
    corpus = write_corpus(tmp_path / "c.jsonl", "born")
    await asyncio.to_thread(build_index, server, corpus, name)
    settings = table(elasticsearch_url, name, top_k=1, cache_size=0)
    async with started(settings) as old:
        stop = asyncio.Event()
        texts: list[str] = []

        async def keep_asking() -> None:
            while not stop.is_set():
                texts.append(await ask(old, "number7"))

        asking = [asyncio.create_task(keep_asking()) for _ in range(4)]
        write_corpus(corpus, "raised")
        await asyncio.to_thread(build_index, server, corpus, name)
        async with started(settings) as new:
            assert new.spec().version != old.spec().version
            assert " raised in" in await ask(new, "number7")
        stop.set()
        await asyncio.wait_for(asyncio.gather(*asking), WAIT_S)
        assert texts
        assert all(" born in" in text for text in texts)
        # A third version deletes the first.
        write_corpus(corpus, "buried")
        await asyncio.to_thread(build_index, server, corpus, name)
        with pytest.raises(ToolUnavailableError, match=r"is gone from .* restart the service"):
            await ask(old, "number8")


Check = Callable[[Front, Elasticsearch, str], str]


def _missing(front: Front, client: Elasticsearch, name: str) -> str:
    return r"index '.*' does not exist on .*make it with `agent-r1 search index --backend elastic"


def _foreign(front: Front, client: Elasticsearch, name: str) -> str:
    client.indices.create(index=name, mappings={"properties": {"text": {"type": "keyword"}}})
    return r"has another mapping: settings\.analysis.*agent_r1_english\.type is missing and must"


def _other_analyzer(front: Front, client: Elasticsearch, name: str) -> str:
    def change(asked: Asked, answer: Answer) -> Answer:
        if asked.path != f"/{name}":
            return answer
        body = answer.json()
        for state in body.values():
            state["mappings"]["properties"]["contents"]["analyzer"] = "standard"
        return Answer.of(200, body)

    _load(front, name)
    front.after = change
    return r"contents\.analyzer is 'standard' and must be 'agent_r1_english'"


def _other_similarity(front: Front, client: Elasticsearch, name: str) -> str:
    def change(asked: Asked, answer: Answer) -> Answer:
        if asked.path != f"/{name}":
            return answer
        return Answer(200, answer.body.replace(b'"b":"0.75"', b'"b":"0.3"'))

    _load(front, name)
    front.after = change
    return r"similarity\.agent_r1_bm25\.b is '0\.3' and must be 0\.75"


def _incomplete(front: Front, client: Elasticsearch, name: str) -> str:
    def change(asked: Asked, answer: Answer) -> Answer:
        return Answer(200, answer.body.replace(b'"complete":true', b'"complete":false'))

    _load(front, name)
    front.after = change
    return "holds 60 of 60 passages; finish it with `agent-r1 search index"


def _several(front: Front, client: Elasticsearch, name: str) -> str:
    for number in range(2):
        client.indices.create(index=f"{name}-{number}", aliases={name: {}})
    return rf"stands for several indices \({name}-0, {name}-1\)"


def _other_version(front: Front, client: Elasticsearch, name: str) -> str:
    front.after = lambda _, answer: Answer(200, answer.body.replace(b'"8.19.', b'"9.0.'))
    return r"is Elasticsearch 9\.0\.\d+, and version 8 is needed"


def _other_product(front: Front, client: Elasticsearch, name: str) -> str:
    front.before = lambda _: Answer(200, b"{}", {"content-type": "application/json"})
    return "answers, but is not Elasticsearch"


def _not_json(front: Front, client: Elasticsearch, name: str) -> str:
    front.before = lambda _: Answer(200, b"<html>")
    return "answers, but not with JSON"


def _nobody(front: Front, client: Elasticsearch, name: str) -> str:
    front.stop()
    return "cannot be reached: .*check host and port"


def _slow(front: Front, client: Elasticsearch, name: str) -> str:
    front.before = lambda _: time.sleep(1.0)
    return r"did not answer within 0\.3 s"


def _load(front: Front, name: str) -> None:
    corpus = front.corpus  # type: ignore[attr-defined]
    build_index(ElasticsearchServer(front.url), corpus, name)


@pytest.mark.parametrize(
    "prepare",
    [
        _missing,
        _foreign,
        _other_analyzer,
        _other_similarity,
        _incomplete,
        _several,
        _other_version,
        _other_product,
        _not_json,
        _nobody,
        _slow,
    ],
)
def test_what_cannot_be_searched_is_explained_before_the_service_is_up(
    front: Front, elasticsearch_url: str, corpus: Path, name: str, prepare: Check
):
    front.corpus = corpus  # type: ignore[attr-defined]
    timeout_s = 0.3 if prepare is _slow else 10.0
    with Elasticsearch(elasticsearch_url) as client:
        message = prepare(front, client, name)
    with pytest.raises(ValueError, match=message):
        open_search_tool("search", table(front.url, name, request_timeout_s=timeout_s))


async def test_starting_checks_the_index_again(elasticsearch_url: str, corpus: Path, name: str):
    await asyncio.to_thread(build_index, ElasticsearchServer(elasticsearch_url), corpus, name)
    tool = await asyncio.to_thread(open_search_tool, "search", table(elasticsearch_url, name))
    with Elasticsearch(elasticsearch_url) as client:
        delete_versions(client, name)
    with pytest.raises(ValueError, match="does not exist"):
        await tool.start()
    await tool.stop()


def want_header(front: Front, value: str, status: int = 401) -> None:
    def check(asked: Asked) -> Answer | None:
        if asked.headers.get("authorization") == value:
            return None
        return error_answer(status, "security_exception", "action is unauthorized for user")

    front.before = check


async def test_an_api_key_comes_from_the_environment(
    front: Front, index: str, monkeypatch: pytest.MonkeyPatch
):
    want_header(front, "ApiKey c2VjcmV0")
    with pytest.raises(ValueError, match=r"wants credentials \(401\); set AGENT_R1_ELASTICSEARCH_"):
        open_search_tool("search", table(front.url, index))
    monkeypatch.setenv("AGENT_R1_ELASTICSEARCH_API_KEY", "wrong")
    with pytest.raises(ValueError, match=r"refuses the credentials \(401\)") as caught:
        open_search_tool("search", table(front.url, index))
    assert "wrong" not in str(caught.value)
    monkeypatch.setenv("AGENT_R1_ELASTICSEARCH_API_KEY", "c2VjcmV0")
    async with started(table(front.url, index)) as tool:
        assert "Number7," in await ask(tool, "number7")
        want_header(front, "another since")
        with pytest.raises(ToolUnavailableError, match="refuses the credentials"):
            await ask(tool, "number8")


async def test_user_and_password_come_from_the_environment(
    front: Front, index: str, monkeypatch: pytest.MonkeyPatch
):
    want_header(front, "Basic ZWxhc3RpYzpwdw==")  # elastic:pw
    monkeypatch.setenv("AGENT_R1_ELASTICSEARCH_USER", "elastic")
    with pytest.raises(ValueError, match="AGENT_R1_ELASTICSEARCH_PASSWORD is not set, but its oth"):
        open_search_tool("search", table(front.url, index))
    monkeypatch.setenv("AGENT_R1_ELASTICSEARCH_PASSWORD", "pw")
    async with started(table(front.url, index)) as tool:
        assert "Number7," in await ask(tool, "number7")
    monkeypatch.setenv("AGENT_R1_ELASTICSEARCH_API_KEY", "c2VjcmV0")
    with pytest.raises(ValueError, match="are both set; unset one"):
        open_search_tool("search", table(front.url, index))


def test_a_lack_of_privileges_names_those_needed(
    front: Front, index: str, monkeypatch: pytest.MonkeyPatch
):
    want_header(front, "nobody", status=403)
    monkeypatch.setenv("AGENT_R1_ELASTICSEARCH_API_KEY", "c2VjcmV0")
    with pytest.raises(ValueError, match=r"\(403\): security_exception: .*`read`, `view_index_m"):
        open_search_tool("search", table(front.url, index))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEM file with a key and a certificate of 127.0.0.1 that vouches for itself."""
    return write_certificate(tmp_path_factory.mktemp("tls") / "server.pem")


async def test_tls_needs_an_authority_that_vouches(
    elasticsearch_url: str, index: str, certificate: Path, tmp_path: Path
):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with Front(elasticsearch_url, context) as front:
        with pytest.raises(ValueError, match=r"cannot be reached over TLS.*set ca_certs"):
            open_search_tool("search", table(front.url, index))
        with pytest.raises(ValueError, match=r"ca_certs .* is not a file"):
            open_search_tool("search", table(front.url, index, ca_certs=tmp_path / "no.pem"))
        for settings in ({"ca_certs": certificate}, {"verify_certs": False}):
            async with started(table(front.url, index, **settings)) as tool:
                assert "Number7," in await ask(tool, "number7")
        plain = front.url.replace("https:", "http:")
        with pytest.raises(ValueError, match=r"cannot be reached.*http or https"):
            open_search_tool("search", table(plain, index))
