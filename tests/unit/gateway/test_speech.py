"""What a client is told of a turn, as it grows and at once."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import example, given
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
