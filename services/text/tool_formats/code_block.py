"""A program as text: the last fenced block of a turn is a call of `code_tests`.

So that a model without tools is scored by the same tests, in the same sandbox, as one that calls
the tool.
"""

from __future__ import annotations

import re

from agent_r1.text.tool_formats.base import CallBlock, ToolFormat, read_call
from agent_r1_proto.tools import TESTS_TOOL

EXAMPLE = "```python\nPROGRAM\n```"
_BLOCK = re.compile(r"^```[ \t]*(?:python|py)?[ \t]*\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE)


class CodeBlockFormat(ToolFormat):
    """The last block between ``` and ```, in no language or in Python."""

    example = EXAMPLE
    trace = "```python"
    in_template = False

    def find(self, text: str, start: int) -> CallBlock | None:
        """Return the last block as a call."""
        blocks = list(_BLOCK.finditer(text, start))
        if not blocks:
            return None
        last = blocks[-1]
        call = {"name": TESTS_TOOL, "arguments": {"code": last["code"]}}
        return CallBlock(last.start(), last.end(), [read_call(call, last.end(), example=EXAMPLE)])
