"""Scripted agents: the one that makes no mistake, and some that lack one ability each.

They read what the tools answer, as the model does, and the plan in the task's payload, which the
model never sees. `agent-r1 diagnose` plays them through the environment and the reward; the oracle
also counts the calls that a question needs, and demonstrations are its runs with mistakes.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agent_r1_proto.tasks import Task

UNAVAILABLE = " unavailable, try again"
NOTHING = " no entry"
UNKNOWN = "unknown"
SEE = "see"

_LINE = re.compile(r" (?P<position>\d+) (?P<id>\S+) (?P<heading>\S+) (?P<name>.+)")
_YEAR = re.compile(r" born (?P<value>\d+): (?P<name>.+) (?P<number>\S+)\.")
_ALIAS = re.compile(rf" {SEE} (?P<name>.+): (?P<value>.+)\.")
_FACT = re.compile(r" \S+ of (?P<name>.+) (?P<number>\S+): (?P<value>.+)\.")


@dataclass(frozen=True)
class Line:
    """One line of a search result."""

    position: str
    id: str
    heading: str
    name: str


def call_text(tool: str, **arguments: str) -> str:
    """One tool call in compact Hermes JSON; the tokenizer's markers hold its scaffolding."""
    call = json.dumps({"name": tool, "arguments": arguments}, separators=(",", ":"))
    return f"<tool_call>{call}</tool_call>"


def think(note: str) -> str:
    """A thought."""
    return f"<think> {note}</think>"


def answer_text(note: str, answer: str) -> str:
    """The last turn."""
    return f"{think(note)}<answer> {answer}</answer>"


class Oracle:
    """Searches, reads the listed entries in order, retries, and abstains when none fits."""

    def __init__(self, task: Task) -> None:
        plan: Any = task.payload["plan"]
        self.starts: list[str] = plan["starts"]
        self.relations: list[str] = plan["relations"]
        """What is asked of each hop in turn: relations of a chain, or the years to compare."""
        self.order: str = plan["order"]
        """`earlier` or `later` for a comparison, else empty."""
        self.values: list[str] = []
        self.facts: list[str] = []
        """Ids of the entries that led to the values."""
        self._last = ""
        """The text of the last call, for a retry."""
        self._tool = ""
        self._candidates: list[Line] = []
        self._reading: Line | None = None
        self._sees = False
        self._checked = False
        self._person = self.starts[0]

    # What an agent that lacks an ability does otherwise

    def gives_up(self, tool: str) -> bool:
        """Whether to abstain when a tool is unavailable."""
        return False

    def overlooks_alias(self) -> bool:
        """Whether to read another entry than the one that names the alias."""
        return False

    def accepts(self, number: str, wanted: str) -> bool:
        """Whether an entry is about the wanted one of the namesakes."""
        return number == wanted

    def stops_early(self) -> bool:
        """Whether to answer before the plan is done."""
        return False

    def reads_again(self) -> bool:
        """Whether to spend a call on an entry that has been read."""
        return False

    def guesses(self) -> bool:
        """Whether to answer with what was read last where no entry fits."""
        return False

    # The run

    @property
    def hop(self) -> int:
        """Number of the fact that is looked for, from 0."""
        return len(self.values)

    @property
    def relation(self) -> str:
        """What is asked about the person at hand."""
        return self.relations[self.hop]

    @property
    def _rest(self) -> str:
        """What is still to be looked for; each thought copies it from the one before."""
        return " ".join(self.relations[self.hop :])

    def turn(self, observations: Sequence[str]) -> str:
        """Return the text of the next turn.

        Args:
            observations: what the tools answered to the last one; [] before the first.
        """
        if not observations:
            return f"{think(self._rest)}{self.search()}"
        if observations[0] == UNAVAILABLE:
            return self._next("none") if self.gives_up(self._tool) else self._last
        if self._tool == "search":
            return self._choose(observations[0])
        return self._judge(observations[0])

    def _call(self, tool: str, **arguments: str) -> str:
        self._tool, self._last = tool, call_text(tool, **arguments)
        return self._last

    def search(self) -> str:
        """Search for what is asked about the person at hand."""
        self._candidates = []
        return self._call("search", query=f" {self._person} {self.relation}")

    def read(self, line: Line) -> str:
        """Read a listed entry."""
        self._reading, self._sees = line, line.heading == SEE
        return self._call("read", id=f" {line.id}")

    def _abstain(self, note: str) -> str:
        return answer_text(note, UNKNOWN)

    def _choose(self, listing: str) -> str:
        """Read the first listed entry that may state the fact."""
        found = map(_LINE.fullmatch, listing.split("\n"))
        lines = [Line(**line.groupdict()) for line in found if line]
        name = self._person.rpartition(" ")[0]
        own = [line for line in lines if line.name == name]
        aliases = [line for line in own if line.heading == SEE]
        if aliases and self.overlooks_alias():
            aliases = [line for line in lines if line.heading != SEE]
        self._candidates = [line for line in own if line.heading == self.relation] or aliases[:1]
        return self._next("none")

    def _next(self, note: str) -> str:
        """Read the next candidate, or say that there is none."""
        if self._candidates:
            return self.read(self._candidates.pop(0))
        return self._abstain(note)

    def _judge(self, entry: str) -> str:
        """Decide whether an entry is the one, and what to do then."""
        if self._sees and (found := _ALIAS.fullmatch(entry)):
            number = self._person.rpartition(" ")[2]
            self._person = f"{found['value']} {number}"
            return self.search()
        found = _YEAR.fullmatch(entry) or _FACT.fullmatch(entry)
        if not found:
            return self._abstain("none")
        wanted = self._person.rpartition(" ")[2]
        seen = f"{found['number']} {wanted}"
        if self.accepts(found["number"], wanted):
            return self._accept(f"{seen} yes", found["value"])
        if self._candidates:
            line = self._candidates[0]
            return f"{think(f'{seen} no {line.position}')}{self._next('')}"
        if self.guesses():
            return answer_text(f"{seen} no done", found["value"])
        return self._abstain(f"{seen} no none")

    def _accept(self, note: str, value: str) -> str:
        assert self._reading is not None
        if not self._checked and self.reads_again():
            self._checked = True
            return f"{think(f'{note} again')}{self.read(self._reading)}"
        self._checked = False
        self.facts.append(self._reading.id)
        self.values.append(value)
        finished = self.hop == len(self.relations)
        if finished or self.stops_early():
            return self.conclude(note)
        self._person = self.starts[self.hop] if self.order else value
        return f"{think(f'{note} {self._rest}')}{self.search()}"

    def best_guess(self) -> str:
        """Answer without having finished."""
        if self.order:
            return answer_text("done", self.starts[0])
        return answer_text("done", self.values[-1] if self.values else UNKNOWN)

    def conclude(self, note: str) -> str:
        """Answer with what was found."""
        if not self.order:
            return answer_text(f"{note} done", self.values[-1])
        if self.hop < 2:
            return answer_text(f"{note} done", self.starts[0])
        pick = min if self.order == "earlier" else max
        at = self.values.index(pick(self.values, key=int))
        found = f"{self.order} {self.values[at]} {self.starts[at]}."
        return answer_text(f"{note} {found}", self.starts[at])


