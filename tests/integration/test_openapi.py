"""Every service against its own description: whatever is sent, the answer is one it names.

schemathesis makes requests that fit `/openapi.json`, and some that do not, and sends them over real
sockets. No answer may be a 5xx, or have a status or a body that the description lacks.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import SearchStrategy
from schemathesis import GenerationMode, checks
from schemathesis.core.errors import InvalidSchema
from schemathesis.core.result import Ok

from agent_r1.reward.app import create_app as create_reward_app
from agent_r1.reward.config import RewardConfig
from agent_r1.reward.scorer import Scorer
from agent_r1.rollout.app import create_app as create_rollout_app
from agent_r1.rollout.weight_versions import WeightVersions
from agent_r1.runtime.http.token import token_headers
from agent_r1.tools.app import ToolService
from agent_r1.tools.app import create_app as create_tool_app
from agent_r1.tools.base import Arguments, CallContext, Tool
from agent_r1.tools.mcp.route import mcp_router
from agent_r1.tools.search.config import SearchConfig
from agent_r1.tools.search.retrieve import add_retrieve
from agent_r1.tools.search.tool import open_search_tool
from agent_r1.weights.file import FileFetcher
from agent_r1.weights.http import ServedFiles
from agent_r1_proto.registry import Registry
from agent_r1_proto.streams import Broker
from agent_r1_proto.weights import NewestVersion
from tests.support.fakes import FakePolicy
from tests.support.served import TOKEN, served

pytestmark = pytest.mark.timeout(240)

RUN_FILE = "0" * 64
EXAMPLES = 10
"""Requests of each kind, fitting and not, for every operation."""

Mend = Callable[[schemathesis.Case], schemathesis.Case]
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]


class Keeper(Tool):
    """Has sessions, numbers and texts."""

    name = "keeper"
    description = "Keeps what it is told."
    parameters = {
        "type": "object",
        "properties": {"text": {"type": "string"}, "number": {"type": "number"}},
        "required": ["text"],
    }
    sessions = True

    async def open(self, rollout_id: str, tool_context: Any) -> None: ...

    async def call(self, arguments: Arguments, context: CallContext) -> str:
        return str(arguments["text"])


@contextlib.asynccontextmanager
async def keeper() -> AsyncIterator[FastAPI]:
    app = create_tool_app(ToolService(Keeper()))
    app.include_router(mcp_router(app.state.service))
    yield app


@contextlib.asynccontextmanager
async def search(folder: Path) -> AsyncIterator[FastAPI]:
    corpus = folder / "corpus.jsonl"
    lines = [{"id": str(i), "title": f"Page {i}", "text": f"Number {i}."} for i in range(5)]
    corpus.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tool = open_search_tool("search", SearchConfig(corpus=corpus))
    app = create_tool_app(ToolService(tool))
    add_retrieve(app, tool)
    yield app


@contextlib.asynccontextmanager
async def reward() -> AsyncIterator[FastAPI]:
    yield create_reward_app(Scorer(RewardConfig(components={"exact_match": 1.0, "f1": 0.0})))


@contextlib.asynccontextmanager
async def rollout(redis_url: str, run_id: str, folder: Path) -> AsyncIterator[FastAPI]:
    async with await Broker.connect(redis_url, run_id) as broker:
        registry = Registry(broker)
        await registry.set_newest_version(NewestVersion(policy_version=0))
        policy = FakePolicy([[1, 2]], eos_token_ids=[2])
        await policy.start()
        versions = WeightVersions(policy, registry, FileFetcher(folder, run_id))
        yield create_rollout_app(
            server_id="s", policy=policy, versions=versions, in_flight=lambda: 0
        )


def name_the_tool(case: schemathesis.Case) -> schemathesis.Case:
    """Make calls that fit calls of the search tool: nothing in the schema says its name."""
    if case.path == "/call":
        body: Any = case.body
        for call in body["calls"]:
            call["name"] = "search"
    return case


def give_answers(case: schemathesis.Case) -> schemathesis.Case:
    """Make a task one that can be scored: what its payload needs depends on the components."""
    if case.path == "/score":
        body: Any = case.body
        body["payload"] = {"answers": ["Paris"]}
    return case


def name_a_file(ranges: Iterator[str | None]) -> Mend:
    """Return what makes requests ask for a file that is there, and for parts of it in turn."""

    def mend(case: schemathesis.Case) -> schemathesis.Case:
        named = {"version": 3, "name": "model.safetensors", "sha256": RUN_FILE}
        case.path_parameters = {key: named[key] for key in case.path_parameters}
        wanted = next(ranges)
        if wanted is not None:
            case.headers["range"] = wanted
        return case

    return mend


def _send(requests: SearchStrategy[schemathesis.Case], asked: dict[str, int]) -> None:
    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(case=requests)
    def send(case: schemathesis.Case) -> None:
        response = case.call(headers=token_headers(TOKEN))
        case.validate_response(response, checks=CHECKS)
        name = f"{case.method} {case.path} {response.status_code}"
        asked[name] = asked.get(name, 0) + 1

    send()


def conforms(
    url: str,
    *,
    operations: int,
    mend: Mend | None = None,
) -> dict[str, int]:
    """Send requests to every operation of a service and check the answers.

    Args:
        url: of the service.
        operations: how many it describes at least.
        mend: makes a request that fits the schema one that the service can take.

    Returns:
        How often each method and path was answered with which status.
    """
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=token_headers(TOKEN))
    results = list(schema.get_all_operations())
    found = [result.ok() for result in results if isinstance(result, Ok)]
    assert len(found) == len(results) >= operations
    asked: dict[str, int] = {}
    for operation in found:
        for mode in GenerationMode:
            requests = operation.as_strategy(generation_mode=mode)
            if mend is not None and mode is GenerationMode.POSITIVE:
                requests = requests.map(mend)
            # Nothing can be wrong; or the schema is changed into one that no value fits, which
            # schemathesis does not see before it has begun.
            with contextlib.suppress(Unsatisfiable, InvalidSchema):
                _send(requests, asked)
    assert {"200", "401", "422"} <= {name.rpartition(" ")[2] for name in asked}
    return asked


@contextlib.asynccontextmanager
async def weight_files(folder: Path) -> AsyncIterator[FastAPI]:
    app = FastAPI()
    files = ServedFiles()
    file = folder / "model.safetensors"
    file.write_bytes(b"12345678")
    files.add(3, file.name, path=file)
    files.add(RUN_FILE, path=file)
    files.add_weights_route(app)
    files.add_run_route(app)
    yield app


def test_the_weights_of_the_learner_are_served_as_described(tmp_path: Path):
    with served(weight_files(tmp_path)) as url:
        parts = [None, "bytes=0-3", "bytes=9-", "bytes=7-2", "bytes=0-1,4-5", "x"]
        asked = conforms(url, operations=2, mend=name_a_file(itertools.cycle(parts)))
    for path in ("GET /weights/files/{version}/{name}", "GET /run/files/{sha256}"):
        assert {f"{path} {status}" for status in (200, 206, 400, 416)} <= asked.keys()


def test_the_tool_service_answers_as_it_describes():
    with served(keeper()) as url:
        asked = conforms(url, operations=7)
    assert asked["POST /open 200"] > 1


def test_the_search_service_answers_as_it_describes(tmp_path: Path):
    with served(search(tmp_path)) as url:
        asked = conforms(url, operations=8, mend=name_the_tool)
    assert asked["POST /call 200"] > 1
    assert asked["POST /retrieve 200"] > 1


def test_the_reward_service_answers_as_it_describes():
    with served(reward()) as url:
        asked = conforms(url, operations=2, mend=give_answers)
    assert asked["POST /score 200"] > 1


@pytest.mark.redis
def test_the_rollout_service_answers_as_it_describes(redis_url: str, run_id: str, tmp_path: Path):
    with served(rollout(redis_url, run_id, tmp_path)) as url:
        asked = conforms(url, operations=4)
    assert asked["POST /weights/canary 200"] > 1
