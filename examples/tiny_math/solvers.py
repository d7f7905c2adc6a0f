"""Scripted agents: the one that makes no mistake, and some that lack one ability each.

They read the results of the calculator, as the model does, and the plan in the task's payload,
which the model never sees. Demonstrations are runs of the oracle with mistakes.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agent_r1_proto.tasks import Task


@dataclass(frozen=True)
class Clause:
    """One clause of the problem, as the plan has it."""

    name: str
    """Whose number changes; "" where the numbers of two are combined."""
    kind: str
    """The clause without its number."""
    after: str
    """Kind of the clause before; "" for the first of a chain."""
    text: str
    expression: str
    """What is to be computed: of `{v}`, the value at hand, `{s}`, the start, or `{a}` and `{b}`."""
    start: str


def call_text(expression: str) -> str:
    """One call in compact Hermes JSON; the tokenizer's markers hold its scaffolding."""
    call = {"name": "calculator", "arguments": {"expression": expression}}
    return f"<tool_call>{json.dumps(call, separators=(',', ':'))}</tool_call>"


class Oracle:
    """Says a clause, computes it, and goes on to the next."""

    def __init__(self, task: Task) -> None:
        plan: Any = task.payload["plan"]
        self._left = [Clause(**clause) for clause in plan]
        self._name = ""
        self._value = ""
        self._done: dict[str, str] = {}
        """Numbers of the chains that are done, by name."""

    # What an agent that lacks an ability does otherwise

    def expression(self, clause: Clause) -> str:
        """What to compute for a clause."""
        return clause.expression

    def skips(self, clause: Clause) -> bool:
        """Whether to pass over a clause which is neither the first nor the last."""
        return False

    def stops_before(self, clause: Clause) -> bool:
        """Whether to answer without the last clause."""
        return False

    # The run

    def turn(self, observations: Sequence[str]) -> str:
        """Return the text of the next turn.

        Args:
            observations: what the calculator answered; [] before the first.
        """
        if observations:
            self._value = observations[0]
        clause = self._choose()
        if clause is None:
            return f"<think> done</think><answer>{self._value}</answer>"
        return self._compute(clause)

    def _choose(self) -> Clause | None:
        """Return the clause to compute now; None at the end."""
        while self._left:
            clause = self._left.pop(0)
            if not self._value:
                return clause
            if self._left and clause.after and self.skips(clause):
                continue
            return None if not self._left and self.stops_before(clause) else clause
        return None

    def _compute(self, clause: Clause) -> str:
        note = ""
        if clause.name != self._name:
            if self._name:
                self._done[self._name] = self._value
            note = "".join(f" {name} has {value}." for name, value in self._done.items())
            note += f" {clause.name}" if clause.name else ""
            self._name, self._value = clause.name, clause.start
        a, b = (*self._done.values(), "", "")[:2]
        expression = self.expression(clause).format(v=self._value, s=clause.start, a=a, b=b)
        return f"<think>{note} {clause.text}</think>{call_text(expression)}"


class OneCall(Oracle):
    """Computes the first clause and answers."""

    def turn(self, observations: Sequence[str]) -> str:
        """Answer with the first result."""
        self._left = [] if observations else self._left
        return super().turn(observations)


class StopsEarly(Oracle):
    """Leaves out the last clause where there are several."""

    def stops_before(self, clause: Clause) -> bool:
        """Always."""
        return True
