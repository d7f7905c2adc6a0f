"""Results of a tool's own code, made fit to travel; or why they cannot be.

app.py hands in what `Tool.call` returned or raised. An exception there is text for the model. What
is no result at all is a mistake of the tool's author: it must not look like a tool that errs, or a
run would train on it.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence

from agent_r1.runtime.unicode import repair_json, repair_text
from agent_r1.runtime.user_code import kind_of
from agent_r1.tools.base import Tool, ToolUnavailableError, error_result, text_result
from agent_r1_proto.parts import ResultPart, TextPart
from agent_r1_proto.tools import ToolCall, ToolResult

logger = logging.getLogger(__name__)

MAX_PROBLEM_CHARS = 1000
"""Longest text about what went wrong."""


class BrokenToolError(Exception):
    """The tool's own code is wrong; asking again does not help."""


def describe_exception(exc: BaseException) -> str:
    """Return the last line of an exception's traceback: its class and its text, cut."""
    return repair_text(traceback.format_exception_only(exc)[-1].strip())[:MAX_PROBLEM_CHARS]


def to_result(tool: Tool, call: ToolCall, answer: object, max_bytes: int) -> ToolResult:
    """Return what became of one call, with at most `max_bytes` of text (UTF-8).

    Raises:
        BrokenToolError: the tool returned something that is no result.
        BaseException: `answer`, if it is an outage or no ordinary exception.
    """
    if isinstance(answer, BaseException):
        result = _raised(tool, call, answer)
    elif isinstance(answer, str):
        result = text_result(answer)
    elif isinstance(answer, ToolResult):
        result = answer
    else:
        raise broken(
            tool, f"call returned {kind_of(answer)}; it must return a string or a ToolResult", call
        )
    parts = _cut(tool.name, [_repaired(part) for part in result.parts], max_bytes)
    return ToolResult(status=result.status, parts=parts, data=repair_json(result.data))


def check_batch(tool: Tool, answers: object, num_calls: int) -> list[object]:
    """Return what `Tool.call_batch` returned, one answer per call.

    Raises:
        BrokenToolError: it returned anything else.
    """
    wanted = f"it must return a list of {num_calls}, one result per call"
    if not isinstance(answers, Sequence) or isinstance(answers, str | bytes):
        raise broken(tool, f"call_batch returned {kind_of(answers)}; {wanted}")
    if len(answers) != num_calls:
        raise broken(tool, f"call_batch returned {len(answers)} results; {wanted}")
    return list(answers)


def broken(tool: Tool, problem: str, call: ToolCall | None = None) -> BrokenToolError:
    """Log a mistake in the tool's code and return the error that says it."""
    logger.error(
        "tool is broken tool=%s version=%s rollout_id=%s problem=%s.%s",
        tool.name,
        tool.version,
        "-" if call is None else call.rollout_id,
        type(tool).__name__,
        problem,
    )
    return BrokenToolError(f"{type(tool).__name__}.{problem}")


def _raised(tool: Tool, call: ToolCall, exc: BaseException) -> ToolResult:
    if isinstance(exc, ToolUnavailableError) or not isinstance(exc, Exception):
        raise exc
    logger.error(
        "tool call raised tool=%s rollout_id=%s turn=%d",
        tool.name,
        call.rollout_id,
        call.turn,
        exc_info=exc,
    )
    return error_result(f"Error: {type(exc).__name__}: {exc}")


def _repaired(part: ResultPart) -> ResultPart:
    return TextPart(text=repair_text(part.text)) if isinstance(part, TextPart) else part


def _cut(tool: str, parts: list[ResultPart], max_bytes: int) -> list[ResultPart]:
    """Return the parts with at most `max_bytes` of text; what is cut says so."""
    total = sum(len(part.text.encode()) for part in parts if isinstance(part, TextPart))
    if total <= max_bytes:
        return parts
    logger.warning(
        "tool result cut tool=%s num_bytes=%d max_result_bytes=%d", tool, total, max_bytes
    )
    kept: list[ResultPart] = []
    left = max_bytes
    for part in parts:
        if not isinstance(part, TextPart):
            kept.append(part)
        elif left > 0:
            text = part.text.encode()
            cut = text[:left].decode(errors="ignore")
            left -= len(text)
            mark = f"\n[truncated: {max_bytes} of {total} bytes]" if left < 0 else ""
            kept.append(TextPart(text=cut + mark))
    return kept
