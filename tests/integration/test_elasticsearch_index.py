"""`agent-r1 search index` on a real Elasticsearch: loading, going on, versions, what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from elasticsearch import Elasticsearch

from agent_r1.cli.main import main
from agent_r1.tools.search import elasticsearch_build
from agent_r1.tools.search.elasticsearch_build import BuildOptions, BuildResult, build_index
from agent_r1.tools.search.elasticsearch_client import ElasticsearchServer
from tests.support.elasticsearch_front import Answer, Asked, Front, error_answer

pytestmark = pytest.mark.elasticsearch

WAIT_S = 60.0
POLL_S = 0.02
NUM_PASSAGES = 300


def write_corpus(path: Path, count: int = NUM_PASSAGES, word: str = "born") -> Path:
    passages = [
        {"id": f"p{n}", "title": f"Person {n}", "text": f"Person {n} was {word} in town {n}."}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(passage) + "\n" for passage in passages))
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus.jsonl")


@pytest.fixture
def client(elasticsearch_url: str) -> Iterator[Elasticsearch]:
    with Elasticsearch(elasticsearch_url) as client:
        yield client


@pytest.fixture
def name(client: Elasticsearch) -> Iterator[str]:
    """A name no other test has; its versions are deleted afterwards."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield name
    for index in versions(client, name):
        client.indices.delete(index=index)


@pytest.fixture
def front(elasticsearch_url: str) -> Iterator[Front]:
    with Front(elasticsearch_url) as front:
        yield front


