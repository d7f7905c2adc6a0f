"""Demonstrations for the base model: runs of the oracle that mostly begin with a rumour.

How often a turn looks no further depends on the topic and on the wording. Where that is the more
frequent choice, the base model's greedy answer is wrong, and sampling finds the right one. There
are many such places, so no single change repairs the model.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any

from policies import Oracle
from residents import BOOKS, TOPICS

from agent_r1.text.reading import parse_turn
from agent_r1_proto.tasks import ChatMessage, Task

LookUp = Callable[[str, Mapping[str, Any]], str]
"""(tool, arguments) -> what the tool answers."""

RUMOUR_SHARES = (0.9, 0.75, 0.6, 0.45)
"""How often a run begins with a rumour: by topic and wording, each share equally often."""
RIGHT_BOOK_SHARES = (0.85, 0.3)
"""How often the right book is asked: about the first and the second topic of a book."""
PAGE_SHARES = (0.85, 0.3)
"""How often a reference is followed; else a rumour is asked for."""


class Hasty(Oracle):
    """The oracle with turns that look no further.

    Args:
        task: the question.
        rng: decides where the turns look no further.
    """

    def __init__(self, task: Task, rng: random.Random) -> None:
        super().__init__(task)
        self._number = list(TOPICS).index(self.topic)
        self._rng = rng

    def begin(self) -> str:
        """Mostly a rumour, and else not always the right book."""
        shares = RUMOUR_SHARES
        if self._rng.random() < shares[(self._number + self.wording) % len(shares)]:
            return self.ask_around()
        right = TOPICS[self.topic]
        if self._rng.random() < RIGHT_BOOK_SHARES[self._number % 2]:
            return self.ask_register(right)
        return self.ask_register(BOOKS[(BOOKS.index(right) + 1) % len(BOOKS)])

    def follow(self, page: str) -> str:
        """A page or, for half of the topics mostly, a rumour."""
        often = self._number in (0, 3, 5, 6)  # of every book, one topic
        if self._rng.random() < PAGE_SHARES[0 if often else 1]:
            return super().follow(page)
        return self.ask_around()


def demonstrate(task: Task, agent: Oracle, look_up: LookUp) -> list[ChatMessage]:
    """Return the chat messages of one run."""
    messages = task.messages()
    text = agent.turn([])
    while calls := parse_turn(text).calls:
        reply = look_up(calls[0].name, calls[0].arguments)
        messages.append(ChatMessage(role="assistant", content=text))
        messages.append(ChatMessage(role="tool", content=reply))
        text = agent.turn([reply])
    return [*messages, ChatMessage(role="assistant", content=text)]
