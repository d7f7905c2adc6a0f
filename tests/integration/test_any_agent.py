"""Agents as they are, each in its sandbox, against a scripted policy: what becomes of them."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent_r1.gateway.attempts import session_name
from agent_r1.gateway.config import AgentConfig
from agent_r1.gateway.session import SessionRules
from agent_r1.gateway.wire import WireError
from agent_r1.text.chat_format import ChatFormat
from agent_r1_proto.parts import TextPart
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import Decoding, Task
from agent_r1_proto.tools import ToolCall, ToolResult
from tests.support.agent_scene import agent_scene, scene_chat
from tests.support.builders import rollout_task
from tests.support.fakes import FakePolicy, FakeToolServer, call_text
from tests.support.learner_fakes import eventually

pytestmark = [pytest.mark.redis, pytest.mark.slow]
REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples" / "any_agent"
RAW = [sys.executable, str(EXAMPLE / "raw_client.py")]
CLASSES = {
    "openai-agents": ("agents", "search_agent:SearchAgent"),
    "openai-agents, Responses": ("agents", "search_agent:ResponsesAgent"),
    "pydantic-ai": ("pydantic_ai", "pydantic_ai_agent:PydanticAgent"),
    "langgraph": ("langgraph", "langgraph_agent:GraphAgent"),
    "smolagents": ("smolagents", "smolagents_agent:SmolAgent"),
}
SEARCH = "<think>look</think>" + call_text(query="Ada")
ANSWER = "<answer>Ada</answer>"
MAX_CONTEXT = 32_000
"""A token is a letter here, and the instructions of some frameworks are long."""
RULES = SessionRules(run_seed=5, max_context=MAX_CONTEXT)


@pytest.fixture
async def broker(redis_url: str, run_id: str) -> AsyncIterator[Broker]:
    async with await Broker.connect(redis_url, run_id) as connection:
        yield connection


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return scene_chat()


def searching(chat: ChatFormat, answer: str = ANSWER) -> FakePolicy:
    """A policy that searches until it has read a result, and then answers."""
    end_id = min(chat._end_of_turn_ids)

    def write(token_ids: list[int], number: int) -> list[int]:
        has_read = "result of {" in chat.decode(token_ids)
        return [*chat.encode(answer if has_read else SEARCH), end_id]

    return FakePolicy(write, eos_token_ids=[end_id], max_context=MAX_CONTEXT)


@pytest.mark.parametrize("framework", ["raw client", *CLASSES])
async def test_an_agent_is_trained_as_it_is(
    framework: str, chat: ChatFormat, broker: Broker, run_id: str, monkeypatch: pytest.MonkeyPatch
):
    settings: dict[str, Any] = {"command": RAW}
    answer = ANSWER
    if framework != "raw client":
        package, settings["type"] = CLASSES[framework]
        del settings["command"]
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{framework} is not installed; `make test-agents` installs it")
        monkeypatch.syspath_prepend(str(EXAMPLE))
    if framework == "smolagents":
        answer = call_text(name="final_answer", answer="Ada")
    rollout = rollout_task(run_id, task=Task(id="q", prompt="Who wrote it?"))
    config = AgentConfig(answer="output", timeout_s=60.0, **settings)
    async with (
        FakeToolServer() as search,
        agent_scene(broker, chat, searching(chat, answer), config, search, rules=RULES) as attempts,
    ):
        trajectory = await attempts.run(rollout)
    assert (trajectory.status, trajectory.reason) == ("COMPLETED", "answer"), trajectory.turns
    assert len(trajectory.turns[0].calls) == 1
    assert trajectory.turns[0].calls[0].arguments == {"query": "Ada"}
    assert trajectory.turns[-1].answer == "Ada"
    assert trajectory.lineages == []
    if framework == "smolagents":  # it writes calls and results into texts of its own
        assert len(trajectory.segment_starts) == len(trajectory.turns) - 1
    else:
        assert "result of" in trajectory.turns[0].calls[0].text()
        assert trajectory.segment_starts == []
    (call,) = search.calls
    assert call.arguments == {"query": "Ada"}
    assert trajectory.num_action_tokens == sum(t.end - t.start for t in trajectory.turns)


OWN_CALL = """
import os,httpx
u,h=os.environ['OPENAI_BASE_URL'],{'authorization':'Bearer '+os.environ['OPENAI_API_KEY']}
m=[{'role':'user','content':'hi'}]
httpx.post(u+'/chat/completions',json={'model':'policy','messages':m},headers=h,timeout=60)
httpx.post(u[:-3]+'/tools/search',json={'query':'Bob'},headers=h)
"""


@pytest.mark.parametrize(
    ("command", "called"),
    [(RAW, ["Ada"]), ([sys.executable, "-c", OWN_CALL], ["Ada", "Bob"])],
    ids=["the policy's call", "a call of the program"],
)
async def test_rewards_get_what_tools_of_the_run_say(
    command: list[str],
    called: list[str],
    chat: ChatFormat,
    broker: Broker,
    run_id: str,
):
    def answer(call: ToolCall) -> ToolResult:
        text = f"result of {json.dumps(call.arguments)}"
        return ToolResult(parts=[TextPart(text=text)], data={"passed": 2})

    config = AgentConfig(answer="output", timeout_s=60.0, command=command)
    search = FakeToolServer(answer=answer, version="8")
    policy = searching(chat)
    async with search, agent_scene(broker, chat, policy, config, search, rules=RULES) as attempts:
        trajectory = await attempts.run(rollout_task(run_id))
    first = trajectory.turns[0]
    assert [call.arguments["query"] for call in first.calls] == called
    assert [call.data for call in first.calls][-1] == {"passed": 2}
    assert (first.calls[-1].version, first.calls[-1].status) == ("8", "ok")
    assert first.start < first.calls[-1].end_token_index < first.end
    heard = [reply.role for reply in first.shown()]
    assert heard == (["tool"] if command is RAW else [])  # the policy read no answer of its program


def test_a_program_that_nobody_knows_is_named():
    with pytest.raises(
        ValueError,
        match=r"known \('pie'\) is none of claude, codex, mini, opencode, pi; set command instead",
    ):
        AgentConfig.model_validate({"known": "pie"})


@pytest.mark.parametrize(
    ("program", "status", "reason"),
    [
        ("raise SystemExit('broken')", "FAILED", "agent_silent: "),
        (
            "import os,httpx\nurl=os.environ['OPENAI_BASE_URL']+'/chat/completions'\n"
            "h={'authorization':'Bearer '+os.environ['OPENAI_API_KEY']}\n"
            "m=[{'role':'user','content':'hi'}]\n"
            "httpx.post(url,json={'model':'policy','messages':m},headers=h,timeout=60)\n"
            "raise SystemExit('gave up')",
            "TRUNCATED",
            "agent_failed: ",
        ),
    ],
)
async def test_how_it_ends_says_what_is_trained(
    program: str, status: str, reason: str, chat: ChatFormat, broker: Broker, run_id: str
):
    config = AgentConfig(command=[sys.executable, "-c", program], timeout_s=60.0)
    async with agent_scene(broker, chat, searching(chat), config) as attempts:
        trajectory = await attempts.run(rollout_task(run_id))
    assert trajectory.status == status, trajectory.reason
    assert trajectory.reason.startswith(reason)
    assert (trajectory.num_action_tokens > 0) == (status == "TRUNCATED")


async def test_a_command_that_is_not_there_starts_no_service(
    chat: ChatFormat, broker: Broker, run_id: str
):
    config = AgentConfig(command=["no-such-program"], timeout_s=60.0)
    with pytest.raises(ValueError, match="no-such-program"):
        async with agent_scene(broker, chat, searching(chat), config):
            pass


async def test_a_search_among_branches_is_refused(chat: ChatFormat, broker: Broker, run_id: str):
    decoding = Decoding(method="majority", candidates=2)
    config = AgentConfig(command=["true"], timeout_s=60.0)
    async with agent_scene(broker, chat, searching(chat), config) as attempts:
        task = rollout_task(run_id, purpose="eval", decoding=decoding)
        trajectory = await attempts.run(task)
    assert trajectory.reason.startswith("decoding_refused: majority")


async def test_an_agent_outlives_a_gateway_that_is_stopped(
    chat: ChatFormat, broker: Broker, run_id: str
):
    """Its attempt is given back, and the gateway that takes it goes on with the same agent."""
    patient = (EXAMPLE.parents[1] / "tests" / "support" / "patient_agent.py").read_text()
    config = AgentConfig(command=[sys.executable, "-c", patient], timeout_s=60.0)
    policy = searching(chat)
    policy.answering.clear()
    rollout = rollout_task(run_id)
    async with agent_scene(broker, chat, policy, config, rules=RULES) as attempts:
        first = asyncio.create_task(attempts.run(rollout))
        await eventually(lambda: bool(policy.streams), first)
        name = session_name(rollout)
        key = attempts._open[name].key
        attempts.is_stopping = True
        first.cancel()
        await asyncio.wait([first])
        with pytest.raises(WireError, match="goes on at another gateway") as refused:
            await attempts.find(name, key)
        assert refused.value.kind == "unavailable"  # which an agent outlives
        attempts.is_stopping = False  # as a gateway that starts at the same address
        waiting = asyncio.create_task(attempts.find(name, key))
        for wrong in ((name, "guess"), (name, ""), ("it", key)):
            with pytest.raises(WireError, match="no session of this id and key") as refused:
                await attempts.find(*wrong)
            assert refused.value.kind == "no_session"
        assert not waiting.done()
        policy.answering.set()
        trajectory = await attempts.run(rollout)
        assert (await waiting).session_id == name
        await attempts.forget(trajectory)
        with pytest.raises(WireError, match="no session of this id and key"):
            await attempts.find(name, key)
    assert (trajectory.status, trajectory.reason) == ("COMPLETED", "answer")
