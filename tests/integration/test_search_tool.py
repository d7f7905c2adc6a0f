"""A real tool service in its own process: search over HTTP, announcement, shutdown."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from elasticsearch import Elasticsearch

from agent_r1.tools.search.elasticsearch_build import build_index
from agent_r1.tools.search.elasticsearch_client import ElasticsearchServer
from agent_r1_proto.tools import CallReply, ToolHealth, ToolSpec
from tests.support.forked import Forked

WAIT_S = 30.0
POLL_S = 0.02
SERVE = """
import json, logging, sys
from pathlib import Path
from agent_r1.tools.kinds import AnyToolConfig
from agent_r1.tools.main import serve
from pydantic import TypeAdapter
from agent_r1.runtime.config import RedisConfig, RunConfig
name, table, folder = sys.argv[1:]
logging.basicConfig(level="INFO")
serve(name=name, run=RunConfig(), redis=RedisConfig(), token=None, announce_dir=Path(folder),
      tool=TypeAdapter(AnyToolConfig).validate_json(table))
"""
SLOW_TOOL = """
import asyncio
from pathlib import Path
from agent_r1.tools.base import Tool

class Slow(Tool):
    name = "slow"
    description = "Waits until a file exists."
    parameters = {"type": "object"}

    async def call(self, arguments, context):
        Path(arguments["entered"]).touch()
        while not Path(arguments["until"]).exists():
            await asyncio.sleep(0.01)
        return "done"
"""


class Service:
    """A tool service process."""

    def __init__(self, name: str, table: dict[str, Any], folder: Path, plugins: Path) -> None:
        self.announcement = folder / f"{name}.json"
        self.announcement.unlink(missing_ok=True)
        self.log = folder / f"{name}.log"
        folder.mkdir(exist_ok=True)
        env = os.environ | {"PYTHONPATH": str(plugins)}
        arguments = (name, json.dumps(table), str(folder))
        self.process = Forked(SERVE, *arguments, env=env, log=self.log)

    def url(self) -> str:
        """Wait for the announcement; return the URL in it."""
        deadline = time.monotonic() + WAIT_S
        while not self.announcement.exists():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(POLL_S)
        announced = json.loads(self.announcement.read_text())
        assert announced["pid"] == self.process.pid
        return announced["url"]

    def stop(self) -> int:
        """Send SIGTERM; return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)


Start = Callable[[str, dict[str, Any]], Service]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Service] = []

    def start_one(name: str, table: dict[str, Any]) -> Service:
        started.append(Service(name, table, tmp_path / "services", tmp_path))
        return started[-1]

    yield start_one
    for service in started:
        if service.process.poll() is None:
            service.process.kill()
            service.process.wait(WAIT_S)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    passages = [
        {"id": f"p{n}", "title": f"Person {n}", "text": f"Person {n} was born in town {n}."}
        for n in range(50)
    ]
    path.write_text("".join(json.dumps(passage) + "\n" for passage in passages))
    return path


def a_call(tool: str, **arguments: Any) -> dict[str, Any]:
    call = {"name": tool, "arguments": arguments, "rollout_id": "r/0/0/0/0", "turn": 0}
    return {"calls": [call | {"timeout_s": WAIT_S}]}


def test_search_answers_over_http_and_stops_cleanly(start: Start, corpus: Path):
    service = start("search", {"corpus": str(corpus), "top_k": 2})
    url = service.url()
    with httpx.Client(base_url=url, timeout=WAIT_S) as http:
        spec = ToolSpec.model_validate_json(http.get("/spec").content)
        health = ToolHealth.model_validate_json(http.get("/healthz").content)
        answer = http.post("/call", json=a_call("search", query="Where was person 7 born?"))
        retrieved = http.post("/retrieve", json={"queries": ["person 7"], "topk": 1})
    assert spec.name == "search"
    assert (health.status, health.version) == ("ok", spec.version)
    reply = CallReply.model_validate_json(answer.content)
    assert reply.results[0].text().startswith("[1] Person 7\nPerson 7 was born in town 7.")
    assert retrieved.json()["result"][0][0]["id"] == "p7"
    assert service.stop() == 0


