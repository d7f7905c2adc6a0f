"""An answer in blocks, as Responses and Messages write one: thought, text and calls in turn.

A block is open until another one begins; a call is written at once. The same blocks make the stream
and the whole answer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import BaseModel

from agent_r1.gateway.speech import Speaker, Speech
from agent_r1.gateway.wire import Asked, Begun, Ended, Said, Session
from agent_r1.gateway.wires.http import Answer, event
from agent_r1.text.tool_formats import ParsedCall

Fields = dict[str, Any]


def models_by_type(*models: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Return models by what their field `type` always is."""
    return {get_args(model.model_fields["type"].annotation)[0]: model for model in models}


@dataclass
class Block:
    """A part of an answer."""

    kind: Literal["thought", "content", "call"]
    index: int
    """Among all blocks."""
    text: str = ""
    call: ParsedCall | None = None
    number: int = 0
    """Of a call, among the calls."""
    is_open: bool = True


class BlockAnswer(Answer):
    """An answer in blocks; the events of a stream are models of the wire's own package."""

    types: Mapping[str, type[BaseModel]]
    """Models of the events, by their type."""
    tells_thoughts = True

    def __init__(self, session: Session, asked: Asked) -> None:
        super().__init__(session, asked)
        self.blocks: list[Block] = []
        self.begun = Begun(0, -1, "")
        self.ended: Ended | None = None
        self._speaker: Speaker | None = None

    @abstractmethod
    def start(self) -> Iterator[Fields]:
        """Yield the events that begin a stream."""

    @abstractmethod
    def opened(self, block: Block) -> Iterator[Fields]:
        """Yield the events that begin a block."""

    @abstractmethod
    def grown(self, block: Block, text: str) -> Iterator[Fields]:
        """Yield the events that tell more text of a block."""

    @abstractmethod
    def closed(self, block: Block) -> Iterator[Fields]:
        """Yield the events that end a block, which for a call are those that tell it."""

    @abstractmethod
    def end(self) -> Iterator[Fields]:
        """Yield the events that end a stream."""

    @abstractmethod
    def whole(self) -> BaseModel:
        """Return the whole answer."""

    def take(self, event: Begun | Said | Ended) -> bytes:
        """Return the events that tell what has happened."""
        if isinstance(event, Begun):
            self.begun = event
            self._speaker = Speaker(event.opening, self.session.turn_reader)
            return self._write(self.start())
        assert self._speaker is not None
        if isinstance(event, Said):
            return self._write(self._tell(self._speaker.feed(event.text)))
        told = self._write(self._tell(self._speaker.finish()))
        self.ended = event
        return told + self._write(self._last())

    def finish(self) -> bytes:
        """Return the end of a stream, or the whole answer."""
        if self.asked.is_streamed:
            return self._write(self.end())
        return self.whole().model_dump_json(exclude_unset=True).encode()

    def encode(self, fields: Fields) -> bytes:
        """Return an event of a stream."""
        model = self.types[fields["type"]].model_validate(fields)
        return event(model.model_dump_json(exclude_unset=True), fields["type"])

    def _write(self, events: Iterator[Fields]) -> bytes:
        is_streamed = self.asked.is_streamed
        return b"".join([self.encode(fields) if is_streamed else b"" for fields in events])

    def _tell(self, speech: Speech) -> Iterator[Fields]:
        if self.tells_thoughts:
            yield from self._grow("thought", speech.thought)
        yield from self._grow("content", speech.content)
        for call in speech.calls:
            number = sum(block.kind == "call" for block in self.blocks)
            yield from self._open(Block("call", len(self.blocks), call=call, number=number))
            yield from self._close()

    def _grow(self, kind: Literal["thought", "content"], text: str) -> Iterator[Fields]:
        if not text:
            return
        if not self.blocks or not self.blocks[-1].is_open or self.blocks[-1].kind != kind:
            yield from self._open(Block(kind, len(self.blocks)))
        self.blocks[-1].text += text
        yield from self.grown(self.blocks[-1], text)

    def _open(self, block: Block) -> Iterator[Fields]:
        yield from self._close()
        self.blocks.append(block)
        yield from self.opened(block)

    def _last(self) -> Iterator[Fields]:
        """End the last block; a turn that says nothing says an empty text."""
        if not self.blocks:
            yield from self._open(Block("content", 0))
        yield from self._close()

    def _close(self) -> Iterator[Fields]:
        if self.blocks and self.blocks[-1].is_open:
            self.blocks[-1].is_open = False
            yield from self.closed(self.blocks[-1])