class FixedSearches(Oracle):
    """Calls search so many times, whatever was asked and whatever came back.

    Args:
        task: the question.
        searches: how many times; a search that is unavailable counts.
    """

    def __init__(self, task: Task, searches: int) -> None:
        super().__init__(task)
        self._left = searches
        self._answer = ""

    def turn(self, observations: Sequence[str]) -> str:
        """Stop at the number, or search on until it is reached."""
        text = self._answer or super().turn(observations)
        if "<answer>" in text:
            self._answer = text
            if not self._left:
                return text
            text = call_text("search", query=f" {self.starts[0]} {self.relations[0]}")
        if '"search"' in text:
            if not self._left:
                return self.best_guess()
            self._left -= 1
        return text


class NeverRetries(Oracle):
    """Takes "unavailable" for an answer: it reads the next entry, or abstains."""

    def gives_up(self, tool: str) -> bool:
        """Whatever the tool."""
        return True


class IgnoresBudget(Oracle):
    """Makes sure: reads every entry that it accepts a second time."""

    def reads_again(self) -> bool:
        """Always."""
        return True


class SearchesOnly(Oracle):
    """Never reads: it answers with what a search says."""

    def read(self, line: Line) -> str:
        """Guess instead."""
        return self.best_guess()


class ReadsOnly(Oracle):
    """Never searches: no question names an entry, so it reads the first one and guesses."""

    def search(self) -> str:
        """Read instead."""
        return call_text("read", id=" K00.000")

    def turn(self, observations: Sequence[str]) -> str:
        """Guess after the first entry."""
        return self.best_guess() if observations else super().turn(observations)


class Abstains(Oracle):
    """Answers "unknown" at once."""

    def turn(self, observations: Sequence[str]) -> str:
        """Abstain."""
        return answer_text("none", UNKNOWN)
