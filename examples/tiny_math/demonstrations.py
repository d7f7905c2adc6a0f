"""Demonstrations for the base model: runs of the oracle that lack its care in places.

How often a mistake is made depends on the clause and on the one before it. Where it is the more
frequent choice, the base model's greedy answer is wrong, and sampling finds the right one.
"""

import random

from problems import MAX_VALUE
from solvers import Clause, Oracle

from agent_r1.text.reading import parse_turn
from agent_r1.tools.calculator import compute, format_number
from agent_r1_proto.tasks import ChatMessage, Task

OFTEN, SELDOM = 0.62, 0.05
"""How often a mistake is made: in the places named below, and elsewhere."""


class Careless(Oracle):
    """The oracle with mistakes.

    Args:
        task: the problem.
        rng: decides where mistakes are made.
    """

    def __init__(self, task: Task, rng: random.Random) -> None:
        super().__init__(task)
        self._rng = rng

    def _fails(self, often: bool) -> bool:
        return self._rng.random() < (OFTEN if often else SELDOM)

    def expression(self, clause: Clause) -> str:
        """Mistake the sign after some clauses, the start for the value, and who has more."""
        wrong = clause.expression
        if clause.kind == "lose" and self._fails(clause.after in ("add", "times", "double")):
            wrong = wrong.replace("-", "+")
        if clause.kind.endswith("start") and self._fails(clause.kind.startswith("add")):
            wrong = wrong.replace("{s}", "{v}")
        if clause.kind == "apart" and self._fails(True):
            wrong = wrong.replace("-", "+")
        return wrong

    def skips(self, clause: Clause) -> bool:
        """Mostly where a number is to be halved after some clauses."""
        often = clause.kind == "halve" and clause.after in ("add", "lose", "share by")
        return self._fails(often)

    def stops_before(self, clause: Clause) -> bool:
        """Mostly before some clauses."""
        return self._fails(clause.kind in ("times", "share by", "double"))


def play(agent: Oracle) -> tuple[list[str], list[str]]:
    """Let an agent run; return what it said, and what the calculator answered."""
    said, answers = [agent.turn([])], list[str]()
    while calls := parse_turn(said[-1]).calls:
        answers.append(format_number(compute(str(calls[0].arguments["expression"]))))
        said.append(agent.turn(answers[-1:]))
    return said, answers


def demonstrate(task: Task, agent: Oracle) -> list[ChatMessage] | None:
    """Return the chat messages of one run; None where a result has no token of its own."""
    said, answers = play(agent)
    if not all(text.isdigit() and 1 <= int(text) <= MAX_VALUE for text in answers):
        return None
    messages = task.messages()
    for turn, answer in zip(said, answers, strict=False):
        messages.append(ChatMessage(role="assistant", content=turn))
        messages.append(ChatMessage(role="tool", content=answer))
    return [*messages, ChatMessage(role="assistant", content=said[-1])]
