"""Reading of a turn: the model's thought, its answer and its tool calls.

The only place where a model's text is parsed. Rollout reads every turn once and records what it
says (`Turn`); reward and evaluation go by that, and read here only turns that nobody has read:
those of older versions, of `POST /score`, and with another `env.answer_pattern`. Text is only ever
read, never re-encoded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Literal

from agent_r1.text.tool_formats import (
    HERMES,
    CallBlock,
    ParsedCall,
    ToolFormat,
    load_tool_format,
)
from agent_r1_proto.rewards import ScoreRequest, ScoreTurn

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
ANSWER_OPEN = "<answer>"
ANSWER_CLOSE = "</answer>"
MARKUP = (THINK_OPEN, THINK_CLOSE, ANSWER_OPEN, ANSWER_CLOSE)

# One that is never closed ends with the text: a search that failed would begin anew behind it.
_STRING = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)', re.DOTALL)
# What tokenizers write at the end of a turn: <|im_end|>, <|eot_id|>, </s>. Backwards, since a
# search from the front would begin anew at each of many.
_ENDS_OF_TURN_REVERSED = re.compile(r"\s*(?:(?:>\|[^<>|\s]+\|<|>s/<)\s*)*")


@dataclass(frozen=True)
class TurnText:
    """One turn of the model, read."""

    text: str
    """The whole turn, without its end-of-turn token."""
    thought: str | None
    """Text of the closed thought that the turn begins with; None without one."""
    said: str
    """The turn without its thoughts."""
    answer: str | None
    """Inside the last `<answer>` block, or what the answer pattern finds; None without one. What
    stands in a thought or a call is none."""
    calls: tuple[ParsedCall, ...]
    """Tool calls, in order; those inside a thought or an answer do not count."""
    well_formed: bool
    """The turn is one closed thought, then calls or one answer, and nothing else."""


@dataclass(frozen=True)
class Block:
    """A stretch of a turn that is no plain text."""

    kind: Literal["thought", "answer", "calls"]
    start: int
    end: int
    content: str = ""
    calls: Sequence[ParsedCall] = ()
    closed: bool = True


class _Search:
    """Positions of closing tags and calls in a turn; text is read once, however many blocks ask."""

    def __init__(self, text: str, tool_format: ToolFormat) -> None:
        self.text = text
        self._format = tool_format
        self._never = len(text) + 1
        self._calls: tuple[int, CallBlock | None] = (self._never, None)
        self._closings: dict[str, tuple[int, int]] = {}

    def calls(self, start: int) -> CallBlock | None:
        """Return the first block of calls at or after `start`."""
        since, found = self._calls
        if not (since <= start and (found is None or start <= found.start)):
            self._calls = start, find_calls(self._format, self.text, start)
        return self._calls[1]

    def closing(self, tag: str, start: int) -> int:
        """Return where a closing tag begins that no string of a readable call quotes, or -1."""
        since, closing = self._closings.get(tag, (self._never, -1))
        if not (since <= start and (closing < 0 or start <= closing)):
            self._closings[tag] = start, self._find_closing(tag, start)
        return self._closings[tag][1]

    def _find_closing(self, tag: str, start: int) -> int:
        closing = self.text.find(tag, start)
        # Calls are looked for in the rest of the text only where one begins before the tag.
        if closing < 0 or self._format.find(self.text[start:closing], 0) is None:
            return closing
        while start < closing and (found := self.calls(start)) and found.start < closing:
            read = [call.end for call in found.calls if not call.error]
            if read and self._quotes(found.start, read[-1], closing):
                closing = self.text.find(tag, read[-1])
            start = max(found.start + 1, read[-1] if read else found.end)
        return closing

    def _quotes(self, start: int, end: int, position: int) -> bool:
        """Return whether a string between `start` and `end` holds what stands at a position."""
        strings = _STRING.finditer(self.text, start, end) if position < end else ()
        return any(string.start() < position < string.end() for string in strings)


@dataclass(frozen=True)
class TurnReader:
    """Reads the turns of one run.

    Args:
        tool_format: how the model writes calls.
        answer_pattern: `env.answer_pattern`; None: the answer is the last `<answer>` block.
        opens_in_thought: the generation prompt ends with `<think>`, so every turn begins inside.
    """

    tool_format: ToolFormat = HERMES
    answer_pattern: str | None = None
    opens_in_thought: bool = False

    @classmethod
    def of(cls, tool_format: str, answer_pattern: str | None) -> TurnReader:
        """Return the reader of a configuration: `env.tool_format` and `env.answer_pattern`.

        Raises:
            ValueError: there is no such format.
        """
        return cls(load_tool_format(tool_format), answer_pattern)

    def read(self, text: str) -> TurnText:
        """Read one turn.

        Whichever of thought, answer and call begins first hides what begins inside it. A tag that
        an argument of a call quotes closes nothing. A thought that is never closed ends with the
        first call in it, or with the turn.

        Args:
            text: the decoded turn, without its end-of-turn token.
        """
        blocks = list(self.blocks(text))
        thoughts = [block for block in blocks if block.kind == "thought"]
        return TurnText(
            text=text,
            thought=_opening_thought(text, blocks),
            said=_without(text, thoughts),
            answer=self._answer(text, blocks),
            calls=tuple(call for block in blocks for call in block.calls),
            well_formed=self._is_well_formed(text, blocks),
        )

    def read_request(self, request: ScoreRequest, *, anew: bool = False) -> ScoreRequest:
        """Return an interaction whose turns say what they are.

        Args:
            request: of a client, which may leave that to the service, or stored by any version.
            anew: also turns that somebody has read, perhaps with another pattern.
        """
        unread = [anew or turn.well_formed is None for turn in request.turns]
        if not any(unread):
            return request
        likely = _opens_in_thought(request.turns)
        turns = [
            replace(self, opens_in_thought=self._opened(turn, likely)).read_turn(turn)
            if is_unread
            else turn
            for turn, is_unread in zip(request.turns, unread, strict=True)
        ]
        return request.model_copy(update={"turns": turns})

    def _opened(self, turn: ScoreTurn, likely: bool) -> bool:
        """Say whether a turn began inside a thought, as the reading says that was recorded of it.

        Templates may begin thoughts after some messages only, and a turn may begin one once more.
        """
        if turn.well_formed is None:
            return likely
        recorded = {name: getattr(turn, name) for name in ("thought", "said", "well_formed")}
        for opens in (False, True):
            found = fields_of(replace(self, opens_in_thought=opens).read(turn.text))
            if recorded.items() <= found.items():
                return opens
        return likely

    def read_turn(self, turn: ScoreTurn) -> ScoreTurn:
        """Return a turn that says what it is."""
        read = self.read(turn.text)
        counted = "num_calls" in turn.model_fields_set
        calls = {} if counted else {"num_calls": len(read.calls)}
        return turn.model_copy(update=fields_of(read) | calls)

    def blocks(self, text: str) -> Iterator[Block]:
        """Yield the thoughts, answers and calls of a turn, in order."""
        search = _Search(text, self.tool_format)
        position = 0
        if self.opens_in_thought:
            thought = self._thought(search, 0, 0)
            yield thought
            position = thought.end
        # Of blocks that begin at one place, the first of these counts.
        finders = (self._find_answer, self._find_calls, self._find_thought)
        found = [find(search, position) for find in finders]
        while begun := [block for block in found if block is not None]:
            first = min(begun, key=lambda block: block.start)
            if first.kind == "thought":
                first = self._thought(search, first.start, first.end)
            yield first
            # Each is looked for again only where it was passed: text is read once, however long.
            found = [
                find(search, first.end) if block is not None and block.start < first.end else block
                for find, block in zip(finders, found, strict=True)
            ]

    def _find_calls(self, search: _Search, position: int) -> Block | None:
        found = find_calls(self.tool_format, search.text, position)
        if found is None:
            return None
        return Block("calls", found.start, found.end, calls=found.calls)

    @staticmethod
    def _find_thought(search: _Search, position: int) -> Block | None:
        """Return the opening tag of the next thought, which is read only if it counts."""
        opened = search.text.find(THINK_OPEN, position)
        return None if opened < 0 else Block("thought", opened, opened + len(THINK_OPEN))

    @staticmethod
    def _find_answer(search: _Search, position: int) -> Block | None:
        """Return the next answer; of nested ones the innermost."""
        text = search.text
        opened = text.find(ANSWER_OPEN, position)
        if opened < 0:
            return None
        closed = search.closing(ANSWER_CLOSE, opened + len(ANSWER_OPEN))
        if closed < 0:
            return None
        start = text.rindex(ANSWER_OPEN, opened, closed)
        content = text[start + len(ANSWER_OPEN) : closed]
        return Block("answer", start, closed + len(ANSWER_CLOSE), content)

    @staticmethod
    def _thought(search: _Search, start: int, content: int) -> Block:
        text = search.text
        closed = search.closing(THINK_CLOSE, content)
        if closed >= 0:
            return Block("thought", start, closed + len(THINK_CLOSE), text[content:closed])
        call = search.calls(content)
        end = len(text) if call is None else call.start
        return Block("thought", start, end, text[content:end], closed=False)

    def _answer(self, text: str, blocks: Sequence[Block]) -> str | None:
        if self.answer_pattern is None:
            answers = [block.content for block in blocks if block.kind == "answer"]
            return answers[-1].strip() if answers else None
        hidden = [block for block in blocks if block.kind != "answer"]
        found = list(re.finditer(self.answer_pattern, _without(text, hidden), re.DOTALL))
        if not found:
            return None
        # A pattern with a group means what the group matches.
        return (found[-1][found[-1].re.groups] or "").strip()

    def _is_well_formed(self, text: str, blocks: Sequence[Block]) -> bool:
        kinds = [block.kind for block in blocks]
        forms = (["thought", "answer"], ["thought", *["calls"] * (len(kinds) - 1)])
        if len(kinds) < 2 or kinds not in forms:
            return False
        if not all(self._is_whole(text, block) for block in blocks):
            return False
        between = _without_end_of_turn(_without(text, blocks))
        return not between.replace(self.tool_format.separator, " ").strip()

    def _is_whole(self, text: str, block: Block) -> bool:
        """Return whether a block ends as it should and holds no tag that begins or ends another."""
        if block.kind != "calls":
            tags = (*MARKUP, *self.tool_format.markup)
            return block.closed and not any(tag in block.content for tag in tags)
        # A call that can be read may have any text in its strings. One that cannot has the right
        # form where its tags are right.
        if not any(call.error for call in block.calls):
            return True
        written = text[block.start : block.end]
        last = self.tool_format.closing_tag
        single = all(written.count(tag) <= 1 for tag in self.tool_format.markup)
        bare = not any(tag in written for tag in MARKUP)
        return bool(last) and written.endswith(last) and single and bare


def parse_turn(
    text: str, *, tool_format: ToolFormat = HERMES, opens_in_thought: bool = False
) -> TurnText:
    """Read one turn; see `TurnReader.read`."""
    return TurnReader(tool_format, opens_in_thought=opens_in_thought).read(text)


def fields_of(turn: TurnText) -> dict[str, Any]:
    """Return what a `Turn` or a `ScoreTurn` says of itself."""
    return {
        "thought": turn.thought,
        "said": None if turn.said == turn.text else turn.said,
        "answer": turn.answer,
        "well_formed": turn.well_formed,
    }


def of_read_turns(component: Callable[[ScoreRequest], float]) -> Callable[[ScoreRequest], float]:
    """Return a component that may be asked of turns that nobody has read: it reads them first."""

    @wraps(component)
    def measure(request: ScoreRequest) -> float:
        return component(TurnReader().read_request(request))

    return measure


def most_frequent(answers: Iterable[str | None], weights: Iterable[float] | None = None) -> int:
    """Return the index of the first answer that most say, 0 where all are empty or None.

    Args:
        answers: in their order.
        weights: what the vote of each counts, above 0; None counts all alike.

    Source: self-consistency, arXiv:2203.11171.
    """
    said = [" ".join((answer or "").casefold().split()) for answer in answers]
    votes: dict[str, float] = {}
    for answer, weight in zip(said, weights or [1.0] * len(said), strict=True):
        if answer:
            votes[answer] = votes.get(answer, 0.0) + weight
    return said.index(max(votes, key=votes.__getitem__)) if votes else 0


def find_calls(tool_format: ToolFormat, text: str, start: int) -> CallBlock | None:
    """Return the first block of calls at or after `start`, and check what a user's class returned.

    Raises:
        ValueError: it is no block of that text.
    """
    found = tool_format.find(text, start)
    if found is not None and not (start <= found.start < found.end <= len(text) and found.calls):
        raise ValueError(
            f"{type(tool_format).__name__}.find(text, {start}) returned {found}; a block of calls "
            f"lies between {start} and {len(text)}, is not empty and has at least one call"
        )
    return found


def _opening_thought(text: str, blocks: Sequence[Block]) -> str | None:
    first = blocks[0] if blocks else None
    if first is None or first.kind != "thought" or not first.closed:
        return None
    inside = THINK_OPEN in first.content or text[: first.start].strip()
    return None if inside else first.content.strip()


def _opens_in_thought(turns: Sequence[ScoreTurn]) -> bool:
    """Return whether turns begin inside a thought: one that was read says so; of others, some close
    a thought that they did not open, and none opens one at its beginning."""
    read = [turn for turn in turns if turn.well_formed is not None]
    begins = any(turn.text.lstrip().startswith(THINK_OPEN) for turn in turns)
    return any(map(_closes_only, read)) or (not begins and any(map(_closes_only, turns)))


def _closes_only(turn: ScoreTurn) -> bool:
    closed = turn.text.find(THINK_CLOSE)
    if THINK_OPEN in (turn.text if closed < 0 else turn.text[:closed]):
        return False
    return closed >= 0 if turn.well_formed is None else turn.said is not None


def _without(text: str, blocks: Iterable[Block]) -> str:
    """Return a text without some blocks; what was around one makes no new tag."""
    pieces: list[str] = []
    last = 0
    for block in blocks:
        pieces.append(text[last : block.start])
        last = block.end
    return " ".join([*pieces, text[last:]]) if pieces else text


def _without_end_of_turn(text: str) -> str:
    ends = _ENDS_OF_TURN_REVERSED.match(text[::-1])
    return text[: len(text) - (ends.end() if ends else 0)]
