"""Tools of the run on the wire: what is listed, what is answered, how it refuses."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from agent_r1.gateway.app import create_wire
from agent_r1.gateway.wire import WireError
from agent_r1_proto.parts import TextPart
from agent_r1_proto.session_log import SessionTakenError
from agent_r1_proto.tools import ToolResult, ToolSpec

KEY = "key-of-the-session"
DEEP = '{"a": ' + "[" * 200 + "]" * 200 + "}"
SEARCH = ToolSpec(name="search", version="1", description="Looks up.", parameters={})


class Sessions:
    """One session, whose tool repeats what it is asked."""

    async def find(self, session_id: str, key: str) -> Any:
        if (session_id, key) != ("one", KEY):
            raise WireError("no_session", "no session has this id and this key; use those given")
        return "session"

    def offered(self, session: str) -> dict[str, ToolSpec]:
        return {"search": SEARCH}

    async def call_tool(self, session: str, name: str, arguments: dict[str, Any]) -> ToolResult:
        if name != "search":
            raise WireError("invalid_request", f"there is no tool {name!r}; offered: search")
        return ToolResult(parts=[TextPart(text=str(arguments))])


@pytest.fixture
async def client():
    sessions: Any = Sessions()
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(create_wire(sessions)),
        base_url="http://gateway/sessions/one",
        headers={"authorization": f"Bearer {KEY}"},
    ) as opened:
        yield opened


async def test_tools_are_listed_and_answer(client: httpx.AsyncClient):
    (listed,) = (await client.get("/tools")).json()
    assert (listed["type"], listed["function"]["name"]) == ("function", "search")
    lower = {"authorization": f"bearer {KEY}"}
    answer = await client.post("/tools/search", json={"query": "Ada"}, headers=lower)
    assert answer.json() == {"status": "ok", "text": "{'query': 'Ada'}"}


@pytest.mark.parametrize(
    ("request_of", "status", "text"),
    [
        ({"url": "/tools/shout", "json": {}}, 400, "offered: search"),
        ({"url": "/tools/search", "content": b"[1"}, 400, "no JSON object of arguments"),
        ({"url": "/tools/search", "content": b"[1]"}, 400, "no JSON object of arguments"),
        ({"url": "/tools/search", "content": b'{"q": NaN}'}, 400, "cannot be kept"),
        ({"url": "/tools/search", "content": b'{"q": 1e999}'}, 400, "cannot be kept"),
        ({"url": "/tools/search", "content": DEEP.encode()}, 400, "nested deeper than 64"),
        ({"url": "/tools/search", "json": {}, "headers": {"authorization": ""}}, 401, "this key"),
        ({"url": "/nothing", "json": {}}, 404, "POST /tools/NAME"),
    ],
)
async def test_errors_have_the_form_of_the_wire(
    client: httpx.AsyncClient, request_of: dict[str, Any], status: int, text: str
):
    answer = await client.post(**request_of)
    assert answer.status_code == status
    assert text in answer.json()["error"]["message"]


class FaultySession:
    """Notes faults, and fails at everything else."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.faults: list[str] = []

    def note_fault(self, fault: str) -> None:
        self.faults.append(fault)

    def __getattr__(self, name: str) -> Any:
        raise self.error


class FaultySessions(Sessions):
    """One session, which fails."""

    def __init__(self, session: Any) -> None:
        self.session = session

    async def find(self, session_id: str, key: str) -> Any:
        return self.session

    async def call_tool(self, session: Any, name: str, arguments: dict[str, Any]) -> ToolResult:
        raise self.session.error


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("responses", {"input": [{"role": "user", "content": [{"type": []}]}]}),
        ("responses", {"input": [{"role": "user", "content": [{"type": {}}]}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": []}]}], "max_tokens": 9}),
        ("messages", {"messages": [], "system": [{"type": {}}], "max_tokens": 9}),
        (
            "responses",
            {
                "input": [
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": DEEP},
                    {"type": "function_call_output", "call_id": "c", "output": "x"},
                ]
            },
        ),
        (
            "chat/completions",
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": DEEP}}],
                    },
                    {"role": "tool", "tool_call_id": "c", "content": "x"},
                ]
            },
        ),
        (
            "messages",
            {
                "max_tokens": 9,
                "messages": [
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "tool_use", "id": "c", "name": "f", "input": json.loads(DEEP)}
                        ],
                    },
                    {"role": "user", "content": "x"},
                ],
            },
        ),
    ],
)
async def test_what_cannot_be_shown_or_kept_is_refused_and_no_fault_of_ours(
    route: str, body: dict[str, Any]
):
    session: Any = FaultySession(RuntimeError("it was asked"))
    app = create_wire(FaultySessions(session))  # type: ignore[arg-type]
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False),
        base_url="http://gateway/sessions/one/v1",
    ) as client:
        answer = await client.post(f"/{route}", json={"model": "policy", **body})
    assert (answer.status_code, session.faults) == (400, []), answer.text


SAID = [{"role": "user", "content": "q"}]
MESSAGES = {"model": "policy", "messages": SAID}


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError("secret"), "its log says why"),
        (SessionTakenError("the session is another gateway's"), "another gateway's"),
    ],
)
@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/tools/search", {}),
        ("/v1/messages/count_tokens", MESSAGES),
        ("/v1/responses", {"model": "policy", "input": SAID, "previous_response_id": "resp_1"}),
        ("/v1/chat/completions", MESSAGES),
    ],
)
async def test_what_fails_here_is_a_fault_of_ours_wherever_it_comes_up(
    route: str, body: dict[str, Any], error: Exception, text: str
):
    session: Any = FaultySession(error)
    app = create_wire(FaultySessions(session))  # type: ignore[arg-type]
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False),
        base_url="http://gateway/sessions/one",
    ) as client:
        answer = await client.post(route, json=body)
    assert answer.status_code == (529 if "messages/" in route else 503)
    assert text in answer.json()["error"]["message"]
    assert "secret" not in answer.text
    assert len(session.faults) == isinstance(error, RuntimeError)
