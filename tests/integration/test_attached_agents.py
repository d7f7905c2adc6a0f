"""Attempts of programs that are started elsewhere: the command that attaches one, and what it does.

The harness of examples/harness works on its task with a scripted policy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent_r1.gateway.attempts import AgentAttempts, session_name
from agent_r1.gateway.config import AgentConfig
from agent_r1.gateway.session import SessionRules
from agent_r1.reward.config import RewardConfig
from agent_r1.reward.scorer import Scorer
from agent_r1.text.chat_format import ChatFormat
from agent_r1.tools.agents import attached as attached_agents
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import RolloutTask, Task
from agent_r1_proto.trajectory import Trajectory
from tests.support.agent_scene import agent_scene, scene_chat
from tests.support.builders import rollout_task
from tests.support.fakes import FakePolicy, call_text
from tests.support.learner_fakes import eventually

pytestmark = [pytest.mark.redis, pytest.mark.slow]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "harness"
AGENT_R1 = Path(sys.executable).with_name("agent-r1")
RULES = SessionRules(run_seed=5, max_context=8000)
END_S = 30.0


@pytest.fixture
async def broker(redis_url: str, run_id: str) -> AsyncIterator[Broker]:
    async with await Broker.connect(redis_url, run_id) as connection:
        yield connection


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return scene_chat()


def mending(chat: ChatFormat) -> FakePolicy:
    """A policy that mends the sum, looks, and says so."""
    end_id = min(chat._end_of_turn_ids)
    script = [
        call_text("bash", command="sed -i 's/total = int/total += int/' total.py"),
        call_text("bash", command="python3 total.py 1 2 3"),
        "It is mended.",
    ]
    return FakePolicy(
        lambda ids, _: [*chat.encode(script[chat.decode(ids).count("</tool_response>")]), end_id],
        eos_token_ids=[end_id],
        max_context=RULES.max_context,
    )


@contextlib.asynccontextmanager
async def attached(
    attempts: AgentAttempts, *program: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Attach a program to the scene by the command."""
    process = await asyncio.create_subprocess_exec(
        *(AGENT_R1, "agents", "attach", str(attempts.agent.url), "--", *program),
        env={**os.environ, "PYTHON": sys.executable},
    )
    try:
        yield process
    finally:
        assert process.returncode is None  # whatever a program does, the command goes on
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(END_S):
            assert await process.wait() == 0


def folder_task(run_id: str) -> RolloutTask:
    metadata: dict[str, Any] = {"folder": "tasks/fix-sum"}
    return rollout_task(run_id, task=Task(id="fix-sum", prompt="fix-sum", metadata=metadata))


async def reward_of(trajectory: Trajectory) -> float:
    scorer = Scorer(RewardConfig(components={"reported": 1.0}))
    return (await scorer.score_trajectory(trajectory)).total


async def test_a_harness_trains_as_it_is(chat: ChatFormat, broker: Broker, run_id: str):
    config = AgentConfig(attached=True, timeout_s=120.0)
    async with (
        agent_scene(broker, chat, mending(chat), config, rules=RULES) as attempts,
        attached(attempts, str(EXAMPLE / "attach.sh")),
    ):
        trajectory = await attempts.run(folder_task(run_id))
    assert (trajectory.status, trajectory.reason) == ("COMPLETED", "answer")
    assert [turn.calls[0].tool for turn in trajectory.turns[:-1]] == ["bash", "bash"]
    assert trajectory.turns[1].calls[0].text() == "6\n"
    assert trajectory.segment_starts == []
    assert await reward_of(trajectory) == 1.0


async def test_an_attempt_under_way_is_given_back_by_whoever_stops(
    chat: ChatFormat, broker: Broker, run_id: str
):
    config = AgentConfig(attached=True, timeout_s=120.0)
    policy = mending(chat)
    policy.answering.clear()
    async with agent_scene(broker, chat, policy, config, rules=RULES) as attempts:
        running = asyncio.create_task(attempts.run(folder_task(run_id)))
        async with attached(attempts, str(EXAMPLE / "attach.sh")):
            await eventually(lambda: bool(policy.streams), running)
        trajectory = await running
        await attempts.forget(trajectory)
        assert trajectory.status == "FAILED"
        assert trajectory.reason.startswith("agent_lost: it was given back")
        policy.answering.set()
        async with attached(attempts, str(EXAMPLE / "attach.sh")):
            again = await attempts.run(folder_task(run_id))
    assert await reward_of(again) == 1.0


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (["sh", "-c", "cat"], "agent_silent: it asked for no turn and ended (ok)"),
        (["sh", "-c", "exit 3"], "exit status 3"),
        (["sh", "-c", "echo '[]' > $AGENT_R1_REPORT"], "AGENT_R1_REPORT"),
        (["sh", "-c", "printf '\\377\\376' > $AGENT_R1_REPORT"], "AGENT_R1_REPORT"),
        (["sh", "-c", "mkdir $AGENT_R1_REPORT"], "AGENT_R1_REPORT"),
        (["sh", "-c", 'rm -rf "$PWD"'], "AGENT_R1_REPORT"),
        (
            ["sh", "-c", """echo '{"exit": "given_back"}' > $AGENT_R1_REPORT"""],
            "'exit' is not told",
        ),
    ],
)
async def test_how_a_program_ends(
    program: Sequence[str],
    reason: str,
    chat: ChatFormat,
    broker: Broker,
    run_id: str,
):
    config = AgentConfig(attached=True, timeout_s=60.0, answer="output")
    async with (
        agent_scene(broker, chat, mending(chat), config, rules=RULES) as attempts,
        attached(attempts, *program),
    ):
        trajectory = await attempts.run(folder_task(run_id))
    assert trajectory.status == "FAILED"  # none has sampled a token
    assert reason in trajectory.reason


