"""What the model wrote in one turn: its thought, its answer and its tool calls (Hermes markup).

agent_loop.py gives the decoded text of a turn and gets `TurnText`; chat_format.py maps the end of
each call back to the sampled token that closes it. Text is only ever read here, never re-encoded.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue, TypeAdapter

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"
THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
ANSWER_OPEN = "<answer>"
ANSWER_CLOSE = "</answer>"
MARKUP = (CALL_OPEN, CALL_CLOSE, THINK_OPEN, THINK_CLOSE, ANSWER_OPEN, ANSWER_CLOSE)
MAX_NAME_LENGTH = 64
WIRE_DEPTH = 16
OUT_OF_RANGE = "the tool call is not valid JSON: a value in it is out of range"
CALL_OBJECT = '{"name": ..., "arguments": {...}}'
"""What stands between the tags of a call, as the model is told."""

_BLOCK = re.compile(
    rf"{THINK_OPEN}.*?{THINK_CLOSE}|{CALL_OPEN}(?P<call>.*?)(?:{CALL_CLOSE}|\Z)"
    rf"|{ANSWER_OPEN}(?P<answer>.*?){ANSWER_CLOSE}",
    re.DOTALL,
)
_JSON_OBJECT = TypeAdapter(dict[str, JsonValue])


@dataclass(frozen=True)
class ParsedCall:
    """One tool call as the model wrote it."""

    name: str
    """Name of the tool; "" when the call could not be read."""
    arguments: dict[str, JsonValue]
    end: int
    """One past the call's last character in the turn's text, its closing tag included."""
    error: str = ""
    """Why the call cannot be read, as the model is told; "" when it can."""


@dataclass(frozen=True)
class TurnText:
    """One turn of the model, read."""

    text: str
    """The whole turn, without its end-of-turn token."""
    thought: str | None
    """Inside the first `<think>` block; None without one."""
    answer: str | None
    """Inside the last `<answer>` block; None without one."""
    calls: tuple[ParsedCall, ...]
    """Tool calls, in order; those inside a thought do not count."""


def parse_turn(text: str, *, opens_in_thought: bool = False) -> TurnText:
    """Read one turn.

    A thought that is never closed hides nothing: calls and answers in it count. A call that is
    never closed ends with the text and cannot be read.

    Args:
        text: the decoded turn, without its end-of-turn token.
        opens_in_thought: the generation prompt ended with `<think>`, so the turn begins inside.
    """
    start = 0
    thought: str | None = None
    closed = text.find(THINK_CLOSE) if opens_in_thought else -1
    if closed >= 0:
        start = closed + len(THINK_CLOSE)
        thought = text[:closed].strip()
    answer: str | None = None
    calls: list[ParsedCall] = []
    for block in _BLOCK.finditer(text, start):
        if block["call"] is not None:
            is_closed = block.group().endswith(CALL_CLOSE)
            calls.append(_read_call(block["call"], block.end(), is_closed=is_closed))
        elif block["answer"] is not None:
            answer = block["answer"].strip()
        elif thought is None:
            thought = block.group()[len(THINK_OPEN) : -len(THINK_CLOSE)].strip()
    return TurnText(text=text, thought=thought, answer=answer, calls=tuple(calls))


def _can_travel(call: dict[str, Any]) -> bool:
    """Say whether values survive the wire: no infinity, lone surrogate or endless nesting.

    They travel inside messages inside messages, whose nesting counts against a parser's limit.
    """
    try:
        written = b'{"x":' * WIRE_DEPTH + _JSON_OBJECT.dump_json(call) + b"}" * WIRE_DEPTH
        read: Any = _JSON_OBJECT.validate_json(written)
        for _ in range(WIRE_DEPTH):
            read = read["x"]
        return read == call
    except (ValueError, RecursionError):
        return False


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


class _RepeatedKeyError(ValueError):
    """An object names a key twice, so that one of its values would be lost."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise _RepeatedKeyError
    return values


def _key_problem(call: dict[str, Any]) -> str | None:
    """Say which key of a call is missing or unknown; a guess would run another call."""
    for key in ("name", "arguments"):
        if key not in call:
            found = ", ".join(map(_shown, call)) or "none"
            return f'the tool call has no "{key}" (its keys: {found}); write {CALL_OBJECT}'
    unknown = [key for key in call if key not in ("name", "arguments")]
    if unknown:
        return f"the tool call has the unknown key {_shown(unknown[0])}; write {CALL_OBJECT}"
    return None


def _shown(key: str) -> str:
    # Escaped: a lone surrogate could not travel in the message.
    return json.dumps(key[:MAX_NAME_LENGTH])


def _read_call(body: str, end: int, *, is_closed: bool) -> ParsedCall:
    def malformed(reason: str) -> ParsedCall:
        return ParsedCall(name="", arguments={}, end=end, error=reason)

    if not is_closed:
        return malformed(f"the tool call is not closed by {CALL_CLOSE}")
    try:
        call: Any = json.loads(body, parse_constant=_reject_constant, object_pairs_hook=_object)
    except json.JSONDecodeError as exc:
        return malformed(f"the tool call is not valid JSON: {exc.msg} at character {exc.pos}")
    except _RepeatedKeyError:
        return malformed("an object in the tool call has the same key twice; write each key once")
    except (ValueError, RecursionError):
        return malformed(OUT_OF_RANGE)
    if not isinstance(call, dict):
        return malformed(f"the tool call must be a JSON object {CALL_OBJECT}")
    problem = _key_problem(call)
    if problem is not None:
        return malformed(problem)
    name, arguments = call["name"], call["arguments"]
    if not isinstance(name, str) or not name:
        return malformed('"name" of the tool call must be the name of a tool')
    if len(name) > MAX_NAME_LENGTH:
        return malformed(f'"name" is longer than {MAX_NAME_LENGTH} characters')
    if not isinstance(arguments, dict):
        return malformed('"arguments" of the tool call must be a JSON object')
    if not _can_travel({"name": name, "arguments": arguments}):
        return malformed(OUT_OF_RANGE)
    return ParsedCall(name=name, arguments=arguments, end=end)
