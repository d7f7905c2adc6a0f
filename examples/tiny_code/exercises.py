"""Exercises: which there are, what they say, and how examples and tests are drawn for them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from operations import (
    FORM_SHARES,
    FORMS,
    OPERATIONS,
    TRANSFORMATIONS,
    Form,
    Operation,
    Use,
    program,
    right_lines,
    use_of,
)
from trials import Case, Trial

NUMBERS, LENGTHS = (-3, 9), (3, 5)
"""Ranges of the numbers in an argument, and of how many there are."""
NUM_EXAMPLES, NUM_TESTS = 2, 6
MAX_VALUE = 499
"""No number that a right program returns is larger: each is one token."""


@dataclass(frozen=True)
class Exercise:
    """What is asked, and how it is tested."""

    operations: tuple[Operation, ...]
    form: Form
    trial: Trial

    @property
    def text(self) -> str:
        """What the model reads."""
        return f" Write f(x): {', '.join(operation.text for operation in self.operations)}."


@dataclass(frozen=True)
class ExerciseSet:
    """Which exercises a set has."""

    lengths: dict[int, float]
    """Numbers of operations, and how often each occurs."""
    use: Use = "train"
    """What all of its compositions are for."""


TRAINED = ExerciseSet({1: 0.1, 2: 0.4, 3: 0.5})
SETS = {
    "in_domain": ExerciseSet({2: 0.25, 3: 0.75}),
    "compositions": ExerciseSet({2: 0.25, 3: 0.75}, use="report"),
    "development": ExerciseSet({2: 0.25, 3: 0.75}, use="choose"),
}


def draw_operations(length: int, use: Use, rng: random.Random) -> tuple[Operation, ...]:
    """Draw operations whose composition is for this use."""
    while True:
        found = (*rng.choices(TRANSFORMATIONS, k=length - 1), rng.choice(OPERATIONS))
        if use_of(found) == use:
            return found


def load(source: str) -> Any:
    """Return the function that a program defines; for lines of operations.py and nothing else."""
    names: dict[str, Any] = {}
    exec(source, names)
    return names["f"]


def draw_exercise(operations: Sequence[Operation], form: Form, rng: random.Random) -> Exercise:
    """Draw arguments, and work out what is right for them."""
    solve = load(program(right_lines(form, operations)))
    cases = [_draw_case(solve, form, rng) for _ in range(NUM_EXAMPLES + NUM_TESTS)]
    trial = Trial(examples=cases[:NUM_EXAMPLES], tests=cases[NUM_EXAMPLES:])
    return Exercise(tuple(operations), form, trial)


def _draw_case(solve: Any, form: Form, rng: random.Random) -> Case:
    while True:
        numbers = [rng.randint(*NUMBERS) for _ in range(rng.randint(*LENGTHS))]
        argument: Any = form.dress(numbers)
        try:
            expected = solve(form.dress(numbers))
        except (ValueError, IndexError):  # nothing is left to take the largest or the last of
            continue
        values = expected if isinstance(expected, list) else [expected]
        if values and all(abs(value) <= MAX_VALUE for value in values):
            return Case(argument=argument, expected=expected)


def make_exercises(exercises: ExerciseSet, count: int, rng: random.Random) -> list[Exercise]:
    """Draw the exercises of a set."""
    found: list[Exercise] = []
    for _ in range(count):
        (length,) = rng.choices(list(exercises.lengths), list(exercises.lengths.values()))
        (form,) = rng.choices(FORMS, FORM_SHARES)
        operations = draw_operations(length, exercises.use, rng)
        found.append(draw_exercise(operations, form, rng))
    return found
