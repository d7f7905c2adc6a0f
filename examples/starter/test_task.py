"""Tests of task.py: `pytest` in this folder runs them, without a model and without services."""

import asyncio

import pytest
from task import AskOnce, Lookup, correct

from agent_r1 import CallContext, CallResult, ModelTurn, ScoreRequest, ScoreTurn, Task

TASK = Task(id="q", prompt="Where was Ann born?", payload={"answer": "Elmstow Bridge"})
CONTEXT = CallContext(rollout_id="r", turn=0, tool_context=None, timeout_s=5.0)
TURN = ModelTurn(number=0, text="", thought=None, answer=None)


def look_up(query):
    return asyncio.run(Lookup().call({"query": query}, CONTEXT))


def test_a_fact_is_found_by_its_name():
    for fact in Lookup().facts:
        first, _ = look_up(fact["title"]).splitlines()
        assert first.strip() == fact["text"]


def test_a_question_is_answered_once():
    asked = CallResult(name="search", arguments={"query": "Ann"}, status="ok", text="Ann is …")
    env = AskOnce(TASK)
    first = asyncio.run(env.step(TURN, [asked]))
    again = asyncio.run(env.step(TURN, [asked]))
    assert first.observations == ["Ann is …"]
    assert again.observations == ["You have asked that before."]


def test_a_turn_without_a_call_is_the_end():
    assert asyncio.run(AskOnce(TASK).step(TURN, [])).done


@pytest.mark.parametrize(
    ("answer", "reward"), [("Elmstow Bridge", 1.0), ("Elmstow", 0.0), (None, 0.0)]
)
def test_only_the_right_answer_is_rewarded(answer, reward):
    request = ScoreRequest(payload=TASK.payload, turns=[ScoreTurn(text="...", answer=answer)])
    assert correct(request) == reward
