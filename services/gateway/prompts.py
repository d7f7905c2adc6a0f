"""What the policy reads before a turn: a request, once it has its place in the forest, as tokens.

session.py --request, place--> here --`Prompt`--> a turn. What the policy has said in a history
stays its own tokens; where a request goes on with a turn, only what is new is encoded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agent_r1.gateway.forest import Place, TurnNode
from agent_r1.gateway.wire import Asked, WireError
from agent_r1.text.chat_format import ChatFormat, OutsideMessage, PromptMessage
from agent_r1.text.chat_template import ChatTemplateError
from agent_r1.text.reading import TurnReader
from agent_r1.text.tool_formats import ParsedCall
from agent_r1_proto.parts import ImageRefusedError
from agent_r1_proto.tasks import ChatMessage

LOOKED_AT = 16
"""Of a history, so many characters for each token of the context are encoded before all of it."""
_NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class Prompt:
    """What stands before one turn."""

    begins: bool
    """It is a sequence of its own; otherwise it stands behind the last token of the parent."""
    token_ids: list[int]
    opening: str
    """The thought that the template begins behind it; "" where it begins none."""
    length: int
    """Tokens before the turn, to the beginning of its sequence."""


@dataclass(frozen=True)
class PromptWriter:
    """Writes the prompts of a session."""

    chat: ChatFormat
    """The model's template."""
    max_context: int
    """Tokens that the policy reads and samples together, at most."""
    keeps_thoughts: bool
    """Thoughts of earlier turns stay, whatever the client keeps."""
    answer_pattern: str | None
    """Of answers in turns."""
    call_id: Callable[[int, int], str]
    """Id of a call of a turn."""

    def write(self, asked: Asked, place: Place) -> Prompt:
        """Return what the policy reads for a request.

        Raises:
            WireError: the request is too long, or the template cannot show it.
        """
        self._check_size(asked)
        new = asked.messages[place.first_new :]
        parent = place.parent
        try:
            if place.is_continued and parent is not None and self._can_append(parent, new):
                reply = self._outside(new, parent)
                is_ended = self.chat.is_ended(parent.token_ids)
                if not self.chat.rewrites(reply):
                    tokens = self.chat.encode_reply(reply, is_ended=is_ended)
                    before = len(parent.context()) + len(parent.token_ids)
                    opening = self.chat.opening_after(reply)
                    return Prompt(False, tokens, opening, before + len(tokens))
            rendered = self.chat.render_prompt(self._dialogue(asked, place), asked.tools)
        except (ChatTemplateError, ImageRefusedError) as exc:
            raise WireError("invalid_request", str(exc), param="messages") from exc
        return Prompt(True, rendered.token_ids, rendered.opening, len(rendered.token_ids))

    def _can_append(self, parent: TurnNode, new: Sequence[ChatMessage]) -> bool:
        """Return whether messages may stand behind a turn's tokens, and nothing before changes."""
        if not new or any(message.role not in ("tool", "user") for message in new):
            return False
        return self.keeps_thoughts or not _has_thought(parent)

    def _check_size(self, asked: Asked) -> None:
        """Refuse what is far too long by its beginning.

        To encode megabytes takes seconds, in which no other session is served.
        """
        limit = self.max_context
        texts = [message.shown() for message in asked.messages]
        texts += [json.dumps(tool.as_function(), ensure_ascii=False) for tool in asked.tools]
        if sum(map(len, texts)) > LOOKED_AT * limit:
            tokens = self.chat.encode_text("\n".join(texts)[: LOOKED_AT * limit])
            self.check_room(len(tokens) // 2)  # a cut, or a border, may make a token of two

    def check_room(self, length: int) -> None:
        """Refuse what leaves no room for a token.

        Raises:
            WireError: it does, by which agents know that they are to shorten their history.
        """
        limit = self.max_context
        if length >= limit:
            raise WireError(
                "context_full",
                # The first words are OpenAI's: some agents look for them, and for no code.
                f"This model's maximum context length is {limit} tokens (model.max_context) with "
                f"what is sampled, and the messages have {length} or more; shorten the history",
                param="messages",
                tokens=(length, limit),
            )

    def _outside(
        self, messages: Sequence[ChatMessage], turn: TurnNode | None
    ) -> list[OutsideMessage]:
        """Return what follows a turn: its results in the order of its calls, then the others."""
        calls = [] if turn is None else self._told_calls(turn)
        number = (
            {} if turn is None else {self.call_id(turn.number, i): i for i in range(len(calls))}
        )
        ordered = (
            sorted(
                messages,
                key=lambda m: (
                    number.get(m.tool_call_id, len(number)) if m.role == "tool" else _NO_LIMIT
                ),
            )
            if all(m.role == "tool" for m in messages)
            else messages
        )
        reply: list[OutsideMessage] = []
        for message in ordered:
            one = self.chat.outside_message(
                message.role, message.text(), max_chars=_NO_LIMIT, max_tokens=None
            )
            call = number.get(message.tool_call_id)
            written = message.tool_call_id if call is None else calls[call].id
            reply.append(replace(one, call_id=written, call=call))
        return reply

    def _dialogue(self, asked: Asked, place: Place) -> list[PromptMessage]:
        """Return a history to render: what the policy said in it stays its own tokens."""
        messages: list[PromptMessage] = []
        turn: TurnNode | None = None
        is_later = False
        for i, message in enumerate(asked.messages):
            if message.role == "assistant":
                is_later, turn = True, place.own.get(i)
                keeps = self.keeps_thoughts or not _has_thought(turn)
                messages.append(self._said_tokens(turn) if turn and keeps else message)
            elif is_later and message.role != "system":
                messages += self._outside([message], turn)
            else:
                messages.append(message)
        return messages

    def _said_tokens(self, turn: TurnNode) -> OutsideMessage:
        """Return what a turn said, as its tokens; the template writes its own end of turn."""
        ids = turn.token_ids[: -1 if self.chat.is_ended(turn.token_ids) else None]
        ids = [*self.chat.encode(turn.opening), *ids]
        return OutsideMessage("assistant", self.chat.decode(ids), ids)

    def _told_calls(self, node: TurnNode) -> list[ParsedCall]:
        """Return the calls of a turn that the client was told, in order."""
        text = self.chat.decode_turn(node.token_ids)[: node.shown]
        return [call for call in self.reader(node).read(text).calls if not call.error]

    @property
    def turn_reader(self) -> TurnReader:
        """Reader of turns; `reader` knows whether one began in a thought."""
        return replace(self.chat.reader, answer_pattern=self.answer_pattern)

    def reader(self, node: TurnNode) -> TurnReader:
        """Return what reads a turn."""
        return replace(self.turn_reader, opens_in_thought=bool(node.opening))


def _has_thought(turn: TurnNode | None) -> bool:
    """Return whether a turn, or one before it in its sequence, has a thought."""
    while turn is not None:
        if turn.read is not None and turn.read.said != turn.read.text:
            return True
        turn = None if turn.begins else turn.parent
    return False
