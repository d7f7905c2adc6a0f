"""Settings of agents, and how an attempt ended, without a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

import agent_r1
from agent_r1.runtime.agent_settings import AgentSettings
from agent_r1.tools.agents import attached
from agent_r1.tools.agents.ending import describe_end
from agent_r1.tools.agents.tool import AgentTool, import_agent
from agent_r1.tools.base import CallContext
from agent_r1_proto.agents import AgentEnd, AttemptReport
from agent_r1_proto.tools import ToolResult

PROGRAM = AgentSettings(command=["agent"], answer="output", memory_mb=512, cpu_s=5.0)
CLASS = AgentSettings(type="my:Agent", answer="output")


def report(**fields: Any) -> dict[str, Any]:
    """Return what a keeper reports of an agent that ended well."""
    found = {"why": "ended", "status": 0, "result": "", "output": "", "errors": "", "files": {}}
    return found | fields


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "type (None), command (None) and attached (false): set exactly one of them"),
        ({"type": "a:B", "command": ["c"]}, "set exactly one of them"),
        ({"command": []}, "type (None), command ([]) and attached (false): set exactly one"),
        ({"type": "no colon"}, "settings.type: String should match"),
        (
            {"command": ["c"], "answer": "file"},
            "answer ('file') and answer_file (None) go together",
        ),
        ({"command": ["c"], "answer_file": "x"}, "go together"),
        ({"command": ["c"], "attached": True}, "attached (true): set exactly one of them"),
        (
            {"attached": True, "answer": "file", "answer_file": "x"},
            "an attached program reports its answer",
        ),
        ({"command": ["c"], "artefacts": ["/etc/passwd"]}, "settings.artefacts.0"),
        ({"command": ["c"], "artefacts": ["x"] * 17}, "settings.artefacts"),
        ({"command": ["c"], "show": ["/no/such"]}, "show ('/no/such') is not there"),
        ({"command": ["c"], "sandbox": "container"}, "set network = true"),
        ({"command": ["c"], "memory": 1}, "settings.memory is unknown; did you mean memory_mb?"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=re.escape(problem)):
        AgentTool(**settings)


def test_a_class_that_is_no_agent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "no_agents.py").write_text(
        "from agent_r1 import Agent\nclass Plain: ...\n"
        "class Slow(Agent):\n    def run(self, task, model): ...\n"
        "class Short(Agent):\n    async def run(self, task): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"is not a subclass of agent_r1\.Agent; derive it"):
        import_agent("no_agents:Plain")
    with pytest.raises(ValueError, match="agent class Slow: run is not async"):
        import_agent("no_agents:Slow")
    with pytest.raises(ValueError, match=r"write `async def run\(self, task, model\)`"):
        import_agent("no_agents:Short")


def test_the_version_is_the_table_s_or_the_class_s():
    assert AgentTool(command=["c"]).spec().version == agent_r1.Agent.version == "1"
    assert AgentTool(command=["c"], version="2").spec().version == "2"


@pytest.mark.parametrize(
    ("settings", "found", "exit_", "error"),
    [
        (PROGRAM, {}, "ok", ""),
        (PROGRAM, {"status": 3 << 8}, "failed", "exit status 3"),
        (PROGRAM, {"status": 3 << 8, "errors": "a\nlast\n\n"}, "failed", "last"),
        (PROGRAM, {"status": 11}, "failed", "ended by SIGSEGV"),
        (PROGRAM, {"status": 24}, "failed", "more than 5 s of CPU; raise agent.cpu_s"),
        (PROGRAM, {"why": "memory", "status": 9}, "failed", "more than 512 MB"),
        (PROGRAM, {"why": "timeout", "status": 9}, "timeout", "longer than it may"),
        (PROGRAM, {"result": '{"not_started": "x: none"}'}, "not_started", "x: none; install"),
        (CLASS, {"result": '{"not_started": "x: none"}'}, "not_started", "none; correct the class"),
        (CLASS, {"result": '{"error": "KeyError: 1"}', "status": 256}, "failed", "KeyError: 1"),
        (CLASS, {"result": "[" * 100_000}, "ok", ""),
        (CLASS, {"result": '{"error": 3}', "status": 256}, "failed", "exit status 1"),
    ],
)
def test_every_end_says_why(settings: AgentSettings, found: dict[str, Any], exit_: str, error: str):
    end = describe_end(settings, report(**found))
    assert end.exit == exit_
    assert error in end.error
    assert bool(end.error) == (exit_ != "ok")


def test_what_is_known_without_a_report_is_enough():
    assert describe_end(PROGRAM, {"why": "timeout"}).exit == "timeout"
    refused = describe_end(PROGRAM, {"problem": "OSError: full"})
    assert (refused.exit, refused.error) == (
        "not_started",
        "the sandbox refused the attempt: OSError: full",
    )


def test_the_answer_comes_from_where_the_table_says():
    said = report(output=" Paris\n", result=json.dumps({"answer": "Rome"}), files={"a": "Oslo"})
    in_file = AgentSettings(command=["c"], answer="file", answer_file="a", artefacts=["a", "b"])
    message = AgentSettings(command=["c"])
    assert describe_end(PROGRAM, said).answer == "Paris"
    assert describe_end(CLASS, said).answer == "Rome"
    assert describe_end(in_file, said).answer == "Oslo"
    assert describe_end(in_file, said).artefacts == {"a": "Oslo"}
    assert describe_end(in_file, report()).answer is None
    assert describe_end(message, said).answer is None


@pytest.mark.parametrize("number", [9, 33, 40, 63])
def test_a_signal_without_a_name_ends_an_agent_like_any_other(number: int):
    end = describe_end(PROGRAM, report(status=number))
    assert (end.exit, end.error[:9]) == ("failed", "ended by ")


@contextlib.asynccontextmanager
async def offered(agents: attached.AttachedAgents) -> AsyncIterator[asyncio.Task[ToolResult]]:
    """Offer an attempt."""
    attempt = {
        "task": {"id": "one", "prompt": [{"role": "user", "content": "Who?"}]},
        "url": "http://gateway/sessions/one/v1",
        "key": "k" * 16,
        "model": "policy",
        "context": 4096,
        "timeout_s": 60.0,
    }
    call = asyncio.create_task(agents.call({}, CallContext("one", 0, attempt, 60.0)))
    yield call
    call.cancel()


async def test_a_program_is_told_of_the_gateway_that_called_last():
    agents = attached.AttachedAgents(attached=True)
    async with offered(agents):
        taken = await agents.take(10.0)
        assert taken is not None
        moved = taken.attempt.model_copy(update={"url": "http://other/sessions/one/v1"})
        context = CallContext("one", 0, moved.model_dump(mode="json"), 60.0)
        again = asyncio.create_task(agents.call({}, context))
        await asyncio.sleep(0)
        followed = agents.follow(taken.id)
        again.cancel()
    assert followed is not None
    assert followed.attempt.url == "http://other/sessions/one/v1"


@pytest.mark.parametrize("arrives", [False, True])
async def test_an_attempt_whose_program_never_asked_for_it_is_given_to_another(
    arrives: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attached, "ARRIVE_S", 1.0 if arrives else 0.0)
    agents = attached.AttachedAgents(attached=True)
    async with offered(agents) as call:
        taken = await agents.take(10.0)
        assert taken is not None
        assert not arrives or agents.follow(taken.id) is not None
        again = await agents.take(1.5 if arrives else 10.0)
        assert (again is None) == arrives
        last = again or taken
        if again is not None:  # whoever had it first is late
            assert again.id != taken.id
            assert agents.follow(taken.id) is None
            assert not agents.end(taken.id, AttemptReport(answer="Bob"))
        assert agents.end(last.id, AttemptReport(answer="Ada"))
        assert AgentEnd.model_validate((await call).data).answer == "Ada"


async def test_a_late_program_keeps_an_attempt_that_no_other_has_taken():
    agents = attached.AttachedAgents(attached=True)
    async with offered(agents) as call:
        taken = await agents.take(10.0)
        assert taken is not None
        agents.offer_again(taken.id)
        assert agents.follow(taken.id) == taken
        assert await agents.take(0.0) is None
        agents.offer_again(taken.id)
        assert agents.end(taken.id, AttemptReport(answer="Ada"))
        assert await agents.take(0.0) is None
        assert AgentEnd.model_validate((await call).data).answer == "Ada"


async def test_attempts_are_handed_out_to_those_who_wait_and_not_once_they_are_closed():
    agents = attached.AttachedAgents(attached=True)
    waiting = [asyncio.create_task(agents.take(10.0)) for _ in range(2)]
    async with offered(agents):
        done, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        (taken,) = [task.result() for task in done]
        assert taken is not None
        agents.offer_again(taken.id)
        again = await left.pop()
        assert again is not None
        agents.offer_again(again.id)
        await agents.close("one")
        assert await agents.take(0.0) is None
        assert agents.follow(again.id) is None


async def test_an_attempt_goes_to_another_program_where_the_one_that_asked_has_gone():
    agents = attached.AttachedAgents(attached=True)
    app = FastAPI()
    attached.add_attempts(app, agents)
    told: list[Any] = [{"type": "http.request", "body": b"{}"}]

    async def receive() -> Any:
        return told.pop() if told else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    scope: Any = {"type": "http", "method": "POST", "path": "/attempts", "headers": []}
    async with offered(agents):
        await app(scope | {"query_string": b""}, receive, send)
        again = await agents.take(0.0)
        assert again is not None
        assert again.id == "one.2"
