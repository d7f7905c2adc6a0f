"""Components that are asked as functions, of turns that nobody has read."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from pydantic import JsonValue

from agent_r1.reward.components import BUILT_IN, TIMED
from agent_r1.reward.config import RewardConfig
from agent_r1.reward.reported import reported
from agent_r1.reward.scorer import Scorer
from agent_r1.text.reading import TurnReader
from agent_r1_proto.rewards import ScoreRequest, ScoreTurn

CALL = '<tool_call>{"name": "s", "arguments": {}}</tool_call>'


def asked(*texts: str, answer: str) -> ScoreRequest:
    turns = [ScoreTurn(text=text) for text in texts]
    return ScoreRequest(prompt=[], payload={"answers": [answer]}, turns=turns)


@pytest.mark.parametrize("answer", ["\u22123", "**-3**", "-3"])
def test_math_equal_reads_the_answer_of_a_turn(answer: str):
    request = asked(f"<think>3</think><answer>{answer}</answer>", answer="-3")
    assert TIMED["math_equal"](request) == 1.0


def test_built_in_components_say_what_the_scorer_says():
    request = asked(f"<think>a</think>{CALL}", "<think>b</think><answer>Ada</answer>", answer="Ada")
    read = TurnReader().read_request(request)
    assert {name: measure(request) for name, measure in BUILT_IN.items()} == {
        name: measure(read) for name, measure in BUILT_IN.items()
    }
    for name in ("exact_match", "format", "reasoning_format", "answered", "tool_calls"):
        assert BUILT_IN[name](request) == 1.0


def test_calls_that_a_text_makes_and_the_request_lacks_are_no_score_of_0():
    with pytest.raises(ValueError, match="how many calls were made but not which"):
        TIMED["all_tests_passed"](asked(CALL, answer="x"))


async def test_the_scorer_reads_a_turn_once():
    config = RewardConfig(components={"math_equal": 1.0, "exact_match": 1.0})
    with patch.object(TurnReader, "read", autospec=True, side_effect=TurnReader.read) as read:
        reward = await Scorer(config).score(asked("<answer>Ada</answer>", answer="Ada"))
    assert reward.total == 2.0
    assert read.call_count == 1


def test_a_reported_reward_is_read_from_the_end_of_the_attempt():
    def of(data: JsonValue) -> float:
        turns = [ScoreTurn(text="a"), ScoreTurn(text="b", data=data)]
        return reported(ScoreRequest(payload={}, turns=turns))

    assert of({"exit": "ok", "reward": 0.25}) == 0.25
    assert of({"exit": "timeout", "reward": None}) == of({"exit": "failed"}) == 0.0
    wrong: list[JsonValue] = [None, {"exit": "ok"}, {"exit": "ok", "reward": "1"}]
    for data in wrong:
        with pytest.raises(ValueError, match="no reward was reported"):
            of(data)
