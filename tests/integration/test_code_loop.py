"""A program is written, tested, mended and rewarded: every part real but the model's text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn

from agent_r1.evaluation.experiments import prompts
from agent_r1.evaluation.experiments.data_sets import CODE
from agent_r1.evaluation.experiments.questions import mbpp
from agent_r1.reward.config import RewardConfig
from agent_r1.reward.scorer import Scorer
from agent_r1.rollout.envs import CodeEnv
from agent_r1.rollout.envs.text_env import TextEnv
from agent_r1.runtime.config import ListenConfig
from agent_r1.runtime.http.serving import bind
from agent_r1.text.chat_format import ChatFormat, reply_roles
from agent_r1.text.tool_formats.code_block import CodeBlockFormat
from agent_r1.tools.app import ToolService, create_app
from agent_r1.tools.sandbox.code_tests import CodeTests
from tests.support.builders import rollout_task
from tests.support.fakes import FakeToolServer, build_tokenizer, call_text
from tests.unit.rollout.loops import agent_loop

TESTS = {"tests": ["assert f(2) == 4", "assert f(3) == 9", "assert f(1) == 1", "assert f(0) == 0"]}
HALF_RIGHT = "def f(x):\n    return x if x < 2 else -1\nprint('All 4 tests passed.')"
RIGHT = "def f(x):\n    return x * x"


@asynccontextmanager
async def served() -> AsyncIterator[str]:
    """The service of `code_tests`, over HTTP; the sandbox is real."""
    try:
        async with asyncio.timeout(60):
            probe = CodeTests()
            await probe.start()
            await probe.stop()
    except ValueError as exc:
        pytest.skip(str(exc))
    listener = bind("code_tests", ListenConfig(), None)
    config = uvicorn.Config(create_app(ToolService(CodeTests())), log_config=None, lifespan="on")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    host, port = listener.getsockname()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        await serving


async def test_a_program_is_mended_until_its_tests_pass():
    tokenizer = build_tokenizer()
    end_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    chat = ChatFormat(tokenizer, end_of_turn_ids=[end_id])
    turns = [call_text("code_tests", code=code) for code in (HALF_RIGHT, RIGHT)]
    async with served() as url:
        service = FakeToolServer(name="code_tests", url=url)  # its address, nothing else of it
        async with agent_loop(
            chat,
            end_id,
            turns,
            service,
            make_env=lambda task: CodeEnv(task, improvement_reward=0.1),
        ) as built:
            task = rollout_task()
            asked = task.task.model_copy(update={"tool_context": TESTS, "tools": ["code_tests"]})
            trajectory = await built.loop.run(task.model_copy(update={"task": asked}))
    assert (trajectory.status, trajectory.reason) == ("COMPLETED", "tests_passed")
    first, second = trajectory.calls()
    assert first.data == {"passed": 2, "failed": 2, "total": 4}
    assert second.data == {"passed": 4, "failed": 0, "total": 4}
    assert [first.process_reward, second.process_reward] == pytest.approx([0.05, 0.05])
    # What failed is read by the model in its next turn.
    shown = chat.decode(trajectory.token_ids.tolist())
    assert "2 of 4 tests passed." in shown
    assert "assert f(2) == 4" in shown
    table = RewardConfig(components={"tests_passed": 1.0, "all_tests_passed": 1.0})
    reward = await Scorer(table).score_trajectory(trajectory)
    assert reward.total == 2.0


async def test_a_program_that_is_only_written_is_scored_by_its_tests():
    tokenizer = build_tokenizer()
    end_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    chat = ChatFormat(
        tokenizer,
        end_of_turn_ids=[end_id],
        reply_roles=reply_roles(tools=False, messages=True),
        tool_format=CodeBlockFormat(),
    )
    record = {"text": "Square a number.", "task_id": 11, "test_list": TESTS["tests"]}
    question = mbpp("mbpp.jsonl:1", record)
    assert question is not None
    asked = prompts.make_task(question, "mbpp", "direct", CODE, None)
    async with served() as url:
        service = FakeToolServer(name="code_tests", url=url)
        async with agent_loop(
            chat,
            end_id,
            [f"Here it is:\n```python\n{HALF_RIGHT}\n```\nIt squares."],
            service,
            env={"max_turns": prompts.max_turns("direct", CODE)},
            make_env=TextEnv,
        ) as built:
            trajectory = await built.loop.run(rollout_task(task=asked))
    assert (trajectory.status, trajectory.reason) == ("TRUNCATED", "max_turns")
    table = RewardConfig(components={"all_tests_passed": 1.0, "tests_passed": 0.0})
    reward = await Scorer(table).score_trajectory(trajectory)
    # f(1) and f(0) of four hold.
    assert reward.components["tests_passed"] == 0.5
    assert reward.components["all_tests_passed"] == 0.0
