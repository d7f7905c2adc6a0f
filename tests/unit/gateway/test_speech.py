"""What a client is told of a turn, as it grows and at once."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent_r1.gateway.speech import Speaker, Speech, said_message
from agent_r1.text.reading import TurnReader
from agent_r1.text.tool_formats import BUILTIN_FORMATS, NO_CALLS, CallBlock, ToolFormat
from agent_r1.text.tool_formats.base import malformed
from agent_r1.text.tool_formats.code_block import CodeBlockFormat
from agent_r1.text.tool_formats.react import ReactFormat


class Shouted(ToolFormat):
    """A user's format, which does not say where its calls may begin."""

    example = trace = "CALL!"

    def find(self, text: str, start: int) -> CallBlock | None:
        found = text.find("!", start)
        return (
            None
            if found < 0
            else CallBlock(found, found + 1, [malformed(found + 1, "no shouting")])
        )


FORMATS = {
    **BUILTIN_FORMATS,
    "react": ReactFormat(),
    "code_block": CodeBlockFormat(),
    "none": NO_CALLS,
    "users": Shouted(),
}
ARGUMENTS = '{"q": "</tool_call> } ] </think> 東京 \\" <answer>"}'
PIECES = [
    *"<>{}[]\n;` ",
    "  \n",
    "東京は",
    "👩‍🚀",
    "plain words",
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "f", "arguments": ',
    '{"type": "function", "name": "f", "parameters": {}}',
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "f[ARGS]",
    "Action: f\n",
    "Action Input: ",
    "\n```python\n",
    "\n```",
    ARGUMENTS,
    f'<tool_call>{{"name": "f", "arguments": {ARGUMENTS}}}</tool_call>',
    f'{{"name": "f", "parameters": {ARGUMENTS}}}',
    f'[TOOL_CALLS] [{{"name": "f", "arguments": {ARGUMENTS}}}, {{"name": "g", "arguments": {{}}}}]',
    f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}",
    f"\nAction: f\nAction Input: {ARGUMENTS}\n",
    "\n```python\nprint(1)\n```\n",
]
TURNS = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)
OPENINGS = st.sampled_from(["", "<think>\n", "<think>\nWell, "])


def tell(name: str, pieces: Iterable[str], opening: str = "") -> list[Speech]:
    speaker = Speaker(opening, TurnReader(FORMATS[name]))
    return [*(speaker.feed(piece) for piece in pieces), speaker.finish()]


