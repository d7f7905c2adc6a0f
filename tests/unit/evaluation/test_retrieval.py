"""The retrieval of `naive_rag`: a real HTTP service, and what the model is shown of it."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from agent_r1.evaluation import retrieval
from agent_r1.evaluation.answer_file import Retrieved
from agent_r1.evaluation.retrieval import (
    RetrievalError,
    check_offered,
    retrieve,
    with_passages,
)
from agent_r1.runtime.http.token import RunToken
from agent_r1_proto.parts import TextPart
from agent_r1_proto.tasks import ChatMessage, Task
from agent_r1_proto.tools import ToolCall, ToolResult
from tests.support.fakes import FakeToolServer, call_text

SYSTEM = ChatMessage(role="system", content="Be brief.")


@pytest.fixture(autouse=True)
def _no_delay(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retrieval, "FIRST_DELAY_S", 0.0)


def questions(count: int) -> list[Task]:
    return [
        Task(id=f"q{i}", prompt=f"question {i}?", metadata={"set": "s"}, tool_context={"n": i})
        for i in range(count)
    ]


async def test_every_question_is_searched_for_once():
    seen: list[tuple[int, int]] = []
    async with FakeToolServer(max_batch=4) as server:
        found = await retrieve(
            server.url,
            questions(10),
            timeout_s=5.0,
            on_progress=lambda done, total: seen.append((done, total)),
        )
    assert len(found) == 10
    assert found["s", "q3", 0] == Retrieved(
        query="question 3?",
        status="ok",
        text='result of {"query": "question 3?"}',
        version="7",
    )
    by_query = {call.arguments["query"]: call for call in server.calls}
    assert len(server.calls) == len(by_query) == 10
    assert by_query["question 3?"].tool_context == {"n": 3}
    assert [len(request.calls) for request in server.requests] == [4, 4, 2]
    assert seen[-1] == (10, 10)


async def test_a_service_with_a_token_answers_its_run_alone():
    token = RunToken("0123456789abcdef")
    async with FakeToolServer(token=token) as server:
        found = await retrieve(server.url, questions(1), timeout_s=5.0, token=token)
        with pytest.raises(RetrievalError, match=r"answered 401: .*another token"):
            await retrieve(server.url, questions(1), timeout_s=5.0)
    assert len(found) == 1


async def test_what_the_tool_refuses_is_text_for_the_model():
    def too_long(_: ToolCall) -> ToolResult:
        return ToolResult(status="error", parts=[TextPart(text="Error: too long.")])

    async with FakeToolServer(answer=too_long) as server:
        found = await retrieve(server.url, questions(1), timeout_s=5.0)
    assert (found["s", "q0", 0].status, found["s", "q0", 0].text) == ("error", "Error: too long.")


async def test_a_short_outage_is_waited_for():
    async with FakeToolServer(statuses=[503, 502], spec_statuses=[503]) as server:
        found = await retrieve(server.url, questions(2), timeout_s=5.0)
    assert len(found) == 2


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (FakeToolServer(always=503), "did not answer in 5 attempts: it answered 503: out of order"),
        (FakeToolServer(always=422), "answered 422: out of order"),
        (FakeToolServer(reply=b"{}"), "does not parse"),
        (FakeToolServer(reply=b'{"version":"1","instance":"i","results":[]}'), "gave 0 results"),
        (FakeToolServer(name="maps"), "is the tool 'maps'"),
        (FakeToolServer(sessions=True), "and sessions"),
        (
            FakeToolServer(parameters={"type": "object"}),
            "needs the tool 'search' with the argument",
        ),
    ],
)
async def test_a_service_that_cannot_be_asked_is_explained(server: FakeToolServer, message: str):
    async with server:
        with pytest.raises(RetrievalError, match=message):
            await retrieve(server.url, questions(1), timeout_s=5.0)


async def test_nobody_there_is_explained():
    async with FakeToolServer() as server:
        url = server.url
    with pytest.raises(RetrievalError, match="did not answer in 5 attempts: ConnectError"):
        await retrieve(url, questions(1), timeout_s=5.0)


def test_passages_stand_in_the_dialogue_as_the_answer_to_a_call():
    task = Task(id="q", prompt=[SYSTEM, ChatMessage(role="user", content='the "É"?')], tools=None)
    found = Retrieved(query='the "É"?', status="ok", text="[1] E", version="7")
    shown = with_passages(task, found)
    said = '<tool_call>\n{"name": "search", "arguments": {"query": "the \\"É\\"?"}}\n</tool_call>'
    assert [(m.role, m.content) for m in shown.messages()] == [
        ("system", "Be brief."),
        ("user", 'the "É"?'),
        ("assistant", said),
        ("tool", "[1] E"),
    ]
    Task.model_validate(shown.model_dump())
    # In the words of the calls that tests of the rollout service use.
    plain = Retrieved(query="Ada", status="ok", text="", version="7")
    assert with_passages(task, plain).messages()[-2].content == call_text(query="Ada")


@pytest.mark.parametrize(
    "roles",
    [["user"], ["system", "user"], ["user", "assistant", "tool"], ["assistant", "tool", "tool"]],
)
def test_a_task_may_end_where_the_model_has_its_turn(roles: list[str]):
    prompt = [{"role": role, "content": "hi"} for role in roles]
    assert len(Task.model_validate({"id": "a", "prompt": prompt}).messages()) == len(roles)


@pytest.mark.parametrize(
    "roles", [["user", "assistant"], ["user", "system"], ["tool"], ["assistant", "user", "tool"]]
)
def test_a_task_that_ends_elsewhere_is_refused(roles: list[str]):
    prompt = [{"role": role, "content": "hi"} for role in roles]
    with pytest.raises(ValidationError, match="must be the user's, or a tool's after an assis"):
        Task.model_validate({"id": "a", "prompt": prompt})


def test_a_task_that_is_not_offered_the_tool_is_refused():
    check_offered([Task(id="a", prompt="q"), Task(id="b", prompt="q", tools=["search"])])
    with pytest.raises(RetrievalError, match=r"task 'c' offers the tools \[\]"):
        check_offered([Task(id="c", prompt="q", tools=[])])