@pytest.mark.elasticsearch
def test_a_service_on_elasticsearch_answers_as_the_embedded_one(
    start: Start, corpus: Path, elasticsearch_url: str
):
    name = f"test-{uuid.uuid4().hex[:12]}"
    built = build_index(ElasticsearchServer(elasticsearch_url), corpus, name)
    try:
        table = {
            "backend": "elasticsearch",
            "elasticsearch_url": elasticsearch_url,
            "index": name,
        }
        services = [start("search", table), start("search_b", {"corpus": str(corpus)})]
        # Search-R1's own request, of search_r1/llm_agent/generation.py.
        body = {"queries": ["person 7", "person 8"], "topk": 1, "return_scores": True}
        answers = []
        for service in services:
            with httpx.Client(base_url=service.url(), timeout=WAIT_S) as http:
                answers.append(http.post("/retrieve", json=body).json())
        ours, theirs = answers
        assert [found[0]["document"] for found in ours["result"]] == [
            {"id": f"p{n}", "contents": f'"Person {n}"\nPerson {n} was born in town {n}.'}
            for n in (7, 8)
        ]
        for ours_one, theirs_one in zip(ours["result"], theirs["result"], strict=True):
            assert ours_one[0]["document"] == theirs_one[0]["document"]
            assert ours_one[0]["score"] == pytest.approx(theirs_one[0]["score"], rel=1e-4)
        assert [service.stop() for service in services] == [0, 0]
    finally:
        with Elasticsearch(elasticsearch_url) as client:
            client.indices.delete(index=built.index)


def test_a_service_whose_elasticsearch_is_not_there_ends_with_the_remedy(start: Start):
    with socket.socket() as taken:  # bound and not listening: nobody answers
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        table = {"backend": "elasticsearch", "elasticsearch_url": url, "index": "wiki"}
        service = start("search", table)
        assert service.process.wait(WAIT_S) != 0
    assert f"{url} cannot be reached" in service.log.read_text()
    assert "check host and port" in service.log.read_text()


def test_a_second_start_finds_the_index(start: Start, corpus: Path):
    first = start("search", {"corpus": str(corpus)})
    first.url()
    assert first.stop() == 0
    second = start("search", {"corpus": str(corpus)})
    second.url()
    assert second.stop() == 0
    assert second.log.read_text().count("index build finished") == 1  # both write this log


def test_two_services_that_start_together_build_one_index(start: Start, corpus: Path):
    services = [start(name, {"corpus": str(corpus)}) for name in ("search", "search_b")]
    for service in services:
        service.url()
    logs = "".join(service.log.read_text() for service in services)
    assert logs.count("index build finished") == 1
    assert [service.stop() for service in services] == [0, 0]


async def test_many_rollouts_search_at_once(start: Start, corpus: Path):
    url = start("search", {"corpus": str(corpus), "top_k": 1}).url()
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as http:

        async def ask(number: int) -> str:
            response = await http.post("/call", json=a_call("search", query=f"person {number}"))
            return CallReply.model_validate_json(response.content).results[0].text()

        texts = await asyncio.gather(*(ask(number % 50) for number in range(200)))
    assert all(f"town {number % 50}." in text for number, text in enumerate(texts))


def test_a_call_in_flight_is_answered_before_the_service_stops(start: Start, tmp_path: Path):
    (tmp_path / "slow_tool.py").write_text(SLOW_TOOL)
    service = start("slow", {"type": "slow_tool:Slow"})
    url = service.url()
    entered, until = tmp_path / "entered", tmp_path / "until"
    client = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import httpx, sys; r = httpx.post(sys.argv[1], content=sys.argv[2], timeout=30); "
            "print(r.status_code, r.json()['results'][0]['parts'][0]['text'])",
            f"{url}/call",
            json.dumps(a_call("slow", entered=str(entered), until=str(until))),
        ],
        stdout=subprocess.PIPE,
    )
    deadline = time.monotonic() + WAIT_S
    while not entered.exists():
        assert time.monotonic() < deadline, service.log.read_text()
        time.sleep(POLL_S)
    service.process.send_signal(signal.SIGTERM)
    while httpx.get(f"{url}/healthz", timeout=WAIT_S).json()["status"] != "draining":
        assert time.monotonic() < deadline
        time.sleep(POLL_S)
    until.touch()
    assert client.communicate(timeout=WAIT_S)[0].decode().strip() == "200 done"
    assert service.process.wait(WAIT_S) == 0


def test_a_taken_port_is_said_with_the_remedy(start: Start, corpus: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        service = start("search", {"corpus": str(corpus), "port": port})
        assert service.process.wait(WAIT_S) != 0
    assert f"port {port} cannot be bound: Address already in use" in service.log.read_text()
    assert "set port = 0" in service.log.read_text()


def test_a_tool_that_cannot_start_ends_with_its_error(start: Start, tmp_path: Path):
    (tmp_path / "broken_tool.py").write_text(
        SLOW_TOOL + "    async def start(self):\n        raise OSError('no licence file')\n"
    )
    service = start("slow", {"type": "broken_tool:Slow"})
    assert service.process.wait(WAIT_S) != 0
    assert "OSError: no licence file" in service.log.read_text()
    assert not service.announcement.exists()
