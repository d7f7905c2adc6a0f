"""Reading the text of a turn."""

from __future__ import annotations

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agent_r1.rollout.parsing import parse_turn
from agent_r1.rollout.tool_formats.hermes import CLOSE as CALL_CLOSE
from agent_r1.rollout.tool_formats.hermes import OPEN as CALL_OPEN
from agent_r1_proto.tools import ToolCall


def call(body: str) -> str:
    return f"{CALL_OPEN}{body}{CALL_CLOSE}"


def test_turn_with_thought_and_call():
    text = (
        "<think> born where? </think>\n"
        '<tool_call>\n{"name": "search", "arguments": {"query": "Ada"}}\n</tool_call>'
    )
    turn = parse_turn(text)
    assert turn.thought == "born where?"
    assert turn.answer is None
    assert [(c.name, c.arguments, c.end, c.error) for c in turn.calls] == [
        ("search", {"query": "Ada"}, len(text), "")
    ]


def test_answer_is_the_last_block():
    turn = parse_turn("<think>x</think><answer>Paris</answer> or <answer> Rome </answer>")
    assert (turn.thought, turn.answer, turn.calls) == ("x", "Rome", ())


def test_calls_inside_a_thought_do_not_count():
    inner = call('{"name": "search", "arguments": {}}')
    assert parse_turn(f"<think>maybe {inner}</think><answer>1</answer>").calls == ()


def test_thought_opened_by_the_generation_prompt():
    inner = call('{"name": "search", "arguments": {}}')
    turn = parse_turn(f"maybe {inner} </think> {inner}", opens_in_thought=True)
    assert turn.thought == f"maybe {inner}"
    assert len(turn.calls) == 1


def test_thought_that_is_never_closed_hides_nothing():
    turn = parse_turn("<think> so " + call('{"name": "search", "arguments": {}}'))
    assert turn.thought is None
    assert [c.name for c in turn.calls] == ["search"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("{not json}", "not valid JSON"),
        ("", "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ('{"arguments": {}}', 'no "name" (its keys: "arguments"); write {"name": ..., "arguments"'),
        ("{}", 'no "name" (its keys: none); write {"name": ..., "arguments": {...}}'),
        ('{"name": 3, "arguments": {}}', '"name" of the tool call must be the name of a tool'),
        ('{"name": "", "arguments": {}}', '"name" of the tool call must be the name of a tool'),
        ('{"name": "' + "x" * 65 + '", "arguments": {}}', "longer than 64"),
        ('{"name": "search"}', 'no "arguments" (its keys: "name"); write {"name": ..., "arg'),
        ('{"name": "search", "parameters": {"query": "Ada"}}', 'no "arguments" (its keys: "name",'),
        ('{"function": "search", "arguments": {}}', 'no "name" (its keys: "function", "arguments'),
        ('{"name": "search", "arguments": {}, "id": 1}', 'the unknown key "id"; write {"name": ..'),
        ('{"name": "search", "arguments": {}, "arguments": {"query": 1}}', "the same key twice"),
        ('{"name": "search", "arguments": {"query": 1, "query": 2}}', "the same key twice"),
        ('{"\\ud800": 1}', 'no "name" (its keys: "\\ud800")'),
        ('{"name": "search", "arguments": "Ada"}', "must be a JSON object"),
        ('{"name": "search", "arguments": {"x": NaN}}', "out of range"),
        ('{"name": "search", "arguments": {"x": "\\ud800"}}', "out of range"),
        ('{"name": "search", "arguments": ' + '{"a":' * 5000 + "1" + "}" * 5001, "out of range"),
        ('{"name": "search", "arguments": {"x": ' + "9" * 5000 + "}}", "out of range"),
        ('{"name": "search", "arguments": {"x": 1e999}}', "out of range"),
        ('{"name": "search", "arguments": ' + '{"a":' * 400 + "1" + "}" * 401, "out of range"),
        ('{"name": "\\udc00", "arguments": {}}', "out of range"),
    ],
)
def test_malformed_calls_say_why(body: str, reason: str):
    (found,) = parse_turn(call(body)).calls
    assert found.name == ""
    assert reason in found.error


def test_call_that_is_never_closed_is_malformed_and_ends_with_the_text():
    text = '<tool_call>{"name": "search", "arguments": {}}'
    (found,) = parse_turn(text).calls
    assert "not closed" in found.error
    assert found.end == len(text)


def test_several_calls_keep_their_order_and_ends():
    first, second = call('{"name": "a", "arguments": {}}'), call("broken")
    turn = parse_turn(f"x{first}\n{second}y")
    assert [c.name for c in turn.calls] == ["a", ""]
    assert [c.end for c in turn.calls] == [1 + len(first), 2 + len(first) + len(second)]


@given(st.text(max_size=300))
def test_any_text_is_read(text: str):
    turn = parse_turn(text + call(text))
    assert turn.text == text + call(text)
    assert [c.end for c in turn.calls] == sorted(c.end for c in turn.calls)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON_VALUES, max_size=4))
def test_arguments_arrive_as_written_and_can_travel(arguments: dict[str, object]):
    body = json.dumps({"name": "t", "arguments": arguments})
    assume(CALL_CLOSE not in body)
    (found,) = parse_turn(call(body)).calls
    if found.error:  # only what cannot travel as UTF-8
        with pytest.raises(UnicodeEncodeError):
            json.dumps(arguments, ensure_ascii=False).encode()
        return
    assert found.arguments == arguments
    sent = ToolCall(name="t", arguments=found.arguments, rollout_id="r", turn=0, timeout_s=1)
    assert ToolCall.model_validate_json(sent.model_dump_json()) == sent
