"""`agent-r1 chat` over a real Redis: questions go out as tasks, transcripts come back."""

from __future__ import annotations

import asyncio
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agent_r1.cli.evaluation import chat as cli_chat
from agent_r1.config.run import Config, ConfigError, load_config, write_config
from agent_r1.reward.config import RewardConfig
from agent_r1.runtime.evaluation_client import GREEDY
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import RolloutTask
from tests.support.builders import scored
from tests.support.config_scene import task_line, write_scene

pytestmark = [pytest.mark.redis, pytest.mark.timeout(60)]


@pytest.fixture
def config(tmp_path: Path, redis_url: str, run_id: str) -> Config:
    file = write_scene(tmp_path / "example")
    (file.parent / "held_out.jsonl").write_text(task_line("h1", prompt="Held out?"))
    return load_config(file, [f"redis.url={redis_url}", f"run.id={run_id}"], {}).config


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Standard input as a pipe; yields the end to type into."""
    read_end, write_end = os.pipe()
    with os.fdopen(read_end) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield write_end


async def answer_tasks(config: Config, seen: list[RolloutTask], **changes: Any) -> None:
    """Stand in for rollout and reward: answer every task at once."""
    assert config.redis.url is not None
    async with await Broker.connect(config.redis.url, config.run.id) as broker:
        consumer = broker.consumer(broker.keys.tasks, RolloutTask, group="rollout", consumer="fake")
        async with consumer:
            while True:
                for entry in await consumer.read(1, 0.5):
                    seen.append(entry.message)
                    stream = entry.message.reply_stream
                    assert stream is not None
                    reply = scored(
                        entry.message, answer=f"to {entry.message.task.prompt}", **changes
                    )
                    await consumer.finish(entry, [(stream, reply)])


async def talk(
    config: Config, question: str | None, **changes: Any
) -> tuple[int, str, list[RolloutTask]]:
    console = Console(file=io.StringIO(), width=120)
    seen: list[RolloutTask] = []
    answering = asyncio.create_task(answer_tasks(config, seen, **changes))
    try:
        code = await cli_chat.converse(config, console, question, GREEDY)
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
    assert isinstance(console.file, io.StringIO)
    return code, console.file.getvalue(), seen


async def test_one_question_is_asked_greedily_and_its_turns_are_shown(config: Config):
    code, text, seen = await talk(config, "Where is Ann?")
    assert code == 0
    assert "user: Where is Ann?" in text
    assert "model> <think>I know.</think><answer>to Where is Ann?</answer>" in text
    assert (seen[0].purpose, seen[0].sampling.temperature) == ("eval", 0.0)


async def test_the_policy_is_the_checkpoints_step_and_nothing_is_called_a_reward(
    config: Config, tmp_path: Path
):
    model = tmp_path / "run" / "checkpoints" / "step_000004" / "model"
    model.mkdir(parents=True)
    chosen = config.model.model_copy(update={"path": str(model)})
    _, text, _ = await talk(config.model_copy(update={"model": chosen}), "Where is Ann?")
    assert f"policy of step 4, {tmp_path}/run" in " ".join(text.split())
    assert "v0" not in text  # what the fresh servers call it
    assert "reward" not in text


async def test_a_question_that_failed_says_why_and_fails(config: Config):
    code, text, _ = await talk(config, "Where?", status="FAILED", reason="tool_timeout: search")
    assert code == 1
    assert "FAILED: tool_timeout: search" in text


async def test_a_conversation_takes_questions_and_held_out_ones_until_it_is_left(
    config: Config, typed: int, capsys: pytest.CaptureFixture[str]
):
    os.write(typed, b":sets\nFirst?\n:pick\n:pick nosuch\n\n:quit\n")
    code, text, seen = await talk(config, None)
    os.close(typed)
    assert code == 0
    assert [rollout.task.prompt for rollout in seen] == ["First?", "Held out?"]
    assert "held_out" in text
    assert "expected: ['there']" in text
    assert "there is no set 'nosuch'; the sets are held_out" in text
    assert capsys.readouterr().out.count("question> ") == 6


async def test_the_end_of_input_ends_the_conversation(config: Config, typed: int):
    os.write(typed, b"Only one?\n")
    os.close(typed)
    code, _, seen = await talk(config, None)
    assert code == 0
    assert [rollout.task.prompt for rollout in seen] == ["Only one?"]


def test_a_run_brings_its_own_configuration_and_its_last_model(config: Config, tmp_path: Path):
    run = tmp_path / "run"
    model = run / "checkpoints" / "step_000004" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    write_config(config, run / "config.json")
    ranges = 'reward.ranges={"desk:brief" = [0.0, 1.0]}'
    own = 'reward.components={"desk:brief" = 1.0}'
    options = ["rollout.max_concurrent=3", own, ranges]
    found = cli_chat.uncompared(cli_chat.chat_config(str(run), None, options))
    assert found.model.path == str(model)
    assert found.rollout.max_concurrent == 3
    # A question that is typed has no answer to compare with.
    assert found.reward.components == {"answered": 1.0}
    RewardConfig.model_validate(found.reward.model_dump())  # what the service is given fits
    with pytest.raises(ConfigError, match="name a configuration with --config"):
        cli_chat.chat_config(str(tmp_path), None, [])


def test_the_ranges_of_components_that_chat_leaves_out_do_no_harm(tmp_path: Path):
    # What a run folder holds whose configuration follows docs/add-a-reward.md.
    file = write_scene(tmp_path / "example")
    ranges = "reward.ranges={'my_rewards:brevity' = [0.0, 1.0]}"
    components = "reward.components={exact_match = 1.0, 'my_rewards:brevity' = 0.2}"
    run = tmp_path / "run"
    run.mkdir()
    write_config(load_config(file, [components, ranges], {}).config, run / "config.json")
    model = run / "checkpoints" / "step_000004" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    served = cli_chat.uncompared(cli_chat.chat_config(str(run), None, []))
    write_config(served, run / "served.json")
    assert load_config(run / "served.json", [], {}).config.reward.components == {"answered": 1.0}


def test_a_reward_model_stays_only_where_it_scores_branches(tmp_path: Path):
    file = write_scene(tmp_path / "example")
    options = [
        "reward.components={exact_match = 1.0, reward_model = 0.5}",
        'reward.servers.reward_model={url = "http://localhost:9/v1", model = "rm"}',
    ]
    config = load_config(file, options, {}).config
    alone = cli_chat.uncompared(config).reward
    assert (alone.components, alone.servers.reward_model) == ({"answered": 1.0}, None)
    scoring = cli_chat.uncompared(config, "reward_model").reward
    assert scoring.components == {"answered": 1.0, "reward_model": 0.0}
    for reward in (alone, scoring):  # what the service is given fits
        RewardConfig.model_validate(reward.model_dump())
