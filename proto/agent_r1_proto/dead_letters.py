"""Dead letters: entries that no service could process, each with its reason.

stream_consumer.py --entry, reason--> the stream `dead_letters` --> `agent-r1 dead-letters`. They
are bounded: the stream keeps the newest `MAX_LETTERS` and counts all, and of an entry over
`MAX_LETTER_BYTES` only the beginning is kept.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

MAX_LETTERS = 256
MAX_LETTER_BYTES = 65_536
"""An entry that takes more is cut; about what a trajectory of 3,000 tokens takes."""
CUT_FIELD_BYTES = 2_048
"""Bytes that are kept of each field of an entry that is cut."""
MAX_REASON_BYTES = 4_096

_FIELD = b"field:"
_REPLY_STREAM = re.compile(rb'"reply_stream":\s*"([^"\\]+)"')
"""Found as text, since what cannot be parsed has to be told apart too."""

Fields = Mapping[bytes, bytes]


@dataclass(frozen=True)
class DeadLetter:
    """An entry that could not be processed, and why."""

    letter_id: str
    stream: str
    entry_id: str
    reason: str
    failed_at: float
    """Unix time, seconds."""
    fields: Fields
    """The entry as it was, or the beginning of each field where it is cut."""
    size_bytes: int = 0
    """Size of the whole entry."""
    cut: bool = False
    """Whether only the beginning was kept: such an entry cannot be retried."""
    unreadable: bool = False
    """Whether it could not even be parsed, so that no result was published in its place."""

    reply_stream: str = ""
    """Stream on which a client waits for what becomes of it; "" is the learner's."""

    @property
    def key(self) -> str:
        """Key of the entry; "" where it has none."""
        return self.fields.get(b"key", b"").decode(errors="replace")

    @property
    def failure(self) -> str:
        """Reason why the sample of an unreadable entry has failed."""
        return f"unreadable_entry: {self.stream.rpartition(':')[2]}: {self.reason}"


def encode_letter(
    stream: str, entry_id: str, reason: str, entry: Fields, *, unreadable: bool
) -> dict[bytes, bytes]:
    """Return the fields of the stream entry that keeps a dead letter."""
    size = sum(len(name) + len(value) for name, value in entry.items())
    cut = size > MAX_LETTER_BYTES
    reply_stream = _REPLY_STREAM.search(entry.get(b"meta", b""))
    return {
        b"stream": stream.encode(),
        b"entry_id": entry_id.encode(),
        b"reason": reason.encode()[:MAX_REASON_BYTES],
        b"failed_at": repr(time.time()).encode(),
        b"size": str(size).encode(),
        b"cut": str(int(cut)).encode(),
        b"unreadable": str(int(unreadable)).encode(),
        b"reply_stream": reply_stream[1] if reply_stream else b"",
        **{
            _FIELD + name: value[:CUT_FIELD_BYTES] if cut else value
            for name, value in entry.items()
        },
    }


def decode_letter(letter_id: bytes, fields: Fields) -> DeadLetter:
    """Read a dead letter from its stream entry."""
    kept = {name[len(_FIELD) :]: value for name, value in fields.items() if name.startswith(_FIELD)}
    return DeadLetter(
        letter_id=letter_id.decode(),
        stream=fields[b"stream"].decode(),
        entry_id=fields[b"entry_id"].decode(),
        reason=fields[b"reason"].decode(errors="replace"),
        failed_at=float(fields[b"failed_at"]),
        fields=kept,
        size_bytes=int(fields.get(b"size", b"0")),
        cut=fields.get(b"cut") == b"1",
        unreadable=fields.get(b"unreadable") == b"1",
        reply_stream=fields.get(b"reply_stream", b"").decode(errors="replace"),
    )
