"""Base of tool formats: what every way to write calls shares; the class that users extend.

reading.py asks a `ToolFormat` for the calls of a turn; chat_format.py asks it for its tags.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import JsonValue, TypeAdapter

MAX_NAME_LENGTH = 64
WIRE_DEPTH = 16
OUT_OF_RANGE = "the tool call is not valid JSON: a value in it is out of range"
_CALL_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_REPEATED = "an object in the tool call has the same key twice; write each key once"
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
    id: str = ""
    """Id that the model gave the call, where its format has such ids."""


@dataclass(frozen=True)
class CallBlock:
    """A stretch of a turn that holds calls, and nothing else."""

    start: int
    """Index of its first character in the turn's text."""
    end: int
    """One past its last character."""
    calls: Sequence[ParsedCall]
    """Calls in order, at least one."""


class ToolFormat(ABC):
    """A way of writing tool calls.

    A class of your own is named `env.tool_format = "module:Name"` and found through `run.plugins`.
    It is made without arguments, once in a process.
    """

    example: ClassVar[str]
    """A call as a model writes it, for messages to models and users."""
    trace: ClassVar[str]
    """Text by which a chat template that tells a model of this format is known."""
    markup: ClassVar[tuple[str, ...]] = ()
    """Tags of the format. Where one is a token, no text of a tool becomes that token."""
    closing_tag: ClassVar[str] = ""
    """Tag that every call ends with; "" where that differs."""
    separator: ClassVar[str] = " "
    """Text that may stand between calls, beside white space."""
    vllm_parser: ClassVar[str] = ""
    """The tool parser of `vllm serve` that reads the same calls; "" where there is none."""
    endings: ClassVar[tuple[str, ...]] = ()
    """Texts with one of which a call ends that can be read: where one has come, and `find` reads
    the call, nothing that follows changes it. () where only the whole turn says what is a call."""
    in_template: ClassVar[bool] = True
    """False where the prompt tells the model about tools and calls: the chat template is then
    given no tools. Results have to be shown by `EnvStep.message`, as `TextEnv` does."""

    @abstractmethod
    def find(self, text: str, start: int) -> CallBlock | None:
        """Return the first block of calls at or after `start`; None where none begins there.

        A call that cannot be read is a `ParsedCall` with an `error`, which the model is told.
        """

    def begins(self, text: str, start: int) -> int:
        """Return where a call may begin at or after `start` in a turn that is not complete.

        Text before it is shown at once. `len(text)` where none may; here, any text may begin one.
        """
        return start

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return the calls of a turn, at least one, as a model would write them.

        `agent-r1 try --policy openai:URL` writes down the calls of a server like this, and in
        Hermes format where a format returns "".

        Args:
            calls: name of the tool and JSON of its arguments.
        """
        return ""


class NoCalls(ToolFormat):
    """For models that are offered no tool: nothing they write is a call."""

    example = trace = ""

    def find(self, text: str, start: int) -> CallBlock | None:
        """Return None."""
        return None

    def begins(self, text: str, start: int) -> int:
        """Return the end of the text."""
        return len(text)


def growing(text: str) -> str:
    """Return a pattern of a text, or of the beginning of it with which what is searched ends."""
    *before, last = map(re.escape, text)
    pattern = last
    for character in reversed(before):
        pattern = rf"{character}(?:{pattern}|\Z)"
    return pattern


def first_match(pattern: re.Pattern[str], text: str, start: int) -> int:
    """Return where a pattern matches first at or after `start`; the end of the text without."""
    found = pattern.search(text, start)
    return len(text) if found is None else found.start()


class _RepeatedKeyError(ValueError):
    """An object names a key twice, so that one of its values would be lost."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise _RepeatedKeyError
    return values


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_reject_constant)
# Numbers stay text: one that is out of range has an end all the same.
_LENIENT_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, strict=False)


