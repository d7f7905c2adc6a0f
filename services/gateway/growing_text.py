"""Text of a turn as its tokens come: what may be shown of it, and where a stop text ends it.

session.py adds tokens; what it gets back goes to a wire. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_r1.text.chat_format import ChatFormat


class GrowingText:
    """Text of a turn as its tokens come: never half a character, and nothing of a stop text."""

    def __init__(self, chat: ChatFormat, stop: Sequence[str]) -> None:
        self._chat = chat
        self._stop = [text for text in stop if text]
        self._held = max((len(text) for text in self._stop), default=1) - 1
        """Characters that may be the beginning of a stop text."""
        self._ids: list[int] = []
        self._from = self._decoded = 0
        """Where what is decoded together begins, and up to where it has been."""
        self._text = ""
        self._told = 0
        self.cut: int | None = None
        """Characters before the stop text; None where none has come."""

    @property
    def is_stopped(self) -> bool:
        """Return whether a stop text has come."""
        return self.cut is not None

    @property
    def stopped_by(self) -> str:
        """Return the stop text that has come; "" where none has."""
        if self.cut is None:
            return ""
        return next((stop for stop in self._stop if self._text.startswith(stop, self.cut)), "")

    def add(self, token_ids: Sequence[int]) -> str:
        """Append tokens, and return the text that may be shown."""
        self._ids += token_ids
        ids = self._ids[: -1 if self._chat.is_ended(self._ids) else None]
        before = self._chat.decode(ids[self._from : self._decoded])
        whole = self._chat.decode(ids[self._from :])
        if not whole.endswith("\ufffd") and len(whole) >= len(before):
            searched = max(0, len(self._text) - self._held)
            self._text += whole[len(before) :]
            self._from, self._decoded = self._decoded, len(ids)
            found = [at for stop in self._stop if (at := self._text.find(stop, searched)) >= 0]
            if found and self.cut is None:
                self.cut = min(found)
        return self._tell(len(self._text) - self._held)

    def finish(self) -> str:
        """Return the rest of the text."""
        ids = self._ids[: -1 if self._chat.is_ended(self._ids) else None]
        self._text = self._chat.decode(ids) if self.cut is None else self._text
        return self._tell(len(self._text))

    def _tell(self, end: int) -> str:
        end = max(self._told, end if self.cut is None else self.cut)
        told, self._told = self._text[self._told : end], end
        return told