def joined(told: list[Speech]) -> Speech:
    return Speech(
        "".join(one.thought for one in told),
        "".join(one.content for one in told),
        tuple(call for one in told for call in one.calls),
    )


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None)
@given(text=TURNS, opening=OPENINGS, seed=st.integers(0, 1 << 32))
@example(text="\nAction: f\n" * 2, opening="", seed=0)
def test_pieces_of_a_turn_say_what_the_whole_says(name: str, text: str, opening: str, seed: int):
    draw = random.Random(seed)
    cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randrange(12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = joined(tell(name, [text], opening))
    for way in (pieces, list(text)):
        assert joined(tell(name, way, opening)) == whole
    reader = TurnReader(FORMATS[name], opens_in_thought=bool(opening))
    said = said_message(text, opening, TurnReader(FORMATS[name]), str)
    assert said.content == whole.content
    good = [call for call in reader.read(text).calls if not call.error]
    assert list(whole.calls) == good
    assert [(c.name, c.arguments, c.id) for c in said.tool_calls] == [
        (call.name, call.arguments, str(i)) for i, call in enumerate(good)
    ]


def told(name: str, *pieces: str, opening: str = "") -> list[tuple[str, str, list[str]]]:
    return [
        (one.thought, one.content, [call.name for call in one.calls])
        for one in tell(name, pieces, opening)
    ]


def test_text_is_told_unless_it_may_be_the_beginning_of_markup():
    assert told("hermes", "a < b <", "tool", "s> <thin", "k") == [
        ("", "a < b", []),
        ("", "", []),
        ("", " <tools>", []),
        ("", "", []),
        ("", " <think", []),
    ]
    assert told("none", "a <tool_call> b") == [("", "a <tool_call> b", []), ("", "", [])]


def test_a_thought_is_told_as_it_grows_and_is_no_content():
    assert told("hermes", "Hm", "m", "</thi", "nk>\n\nPar", "is\n", opening="<think>\nWell, ") == [
        ("Well, Hm", "", []),
        ("m", "", []),
        ("", "", []),
        ("", "Par", []),
        ("", "is", []),
        ("", "\n", []),
    ]


SEARCH = '<tool_call>{"name": "search", "arguments": {"q": "</tool_call>"}}</tool_call>'


def test_a_call_is_told_once_it_is_complete():
    assert told("hermes", "Look.\n" + SEARCH[:-1], SEARCH[-1], "\n", SEARCH, " so") == [
        ("", "Look.", []),
        ("", "", ["search"]),
        ("", "", []),
        ("", "", ["search"]),
        ("", "\nso", []),
        ("", "", []),
    ]
    calls = '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}'
    assert told("llama3_json", calls) == [("", "", ["f", "g"]), ("", "", [])]
    calls = '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]'
    assert told("mistral", calls[:-1], calls[-1]) == [
        ("", "", []),
        ("", "", ["f", "g"]),
        ("", "", []),
    ]


def test_a_call_that_cannot_be_read_is_text_at_the_end():
    speaker = Speaker("", TurnReader(FORMATS["hermes"]))
    bad = "<tool_call>{search}</tool_call>"
    assert [speaker.feed(f"Look. {bad}"), speaker.feed(SEARCH)] == [
        Speech(content="Look."),
        Speech(),
    ]
    rest = speaker.finish()
    assert (rest.content, [call.name for call in rest.calls]) == (f" {bad}", ["search"])


def test_a_call_in_a_thought_is_told_only_where_the_thought_never_ends():
    assert told("hermes", "<think>use ", SEARCH, "</think>Paris")[-1] == (
        f" {SEARCH}",
        "Paris",
        [],
    )
    assert told("hermes", "<think>use ", SEARCH)[-1] == ("", "", ["search"])


def test_the_tags_of_an_answer_are_text():
    text = "<answer>Paris</answer> yes"
    assert told("hermes", "<answer>Par", text[11:]) == [
        ("", "<answer>Par", []),
        ("", text[11:], []),
        ("", "", []),
    ]
    assert told("hermes", f"<answer>{SEARCH}</answer>")[-1] == ("", f"{SEARCH}</answer>", [])


CODE = json.dumps({"code": "def f(x):\n    return {'a': [x], \"b\": {x}}\n" * 800})


@pytest.mark.parametrize("name", [*BUILTIN_FORMATS, "react", "code_block"])
@pytest.mark.parametrize(
    "text",
    [
        "Words with < and { and [ in them. " * 1000,
        f'<tool_call>{{"name": "f", "arguments": {CODE}}}</tool_call>',
        f'{{"name": "f", "parameters": {CODE}}}',
        f'[TOOL_CALLS] [{{"name": "f", "arguments": {CODE}}}]',
        "<tool_call>{</tool_call>" * 1300,
        "{" + " " * 32_000,
    ],
    ids=["words", "hermes", "llama3_json", "mistral", "malformed", "spaces"],
)
def test_8000_tokens_are_read_in_a_moment(name: str, text: str):
    speaker = Speaker("", TurnReader(FORMATS[name]))
    began = time.process_time()
    for start in range(0, len(text), 4):
        speaker.feed(text[start : start + 4])
    speaker.finish()
    # 0.05 to 0.35 s here. To read each beginning once more takes 8,000 readings of 16 KB on
    # average, each some 50 us or more.
    assert time.process_time() - began < 2.0
