"""The tool service's HTTP contract: every way a call can end, sessions, draining."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import JsonValue

from agent_r1.tools.app import ToolService, create_app
from agent_r1.tools.base import (
    Arguments,
    CallContext,
    Tool,
    ToolBusyError,
    ToolUnavailableError,
    error_result,
)
from agent_r1.tools.config import ToolConfig
from agent_r1_proto.parts import TextPart
from agent_r1_proto.tools import CallReply, ToolHealth, ToolResult, ToolSpec
from tests.support.fakes import LeavingClient

WAIT_S = 10.0


class Scripted(Tool):
    """Does what the argument `do` says."""

    name = "scripted"
    description = "Does as told."
    version = "7"
    parameters = {
        "type": "object",
        "properties": {"do": {"type": "string"}},
        "required": ["do"],
        "additionalProperties": False,
    }
    max_batch = 4

    def __init__(self, *, sessions: bool = False) -> None:
        self.sessions = sessions
        self.contexts: list[CallContext] = []
        self.events: list[str] = []
        self.cancelled = 0
        self.entered = asyncio.Event()
        self.release = asyncio.Event()

    async def call(self, arguments: Arguments, context: CallContext) -> Any:
        self.contexts.append(context)
        match arguments["do"]:
            case "raise":
                raise LookupError("no such page")
            case "time out inside":
                raise TimeoutError("the site was slow")
            case "outage":
                raise ToolUnavailableError("the database is down")
            case "full":
                raise ToolBusyError("all 4 places are taken")
            case "error":
                return error_result("nothing there")
            case "number":
                return 7
            case "none":
                return None
            case "bytes":
                return b"raw"
            case "object":
                return {"text": "x"}
            case "surrogate":
                return ToolResult(parts=[TextPart(text="a\ud800b")], data={"\udfff": ["\ud83d"]})
            case "surrogate error":
                raise LookupError("no \ud800 page")
            case "long":
                return ToolResult(parts=[TextPart(text="é" * 600), TextPart(text="more")])
            case "wait":
                self.entered.set()
                try:
                    await self.release.wait()
                except asyncio.CancelledError:
                    self.cancelled += 1
                    raise
        return f"did {arguments['do']}"

    async def open(self, rollout_id: str, tool_context: JsonValue) -> None:
        self.events.append(f"open {rollout_id}")

    async def close(self, rollout_id: str) -> None:
        self.events.append(f"close {rollout_id}")

    async def start(self) -> None:
        self.events.append("start")

    async def stop(self) -> None:
        self.events.append("stop")


@contextlib.asynccontextmanager
async def client_of(tool: Tool, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(ToolService(tool, "here-1", ToolConfig(**options)))
    async with serving(app) as client:
        yield client


@contextlib.asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://tool") as client,
    ):
        yield client


def a_call(do: str = "it", **changes: Any) -> dict[str, Any]:
    call = {"name": "scripted", "arguments": {"do": do}, "rollout_id": "r/0/0/0/0", "turn": 0}
    return call | {"timeout_s": 5.0} | changes


async def post_calls(client: httpx.AsyncClient, *calls: dict[str, Any]) -> httpx.Response:
    return await client.post("/call", json={"calls": list(calls)})


async def results(client: httpx.AsyncClient, *calls: dict[str, Any]) -> list[ToolResult]:
    response = await post_calls(client, *calls)
    assert response.status_code == 200, response.text
    return CallReply.model_validate_json(response.content).results


async def test_spec_and_health_are_contract_messages():
    async with client_of(Scripted()) as client:
        spec = ToolSpec.model_validate_json((await client.get("/spec")).content)
        health = ToolHealth.model_validate_json((await client.get("/healthz")).content)
    assert (spec.name, spec.version, spec.max_batch) == ("scripted", "7", 4)
    assert (health.status, health.instance, health.sessions) == ("ok", "here-1", 0)


async def test_calls_are_answered_in_order_with_version_and_instance():
    async with client_of(Scripted()) as client:
        response = await post_calls(client, a_call("one"), a_call("two"))
    reply = CallReply.model_validate_json(response.content)
    assert (reply.version, reply.instance) == ("7", "here-1")
    assert [result.text() for result in reply.results] == ["did one", "did two"]


async def test_the_tool_gets_the_calls_context():
    tool = Scripted()
    async with client_of(tool) as client:
        await results(client, a_call(turn=3, tool_context={"user": "u"}, timeout_s=2.5))
    assert tool.contexts == [CallContext("r/0/0/0/0", 3, {"user": "u"}, 2.5)]


async def test_an_exception_is_the_tools_answer_and_its_traceback_is_logged(
    caplog: pytest.LogCaptureFixture,
):
    async with client_of(Scripted()) as client:
        bad, good, slow = await results(
            client, a_call("raise"), a_call("it"), a_call("time out inside")
        )
    assert (bad.status, bad.text()) == ("error", "Error: LookupError: no such page")
    assert (good.status, good.text()) == ("ok", "did it")
    assert (slow.status, slow.text()) == ("error", "Error: TimeoutError: the site was slow")
    assert "Traceback" in caplog.text
    assert "rollout_id=r/0/0/0/0" in caplog.text


async def test_a_tools_own_error_result_passes_through():
    async with client_of(Scripted()) as client:
        (result,) = await results(client, a_call("error"))
    assert (result.status, result.text()) == ("error", "nothing there")


@pytest.mark.parametrize(
    ("do", "kind"),
    [
        ("number", "int (7)"),
        ("none", "None"),
        ("bytes", "bytes (b'raw')"),
        ("object", "dict ({'text': 'x'})"),
    ],
)
async def test_a_result_of_a_wrong_type_is_no_answer_but_a_mistake_in_the_tool(
    do: str, kind: str, caplog: pytest.LogCaptureFixture
):
    async with client_of(Scripted()) as client:
        response = await post_calls(client, a_call(do))
        text = (await client.get("/metrics")).text
    problem = f"Scripted.call returned {kind}; it must return a string or a ToolResult"
    assert (response.status_code, response.json()) == (501, {"detail": problem})
    assert f"tool is broken tool=scripted version=7 rollout_id=r/0/0/0/0 problem={problem}" in (
        caplog.text
    )
    assert 'status="501"' in text


async def test_half_a_surrogate_pair_is_replaced_wherever_a_tool_puts_it():
    async with client_of(Scripted()) as client:
        fine, raised = await results(client, a_call("surrogate"), a_call("surrogate error"))
    assert fine.text() == "a\N{REPLACEMENT CHARACTER}b"
    assert fine.data == {"\N{REPLACEMENT CHARACTER}": ["\N{REPLACEMENT CHARACTER}"]}
    assert raised.text() == "Error: LookupError: no \N{REPLACEMENT CHARACTER} page"


async def test_a_long_result_is_cut_before_it_travels_and_says_so(
    caplog: pytest.LogCaptureFixture,
):
    # "é" is 2 bytes: 600 of them and "more" are 1204, and 501 bytes hold 250 of them.
    async with client_of(Scripted(), max_result_bytes=501) as client:
        (result,) = await results(client, a_call("long"))
    assert result.text() == "é" * 250 + "\n[truncated: 501 of 1204 bytes]"
    assert "tool result cut tool=scripted num_bytes=1204 max_result_bytes=501" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({}, "'do' is a required property"), ({"do": 1}, "1 is not of type 'string' (at $.do)")],
)
async def test_arguments_that_do_not_fit_the_schema_never_reach_the_tool(
    arguments: dict[str, Any], text: str
):
    tool = Scripted()
    async with client_of(tool) as client:
        bad, good = await results(client, a_call(arguments=arguments), a_call("it"))
    assert bad.status == "error"
    assert bad.text() == f"Error: the arguments are not valid: {text}"
    assert good.text() == "did it"
    assert len(tool.contexts) == 1


async def test_many_arguments_are_checked_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch):
    threads: list[threading.Thread] = []

    def find(*_: object) -> None:
        threads.append(threading.current_thread())

    monkeypatch.setattr("agent_r1.tools.app.find_error", find)
    async with client_of(Scripted()) as client:
        for count in (10, 2000):
            await results(client, a_call(arguments={"do": "it", "many": [[0] * count]}))
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


@pytest.mark.parametrize(
    ("do", "status", "detail"),
    [("outage", 503, "the database is down"), ("full", 429, "all 4 places are taken")],
)
async def test_an_outage_is_no_result(do: str, status: int, detail: str):
    async with client_of(Scripted()) as client:
        response = await post_calls(client, a_call(do))
    assert (response.status_code, response.json()) == (status, {"detail": detail})


async def test_a_call_beyond_its_time_is_504_and_cancelled():
    tool = Scripted()
    async with client_of(tool) as client:
        response = await post_calls(client, a_call("wait", timeout_s=0.05))
    assert response.status_code == 504
    assert "did not answer within 0.05 s" in response.json()["detail"]
    assert "raise env.tool_timeout_s" in response.json()["detail"]


async def test_a_call_nobody_waits_for_any_more_is_cancelled():
    tool = Scripted()
    app = create_app(ToolService(tool, instance="here-1"))
    async with app.router.lifespan_context(app):
        client = LeavingClient(app)
        leaving = asyncio.create_task(client.post("/call", {"calls": [a_call("wait")]}))
        await asyncio.wait_for(tool.entered.wait(), WAIT_S)
        client.leave()
        await asyncio.wait_for(leaving, 4.0)  # the call's own time is 5 s
        assert tool.cancelled == 1


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b"{", "body: Invalid JSON"),
        (b'{"calls": []}', "calls: List should have at least 1 item"),
        (b'{"calls": [], "extra": 1}', "extra: Extra inputs are not permitted (got 1)"),
    ],
)
async def test_a_wrong_body_is_422_and_says_where_and_what(body: bytes, detail: str):
    async with client_of(Scripted()) as client:
        response = await client.post("/call", content=body)
    assert response.status_code == 422
    assert detail in response.json()["detail"]


async def test_a_wrong_call_is_422_and_says_value_and_limit():
    async with client_of(Scripted()) as client:
        timeout = await post_calls(client, a_call(timeout_s=0))
        name = await post_calls(client, a_call(name="other"))
        many = await post_calls(client, *[a_call()] * 5)
    assert timeout.status_code == name.status_code == many.status_code == 422
    assert "calls.0.timeout_s: Input should be greater than 0 (got 0)" in timeout.json()["detail"]
    assert "name ('other') must be 'scripted'" in name.json()["detail"]
    assert "calls (5) must be at most 4" in many.json()["detail"]


@pytest.mark.parametrize("value", ["true", '"5"', '"NaN"', "NaN"])
async def test_a_number_is_written_as_a_number(value: str):
    body = json.dumps({"calls": [a_call(timeout_s="here")]}).replace('"here"', value)
    async with client_of(Scripted()) as client:
        response = await client.post("/call", content=body)
    assert response.status_code == 422
    assert "timeout_s" in response.json()["detail"]


async def test_more_calls_than_allowed_at_once_are_503():
    tool = Scripted()
    async with client_of(tool, max_calls_in_flight=1) as client:
        first = asyncio.create_task(post_calls(client, a_call("wait")))
        await asyncio.wait_for(tool.entered.wait(), WAIT_S)
        second = await post_calls(client, a_call("it"))
        tool.release.set()
        assert (await first).status_code == 200
        third = await post_calls(client, a_call("it"))
    assert second.status_code == 503
    assert "limit is 1" in second.json()["detail"]
    assert third.status_code == 200


async def test_a_batch_override_answers_whole_requests():
    class Batching(Scripted):
        async def call_batch(
            self, calls: Sequence[tuple[Arguments, CallContext]]
        ) -> list[ToolResult | str | BaseException]:
            if calls[0][0]["do"] == "short":
                return []
            return [f"{index} of {len(calls)}" for index in range(len(calls))]

    async with client_of(Batching()) as client:
        found = await results(client, a_call("a"), a_call(arguments={}), a_call("b"))
        short = await post_calls(client, a_call("short"))
    assert [result.text() for result in found][::2] == ["0 of 2", "1 of 2"]
    assert found[1].status == "error"
    assert short.status_code == 501
    assert "Batching.call_batch returned 0 results; it must return a list of 1" in short.text


async def test_start_and_stop_bracket_the_service():
    tool = Scripted()
    async with client_of(tool):
        assert tool.events == ["start"]
    assert tool.events == ["start", "stop"]


# --- Sessions ------------------------------------------------------------------------------------

SESSION = {"rollout_id": "r/0/0/0/0", "tool_context": None}


async def test_a_call_without_an_open_session_is_409():
    tool = Scripted(sessions=True)
    async with client_of(tool) as client:
        before = await post_calls(client, a_call())
        assert (await client.post("/open", json=SESSION)).json() == {}
        during = await post_calls(client, a_call())
        health = (await client.get("/healthz")).json()
        assert (await client.post("/close", json=SESSION)).json() == {}
        after = await post_calls(client, a_call())
    assert (before.status_code, during.status_code, after.status_code) == (409, 200, 409)
    assert "has no open session here" in before.json()["detail"]
    assert health["sessions"] == 1
    assert tool.events == ["start", "open r/0/0/0/0", "close r/0/0/0/0", "stop"]


async def test_open_sessions_are_closed_on_shutdown():
    tool = Scripted(sessions=True)
    async with client_of(tool) as client:
        await client.post("/open", json=SESSION)
    assert tool.events[-2:] == ["close r/0/0/0/0", "stop"]


async def test_sessions_without_calls_expire():
    tool = Scripted(sessions=True)
    closed = asyncio.Event()
    note = tool.close

    async def close(rollout_id: str) -> None:
        await note(rollout_id)
        closed.set()

    tool.close = close  # type: ignore[method-assign]
    async with client_of(tool, session_expiry_s=0.05) as client:
        await client.post("/open", json=SESSION)
        await asyncio.wait_for(closed.wait(), WAIT_S)
        assert (await post_calls(client, a_call())).status_code == 409


async def test_a_tool_without_sessions_refuses_open():
    async with client_of(Scripted()) as client:
        response = await client.post("/open", json=SESSION)
    assert response.status_code == 409
    assert "keeps no sessions" in response.json()["detail"]


@pytest.mark.parametrize(
    ("error", "status", "detail"),
    [
        (KeyError("page"), 501, "Opening.open raised KeyError: 'page'"),
        (ToolUnavailableError("no browser"), 503, "no browser"),
    ],
)
async def test_a_session_that_cannot_be_opened_says_why(
    error: Exception, status: int, detail: str, caplog: pytest.LogCaptureFixture
):
    class Opening(Scripted):
        async def open(self, rollout_id: str, tool_context: JsonValue) -> None:
            raise error

    async with client_of(Opening(sessions=True)) as client:
        answer = await client.post("/open", json=SESSION)
        health = (await client.get("/healthz")).json()
    assert (answer.status_code, answer.json()) == (status, {"detail": detail})
    assert health["sessions"] == 0
    assert "Traceback" in caplog.text
    if status == 501:
        assert "session open raised tool=scripted rollout_id=r/0/0/0/0" in caplog.text


# --- Draining ------------------------------------------------------------------------------------


async def test_draining_refuses_new_calls_and_waits_for_those_in_flight():
    tool = Scripted()
    app = create_app(ToolService(tool))
    service: ToolService = app.state.service
    async with serving(app) as client:
        assert (await client.get("/readyz")).status_code == 200
        first = asyncio.create_task(post_calls(client, a_call("wait")))
        await asyncio.wait_for(tool.entered.wait(), WAIT_S)
        drain = asyncio.create_task(service.drain(WAIT_S))
        await asyncio.sleep(0)
        health = (await client.get("/healthz")).json()
        assert (await client.get("/readyz")).status_code == 503
        refused = await post_calls(client, a_call("it"))
        assert not drain.done()
        tool.release.set()
        await asyncio.wait_for(drain, WAIT_S)
        assert (await first).status_code == 200
    assert health["status"] == "draining"
    assert refused.status_code == 503
    assert "is shutting down" in refused.json()["detail"]


async def test_a_draining_service_still_serves_its_open_sessions():
    tool = Scripted(sessions=True)
    app = create_app(ToolService(tool))
    service: ToolService = app.state.service
    async with serving(app) as client:
        await client.post("/open", json=SESSION)
        drain = asyncio.create_task(service.drain(WAIT_S))
        await asyncio.sleep(0)
        assert (await post_calls(client, a_call())).status_code == 200
        new = await client.post("/open", json=SESSION | {"rollout_id": "r/0/0/1/0"})
        assert not drain.done()
        await client.post("/close", json=SESSION)
        await asyncio.wait_for(drain, WAIT_S)
    assert new.status_code == 503


async def test_a_drain_that_takes_too_long_ends(caplog: pytest.LogCaptureFixture):
    tool = Scripted(sessions=True)
    app = create_app(ToolService(tool))
    async with serving(app) as client:
        await client.post("/open", json=SESSION)
        await app.state.service.drain(0.01)
    assert "drain timed out tool=scripted calls_in_flight=0 sessions=1" in caplog.text


async def test_metrics_count_calls_by_how_they_ended():
    tool = Scripted()
    async with client_of(tool) as client:
        before = (await client.get("/metrics")).text
        for what in ("a", "b", "error", "outage"):
            await post_calls(client, a_call(what))
        text = (await client.get("/metrics")).text
    labels = 'tool="scripted",version="7"'
    for status in ("ok", "error"):  # at 0 before, or the first would be no change
        assert f'agent_r1_tool_calls_total{{status="{status}",{labels}}} 0.0' in before
    assert f'agent_r1_tool_calls_total{{status="ok",{labels}}} 2.0' in text
    assert f'agent_r1_tool_calls_total{{status="error",{labels}}} 1.0' in text
    assert f'agent_r1_tool_calls_total{{status="503",{labels}}} 1.0' in text
    assert f"agent_r1_tool_request_seconds_count{{{labels}}} 4.0" in text
    assert f"agent_r1_tool_calls_in_flight{{{labels}}} 0.0" in text


async def test_metrics_have_the_counts_of_the_tool_itself():
    class Counting(Scripted):
        def counters(self) -> dict[str, int]:
            return {"cached": 3}

    async with client_of(Counting()) as client:
        text = (await client.get("/metrics")).text
    assert 'agent_r1_tool_events_total{event="cached",tool="scripted",version="7"} 3.0' in text


async def test_the_api_description_has_every_body_and_answer():
    async with client_of(Scripted()) as client:
        described = (await client.get("/openapi.json")).json()
    schemas = described["components"]["schemas"]
    post = described["paths"]["/call"]["post"]
    body = post["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert body == "#/components/schemas/CallRequest"
    assert schemas["CallRequest"]["properties"]["calls"]["items"]["$ref"].endswith("/ToolCall")
    assert schemas["ToolCall"]["properties"]["timeout_s"]["exclusiveMinimum"] == 0
    answer = post["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
    assert answer == "#/components/schemas/CallReply"
    assert {"408", "409", "413", "422", "501", "503", "504"} <= post["responses"].keys()
    references = set(re.findall(r'"\$ref": ?"#/components/schemas/(\w+)"', json.dumps(described)))
    assert references <= schemas.keys()


class Forking(Scripted):
    """Copies its sessions."""

    async def fork(self, rollout_id: str, fork_id: str) -> None:
        if fork_id == "bad":
            raise LookupError("no such place")
        self.events.append(f"fork {rollout_id} {fork_id}")


async def test_a_session_is_forked_over_http_and_the_spec_says_that_it_can_be():
    tool = Forking(sessions=True)
    async with client_of(tool) as client:
        spec = (await client.get("/spec")).json()
        await client.post("/open", json={"rollout_id": "r"})
        bodies = [("r", "r.0"), ("gone", "r.1"), ("r", "bad")]
        forked = [
            await client.post("/fork", json={"rollout_id": of, "fork_id": to}) for of, to in bodies
        ]
        answer = await post_calls(client, a_call(rollout_id="r.0"))
    assert spec["forks"]
    assert [reply.status_code for reply in forked] == [200, 409, 501]
    assert "Forking.fork raised LookupError: no such place" in forked[2].text
    assert answer.status_code == 200
    assert tool.events == ["start", "open r", "fork r r.0", "close r", "close r.0", "stop"]


async def test_a_tool_that_does_not_fork_says_what_to_do():
    async with client_of(Scripted(sessions=True)) as client:
        spec = (await client.get("/spec")).json()
        await client.post("/open", json={"rollout_id": "r"})
        refused = await client.post("/fork", json={"rollout_id": "r", "fork_id": "r.0"})
    assert not spec["forks"]
    assert refused.status_code == 409
    assert "forks no sessions; open one and repeat the calls" in refused.text
