"""What a turn says to a client, as its text grows: thought, content and tool calls.

wires/*.py feed a `Speaker` what the policy writes; session.py asks `said_message` what the client
was told in the end, by which a turn is known when it comes back. Pure; text/reading.py parses.

Content is the turn without its thoughts and calls; the tags of an answer, and calls that cannot be
read, are text. White space beside a thought or a call is not told. Text is held from where markup
may begin; and to the end of the turn where only that decides what it is: a call in a thought that
is open, a call that cannot be read, markup in an answer that is open.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from agent_r1.text.reading import (
    ANSWER_CLOSE,
    ANSWER_OPEN,
    THINK_CLOSE,
    THINK_OPEN,
    TurnReader,
    find_calls,
)
from agent_r1.text.tool_formats import ParsedCall
from agent_r1.text.tool_formats.base import first_match, growing
from agent_r1_proto.tasks import ChatMessage, MessageCall

_TAGS = {
    "said": re.compile("|".join(map(growing, (THINK_OPEN, ANSWER_OPEN)))),
    "answer": re.compile("|".join(map(growing, (THINK_OPEN, ANSWER_OPEN, ANSWER_CLOSE)))),
    "thought": re.compile(growing(THINK_CLOSE)),
}
"""Tags that matter in text of each kind, and their beginnings where the text ends with one."""


@dataclass(frozen=True)
class Speech:
    """What a turn says, or what of it is told next."""

    thought: str = ""
    content: str = ""
    calls: tuple[ParsedCall, ...] = ()
    """Those that can be read, in order."""

    def __bool__(self) -> bool:
        return bool(self.thought or self.content or self.calls)

    def after(self, told: Speech) -> Speech:
        """Return the rest of it, of which the beginning has been told."""
        return Speech(
            self.thought[len(told.thought) :],
            self.content[len(told.content) :],
            self.calls[len(told.calls) :],
        )


class Speaker:
    """Tells a turn as it grows.

    Args:
        opening: the thought that the template began before the turn; "" where it began none.
        reader: of the turns of this model.
    """

    def __init__(self, opening: str, reader: TurnReader) -> None:
        self._opening = opening
        self._reader = replace(reader, opens_in_thought=bool(opening))
        self._format = reader.tool_format
        self._parts = _Parts(opening, self._format.separator)
        self._kind: Literal["said", "answer", "thought"] = "thought" if opening else "said"
        self._text = ""
        self._at = 0
        """Everything before it is told, or markup."""
        self._searched = 0
        """Up to where the end of the call at `_at` has been looked for."""
        self._told = Speech()

    def feed(self, text: str) -> Speech:
        """Append text, and return what can be told of the turn now; it may be empty."""
        self._text += text
        while self._step():
            pass
        return self._tell(self._parts.speech())

    def finish(self) -> Speech:
        """Return the rest of what the turn says."""
        return self._tell(_read(self._text, self._opening, self._reader))

    def _tell(self, speech: Speech) -> Speech:
        told, self._told = self._told, speech
        return speech.after(told)

    def _step(self) -> bool:
        """Pass over text up to the next markup, and over that; False: more text has to come."""
        tag = first_match(_TAGS[self._kind], self._text, self._at)
        call = self._format.begins(self._text, self._at)
        passed, self._at = self._text[self._at : min(tag, call)], min(tag, call)
        self._parts.add("thought" if self._kind == "thought" else "content", passed)
        if call <= tag:
            return self._kind == "said" and self._pass_call()
        if self._kind == "said" and self._text.startswith(THINK_OPEN, tag):
            self._parts.end("content")
            self._pass(THINK_OPEN, "thought")
        elif self._kind == "said" and self._text.startswith(ANSWER_OPEN, tag):
            self._parts.add("content", ANSWER_OPEN)
            self._pass(ANSWER_OPEN, "answer")
        elif self._kind == "answer" and self._text.startswith(ANSWER_CLOSE, tag):
            self._parts.add("content", ANSWER_CLOSE)
            self._pass(ANSWER_CLOSE, "said")
        elif self._kind == "thought" and self._text.startswith(THINK_CLOSE, tag):
            self._parts.end("thought")
            self._pass(THINK_CLOSE, "said")
        else:
            return False
        return True

    def _pass(self, tag: str, kind: Literal["said", "answer", "thought"]) -> None:
        self._at += len(tag)
        self._kind = kind

    def _pass_call(self) -> bool:
        """Pass over a block of calls that are complete and can be read."""
        endings = self._format.endings
        # Where none has come since, a long call is not read once more.
        since = max(self._at, self._searched - max(map(len, endings), default=1) + 1)
        self._searched = len(self._text)
        if not any(self._text.find(ending, since) >= 0 for ending in endings):
            return False
        block = find_calls(self._format, self._text, self._at)
        if block is None or block.start != self._at or any(call.error for call in block.calls):
            return False
        self._parts.end("content")
        self._parts.calls += block.calls
        self._at = self._searched = block.end
        return True


def said_message(
    text: str, opening: str, reader: TurnReader, call_ids: Callable[[int], str]
) -> ChatMessage:
    """Return the message that a client was told for a turn, without the thought.

    Args:
        text: the decoded turn, up to where it was shown, without its end-of-turn token.
        opening: the thought that the template began before it.
        reader: of the turns of this model.
        call_ids: give the id of a call by its place among those that can be read.
    """
    speech = _read(text, opening, replace(reader, opens_in_thought=bool(opening)))
    calls = [
        MessageCall(name=call.name, arguments=call.arguments, id=call_ids(i))
        for i, call in enumerate(speech.calls)
    ]
    return ChatMessage(role="assistant", content=speech.content, tool_calls=calls)


def _read(text: str, opening: str, reader: TurnReader) -> Speech:
    """Return what a whole turn says; a call that cannot be read is text."""
    parts = _Parts(opening, reader.tool_format.separator)
    at = 0
    for block in reader.blocks(text):
        if block.kind == "thought":
            parts.add("content", text[at : block.start])
            parts.end("content")
            parts.add("thought", block.content)
            parts.end("thought")
            at = block.end
        start = block.start
        for call in block.calls:
            if not call.error:
                parts.add("content", text[at:start])
                parts.end("content")
                parts.calls.append(call)
                at = call.end
            start = call.end
        if block.calls and not block.calls[-1].error:
            at = block.end  # what a format has behind its last call is said to nobody
    parts.add("content", text[at:])
    return parts.speech(whole=True)


class _Parts:
    """Thought and content of a turn in parts, between which there is a thought or a call.

    Each part but the first of the content begins without white space, and each but the last of it
    ends without; they stand on lines of their own.
    """

    def __init__(self, opening: str, separator: str) -> None:
        self.calls: list[ParsedCall] = []
        self._separator = separator.strip()
        self._told = {"thought": "", "content": ""}
        self._held = {"thought": "", "content": ""}
        """White space with which a part ends so far."""
        self._is_new = {"thought": True, "content": bool(opening)}
        self.add("thought", opening.removeprefix(THINK_OPEN))

    def add(self, kind: Literal["thought", "content"], text: str) -> None:
        """Append to a part."""
        if not text:
            return
        text = self._held[kind] + text
        if self._is_new[kind]:
            text = text.lstrip()
            while self._separator and text.startswith(self._separator):
                text = text.removeprefix(self._separator).lstrip()
        shown = text.rstrip()
        self._held[kind] = text[len(shown) :]
        if shown:
            between = "\n" if self._is_new[kind] and self._told[kind] else ""
            self._told[kind] += between + shown
            self._is_new[kind] = False

    def end(self, kind: Literal["thought", "content"]) -> None:
        """End a part."""
        self._held[kind] = ""
        self._is_new[kind] = True

    def speech(self, *, whole: bool = False) -> Speech:
        """Return what is told so far, or the whole turn, whose last white space is its own."""
        rest = self._held["content"] if whole else ""
        return Speech(self._told["thought"], self._told["content"] + rest, tuple(self.calls))