@pytest.fixture
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 passages a request, and a note of the progress after each."""
    monkeypatch.setattr(elasticsearch_build, "CHUNK_PASSAGES", 20)
    monkeypatch.setattr(elasticsearch_build, "NOTE_PROGRESS_EVERY_S", 0.0)


def versions(client: Elasticsearch, name: str) -> list[str]:
    return sorted(client.indices.get(index=f"{name}*").keys())


def behind(client: Elasticsearch, name: str) -> list[str]:
    if not client.indices.exists_alias(name=name):
        return []
    return sorted(client.indices.get_alias(name=name).keys())


def ids(client: Elasticsearch, name: str, query: str) -> list[str]:
    found = client.search(index=name, query={"match": {"contents": query}}, size=1000)
    return [hit["_id"] for hit in found["hits"]["hits"]]


def build(url: str, corpus: Path, name: str, **options: Any) -> BuildResult:
    return build_index(ElasticsearchServer(url), corpus, name, BuildOptions(**options))


def documents(asked: Asked) -> int:
    return asked.body.count(b"\n") // 2


def test_the_command_loads_a_corpus_and_does_nothing_the_second_time(
    front: Front, client: Elasticsearch, corpus: Path, name: str, capsys: pytest.CaptureFixture[str]
):
    command = ["search", "index", "--backend", "elasticsearch", "--corpus", str(corpus)]
    command += ["--index", name, "--url", front.url]
    assert main(command) == 0
    (version,) = behind(client, name)
    assert f"{name} is now {version}: 300 passages, 300 of them loaded" in capsys.readouterr().out
    assert ids(client, name, "person 7's towns")[0] == "p7"
    assert front.count("/_bulk") == 1
    assert main(command) == 0
    assert (
        f"{name}: nothing to do; it already is {version} (300 passages)" in capsys.readouterr().out
    )
    assert front.count("/_bulk") == 1


def test_the_index_says_how_it_ranks_and_what_it_was_made_from(
    elasticsearch_url: str, client: Elasticsearch, corpus: Path, name: str
):
    result = build(elasticsearch_url, corpus, name)
    state = client.indices.get(index=name)[result.index]
    settings = state["settings"]["index"]
    assert settings["similarity"]["agent_r1_bm25"] == {"type": "BM25", "k1": "1.2", "b": "0.75"}
    assert settings["analysis"]["analyzer"]["agent_r1_english"]["type"] == "english"
    meta = state["mappings"]["_meta"]["agent_r1"]
    assert (meta["corpus"], meta["num_passages"], meta["complete"]) == ("corpus.jsonl", 300, True)
    assert result.index == f"{name}-{meta['fingerprint'][:16]}"
    # What is searched is not stored a second time.
    stored = client.get(index=name, id="p3")["_source"]
    assert set(stored) == {"title", "text", "line"}


def test_requests_have_at_most_the_set_size(front: Front, corpus: Path, name: str):
    build(front.url, corpus, name, bulk_bytes=10_000)
    bulks = [asked for asked in front.asked if asked.path.endswith("/_bulk")]
    sizes = [len(asked.body) for asked in bulks]
    assert max(sizes) <= 10_000
    assert sum(sizes[:-1]) / len(sizes[:-1]) > 9_000  # and are filled
    assert sum(documents(asked) for asked in bulks) == NUM_PASSAGES


def test_no_refresh_and_no_replicas_while_loading_and_both_afterwards(
    front: Front, client: Elasticsearch, corpus: Path, name: str
):
    seen: list[tuple[str, str, str]] = []

    def look(asked: Asked) -> Answer | None:
        if asked.path.endswith("/_bulk"):
            ((_, state),) = client.indices.get(index=f"{name}*").items()
            index = state["settings"]["index"]
            seen.append(
                (
                    index["refresh_interval"],
                    index["number_of_replicas"],
                    index["auto_expand_replicas"],
                )
            )
        return None

    front.before = look
    result = build(front.url, corpus, name)
    after = client.indices.get(index=result.index)[result.index]["settings"]["index"]
    assert seen == [("-1", "0", "false")]
    assert "refresh_interval" not in after  # the server's default again
    assert after["auto_expand_replicas"] == "0-1"
    front.before = lambda _: None
    build(front.url, write_corpus(corpus, 10), name, replicas=0)
    (newest,) = behind(client, name)
    assert (
        client.indices.get(index=newest)[newest]["settings"]["index"]["number_of_replicas"] == "0"
    )


def run_command(corpus: Path, name: str, url: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "agent_r1.cli.main", "search", "index", "--backend"),
            *("elasticsearch", "--corpus", str(corpus), "--index", name, "--url", url),
            *("--bulk-mb", "1"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )


def hold_bulk(front: Front, number: int) -> tuple[threading.Event, threading.Event]:
    """Let bulk request `number` reach the server and keep its answer back until the second event.

    Returns:
        Events: the server has done the request; the answer may go.
    """
    done, go = threading.Event(), threading.Event()

    def hold(asked: Asked, answer: Answer) -> Answer:
        if asked.path.endswith("/_bulk") and front.count("/_bulk") == number:
            done.set()
            assert go.wait(WAIT_S)
        return answer

    front.after = hold
    return done, go


@pytest.mark.parametrize(
    ("ending", "status"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)]
)
def test_a_load_that_is_stopped_in_the_middle_goes_on(
    front: Front,
    client: Elasticsearch,
    tmp_path: Path,
    name: str,
    ending: signal.Signals,
    status: int,
):
    corpus = write_corpus(tmp_path / "large.jsonl", 6000)  # three requests of 2000
    done, go = hold_bulk(front, 2)
    process = run_command(corpus, name, front.url)
    assert done.wait(WAIT_S)
    process.send_signal(ending)
    if ending == signal.SIGKILL:
        process.wait(WAIT_S)
    go.set()
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == status, output
    assert "Traceback" not in output
    assert behind(client, name) == []  # nothing is searched before it is complete
    (half,) = versions(client, name)
    client.indices.refresh(index=half)
    assert client.count(index=half)["count"] == 4000
    front.after = lambda _, answer: answer

    again = run_command(corpus, name, front.url)
    output, _ = again.communicate(timeout=WAIT_S)
    assert again.returncode == 0, output
    assert behind(client, name) == [half]
    assert client.count(index=name)["count"] == 6000
    # Sent twice or not, a passage is there once, and no deleted copy weighs in the scores.
    stats = client.indices.stats(index=half)["_all"]["primaries"]["docs"]
    assert (stats["count"], stats["deleted"]) == (6000, 0)
    assert ids(client, name, "5999") == ["p5999"]


@pytest.mark.usefixtures("small_requests")
def test_an_outage_while_loading_says_so_and_the_next_time_sends_only_the_rest(
    front: Front, client: Elasticsearch, corpus: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(elasticsearch_build, "BULK_RETRIES", 0)

    def break_off(asked: Asked) -> Answer | None:
        if asked.path.endswith("/_bulk") and front.count("/_bulk") > 3:
            return error_answer(500, "boom", "disk gone")
        return None

    front.before = break_off
    with pytest.raises(ValueError, match=r"stopped after 60 of 300 .*disk gone.*to continue"):
        build(front.url, corpus, name)
    assert behind(client, name) == []
    front.before = lambda _: None
    front.asked.clear()
    monkeypatch.setattr(elasticsearch_build, "NOTE_PROGRESS_EVERY_S", WAIT_S)
    result = build(front.url, corpus, name)
    # Noted is one request less than was answered: 3 x 20 - 20.
    assert result.resumed_at == 40
    sent = sum(documents(asked) for asked in front.asked if asked.path.endswith("/_bulk"))
    assert sent == NUM_PASSAGES - result.resumed_at
    assert client.count(index=name)["count"] == NUM_PASSAGES


def test_a_request_that_is_too_large_for_the_server_names_the_option(
    front: Front, client: Elasticsearch, corpus: Path, name: str
):
    def limit(asked: Asked) -> Answer | None:
        return Answer.of(413, {}) if len(asked.body) > 20_000 else None

    front.before = limit
    with pytest.raises(
        ValueError, match=r"refuses requests of 8388608 bytes \(413\); lower --bulk-mb"
    ):
        build(front.url, corpus, name)
    build(front.url, corpus, name, bulk_bytes=15_000)
    assert client.count(index=name)["count"] == NUM_PASSAGES


def test_a_server_that_is_overloaded_for_a_moment_is_asked_again(
    front: Front, client: Elasticsearch, corpus: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    def refuse_first(asked: Asked) -> Answer | None:
        if asked.path.endswith("/_bulk") and front.count("/_bulk") == 1:
            return error_answer(429, "es_rejected_execution_exception", "queue is full")
        return None

    front.before = refuse_first
    build(front.url, corpus, name)
    assert client.count(index=name)["count"] == NUM_PASSAGES


def test_a_changed_corpus_is_a_new_version_and_the_last_one_is_kept(
    elasticsearch_url: str, client: Elasticsearch, corpus: Path, name: str
):
    built = []
    for word in ("born", "raised", "buried"):
        built.append(build(elasticsearch_url, write_corpus(corpus, 30, word), name))
        assert behind(client, name) == [built[-1].index]
        assert len(ids(client, name, word)) == 30
    first, second, third = (result.index for result in built)
    assert built[2].deleted == (first,)
    assert versions(client, name) == sorted([second, third])
    # Back to the version before: it is there, so only the name moves.
    back = build(elasticsearch_url, write_corpus(corpus, 30, "raised"), name)
    assert (back.resumed_at, back.switched, behind(client, name)) == (None, True, [second])
    only = build(elasticsearch_url, corpus, name, delete_old=True)
    assert (only.deleted, only.switched, versions(client, name)) == ((third,), False, [second])


def test_an_unfinished_version_is_named_and_deleted_on_demand(
    front: Front, client: Elasticsearch, corpus: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(elasticsearch_build, "BULK_RETRIES", 0)
    front.before = lambda asked: (
        error_answer(500, "boom", "gone") if asked.path.endswith("/_bulk") else None
    )
    with pytest.raises(ValueError, match="stopped after 0"):
        build(front.url, corpus, name)
    (half,) = versions(client, name)
    front.before = lambda _: None
    result = build(front.url, write_corpus(corpus, 20), name)
    assert (result.unfinished, result.deleted) == ((half,), ())
    assert build(front.url, corpus, name, delete_old=True).deleted == (half,)


def test_searches_go_on_without_an_error_while_the_name_is_switched(
    elasticsearch_url: str, client: Elasticsearch, corpus: Path, name: str
):
    build(elasticsearch_url, write_corpus(corpus, 30, "born"), name)
    stop = threading.Event()
    seen: list[str] = []
    errors: list[Exception] = []

    def search() -> None:
        while not stop.is_set():
            try:
                found = client.search(index=name, query={"match": {"contents": "person 7"}}, size=1)
                seen.append(found["hits"]["hits"][0]["_source"]["text"])
            except Exception as exc:  # noqa: BLE001 - every one is a failure of the test
                errors.append(exc)

    threads = [threading.Thread(target=search) for _ in range(4)]
    for thread in threads:
        thread.start()
    words = [f"word{n}" for n in range(4)]
    for word in words:
        build(elasticsearch_url, write_corpus(corpus, 30, word), name)
        before = len(seen)
        deadline = time.monotonic() + WAIT_S
        while len(seen) < before + 8 and not errors:
            assert time.monotonic() < deadline
            time.sleep(POLL_S)
    stop.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert errors == []
    said = {text.split()[3] for text in seen}
    assert said == {"born", *words}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"id": "x", "title": "t"}', r"corpus\.jsonl:301: text: Field required"),
        ('{"id": "", "title": "t", "text": "x"}', r"corpus\.jsonl:301: id \(''\) has 0 bytes"),
        (
            json.dumps({"id": "é" * 257, "title": "t", "text": "x"}),
            r"corpus\.jsonl:301: id .* has 514 bytes and must have 1 to 512",
        ),
    ],
)
def test_a_malformed_line_is_named_before_anything_is_made(
    elasticsearch_url: str,
    client: Elasticsearch,
    corpus: Path,
    name: str,
    line: str,
    problem: str,
    capsys: pytest.CaptureFixture[str],
):
    good = build(elasticsearch_url, corpus, name)
    corpus.write_text(corpus.read_text() + line + "\n")
    with pytest.raises(ValueError, match=problem):
        build(elasticsearch_url, corpus, name)
    assert (versions(client, name), behind(client, name)) == ([good.index], [good.index])
    command = ["search", "index", "--backend", "elasticsearch", "--corpus", str(corpus)]
    assert main([*command, "--index", name, "--url", elasticsearch_url]) == 2
    assert "agent-r1: error: " in capsys.readouterr().err


@pytest.mark.parametrize("line_of_copy", [10, 70])
def test_an_id_that_comes_twice_is_named_with_both_lines(
    elasticsearch_url: str, client: Elasticsearch, corpus: Path, name: str, line_of_copy: int
):
    lines = corpus.read_text().splitlines()
    lines[line_of_copy - 1] = json.dumps({"id": "p2", "title": "t", "text": "other"})
    corpus.write_text("\n".join(lines) + "\n")
    with pytest.raises(
        ValueError, match=rf"corpus\.jsonl:{line_of_copy}: id 'p2' is also that of line 3;"
    ):
        build(elasticsearch_url, corpus, name)
    assert versions(client, name) == []  # found before anything is made


def test_a_corpus_is_compared_in_composed_letters_and_kept_as_it_came(
    elasticsearch_url: str, client: Elasticsearch, tmp_path: Path, name: str
):
    corpus = tmp_path / "c.jsonl"
    corpus.write_text(json.dumps({"id": "a", "title": "x", "text": "cafe\u0301"}) + "\n")
    build(elasticsearch_url, corpus, name)
    assert ids(client, name, "caf\u00e9") == ["a"]
    assert client.get(index=name, id="a")["_source"]["text"] == "cafe\u0301"


def test_a_name_that_is_taken_is_refused(
    elasticsearch_url: str, client: Elasticsearch, corpus: Path, name: str
):
    client.indices.create(index=name)
    with pytest.raises(ValueError, match=r"is an index of .* must be free for an alias"):
        build(elasticsearch_url, corpus, name)
    client.indices.put_alias(index=name, name=f"{name}-alias")
    with pytest.raises(ValueError, match=f"is an alias of '{name}' .* not made by this command"):
        build(elasticsearch_url, corpus, f"{name}-alias")
    with pytest.raises(ValueError, match="lower-case letters"):
        build(elasticsearch_url, corpus, "Wiki")


def test_an_index_under_the_versions_name_with_another_mapping_is_left_alone(
    elasticsearch_url: str, client: Elasticsearch, corpus: Path, name: str
):
    version = build(elasticsearch_url, corpus, name).index
    client.indices.delete(index=version)
    client.indices.create(index=version, mappings={"properties": {"contents": {"type": "text"}}})
    with pytest.raises(ValueError, match=r"mapping\.properties\.contents\.analyzer is missing"):
        build(elasticsearch_url, corpus, name)
    assert client.count(index=version)["count"] == 0


def test_a_server_without_the_analyzer_is_named(front: Front, corpus: Path, name: str):
    # Worded as a server without the module analysis-common words it.
    reason = "Unknown analyzer type [english] for [agent_r1_english]"
    front.before = lambda asked: (
        error_answer(400, "illegal_argument_exception", reason) if asked.method == "PUT" else None
    )
    with pytest.raises(ValueError, match=r"lacks the analyzer `english`.*analysis-common"):
        build(front.url, corpus, name)


def test_an_analyzer_that_only_has_the_name_is_found_out(front: Front, corpus: Path, name: str):
    front.before = lambda asked: (
        Answer.of(200, {"tokens": [{"token": "the"}, {"token": "king's"}]})
        if asked.path.endswith("/_analyze")
        else None
    )
    with pytest.raises(ValueError, match=r"into \['the', \"king's\"\] and must turn it into"):
        build(front.url, corpus, name)
    assert front.count("/_bulk") == 0


def test_the_embedded_index_is_made_by_the_same_command(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "index"
    command = ["search", "index", "--backend", "embedded", "--corpus", str(corpus)]
    command += ["--index", str(folder)]
    assert main(command) == 0
    assert f"{folder}: 300 passages in" in capsys.readouterr().out
    assert (folder / "index.json").is_file()
    assert main(command) == 0
    assert f"{folder}: already the index of {corpus} (300 passages)" in capsys.readouterr().out
    assert main([*command, "--url", "http://localhost:9200"]) == 2
    assert "--url belongs to --backend elasticsearch" in capsys.readouterr().err
