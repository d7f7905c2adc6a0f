"""Reward functions of TRL as components."""

from __future__ import annotations

from typing import Any

import pytest

from agent_r1 import ScoreRequest, trl_reward
from agent_r1_proto.rewards import ScoreTurn
from agent_r1_proto.tasks import ChatMessage

REQUEST = ScoreRequest(
    payload={"solution": "4", "level": 2},
    prompt=[ChatMessage(role="system", content="s"), ChatMessage(role="user", content="2 + 2?")],
    turns=[ScoreTurn(text="let me see"), ScoreTurn(text="4")],
)


def test_messages_and_columns_arrive_as_trl_gives_them():
    seen: dict[str, Any] = {}

    def accuracy(
        prompts: Any, completions: Any, solution: list[str], **columns: Any
    ) -> list[float]:
        """Compares."""
        seen.update(prompts=prompts, completions=completions, columns=columns)
        contents = [completion[-1]["content"] for completion in completions]
        return [float(c == s) for c, s in zip(contents, solution, strict=True)]

    component = trl_reward(accuracy)
    assert component(REQUEST) == 1.0
    assert (component.__name__, component.__doc__) == ("accuracy", "Compares.")
    assert seen["prompts"][0][-1] == {"role": "user", "content": "2 + 2?"}
    assert seen["completions"] == [
        [
            {"role": "assistant", "content": "let me see"},
            {"role": "assistant", "content": "4"},
        ]
    ]
    assert seen["columns"] == {"level": [2]}


def test_texts_are_given_where_the_function_reads_texts():
    def length(prompts: list[str], completions: list[str]) -> list[float]:
        return [float(len(p) + len(c)) for p, c in zip(prompts, completions, strict=True)]

    # "2 + 2?" has 6 characters; "let me see", a line end and "4" have 10 + 1 + 1
    assert trl_reward(length, messages=False)(REQUEST) == 18.0


def test_none_counts_nothing():
    assert trl_reward(lambda completions, **_: [None])(REQUEST) == 0.0


@pytest.mark.parametrize("value", [[1.0, 2.0], 1.0, [], "x"])
def test_what_is_no_list_of_one_is_an_error(value: Any):
    with pytest.raises(ValueError, match="returns a list of one"):
        trl_reward(lambda completions, **_: value)(REQUEST)


def test_a_column_that_the_payload_lacks_is_named():
    def needs(completions: Any, answer: Any) -> list[float]:
        return [1.0]

    with pytest.raises(ValueError, match=r"needs asks for the column 'answer'.* level, solution"):
        trl_reward(needs)(REQUEST)
