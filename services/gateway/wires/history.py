"""A history as a wire reads it: items or blocks of a request, one after another, become messages.

The instructions and the system messages that come first are one message, since most chat templates
have one place for them; what a client says as the system later on is told as the user's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic import JsonValue, ValidationError

from agent_r1.gateway.wire import turn_id_in
from agent_r1.gateway.wires.http import problem_of, refuse
from agent_r1.text.tokens import nesting
from agent_r1_proto.parts import TextPart, shown_text
from agent_r1_proto.tasks import ChatMessage, MessageCall, Role
from agent_r1_proto.tools import ToolSpec

_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Parts of a content that are text, and their fields that have it."""
MAX_NESTING = 64
"""Most lists and objects of a call's arguments that stand in each other."""


@dataclass
class _Draft:
    """A message that may still grow."""

    where: str
    """Of the request; for errors."""
    role: Role
    texts: list[str] = field(default_factory=list[str])
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    answers: str = ""
    """Id of the call that a result answers."""
    turn_id: str = ""
    """Of the turn that said it, where an id of ours came with it."""
    has_own_text: bool = False
    """An id of ours came with its text, so text without one is not the turn's."""

    def message(self) -> ChatMessage:
        """Return the message.

        Raises:
            WireError: it cannot be shown to a policy.
        """
        parts = [TextPart(text=text) for text in self.texts]
        try:
            message = ChatMessage(
                role=self.role,
                content="".join(self.texts) if len(parts) < 2 else list(parts),
                tool_calls=[MessageCall.model_validate(call) for call in self.calls],
                tool_call_id=self.answers,
            )
            check_calls(message)
        except (ValueError, RecursionError) as exc:
            refuse(self.where, f"{self.where}: {problem_of(exc)}", exc)
        return message


class History:
    """The messages of one request, as they are gathered."""

    def __init__(self) -> None:
        self._drafts: list[_Draft] = []
        self._is_open = False
        """The last message goes on until `end_message`."""

    def end_message(self) -> None:
        """End the message that goes on."""
        self._is_open = False

    def tell(self, where: str, role: Role, texts: Sequence[str]) -> None:
        """Add text of the system or the user."""
        last = self._drafts[-1] if self._drafts and self._is_open else None
        if last is None or last.role != role:
            last = self._begin(_Draft(where, role))
        last.texts += texts

    def result(self, where: str, call_id: str, texts: Sequence[str]) -> None:
        """Add the result of a call."""
        self._begin(_Draft(where, "tool", list(texts), answers=call_id))

    def say(
        self,
        where: str,
        *,
        turn_id: str = "",
        texts: Sequence[str] = (),
        call: Mapping[str, Any] | None = None,
    ) -> None:
        """Add what the assistant said.

        Args:
            where: of the request.
            turn_id: of the turn that said it; "" where nothing names one.
            texts: of it.
            call: name, arguments and id of a call.
        """
        turn_id = turn_id or ("" if call is None else turn_id_in(str(call.get("id"))))
        draft = self._going_on(turn_id)
        if draft is None or (texts and not turn_id and draft.has_own_text):
            draft = self._begin(_Draft(where, "assistant"))
        draft.has_own_text |= bool(texts and turn_id)
        draft.turn_id = draft.turn_id or turn_id
        draft.texts += texts
        draft.calls += [] if call is None else [dict(call)]

    def extend(self, messages: Iterable[tuple[ChatMessage, str]]) -> None:
        """Add messages that are kept, with the ids of their turns."""
        for one, turn_id in messages:
            calls = [call.model_dump() for call in one.tool_calls]
            texts = [shown_text(one.content)] if one.content else []
            draft = _Draft("history", one.role, texts, calls, one.tool_call_id, turn_id)
            self._begin(draft)
        self.end_message()

    def finish(
        self, instructions: Sequence[str] = ()
    ) -> tuple[tuple[ChatMessage, ...], dict[int, str]]:
        """Return the messages, and by index the ids of the turns that said them.

        Raises:
            WireError: a message cannot be shown to a policy.
        """
        told = next((i for i, one in enumerate(self._drafts) if one.role != "system"), None)
        head, rest = self._drafts[:told], self._drafts[len(self._drafts[:told]) :]
        texts = [*instructions, *(text for draft in head for text in draft.texts)]
        where = head[0].where if head else "instructions"
        drafts = [_Draft(where, "system", ["\n\n".join(texts)])] if texts else []
        for draft in rest:
            draft.role = "user" if draft.role == "system" else draft.role
        drafts += rest
        turn_ids = {i: draft.turn_id for i, draft in enumerate(drafts) if draft.turn_id}
        return tuple(draft.message() for draft in drafts), turn_ids

    def _begin(self, draft: _Draft) -> _Draft:
        self._drafts.append(draft)
        self._is_open = draft.role != "tool"
        return draft

    def _going_on(self, turn_id: str) -> _Draft | None:
        """Return the assistant's message that goes on; None where another one begins.

        Calls of one turn may come each with its result behind it.
        """
        for draft in reversed(self._drafts):
            if draft.role == "assistant":
                if turn_id and draft.turn_id == turn_id:
                    return draft
                is_last = draft is self._drafts[-1] and self._is_open
                return draft if is_last and not (turn_id and draft.turn_id) else None
            if draft.role != "tool":
                break
        return None


