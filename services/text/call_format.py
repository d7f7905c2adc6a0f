"""Whether the chat template writes tool calls in the format that they are read in.

main.py asks at start, and `agent-r1 check` before anything starts: a template that tells the
model another format yields a policy that never calls a tool. The template is made to render a call,
and the rendering is read as a turn of the model would be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agent_r1.text.chat_template import ChatTemplateError, render
from agent_r1.text.reading import parse_turn
from agent_r1.text.tool_formats import BUILTIN_FORMATS, ToolFormat
from agent_r1_proto.tools import ToolSpec

ANY_TOOL = ToolSpec(
    name="tool",
    version="1",
    description="Searches.",
    parameters={"type": "object", "properties": {"query": {"type": "string"}}},
)
"""Stands for tools whose schema is not known yet."""
UNREAD_TRACES = ("<function", "<|tool_call")
"""Traces, in what a template tells the model, of formats that no built-in one reads."""

_QUESTION, _VALUE, _RESULT = "Question-7f3a", "Value-7f3a", "Result-7f3a"
_ARGUMENTS = {"text": _VALUE, "quoted": 'a "word"', "number": 3}
_CALL_ID = "call7f3a0"  # nine letters and digits: some templates accept no other length
_SHOWN_CHARS = 240


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
    template = _Template(tokenizer, dict(template_kwargs or {}))
    turn = template.turn_with_call(tools)
    name = tools[0].name
    if _VALUE in turn:
        if not _reads(tool_format, turn, name):
            readers = [key for key, other in BUILTIN_FORMATS.items() if _reads(other, turn, name)]
            raise _other_format(tool_format, f"writes a call as {_shorten(turn)}", readers)
        return None
    told = template.told_about(tools)
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


class _Template:
    def __init__(self, tokenizer: Any, kwargs: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._kwargs = kwargs

    def turn_with_call(self, tools: Sequence[ToolSpec]) -> str:
        """Render a dialogue whose assistant calls the first tool; return what it says."""
        try:
            said = self._render(tools, _call(tools[0].name, _ARGUMENTS))
        except ChatTemplateError:  # some templates want the arguments as a string of JSON
            said = self._render(tools, _call(tools[0].name, json.dumps(_ARGUMENTS)))
        return said.rpartition(_QUESTION)[2].partition(_RESULT)[0]

    def told_about(self, tools: Sequence[ToolSpec]) -> dict[str, int]:
        """Count traces of formats in what the template says about tools, but not in the tools."""
        one, two = self._render(tools[:1]), self._render([tools[0], tools[0]])
        traces = [*(format.trace for format in BUILTIN_FORMATS.values()), *UNREAD_TRACES]
        # What a second tool adds, the first one has brought along as well.
        return {trace: 2 * one.count(trace) - two.count(trace) for trace in traces}

    def _render(self, tools: Sequence[ToolSpec], call: dict[str, Any] | None = None) -> str:
        dialogue: list[dict[str, Any]] = [{"role": "user", "content": _QUESTION}]
        if call is not None:
            name = call["function"]["name"]
            dialogue += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "name": name, "tool_call_id": _CALL_ID, "content": _RESULT},
            ]
        what = "the tools" if call is None else "a tool call and its result"
        functions = [tool.as_function() for tool in tools]
        return render(self._tokenizer, dialogue, what, tools=functions, **self._kwargs)


def _call(name: str, arguments: Any) -> dict[str, Any]:
    return {
        "id": _CALL_ID,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _shorten(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…")
