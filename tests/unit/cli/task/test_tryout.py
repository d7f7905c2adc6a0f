"""What `agent-r1 try` asks first, and what it warns of."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agent_r1.cli.main import main
from agent_r1.cli.task.tryout import first_tasks, print_group, warnings
from agent_r1.config.run import load_config
from agent_r1.runtime.evaluation_client import EvalResult
from agent_r1_proto.tasks import Task
from agent_r1_proto.trajectory import ToolCallRecord
from tests.support.builders import scored
from tests.support.config_scene import write_scene

OK_CALL = ToolCallRecord(end_token_index=2, tool="search", status="ok")
BAD_CALL = ToolCallRecord(end_token_index=2, tool="", status="malformed", error="not valid JSON")


def group(name: str, *rewards: float, **changes: Any) -> list[EvalResult]:
    task = Task(id=name, prompt="Where?")
    fields = {"calls": [OK_CALL], **changes}
    return [EvalResult(task, scored(total=reward, **fields)) for reward in rewards]


def warned(*groups: list[EvalResult], calls_tools: bool = True) -> list[str]:
    return list(warnings(groups, calls_tools=calls_tools))


def test_groups_with_different_rewards_and_calls_are_no_reason_to_warn():
    assert warned(group("a", 0.0, 1.0), group("b", 0.5, 0.0)) == []


def test_groups_of_equal_rewards_are_named_with_the_reward():
    (warning,) = warned(group("a", 0.0, 1.0), group("b", 0.5, 0.5))
    assert warning.startswith("all rewards are equal in 1 of 2 groups: b (0.5); a group teaches")


def test_nothing_can_be_learned_where_all_groups_are_equal():
    (warning,) = warned(group("a", 0.0, 0.0), group("b", 1.0, 1.0))
    assert warning.startswith(
        "nothing can be learned: all rewards are equal in 2 of 2 groups: a (0), b (1)"
    )


def test_one_attempt_has_nothing_to_be_compared_with():
    assert warned(group("a", 1.0)) == []


def test_a_model_that_calls_no_tool_is_told_of_unless_there_is_none():
    quiet = group("a", 0.0, 1.0, calls=[])
    (warning,) = warned(quiet)
    assert warning.startswith("the model made no tool call; ")
    assert warned(quiet, calls_tools=False) == []


def test_calls_that_cannot_be_read_are_told_of_with_the_first_reason():
    (warning,) = warned(group("a", 0.0, 1.0, calls=[BAD_CALL]))
    assert warning.startswith("none of the 2 tool calls could be read; the first: not valid JSON;")
    assert warned(group("a", 0.0, calls=[BAD_CALL]), group("b", 1.0)) == []


def test_attempts_that_failed_or_were_cut_off_are_counted_with_a_reason():
    lost = EvalResult(Task(id="a", prompt="Where?"), None, "no result in time")
    cut = group("b", 0.0, 1.0, status="TRUNCATED", reason="max_turns")
    assert [
        text.partition("; raise")[0].partition("; correct")[0] for text in warned([lost], cut)
    ] == [
        "1 of 3 attempts failed; the first: no result in time",
        "2 of 3 attempts were cut off; the first: max_turns",
    ]


def test_a_group_is_printed_with_its_rewards_and_the_share_that_was_sampled():
    console = Console(file=io.StringIO(), width=200)
    print_group(group("q7", 0.0, 1.0), "the base", console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "q7  sample 1  COMPLETED" in text
    # A prompt of 2 tokens and 3 that were sampled.
    assert "the base; 5 tokens (60% sampled), 1 turns" in text
    assert text.rstrip().endswith("rewards of q7: 0  1")


def test_the_tasks_are_those_that_training_begins_with(tmp_path: Path):
    file = write_scene(tmp_path / "example")
    config = load_config(file, ["run.seed=3"], {}).config
    assert config.data is not None
    order = config.prompt_order()
    assert [t.id for t in first_tasks(config, 1)] == [order.task(0).id]
    assert sorted(t.id for t in first_tasks(config, 9)) == ["a", "b"]  # there are two
    only_evaluation = config.model_copy(update={"data": None})
    assert len(first_tasks(only_evaluation, 1)) == 1


def test_a_model_without_a_server_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = write_scene(tmp_path / "example")
    assert main(["try", str(file), "--model", "x"]) == 2
    assert "--model goes with --policy openai:URL" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["-n", "--samples", "--model"])
def test_options_of_attempts_are_refused_without_a_policy(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = write_scene(tmp_path / "example")
    assert main(["try", str(file), "--policy", "none", option, "2"]) == 2
    assert f"{option} does nothing with --policy none; leave it out" in capsys.readouterr().err
