"""Calls as ReAct writes them: a line that names the action, and a line with its input as JSON.

Source: ReAct, arXiv:2210.03629; the two lines are those that LangChain's prompts made common.
"""

from __future__ import annotations

import re

from agent_r1.text.tool_formats.base import (
    CallBlock,
    ToolFormat,
    first_match,
    growing,
    malformed,
    read_call_at,
)

NAME, INPUT = "Action:", "Action Input:"
EXAMPLE = f'{NAME} TOOL\n{INPUT} {{"NAME": "VALUE"}}'
_ACTION = re.compile(
    rf"^[ \t]*{NAME}(?P<name>[^\n]*)$(?P<input>\s*^[ \t]*{INPUT}\s*)?", re.MULTILINE
)
_BEGINS = re.compile(rf"^[ \t]*(?:\Z|{growing(NAME)})", re.MULTILINE)


class ReactFormat(ToolFormat):
    """One action a turn, the first; what the model writes after it is no call and no answer."""

    example = EXAMPLE
    trace = INPUT
    in_template = False

    def find(self, text: str, start: int) -> CallBlock | None:
        """Return the first action; its block reaches to the end of the turn."""
        action = _ACTION.search(text, start)
        if action is None:
            return None
        if action["input"] is None:
            problem = f"the action has no line `{INPUT}` with JSON; write {EXAMPLE}"
            call = malformed(len(text), problem)
        else:
            named = {"name": action["name"].strip(" \t")}
            call = read_call_at(text, action.end(), named, example=EXAMPLE)
        return CallBlock(action.start(), len(text), [call])

    def begins(self, text: str, start: int) -> int:
        """Return where the next line of an action may begin."""
        return first_match(_BEGINS, text, start)
