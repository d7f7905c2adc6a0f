"""Scripted agents: the one that makes no mistake, and some that look no further than one turn.

They read what the tools answer, as the model does, and the plan in the task's payload, which the
model never sees. `agent-r1 diagnose` plays them through the environment and the reward;
demonstrations are runs of the oracle with mistakes.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from residents import TOPICS

from agent_r1_proto.tasks import Task

NOTHING = " no entry"
_REFERENCE = re.compile(r" see (?P<page>\S+)$")
_CLAIM = re.compile(r" says (?P<town>\S+)$")


def call_text(tool: str, **arguments: str) -> str:
    """One tool call in compact Hermes JSON; the tokenizer's markers hold its scaffolding."""
    call = json.dumps({"name": tool, "arguments": arguments}, separators=(",", ":"))
    return f"<tool_call>{call}</tool_call>"


class Oracle:
    """Asks the right book, and opens the pages to which it refers."""

    def __init__(self, task: Task) -> None:
        plan: Any = task.payload["plan"]
        self.name: str = plan["name"]
        self.topic: str = plan["topic"]
        self.wording: int = plan["wording"]

    # What an agent that looks no further does otherwise

    def begin(self) -> str:
        """The first turn."""
        return self.ask_register(TOPICS[self.topic])

    def follow(self, page: str) -> str:
        """The turn after a reference to a page."""
        return call_text("page", id=f" {page}")

    def conclude(self, town: str) -> str:
        """The turn after a source has named a town."""
        return f"<answer> {town}</answer>"

    # The run

    def turn(self, observations: Sequence[str]) -> str:
        """Return the text of the next turn.

        Args:
            observations: what the tool answered to the last one; [] before the first.
        """
        if not observations:
            return self.begin()
        if found := _REFERENCE.search(observations[0]):
            return self.follow(found["page"])
        found = _CLAIM.search(observations[0])
        return self.conclude(found["town"] if found else "unknown")

    def ask_register(self, book: str) -> str:
        """Look the question up in a book."""
        return call_text("register", book=f" {book}", query=f" {self.name} {self.topic}")

    def ask_around(self) -> str:
        """Ask for a rumour."""
        return call_text("rumour", query=f" {self.name} {self.topic}")


class Believes(Oracle):
    """Believes a rumour: it names a town at once."""

    def begin(self) -> str:
        """Ask around."""
        return self.ask_around()


class Verifies(Oracle):
    """Asks around, and the right book after that: one call too many."""

    def begin(self) -> str:
        """Ask around."""
        self._verified = False
        return self.ask_around()

    def conclude(self, town: str) -> str:
        """Ask the book before the answer."""
        if self._verified:
            return super().conclude(town)
        self._verified = True
        return super().begin()


class OneBook(Oracle):
    """Asks the same book about everything.

    Args:
        task: the question.
        book: which one.
    """

    def __init__(self, task: Task, book: str) -> None:
        super().__init__(task)
        self._book = book

    def begin(self) -> str:
        """Ask the book."""
        return self.ask_register(self._book)


class OpensNoPage(Oracle):
    """Says that it does not know where a book refers to a page."""

    def follow(self, page: str) -> str:
        """Give up."""
        return self.conclude("unknown")