def check_calls(message: ChatMessage) -> None:
    """Check what stands as JSON in JSON in a message of the assistant.

    Raises:
        ValueError: half a surrogate pair came in that way, or what `check_nesting` refuses.
        RecursionError: it is nested deeper still.
    """
    message.shown().encode()
    for call in message.tool_calls:
        check_nesting(call.arguments)


def check_nesting(arguments: JsonValue) -> None:
    """Check that the arguments of a call can be read where they stand within other JSON.

    Raises:
        ValueError: they are nested too deeply.
        RecursionError: deeper still.
    """
    if nesting(arguments) > MAX_NESTING:
        raise ValueError(f"arguments are nested deeper than {MAX_NESTING}; send flatter JSON")


def read_texts(where: str, content: JsonValue) -> list[str]:
    """Return the texts of a content: a string, or a list of parts.

    Raises:
        WireError: a part is no text.
    """
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        refuse(where, f"{where}: the content is neither a text nor a list; send one of them")
    return [_read_text(f"{where}.{i}", part) for i, part in enumerate(content)]


def _read_text(where: str, part: JsonValue) -> str:
    part = table(where, part)
    kind = str(part.get("type"))
    text = part.get(_TEXTS.get(kind, ""))
    if not isinstance(text, str):
        if kind in _TEXTS:
            refuse(where, f"{where}: the part of type {kind} has no text; send one")
        refuse(
            where,
            f"{where}: a part of type {kind!r:.50} cannot be shown to the policy, which reads text "
            "alone; send text in its place, such as a description",
        )
    return text


def table(where: str, value: JsonValue) -> dict[str, JsonValue]:
    """Return a JSON object.

    Raises:
        WireError: it is none.
    """
    if not isinstance(value, dict):
        refuse(where, f"{where}: {value!r:.50} is no JSON object; send one")
    return cast("dict[str, JsonValue]", value)


def read_arguments(arguments: str) -> dict[str, JsonValue]:
    """Return the arguments of a call: what is no JSON object is an argument of that name."""
    try:
        parsed: JsonValue = json.loads(arguments) if arguments.strip() else {}
    except ValueError:
        parsed = arguments
    return parsed if isinstance(parsed, dict) else {"arguments": parsed}


def read_tool(where: str, name: object, description: object, schema: object) -> ToolSpec:
    """Return a tool that is offered to the policy.

    Raises:
        WireError: it cannot be offered.
    """
    try:
        return ToolSpec.model_validate(
            {
                "name": name,
                "version": "",
                "description": description or "",
                "parameters": schema or {"type": "object", "properties": {}},
            }
        )
    except ValidationError as exc:
        refuse(where, f"{where}: {problem_of(exc)}", exc)