async def test_programs_of_others_ask_over_http(chat: ChatFormat, broker: Broker, run_id: str):
    config = AgentConfig(attached=True, timeout_s=60.0, answer="output")
    rollout = folder_task(run_id)
    async with (
        agent_scene(broker, chat, mending(chat), config, rules=RULES) as attempts,
        httpx.AsyncClient(base_url=str(attempts.agent.url), timeout=END_S) as client,
    ):
        assert (await client.post("/attempts", json={"wait_s": 0})).status_code == 204
        running = asyncio.create_task(attempts.run(rollout))
        given = (await client.post("/attempts")).json()
        assert given["id"] == f"{session_name(rollout)}.1"
        assert given["attempt"]["task"]["metadata"] == {"folder": "tasks/fix-sum"}
        assert "payload" not in str(given)
        assert (await client.get(f"/attempts/{given['id']}")).json() == given
        assert (await client.post("/attempts", json={"wait_s": 0})).status_code == 204  # one each
        attempt = given["attempt"]
        async with httpx.AsyncClient(
            base_url=attempt["url"],
            headers={"authorization": f"Bearer {attempt['key']}"},
            timeout=END_S,
        ) as model:
            body = {"model": attempt["model"], "messages": [{"role": "user", "content": "Mend."}]}
            (await model.post("/chat/completions", json=body)).raise_for_status()
        end = f"/attempts/{given['id']}/end"
        wrong = await client.post(end, json={"exit": "ok", "reward": "much"})
        assert wrong.status_code == 422
        report = {"answer": "6", "reward": 0.25, "output": "seen"}
        assert (await client.post(end, json=report)).status_code == 200
        trajectory = await running
        for late in (await client.get(f"/attempts/{given['id']}"), await client.post(end, json={})):
            assert late.status_code == 410
    assert (trajectory.status, trajectory.turns[-1].answer) == ("COMPLETED", "6")
    assert await reward_of(trajectory) == 0.25


async def test_a_program_that_has_gone_is_a_loss(
    chat: ChatFormat, broker: Broker, run_id: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attached_agents, "GONE_S", 0.5)
    monkeypatch.setattr(attached_agents, "NOTICE_S", 0.1)
    config = AgentConfig(attached=True, timeout_s=60.0)
    async with (
        agent_scene(broker, chat, mending(chat), config, rules=RULES) as attempts,
        httpx.AsyncClient(base_url=str(attempts.agent.url), timeout=END_S) as client,
    ):
        running = asyncio.create_task(attempts.run(folder_task(run_id)))
        given = (await client.post("/attempts")).json()
        attempt = given["attempt"]
        headers = {"authorization": f"Bearer {attempt['key']}"}
        body = {"model": attempt["model"], "messages": [{"role": "user", "content": "Mend."}]}
        assert (await client.get(f"/attempts/{given['id']}")).status_code == 200
        url = f"{attempt['url']}/chat/completions"
        (await client.post(url, json=body, headers=headers)).raise_for_status()
        trajectory = await running
    assert trajectory.status == "FAILED"
    assert trajectory.reason.startswith("agent_lost: it was given back: its program has not asked")


async def test_an_attempt_that_nobody_asks_for_is_no_fault_of_an_agent(
    chat: ChatFormat, broker: Broker, run_id: str
):
    config = AgentConfig(attached=True, timeout_s=1.0)
    async with agent_scene(broker, chat, mending(chat), config, rules=RULES) as attempts:
        trajectory = await attempts.run(folder_task(run_id))
    assert trajectory.status == "FAILED"
    assert trajectory.reason.startswith("agent_lost: no program asked for it in its time")
