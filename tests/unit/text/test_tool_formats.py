"""Reading calls in every format: what counts as one, where it ends, and what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1 import CallBlock, ParsedCall, ToolFormat
from agent_r1.text.reading import parse_turn
from agent_r1.text.tool_formats import BUILTIN_FORMATS, NO_CALLS, load_tool_format
from agent_r1.text.tool_formats.react import ReactFormat

LLAMA = '{"name": "search", "parameters": {"query": "Ada"}}'
NAMED = '[TOOL_CALLS]search[ARGS]{"query": "Ada"}'
ADA = ("search", {"query": "Ada"})


def read(tool_format: str, text: str) -> list[tuple[str, dict[str, object]]]:
    calls = parse_turn(text, tool_format=BUILTIN_FORMATS[tool_format]).calls
    return [(call.name, dict(call.arguments)) for call in calls]


def errors(tool_format: str, text: str) -> list[str]:
    return [call.error for call in parse_turn(text, tool_format=BUILTIN_FORMATS[tool_format]).calls]


@pytest.mark.parametrize(
    "text",
    [
        LLAMA,
        f"<|python_tag|>{LLAMA}",
        f"<think>who?</think>\n{LLAMA}",
        LLAMA.replace("parameters", "arguments"),
        '{"type": "function", ' + LLAMA[1:],
        f"I look it up: {LLAMA} and wait.",
    ],
)
def test_llama_calls_have_no_tags(text: str):
    assert read("llama3_json", text) == [ADA]


def test_llama_calls_are_separated_by_semicolons_and_end_with_their_brace():
    text = f"{LLAMA}; {LLAMA}"
    calls = parse_turn(text, tool_format=BUILTIN_FORMATS["llama3_json"]).calls
    assert [call.end for call in calls] == [len(LLAMA), len(text)]


@pytest.mark.parametrize(
    "text",
    [
        r"\frac{1}{2}",
        '{"answer": 42}',
        f"<answer>{LLAMA}</answer>",
        f"<think>{LLAMA}</think>",
        "{'name': 'search'}",
    ],
)
def test_other_braces_are_no_llama_call(text: str):
    assert read("llama3_json", text) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"name": "search"}', 'no "parameters" (its keys: "name"); write {"name": ..., "param'),
        ('{"name": "search", "parameters": {"query": ', "not valid JSON"),
        ('{"name": "search", "parameters": {}, "id": 1}', 'the unknown key "id"'),
        ('{"name": "search", "parameters": {}, "parameters": {}}', "the same key twice"),
        ('{"name": "search", "parameters": "Ada"}', '"parameters" of the tool call must be a JSON'),
    ],
)
def test_a_llama_call_that_cannot_be_read_says_why(text: str, reason: str):
    (error,) = errors("llama3_json", text)
    assert reason in error


@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS] [{"name": "search", "arguments": {"query": "Ada"}}]',
        '[TOOL_CALLS][{"name": "search", "arguments": {"query": "Ada"}, "id": "abcdefghi"}]',
        '[TOOL_CALLS] {"name": "search", "arguments": {"query": "Ada"}}',
        NAMED,
        '[TOOL_CALLS]search[CALL_ID]abcdefghi[ARGS]{"query": "Ada"}',
        f"I look it up.{NAMED}",
    ],
)
def test_mistral_calls_stand_behind_their_tag(text: str):
    assert read("mistral", text) == [ADA]


def test_each_call_of_a_list_ends_with_its_object_and_the_last_with_the_list():
    first = '[TOOL_CALLS] [{"name": "search", "arguments": {"query": "Ada"}}'
    text = first + ', {"name": "search", "arguments": {"query": "Ada"}} ]'
    calls = parse_turn(text, tool_format=BUILTIN_FORMATS["mistral"]).calls
    assert [call.end for call in calls] == [len(first), len(text)]


def test_two_named_calls_follow_each_other():
    assert read("mistral", NAMED + NAMED) == [ADA, ADA]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[TOOL_CALLS]", "not valid JSON"),
        ("[TOOL_CALLS] []", "not valid JSON"),
        ('[TOOL_CALLS] [{"name": "search", "arguments": {}}', "is not closed by ]"),
        ("[TOOL_CALLS]search[ARGS]{", "not valid JSON"),
        ("[TOOL_CALLS]search[ARGS][1]", '"arguments" of the tool call must be a JSON object'),
        ('[TOOL_CALLS] [{"name": "search"}]', 'no "arguments" (its keys: "name")'),
    ],
)
def test_a_mistral_call_that_cannot_be_read_says_why(text: str, reason: str):
    assert reason in errors("mistral", text)[-1]


def test_calls_before_a_broken_one_are_kept():
    text = '[TOOL_CALLS] [{"name": "search", "arguments": {"query": "Ada"}}, broken'
    first, second = parse_turn(text, tool_format=BUILTIN_FORMATS["mistral"]).calls
    assert (first.name, first.error, second.name) == ("search", "", "")
    assert second.end == len(text)


@pytest.mark.parametrize("name", BUILTIN_FORMATS)
@given(text=st.text(alphabet='{}[]<>"name:,TOOL_CALSRG ;\\', max_size=60))
def test_any_text_is_read_in_every_format(name: str, text: str):
    opening = {"hermes": "<tool_call>", "llama3_json": '{"name":', "mistral": "[TOOL_CALLS]"}[name]
    ends = [
        call.end
        for call in parse_turn(text + opening + text, tool_format=BUILTIN_FORMATS[name]).calls
    ]
    assert ends == sorted(ends)
    assert all(0 < end <= len(text + opening + text) for end in ends)


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral"])
def test_calls_that_are_written_are_read_again(name: str):
    tool_format = BUILTIN_FORMATS[name]
    calls = [("search", '{"query": "a \\"b\\" {c}"}'), ("add", '{"x": 1}')]
    text = "Let me see. " + tool_format.write(calls)
    read = parse_turn(text, tool_format=tool_format).calls
    assert [(call.name, call.arguments, call.error) for call in read] == [
        (name, json.loads(arguments), "") for name, arguments in calls
    ]


MARKUP = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<answer>", "</answer>", "]", "}"]
MARKUP += ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "; ", '{"name": "a", "parameters": {}}']
FORMATS = {**BUILTIN_FORMATS, "react": ReactFormat()}


def written(name: str, query: str) -> str:
    if name == "react":
        return f"Action: search\nAction Input: {json.dumps({'query': query})}"
    return FORMATS[name].write([("search", json.dumps({"query": query}))])


@pytest.mark.parametrize("name", FORMATS)
@given(quoted=st.lists(st.sampled_from(MARKUP), min_size=1, max_size=3).map("".join))
def test_markup_in_an_argument_is_text(name: str, quoted: str):
    call = written(name, quoted)
    for opening in ("", "<think>so</think>\n"):
        turn = parse_turn(opening + call, tool_format=FORMATS[name])
        assert [(c.name, c.arguments) for c in turn.calls] == [("search", {"query": quoted})]
        assert [c.end for c in turn.calls] == [len(opening + call)]
        assert turn.answer is None
    in_thought = f"<think>maybe\n{call}\n</think><answer>1</answer>"
    turn = parse_turn(in_thought, tool_format=FORMATS[name])
    assert (turn.calls, turn.answer) == ((), "1")
    turn = parse_turn(in_thought[7:], tool_format=FORMATS[name], opens_in_thought=True)
    assert (turn.calls, turn.answer) == ((), "1")
    turn = parse_turn(f"<think>so\n{call}", tool_format=FORMATS[name])
    assert [c.arguments for c in turn.calls] == [{"query": quoted}]


@pytest.mark.parametrize("name", BUILTIN_FORMATS)
def test_where_no_tool_is_offered_nothing_is_a_call(name: str):
    text = {"hermes": "<tool_call>{}</tool_call>", "llama3_json": LLAMA, "mistral": NAMED}[name]
    assert parse_turn(text, tool_format=NO_CALLS).calls == ()


OWN = """
from agent_r1 import CallBlock, ParsedCall, ToolFormat


