"""Demonstrations for the base model: runs of a careless agent, which seldom repairs its programs.

How often a line is mistaken depends on the operation and on the one before it. Where the mistake
is the more frequent choice, the base model's greedy program is wrong, and sampling finds the right
one.
"""

import copy
import random
from collections.abc import Iterable, Sequence
from typing import Any

from exercises import Exercise, load
from operations import FORMS, RETURN_LIST, Operation, program
from programmers import DONE, call_text
from trials import PASSED, Case, Outcome

from agent_r1_proto.tasks import ChatMessage

OFTEN, SELDOM = 0.62, 0.06
"""How often a line is mistaken: in the places named below, and elsewhere."""
REPAIRS = 0.4
"""How often a program that failed is repaired, and not left as it is."""
RIGHT_REPAIR = 0.6
"""How often a repair turns a line that is wrong into the right one."""
GUESSES = 0.06
"""How often a first program expects another form than plain numbers."""

KEEPS, MAPS = ("keep even", "keep positive"), ("double", "square")
ORDERS, DROPS = ("reverse", "sort"), ("drop first", "drop last")
WEAK_AFTER = {
    "keep even": MAPS,
    "keep positive": ("", *ORDERS),
    "double": KEEPS,
    "square": DROPS,
    "reverse": MAPS,
    "sort": KEEPS,
    "drop first": ORDERS,
    "drop last": ORDERS,
    "sum": DROPS,
    "count": KEEPS,
    "largest": MAPS,
    "last": ORDERS,
}
"""By operation: those after which it is often mistaken; "" is the beginning."""


class Careless:
    """Writes the programs of one run.

    Args:
        exercise: what is asked.
        rng: decides where mistakes are made.
    """

    def __init__(self, exercise: Exercise, rng: random.Random) -> None:
        self._operations = exercise.operations
        self._form = exercise.form
        self._rng = rng

    def first(self) -> list[str]:
        """Return the lines of the first program, the form's line first."""
        form = self._rng.choice(FORMS) if self._rng.random() < GUESSES else FORMS[0]
        befores = ["", *(operation.text for operation in self._operations)]
        lines = [self._line(*pair) for pair in zip(self._operations, befores, strict=False)]
        return [form.line, *lines, *self._ending()]

    def repaired(self, lines: Sequence[str]) -> list[str]:
        """Return the lines of a second program."""
        form, *rest = lines
        if form != self._form.line and self._succeeds():
            form = self._form.line
        for i, operation in enumerate(self._operations):
            if rest[i] != operation.line and self._succeeds():
                rest[i] = operation.line
        return [form, *rest]

    def _line(self, operation: Operation, before: str) -> str:
        often = before in WEAK_AFTER[operation.text]
        mistaken = self._rng.random() < (OFTEN if often else SELDOM)
        return operation.mistake if mistaken else operation.line

    def _ending(self) -> list[str]:
        return [] if self._operations[-1].ends else [RETURN_LIST]

    def _succeeds(self) -> bool:
        return self._rng.random() < RIGHT_REPAIR


def outcomes(source: str, cases: Iterable[Case]) -> list[Outcome]:
    """Call the program of a demonstration, as the tool's harness does in the sandbox."""
    solve = load(source)
    return [_outcome(solve, copy.deepcopy(case.argument)) for case in cases]


def _outcome(solve: Any, argument: Any) -> Outcome:
    try:
        return repr(solve(argument)), ""
    except Exception as error:  # noqa: BLE001 - whatever a program raises is what the model reads
        return "", f"{type(error).__name__}: {error}"


def answer(exercise: Exercise, source: str) -> tuple[str, bool]:
    """Return what the tool says of a program, and whether it passes every hidden test."""
    trial = exercise.trial
    shown, counts = trial.judge(outcomes(source, (*trial.examples, *trial.tests)))
    return shown, counts.share == 1.0


def demonstrate(exercise: Exercise, rng: random.Random) -> list[ChatMessage]:
    """Return the chat messages of one run."""
    agent = Careless(exercise, rng)
    lines = agent.first()
    shown, _ = answer(exercise, program(lines))
    messages = [
        ChatMessage(role="user", content=exercise.text),
        ChatMessage(role="assistant", content=call_text(program(lines))),
        ChatMessage(role="tool", content=shown),
    ]
    if shown == PASSED or rng.random() >= REPAIRS:
        return [*messages, ChatMessage(role="assistant", content=DONE)]
    repaired = call_text(program(agent.repaired(lines)))
    return [*messages, ChatMessage(role="assistant", content=repaired)]
