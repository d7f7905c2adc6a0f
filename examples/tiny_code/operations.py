"""What programs are made of: operations on a list of numbers, and the ways numbers may arrive.

An operation is one line of Python, and has one common mistake. Neighbouring operations come in
pairs; a third of all pairs is held out, so that no demonstration and no training task has one.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Numbers = list[int]
Use = Literal["train", "report", "choose"]


@dataclass(frozen=True)
class Operation:
    """One line of a program."""

    text: str
    """As the task says it."""
    line: str
    """As it should be written."""
    mistake: str
    """As it is often written."""
    ends: bool = False
    """Whether it gives a number, which nothing can follow."""


OPERATIONS = (
    Operation("keep even", "x=[v for v in x if v % 2 == 0]", "x=[v for v in x if v % 2 == 1]"),
    Operation("reverse", "x=x[::-1]", "x=x.reverse()"),
    Operation("double", "x=[v * 2 for v in x]", "x=[v + 2 for v in x]"),
    Operation("drop first", "x=x[1:]", "x=x[:1]"),
    Operation("keep positive", "x=[v for v in x if v > 0]", "x=[v for v in x if v >= 0]"),
    Operation("sort", "x=sorted(x)", "x=x.sort()"),
    Operation("square", "x=[v * v for v in x]", "x=[v * 2 for v in x]"),
    Operation("drop last", "x=x[:-1]", "x=x[-1:]"),
    Operation("sum", "return sum(x)", "return sum(v)", ends=True),
    Operation("count", "return len(x)", "return x.count()", ends=True),
    Operation("largest", "return max(x)", "return min(x)", ends=True),
    Operation("last", "return x[-1]", "return x[len(x)]", ends=True),
)
RETURN_LIST = "return x"
"""Last line of a program whose last operation gives a list."""
TRANSFORMATIONS = tuple(operation for operation in OPERATIONS if not operation.ends)
BY_TEXT = {operation.text: operation for operation in OPERATIONS}


def use_of(operations: Sequence[Operation]) -> Use:
    """Say what a composition is for, by its pairs: a quarter is reported on, a twelfth chooses."""
    places = [OPERATIONS.index(operation) for operation in operations]
    # Twelve operations stand in a circle; neighbours there are of different kinds.
    apart = {(second - first) % 12 for first, second in itertools.pairwise(places)}
    if apart & {3, 6, 9}:
        return "report"
    return "choose" if 8 in apart else "train"


@dataclass(frozen=True)
class Form:
    """How numbers arrive, which no task says: errors do."""

    name: str
    line: str
    """Turns the argument into a list of numbers; "" where it is one."""
    dress: Callable[[Numbers], list[object]]
    """Brings numbers into the form."""


def _nest(numbers: Numbers) -> list[object]:
    half = (len(numbers) + 1) // 2
    return [numbers[:half], numbers[half:]]


FORMS = (
    Form("plain", "", list),
    Form("texts", "x=[int(v) for v in x]", lambda numbers: [str(number) for number in numbers]),
    Form("nested", "x=sum(x, [])", _nest),
    Form("gaps", "x=[v for v in x if v != None]", lambda numbers: [numbers[0], None, *numbers[1:]]),
)
FORM_SHARES = (0.52, 0.16, 0.16, 0.16)


def program(lines: Sequence[str]) -> str:
    """Return the source of `f` with these lines."""
    return "\n ".join(["def f(x):", *filter(None, lines)])


def right_lines(form: Form, operations: Sequence[Operation]) -> list[str]:
    """Return the lines of a right program, the form's first, even where it is empty."""
    lines = [operation.line for operation in operations]
    return [form.line, *lines] if operations[-1].ends else [form.line, *lines, RETURN_LIST]