class Shell(ToolFormat):
    example = "$ name text"
    trace = "$ "

    def find(self, text, start):
        at = text.find("$ ", start)
        if at < 0:
            return None
        end = (text + "\\n").index("\\n", at)
        name, _, words = text[at + 2 : end].partition(" ")
        return CallBlock(at, end, [ParsedCall(name, {"text": words}, end)])


class Endless(Shell):
    def find(self, text, start):
        return CallBlock(start, start, [])


class NoExample(ToolFormat):
    trace = "$"

    def find(self, text, start):
        return None


class Missing(ToolFormat):
    example = trace = "$"
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_tool_formats.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return "own_tool_formats"


def test_a_format_of_ones_own(own_module: str):
    own = load_tool_format(f"{own_module}:Shell")
    turn = parse_turn("<think>$ no</think>$ say hello you", tool_format=own)
    assert [(c.name, c.arguments) for c in turn.calls] == [("say", {"text": "hello you"})]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("NoExample", "lacks the text 'example'; set it on the class"),
        ("Missing", "cannot be made without arguments"),
        ("ParsedCall", "must be a subclass of agent_r1.ToolFormat"),
    ],
)
def test_a_class_that_is_no_format_is_refused(own_module: str, name: str, problem: str):
    with pytest.raises(ValueError, match=r"env\.tool_format") as caught:
        load_tool_format(f"{own_module}:{name}")
    assert problem in str(caught.value)


def test_a_format_that_goes_nowhere_is_an_error_and_no_endless_loop(own_module: str):
    with pytest.raises(ValueError, match=r"Endless\.find"):
        parse_turn("text", tool_format=load_tool_format(f"{own_module}:Endless"))


def test_user_code_finds_the_classes_in_the_package():
    assert ToolFormat.__module__.startswith("agent_r1.text.tool_formats")
    assert CallBlock(0, 1, [ParsedCall("a", {}, 1)]).calls[0].name == "a"
    assert json.loads(LLAMA)["name"] == "search"
