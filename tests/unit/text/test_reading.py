"""Reading the text of a turn."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.text.reading import TurnReader, parse_turn
from agent_r1.text.tool_formats import BUILTIN_FORMATS, CallBlock, ToolFormat
from agent_r1.text.tool_formats.code_block import CodeBlockFormat
from agent_r1.text.tool_formats.hermes import CLOSE as CALL_CLOSE
from agent_r1.text.tool_formats.hermes import OPEN as CALL_OPEN
from agent_r1.text.tool_formats.react import ReactFormat
from agent_r1_proto.rewards import ScoreRequest, ScoreTurn
from agent_r1_proto.tools import ToolCall

TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<answer>", "</answer>", "}", '"']


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


SEARCH = call('{"name": "search", "arguments": {}}')


@pytest.mark.parametrize("opens_in_thought", [False, True])
def test_thought_that_is_never_closed_ends_with_the_first_call_or_the_turn(opens_in_thought: bool):
    begun = "" if opens_in_thought else "<think>"
    turn = parse_turn(
        f"{begun} so <answer>1</answer> {SEARCH} <answer>2</answer>",
        opens_in_thought=opens_in_thought,
    )
    assert (turn.thought, turn.answer, turn.well_formed) == (None, "2", False)
    assert [c.name for c in turn.calls] == ["search"]
    assert turn.said == f" {SEARCH} <answer>2</answer>"
    never = parse_turn(f"{begun} so <answer>1</answer>", opens_in_thought=opens_in_thought)
    assert (never.thought, never.answer, never.said) == (None, None, " ")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>I would say <answer>Paris</answer>.</think>I do not know.", None),
        ("<think>or <answer>Paris</answer></think><answer>Rome</answer>", "Rome"),
        ("<think>x</think><answer>it is <answer>Paris</answer></answer>", "Paris"),
        ("<think>x</think><answer>Paris", None),
        (f"{call('<answer>Paris</answer>')}", None),
        ("<answer>Rome</answer><think>or <answer>Paris</answer>", "Rome"),
        ("<answer><think>x</think>Paris</answer>", "<think>x</think>Paris"),
    ],
)
def test_an_answer_in_a_thought_or_a_call_is_none(text: str, answer: str | None):
    assert parse_turn(text).answer == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"<think>\boxed{1}</think> \boxed{2} or \boxed{3}", "3"),
        (r"<think>\boxed{1}</think>", None),
        (r"<think>\boxed{1}", None),
        (r"\boxed{2} <think>\boxed{1}", "2"),
        (call(r"\boxed{1}"), None),
        (r"<answer>\boxed{4}</answer>", "4"),
    ],
)
def test_a_pattern_looks_for_the_answer_outside_thoughts_and_calls(text: str, answer: str | None):
    assert TurnReader(answer_pattern=r"\\boxed\{(.*?)\}").read(text).answer == answer


@pytest.mark.parametrize(
    ("text", "well_formed"),
    [
        (f"<think>a</think>{SEARCH}{SEARCH}", True),
        ("<think></think> <answer>1</answer>\n<|im_end|>", True),
        (f"{SEARCH}", False),
        (f"<think>a</think>{SEARCH}<answer>1</answer>", False),
        (f"<think>a</think>and {SEARCH}", False),
        ("<think>a</think><think>b</think><answer>1</answer>", False),
        ("<think>a</think>", False),
        (f"<think>a {SEARCH}</think><answer>1</answer>", False),
        (f"<think>a</think>{call('no json')}", True),  # the right form, whatever is in it
        ("<think>a</think><tool_call>{}", False),
        (f"<think>a</think>{call('<think>')}", False),
    ],
)
def test_a_well_formed_turn_is_a_thought_and_then_calls_or_an_answer(text: str, well_formed: bool):
    assert parse_turn(text).well_formed is well_formed
    closed = text.removeprefix("<think>")
    if closed != text:  # the same after a template that opens the thought
        assert parse_turn(closed, opens_in_thought=True).well_formed is well_formed


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_json", '{"name": "search", "parameters": {}}'),
        ("llama3_json", BUILTIN_FORMATS["llama3_json"].write([("a", "{}"), ("b", "{}")])),
        ("mistral", '[TOOL_CALLS][{"name": "search", "arguments": {}}]'),
    ],
)
def test_calls_of_every_format_are_well_formed(name: str, text: str):
    reader = TurnReader(BUILTIN_FORMATS[name])
    assert reader.read(f"<think>a</think>{text}").well_formed
    assert not reader.read(f"<think>a</think>{text[:-2]}").well_formed


def unread(*texts: str, **changes: Any) -> ScoreRequest:
    return ScoreRequest(payload={}, turns=[ScoreTurn(text=text, **changes) for text in texts])


def test_a_request_whose_turns_are_read_stays_as_it_is():
    read = TurnReader().read_request(unread("<answer>1</answer>"))
    again = TurnReader(answer_pattern="(x)").read_request(read)
    assert again is read
    assert read.turns[0].answer == "1"
    anew = TurnReader(answer_pattern=r"\d").read_request(read, anew=True)
    assert anew.turns[0].answer == "1"


def test_a_stored_interaction_tells_that_its_template_opened_the_thoughts():
    read = TurnReader().read_request(
        unread("a</think><answer>1</answer>", "I never <answer>2</answer>")
    )
    assert [(t.thought, t.answer, t.said) for t in read.turns] == [
        ("a", "1", " <answer>1</answer>"),
        (None, None, " "),
    ]
    # Read once more, with another pattern, they still do; also where no thought was closed.
    anew = TurnReader(answer_pattern=r"\d").read_request(read, anew=True)
    assert [turn.answer for turn in anew.turns] == ["1", None]
    never = ScoreTurn(text="I never <answer>2</answer>", well_formed=False, said=" ")
    found = TurnReader().read_request(ScoreRequest(payload={}, turns=[never]), anew=True)
    assert found.turns[0].answer is None


def test_turns_that_were_read_tell_more_than_how_others_begin():
    # The template opens the thoughts, and the first turn opens one once more.
    rollout = TurnReader(opens_in_thought=True)
    turns = [
        rollout.read_turn(ScoreTurn(text=text))
        for text in ("<think>a</think><answer>1</answer>", "I never <answer>2</answer>")
    ]
    read = TurnReader().read_request(ScoreRequest(payload={}, turns=turns), anew=True)
    assert [turn.answer for turn in read.turns] == ["1", None]


@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        "<think>a</think> 1 <answer>2</answer>",
        "a</think> 1 <answer>2</answer>",
        "1 <answer>2</answer>",
        "<think><think>a</think> 1",
        f"so {SEARCH}",
    ],
)
def test_a_turn_that_was_read_is_read_anew_as_it_began(text: str, opens: bool):
    read = TurnReader(opens_in_thought=opens).read_turn(ScoreTurn(text=text))
    wanted = TurnReader(answer_pattern=r"\d", opens_in_thought=opens).read_turn(read)
    request = ScoreRequest(payload={}, turns=[read])
    assert TurnReader(answer_pattern=r"\d").read_request(request, anew=True).turns == [wanted]


def test_a_template_that_began_some_thoughts_only_is_told_from_the_turns():
    turns = [
        TurnReader(opens_in_thought=True).read_turn(ScoreTurn(text=f"look</think>{SEARCH}")),
        TurnReader().read_turn(ScoreTurn(text="it is <answer>1</answer>")),
    ]
    request = ScoreRequest(payload={}, turns=turns)
    anew = TurnReader(answer_pattern=r"\d").read_request(request, anew=True)
    assert [(turn.thought, turn.answer) for turn in anew.turns] == [("look", None), (None, "1")]


def test_calls_are_counted_where_the_client_has_not():
    text = f"<think>a</think>{SEARCH}{SEARCH}"
    assert TurnReader().read_request(unread(text)).turns[0].num_calls == 2
    assert TurnReader().read_request(unread(text, num_calls=0)).turns[0].num_calls == 0


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


def quoting(text: str) -> str:
    return call(json.dumps({"name": "search", "arguments": {"query": text}}))


@pytest.mark.parametrize(
    "quoted", [*TAGS, quoting("</tool_call>"), "<think></tool_call></think><answer>1</answer>"]
)
def test_a_call_ends_behind_its_object_whatever_its_strings_quote(quoted: str):
    first = f"<think>a</think>{quoting(quoted)}"
    text = f"{first} \n{quoting('second')}</think><answer>x</answer>"
    turn = parse_turn(text)
    assert [(c.arguments, c.error) for c in turn.calls] == [
        ({"query": quoted}, ""),
        ({"query": "second"}, ""),
    ]
    assert turn.calls[0].end == len(first)
    assert (turn.thought, turn.answer) == ("a", "x")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"name": "search", "arguments": {"q": "</tool_call><tool_call>"}} x', "Extra data"),
        ('{"name": "search", "arguments": {"q": "</tool_call>", "q": 1}}', "same key twice"),
        ('{"name": "search", "arguments": {"q": "</tool_call>", "x": NaN}}', "out of range"),
        ('{"name": "search", "arguments": {"q": "</tool_call>", "x": 1e999}}', "out of range"),
        ('{"name": "search", "arguments": {"q": "</tool_call>\n"}}', "control character"),
        ('["</tool_call>', "Unterminated string"),
        ('{"name": "</tool_call>', "Unterminated string"),
    ],
)
def test_a_quoted_tag_in_a_malformed_call(body: str, reason: str):
    # One that is an object ends behind it; any other at the first closing tag.
    (found,) = parse_turn(call(body)).calls
    assert reason in found.error
    is_object = body.startswith("{") and "}" in body
    tags = 2 if is_object else 1
    assert call(body)[: found.end].count(CALL_CLOSE) == tags
    assert call(body)[: found.end].endswith(CALL_CLOSE)


def test_a_call_whose_only_closing_tag_is_quoted_is_not_closed():
    text = quoting("</tool_call>").removesuffix(CALL_CLOSE)
    (found,) = parse_turn(text).calls
    assert "not closed" in found.error
    assert found.end == len(text)


def test_a_thought_is_not_closed_by_a_tag_that_a_call_in_it_quotes():
    quoted = quoting("</think><answer>no</answer>")
    turn = parse_turn(f"<think>maybe {quoted} or not</think><answer>1</answer>")
    assert (turn.thought, turn.answer, turn.calls) == (f"maybe {quoted} or not", "1", ())
    turn = parse_turn(f"maybe {quoted} or not</think><answer>1</answer>", opens_in_thought=True)
    assert (turn.thought, turn.answer, turn.calls) == (f"maybe {quoted} or not", "1", ())


@pytest.mark.parametrize("opens_in_thought", [True, False])
def test_a_thought_whose_only_closing_tag_is_quoted_is_not_closed(opens_in_thought: bool):
    opening = "" if opens_in_thought else "<think>"
    turn = parse_turn(f"{opening}so {quoting('</think>')}", opens_in_thought=opens_in_thought)
    assert [call.arguments for call in turn.calls] == [{"query": "</think>"}]
    assert turn.thought is None


def test_an_answer_is_not_closed_by_a_tag_that_a_call_in_it_quotes():
    quoted = quoting("</answer>")
    turn = parse_turn(f"<answer>so {quoted} it is</answer>")
    assert (turn.answer, turn.calls) == (f"so {quoted} it is", ())


def test_what_cannot_be_read_in_a_thought_does_not_keep_it_open():
    turn = parse_turn("<think>a <tool_call> is</think>" + quoting("x"))
    assert (turn.thought, [c.arguments for c in turn.calls]) == (
        "a <tool_call> is",
        [{"query": "x"}],
    )


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


QUOTED_TAGS = st.lists(st.sampled_from([*TAGS, "[TOOL_CALLS]", "]", "\n", "a"])).map("".join)


@given(st.dictionaries(st.text() | QUOTED_TAGS, JSON_VALUES | QUOTED_TAGS, max_size=4))
def test_arguments_arrive_as_written_and_can_travel(arguments: dict[str, object]):
    body = json.dumps({"name": "t", "arguments": arguments})
    (found,) = parse_turn(call(body)).calls
    if found.error:  # only what cannot travel as UTF-8
        with pytest.raises(UnicodeEncodeError):
            json.dumps(arguments, ensure_ascii=False).encode()
        return
    assert found.arguments == arguments
    sent = ToolCall(name="t", arguments=found.arguments, rollout_id="r", turn=0, timeout_s=1)
    assert ToolCall.model_validate_json(sent.model_dump_json()) == sent


class CountedText(str):
    """A text that counts the characters that are searched or copied."""

    read = 0

    def find(self, tag: str, start: int = 0, end: int | None = None) -> int:  # pyright: ignore
        found = super().find(tag, start, end)
        self.read += len(self[start:end]) if found < 0 else found - start
        return found

    def __getitem__(self, key: Any) -> str:
        piece = super().__getitem__(key)
        self.read += len(piece)
        return piece


class CountedFormat(ToolFormat):
    """A format that counts the characters in which calls were looked for."""

    example = trace = ""

    def __init__(self, counted: ToolFormat) -> None:
        self._counted = counted
        self.read = 0

    def find(self, text: str, start: int) -> CallBlock | None:
        found = self._counted.find(text, start)
        self.read += (len(text) if found is None else found.calls[-1].end) - start
        return found


FORMATS: dict[str, ToolFormat] = {
    **BUILTIN_FORMATS,
    "react": ReactFormat(),
    "code_block": CodeBlockFormat(),
}
CALLS = {
    "hermes": "<tool_call>{}</tool_call>",
    "llama3_json": "{}",
    "mistral": "[TOOL_CALLS][{}]",
    "react": "\nAction: search\nAction Input: {}\n",
    "code_block": "\n```python\n{}\n```\n",
}
QUOTING_OBJECT = '{"name": "s", "arguments": {"q": "</think></answer>"}}'


@pytest.mark.parametrize(
    "text",
    [
        "<think>{call}" * 200,
        "<answer>{call}" * 200,
        "<think>{call}</think>" * 200,
        "<answer>{call}</answer>" * 200,
        "<think>" + "{call}" * 200 + "</think>",
        "<answer>" + "{call}" * 200 + "</answer>",
        "<think>" + "<answer>{call}" * 200 + "</answer></think>",
        "<think>" + "<answer>{call}" * 200,
        "<think><answer></think>{call}" * 200 + "</answer>",
        "<answer><think></answer>{call}" * 200 + "</think>",
        "<think>" * 500,
        "<answer>" * 500,
        "<think><answer>" * 300 + "{call}",
        "<answer>{call}</think>" * 200,
    ],
)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("opens_in_thought", [True, False])
def test_a_text_is_read_a_few_times_only_however_many_blocks_it_has(
    name: str, text: str, opens_in_thought: bool
):
    written = CountedText(text.replace("{call}", CALLS[name].replace("{}", QUOTING_OBJECT)))
    counted = CountedFormat(FORMATS[name])
    parse_turn(written, tool_format=counted, opens_in_thought=opens_in_thought)
    # Several kinds of search and copies, each of which passes over the text once. One search for
    # each of 200 blocks would be a hundred times its length.
    assert written.read + counted.read <= 16 * len(written)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("react", "Action: x" + " " * 20_000 + "x"),
        ("react", "Action: x" + " \n" * 10_000 + "x"),
        ("code_block", "```" + " " * 20_000 + "x"),
    ],
)
def test_white_space_is_read_once(name: str, text: str):
    # A search that tries every way to divide the spaces takes 2e8 steps: seconds.
    began = time.process_time()
    parse_turn(text, tool_format=FORMATS[name])
    assert time.process_time() - began < 0.3


def test_escaped_quotes_in_a_call_are_read_once():
    body = json.dumps({"name": "s", "arguments": {"q": '"' * 40_000 + "</think>" + '"' * 9}})
    began = time.process_time()
    turn = parse_turn(f"<think>{call(body)}</think><answer>1</answer>")
    assert time.process_time() - began < 0.5
    assert (turn.answer, turn.calls) == ("1", ())
