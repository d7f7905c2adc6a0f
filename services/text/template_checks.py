"""Checks of a chat template, tried on dummy dialogues before anything is sampled.

chat_format.py asks whether earlier turns are rendered as they were written, once there are later
ones: many templates remove the thinking of earlier turns, some at every reply, some only at a
message of the user. main.py and `agent-r1 check` ask whether calls are written in the format
that they are read in: a template that tells the model another one yields a policy that never calls
a tool.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from agent_r1.text.chat_template import ChatTemplateError, render
from agent_r1.text.reading import parse_turn
from agent_r1.text.tool_formats import BUILTIN_FORMATS, ToolFormat
from agent_r1_proto.tasks import Role
from agent_r1_proto.tools import ToolSpec

# Words that no template writes by itself, without whitespace at their ends (templates may strip).
QUESTION, THOUGHT, SAID = "Question-7f3a", "Thought-7f3a", "Said-7f3a"
REPLY = "Reply-7f3a"
_SPOKEN = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}"
_CALL_ID = "call7f3a{}"  # nine letters and digits: some templates accept no other length
ANY_TOOL = ToolSpec(
    name="tool7f3a",
    version="1",
    description="Any tool.",
    parameters={"type": "object", "properties": {"text": {"type": "string"}}},
)
"""Stands for tools whose schema is not known yet."""
ANY_FUNCTION = ANY_TOOL.as_function()
UNREAD_TRACES = ("<function", "<|tool_call")
"""Traces, in what a template tells the model, of formats that no built-in one reads."""
_VALUE = "Value-7f3a"
_ARGUMENTS = {"text": _VALUE, "quoted": 'a "word"', "number": 3}
_SHOWN_CHARS = 240

Dialogue = list[dict[str, Any]]
Render = Callable[[Dialogue, Mapping[str, Any]], str]
"""Renders a dialogue up to the next turn of the model, with more variables of the template, and
without the thought that it may begin for the model."""


def dummy_id(index: int) -> str:
    """Return what a dialogue calls the call that a result answers, for the first ten results."""
    return _CALL_ID.format(index % 10)


def outside_message(index: int, role: Role, text: str) -> dict[str, str]:
    """Return a message as templates take it; a result says which call it answers."""
    call = {"tool_call_id": dummy_id(index), "name": ANY_FUNCTION["function"]["name"]}
    return {"role": role, "content": text, **(call if role == "tool" else {})}


def short_dialogue(roles: Sequence[Role], replies: Sequence[str]) -> Dialogue:
    """Return a question, a turn with a thought, and what follows it."""
    return [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": _SPOKEN},
        *map(outside_message, range(len(roles)), roles, replies),
    ]


def count_alike(one: str, other: str) -> int:
    """Return how many characters two texts have alike, from the beginning."""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in alike)


def keeps_turns(render: Render, role: Role, extra: Mapping[str, Any]) -> bool:
    """Say whether earlier turns stay as they were where messages of a role follow them.

    Compared are prompts, since the model samples after nothing else: what a template writes only at
    the end of a dialogue, where it asks for no turn, is in none of them. Nor is a thought that it
    begins for the model, which it may do after some messages only: the turn has it, if it goes on.
    """
    one = short_dialogue((role,), [REPLY])
    dialogues = [{"role": "user", "content": QUESTION}], one, [*one, *one[1:]]
    asked, first, second = (render(dialogue, extra) for dialogue in dialogues)
    start = count_alike(asked, first)
    end = asked[start:]  # "" where each turn is written as the generation prompt begins it
    turn = first[start : len(first) - len(end)]
    return (
        first.endswith(end)
        and second == first[:start] + turn + turn + end
        and turn.count(THOUGHT) == 1
    )


def keeping_key(render: Render, role: Role, template: str) -> str:
    """Name the setting under which a template keeps earlier turns, by trying them."""
    # A name that is no variable of the template changes nothing.
    for name in sorted(set(re.findall(r"\w*(?:think|reason|keep|preserve|clear)\w*", template))):
        for value in (True, False):
            try:
                keeps = keeps_turns(render, role, {name: value})
            except ChatTemplateError:
                continue
            if keeps:
                return f"set env.chat_template_kwargs = {{{name} = {json.dumps(value)}}}"
    return (
        "env.chat_template_kwargs has no variable of this template that keeps them; put a "
        "chat_template.jinja that renders every turn as it was written beside the model"
    )


def check_call_format(
    tokenizer: Any,
    tool_format: ToolFormat,
    tools: Sequence[ToolSpec],
    template_kwargs: Mapping[str, Any] | None = None,
) -> str | None:
    """Check that calls are read in the format that the chat template tells the model.

    Args:
        tokenizer: has the chat template.
        tool_format: how calls are read.
        tools: what the model is offered; with none, or with a format that the template need not
            know, there is nothing to check.
        template_kwargs: `env.chat_template_kwargs`.

    Returns:
        A remark for the user where the template says nothing about calls, else None.

    Raises:
        ChatTemplateError: the template cannot render the tools, a call or its result, or it
            writes calls in another format.
    """
    if not tools or not tool_format.in_template:
        return None

    def shown(offered: Sequence[ToolSpec], *said: dict[str, Any]) -> str:
        what = "a tool call and its result" if said else "the tools"
        dialogue = [{"role": "user", "content": QUESTION}, *said]
        functions = [tool.as_function() for tool in offered]
        return render(tokenizer, dialogue, what, tools=functions, **(template_kwargs or {}))

    name = tools[0].name
    turn = _turn_with_call(partial(shown, tools), name)
    if _VALUE in turn:
        if not _reads(tool_format, turn, name):
            readers = [key for key, other in BUILTIN_FORMATS.items() if _reads(other, turn, name)]
            raise _other_format(tool_format, f"writes a call as {_shorten(turn)}", readers)
        return None
    told = _told_about(shown, tools[0])
    if told.get(tool_format.trace):
        return None
    found = [trace for trace, count in told.items() if count > 0]
    if found:
        readers = [key for key, other in BUILTIN_FORMATS.items() if other.trace == found[0]]
        what = f"tells the model about calls with {found[0]}"
        raise _other_format(tool_format, what, readers)
    return (
        "the chat template does not tell the model how a call is written: unless its training has, "
        f"say in env.system_prompt that a call is {tool_format.example}"
    )


def _reads(tool_format: ToolFormat, turn: str, name: str) -> bool:
    """Say whether a format reads the rendered call, and nothing else, in a turn."""
    calls = parse_turn(turn, tool_format=tool_format).calls
    return [(call.name, call.arguments) for call in calls] == [(name, _ARGUMENTS)]


def _other_format(tool_format: ToolFormat, what: str, readers: Sequence[str]) -> ChatTemplateError:
    remedy = (
        "name the model's own format in env.tool_format (module:Name of a ToolFormat), choose a "
        "model whose template has this one, or put a chat_template.jinja that has it beside the "
        "model"
    )
    if readers:
        remedy = f'set env.tool_format = "{readers[0]}"'
    return ChatTemplateError(
        f"the chat template {what}, and calls are read as {tool_format.example}, so that no call "
        f"of the model would be understood; {remedy}"
    )


def _turn_with_call(shown: Callable[..., str], name: str) -> str:
    """Render a dialogue whose assistant calls a tool; return what it says."""
    result = {**outside_message(0, "tool", REPLY), "name": name}
    try:
        said = shown(_call(name, _ARGUMENTS), result)
    except ChatTemplateError:  # some templates want the arguments as a string of JSON
        said = shown(_call(name, json.dumps(_ARGUMENTS)), result)
    return said.rpartition(QUESTION)[2].partition(REPLY)[0]


def _told_about(shown: Callable[..., str], tool: ToolSpec) -> dict[str, int]:
    """Count traces of formats in what the template says about a tool, but not in the tool."""
    one, two = shown([tool]), shown([tool, tool])
    traces = [*(format.trace for format in BUILTIN_FORMATS.values()), *UNREAD_TRACES]
    # What a second tool adds, the first one has brought along as well.
    return {trace: 2 * one.count(trace) - two.count(trace) for trace in traces}


def _call(name: str, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    call = {"id": dummy_id(0), "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _shorten(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…")
