"""What `agent-r1 try --policy none` finds by reading.

tests/integration/test_validate.py plays episodes.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from agent_r1.cli.task.episodes import read_episode
from agent_r1.cli.task.validate import (
    Line,
    _unanswered,
    data_checks,
    episode_checks,
    number_notes,
    repeated,
)
from agent_r1.config.run import load_config
from agent_r1.config.sources import ConfigError
from agent_r1.reward.config import RewardConfig
from agent_r1_proto.parts import Part, TextPart
from agent_r1_proto.tasks import Task
from agent_r1_proto.trajectory import ToolCallRecord
from tests.support.builders import trajectory
from tests.support.config_scene import write_scene

TRAIN, HELD_OUT = Path("train.jsonl"), Path("held_out.jsonl")


def lines(*tasks: tuple[Path, str, dict[str, object]]) -> list[Line]:
    numbers = {TRAIN: 0, HELD_OUT: 0}
    made = []
    for file, prompt, payload in tasks:
        numbers[file] += 1
        task = Task.model_validate(
            {"id": f"{file.stem}-{numbers[file]}", "prompt": prompt, "payload": payload}
        )
        made.append(Line(task, f"{file}:{numbers[file]}", trains=file == TRAIN))
    return made


def test_a_question_of_the_evaluation_that_is_trained_on_is_a_leak():
    answer: dict[str, object] = {"answer": "Rome"}
    tasks = lines(
        (TRAIN, "Who?", {}), (TRAIN, "Where is it?", answer), (HELD_OUT, "where  IS it?", answer)
    )
    assert list(repeated(tasks)) == [
        "held_out.jsonl:1 (task 'held_out-1') leaks: train.jsonl:2 (task 'train-2') trains on the "
        "same question; remove one of them"
    ]


def test_a_question_that_is_there_twice_repeats():
    tasks = lines((TRAIN, "Who?", {}), (TRAIN, "Where?", {}), (TRAIN, "Who?", {}))
    assert list(repeated(tasks)) == [
        "train.jsonl:3 (task 'train-3') repeats train.jsonl:1 (task 'train-1'); remove one of them"
    ]


def test_games_that_differ_in_their_payload_are_different_tasks():
    tasks = lines((TRAIN, "Play.", {"seed": 1}), (HELD_OUT, "Play.", {"seed": 2}))
    assert list(repeated(tasks)) == []


def test_a_file_whose_answers_are_numbers_is_noted_where_words_are_compared():
    def gold(file: Path, *answers: object) -> tuple[Path, str, dict[str, object]]:
        return file, "?", {"answers": list(answers)}

    tasks = lines(
        gold(TRAIN, "3.5"),
        gold(TRAIN, "\u22125", "minus five"),
        gold(TRAIN, "Paris"),
        gold(HELD_OUT, "Paris"),
        gold(HELD_OUT, "1989 AD", 7),
        gold(HELD_OUT, "1989"),
        (HELD_OUT, "?", {"level": 1}),
    )
    for reward, named in (
        (RewardConfig(), "exact_match"),
        (RewardConfig(rule="paper"), "exact_match"),
        (RewardConfig(components={"f1": 1.0, "exact_match": 0.5}), "f1 and exact_match"),
    ):
        (note,) = number_notes(reward, tasks)  # 2 of 3 tasks of the one file, 1 of 4 of the other
        assert note.startswith(
            f"train.jsonl: the answers of 2 of 3 tasks are numbers, which {named} compares without "
        )
        assert "math_equal" in note
    other = RewardConfig(components={"math_equal": 1.0, "exact_match": 0.0})
    assert list(number_notes(other, tasks)) == []
    assert list(number_notes(RewardConfig(), tasks[3:])) == []


def test_the_note_on_numbers_is_shown_with_the_tasks(tmp_path: Path):
    config = load_config(write_scene(tmp_path / "x"), [], {}).config
    found = next(iter(data_checks(config, lines((TRAIN, "6 * 12?", {"answers": ["72"]})))))
    assert len(found.notes) == 1
    assert not found.problems


def test_every_task_for_which_the_environment_cannot_be_made_is_named_up_to_five(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "goals_env.py").write_text(
        "from agent_r1 import ToolEnv\n"
        "class GoalEnv(ToolEnv):\n"
        "    def __init__(self, task):\n"
        "        super().__init__(task)\n"
        "        self.goal = task.payload['goal']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config(write_scene(tmp_path / "x"), ["env.type=goals_env:GoalEnv"], {}).config
    wrong = [(TRAIN, f"Reach {i}.", {}) for i in range(7)]
    tasks = lines((TRAIN, "Reach it.", {"goal": 1}), *wrong)
    _, environment = data_checks(config, tasks)
    assert len(environment.problems) == 6  # five, and how many more there are
    assert (
        "train.jsonl:2 (task 'train-2'): GoalEnv(...) raised KeyError: 'goal'"
        in (environment.problems[0])
    )
    assert environment.problems[-1] == "2 more like these"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "Invalid JSON"),
        ('{"task": "a"}', "turns: Field required"),
        ('{"task": "a", "turns": []}', "turns: List should have at least 1 item"),
        ('{"task": "a", "turns": ["x"], "rewards": 1}', "rewards: Extra inputs"),
    ],
)
def test_an_episode_that_cannot_be_read_says_what_to_write(tmp_path: Path, text: str, wrong: str):
    file = tmp_path / "passing.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=wrong) as error:
        read_episode(file)
    assert f"{file}" in str(error.value)
    assert '"turns": ["text of the first turn", ...]' in str(error.value)


def test_an_episode_that_is_missing_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"gone\.json cannot be read: No such file"):
        read_episode(tmp_path / "gone.json")


async def test_without_episodes_nothing_shows_that_a_tool_answers():
    config: Any = SimpleNamespace(episodes=SimpleNamespace(passing=None, failing=None))
    runner: Any = SimpleNamespace(specs={"half": None, "boom": None})
    notes = [note async for look in episode_checks(config, runner, []) for note in look.notes]
    assert notes[-1].startswith("no episode calls boom, half, so nothing shows that it answers")


def test_a_tool_whose_every_call_ended_in_an_error_is_named():
    def call(tool: str, status: Literal["ok", "error", "malformed"]) -> ToolCallRecord:
        parts: list[Part] = [TextPart(text="Error: KeyError: 'x'")]
        return ToolCallRecord(end_token_index=4, tool=tool, status=status, parts=parts)

    calls = [call("a", "error"), call("b", "error"), call("b", "ok"), call("c", "malformed")]
    (problem,) = _unanswered(trajectory(calls=calls))
    assert problem.startswith('every call of tools.a ended in an error ("Error: KeyError: ')