def read_json(text: str, start: int = 0) -> tuple[Any, int]:
    """Read the JSON value that begins at `start`.

    Returns:
        The value, and one past its last character.

    Raises:
        ValueError: it is no JSON, or nothing that a call may hold; the text is for the model.
    """
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as exc:
        where = f"{exc.msg} at character {exc.pos - start}"
        raise ValueError(f"the tool call is not valid JSON: {where}") from exc
    except _RepeatedKeyError as exc:
        raise ValueError(_REPEATED) from exc
    except (ValueError, RecursionError) as exc:
        raise ValueError(OUT_OF_RANGE) from exc


def end_of_object(text: str, start: int) -> int:
    """Return one past the JSON object at `start`, whatever its values; `start` where none ends."""
    if not text.startswith("{", start):
        return start
    try:
        return _LENIENT_DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return start


def malformed(end: int, reason: object) -> ParsedCall:
    """Return a call that cannot be read."""
    return ParsedCall(name="", arguments={}, end=end, error=str(reason))


def read_call(
    call: Any,
    end: int,
    *,
    example: str,
    argument_keys: Sequence[str] = ("arguments",),
    other_keys: Sequence[str] = (),
) -> ParsedCall:
    """Return the call that a JSON value is; a guess would run another one.

    Args:
        call: the value.
        end: where it ends in the text of the turn.
        example: how the model is told to write a call.
        argument_keys: what the key of the arguments may be called; the first is the usual name.
        other_keys: keys that may stand beside name and arguments, and say nothing.
    """
    if not isinstance(call, dict):
        return malformed(end, f"the tool call must be a JSON object {example}")
    named = next((key for key in argument_keys if key in call), argument_keys[0])
    for key in ("name", named):
        if key not in call:
            found = ", ".join(map(_shown, call)) or "none"
            return malformed(
                end, f'the tool call has no "{key}" (its keys: {found}); write {example}'
            )
    unknown = [key for key in call if key not in ("name", named, *other_keys)]
    if unknown:
        problem = f"the tool call has the unknown key {_shown(unknown[0])}; write {example}"
        return malformed(end, problem)
    name, arguments = call["name"], call[named]
    if not isinstance(name, str) or not name:
        return malformed(end, '"name" of the tool call must be the name of a tool')
    if len(name) > MAX_NAME_LENGTH:
        return malformed(end, f'"name" is longer than {MAX_NAME_LENGTH} characters')
    if not isinstance(arguments, dict):
        return malformed(end, f'"{named}" of the tool call must be a JSON object')
    if not _can_travel({"name": name, "arguments": arguments}):
        return malformed(end, OUT_OF_RANGE)
    return ParsedCall(name=name, arguments=arguments, end=end, id=call_id(call.get("id")))


def read_call_at(
    text: str, start: int, named: Mapping[str, str] | None = None, **how: Any
) -> ParsedCall:
    """Return the call whose JSON begins at `start`; one that is no JSON ends with the text.

    Args:
        text: of the turn.
        start: of the JSON in it.
        named: what stands before it (`name`, `id`) where it is the arguments alone.
        how: keyword arguments of `read_call`.
    """
    try:
        value, end = read_json(text, start)
    except ValueError as exc:
        return malformed(len(text), exc)
    call = value if named is None else {**named, "arguments": value}
    return read_call(call, end, **how)


def json_call(name: str, arguments: str, key: str = "arguments") -> str:
    """Return a call as an object; arguments that are no JSON stay as they are."""
    return f'{{"name": {json.dumps(name)}, "{key}": {arguments}}}'


def call_id(value: Any) -> str:
    """Return what a model wrote as the id of a call; "" for what is none."""
    return value if isinstance(value, str) and _CALL_ID.fullmatch(value) else ""


def _shown(key: str) -> str:
    # Escaped: a lone surrogate could not travel in the message.
    return json.dumps(key[:MAX_NAME_LENGTH])


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
