"""Problems in several steps: which there are, what they say, and how numbers are drawn for them.

A chain starts with a number and changes it clause by clause. A problem asks for the value of one
chain, or for the sum or the difference of two. Neighbouring clauses come in pairs; a quarter of all
pairs is held out, so that no demonstration and no training problem has one.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NAMES = ("Anna", "Ben", "Carl", "Dora", "Emil", "Fay", "Gus", "Hilda")
THINGS = ("coins", "apples", "pens", "cards", "stamps", "nuts")
MAX_VALUE = 499
"""No number of a problem or of its solution is larger: each is one token."""
START, ADDED, FACTOR = (4, 60), (2, 60), (2, 9)
"""Ranges of the numbers in a problem."""
DRAWS = 50
"""How often numbers are drawn for some operations before others are tried."""


@dataclass(frozen=True)
class Operation:
    """One kind of clause."""

    text: str
    """In the problem; `{}` is where a number of the clause stands."""
    expression: str
    """What is to be computed of the value `v`, the clause's number `n` and the start `s`."""
    numbers: tuple[int, int] | None = None

    @property
    def kind(self) -> str:
        """The clause without its number."""
        return self.text.removesuffix(" {}")


OPERATIONS = (
    Operation("add {}", "{v}+{n}", ADDED),
    Operation("lose {}", "{v}-{n}", ADDED),
    Operation("times {}", "{v}*{n}", FACTOR),
    Operation("share by {}", "{v}/{n}", FACTOR),
    Operation("double", "{v}*2"),
    Operation("halve", "{v}/2"),
    Operation("add the start", "{v}+{s}"),
    Operation("lose the start", "{v}-{s}"),
)
COMBINATIONS = {"together": "{a}+{b}", "apart": "{a}-{b}"}
"""What may be asked of two chains; the first one has more."""


def is_held_out(first: Operation, second: Operation) -> bool:
    """Whether a pair of neighbouring clauses is kept for evaluation; each kind begins two."""
    row, column = OPERATIONS.index(first), OPERATIONS.index(second)
    return (column - row) % len(OPERATIONS) in (3, 6)


@dataclass(frozen=True)
class Step:
    """One clause with its number."""

    operation: Operation
    number: int

    @property
    def text(self) -> str:
        """The clause as the problem says it."""
        return self.operation.text.format(self.number)


@dataclass(frozen=True)
class Chain:
    """A start and what happens to it."""

    name: str
    start: int
    steps: tuple[Step, ...]
    value: int
    """The number at the end."""


@dataclass(frozen=True)
class Problem:
    """What is asked, and what has to be computed."""

    text: str
    chains: tuple[Chain, ...]
    combination: str
    """Key of COMBINATIONS; "" for a single chain."""
    answer: int

    @property
    def type(self) -> str:
        """Number of clauses of each chain."""
        return "+".join(str(len(chain.steps)) for chain in self.chains)


Shape = tuple[int, ...]
"""Number of clauses of each chain."""


@dataclass(frozen=True)
class ProblemSet:
    """Which problems a set has."""

    shapes: dict[Shape, float]
    """How often each occurs."""
    held_out: bool = False
    """True: every problem has a held-out pair; False: none has."""


TRAINED: dict[Shape, float] = {(1,): 0.1, (2,): 0.2, (3,): 0.2, (4,): 0.1, (1, 1): 0.2, (2, 1): 0.2}
ASKED: dict[Shape, float] = {(2,): 0.25, (3,): 0.3, (4,): 0.15, (1, 1): 0.1, (2, 1): 0.2}
SETS = {
    "in_domain": ProblemSet(ASKED),
    "compositions": ProblemSet({(2,): 0.25, (3,): 0.35, (4,): 0.2, (2, 1): 0.2}, held_out=True),
    "longer": ProblemSet({(5,): 0.4, (1, 2): 0.3, (2, 2): 0.3}),
    "development": ProblemSet(ASKED),
}


def draw_operations(length: int, held_out: bool, rng: random.Random) -> list[Operation]:
    """Draw kinds of clauses, with a held-out pair of neighbours or without."""
    while True:
        found = rng.choices(OPERATIONS, k=length)
        pairs = itertools.pairwise(found)
        if any(is_held_out(*pair) for pair in pairs) == held_out:
            return found


def draw_chain(name: str, operations: Sequence[Operation], rng: random.Random) -> Chain | None:
    """Draw numbers; None where a value is not a whole number from 1 to MAX_VALUE."""
    start = value = rng.randint(*START)
    steps: list[Step] = []
    for operation in operations:
        step, after = _draw_step(operation, value, start, rng)
        if after is None:
            return None
        steps.append(step)
        value = after
    return Chain(name, start, tuple(steps), value)


_APPLY: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b if a % b == 0 else 0,
}


def _draw_step(
    operation: Operation, value: int, start: int, rng: random.Random
) -> tuple[Step, int | None]:
    number = rng.randint(*operation.numbers) if operation.numbers else 0
    expression = operation.expression.format(v=value, n=number, s=start)
    sign = next(sign for sign in _APPLY if sign in expression)
    left, right = map(int, expression.split(sign))
    after = _APPLY[sign](left, right)
    return Step(operation, number), after if 1 <= after <= MAX_VALUE else None


def draw_problem(shape: Shape, held_out: bool, rng: random.Random) -> Problem:
    """Draw a problem of one shape."""
    while True:
        # Where a problem has two chains, the first one has the held-out pair: the other is short.
        operations = [draw_operations(n, held_out and i == 0, rng) for i, n in enumerate(shape)]
        for _ in range(DRAWS):
            if problem := _try_problem(operations, rng):
                return problem


def _try_problem(operations: Sequence[Sequence[Operation]], rng: random.Random) -> Problem | None:
    names = rng.sample(NAMES, len(operations))
    drawn = map(draw_chain, names, operations, [rng] * len(operations))
    chains = tuple(chain for chain in drawn if chain)
    if len(chains) < len(operations):
        return None
    combination = rng.choice(sorted(COMBINATIONS)) if len(chains) == 2 else ""
    answer = chains[0].value
    if combination:
        answer += chains[1].value if combination == "together" else -chains[1].value
    if not 1 <= answer <= MAX_VALUE:
        return None
    return Problem(_text(chains, rng.choice(THINGS), combination), chains, combination, answer)


def _text(chains: Sequence[Chain], thing: str, combination: str) -> str:
    told = [
        f" {chain.name} has {chain.start} {thing}: {', '.join(s.text for s in chain.steps)}."
        for chain in chains
    ]
    asked = f" How many {combination}?" if combination else " How many?"
    return "".join([*told, asked])


def make_problems(
    problems: ProblemSet, count: int, rng: random.Random, seen: set[str]
) -> list[Problem]:
    """Draw problems of a set; none whose text is in `seen`, to which the new ones are added."""
    found: list[Problem] = []
    shapes = list(problems.shapes)
    while len(found) < count:
        (shape,) = rng.choices(shapes, list(problems.shapes.values()))
        problem = draw_problem(shape, problems.held_out, rng)
        if problem.text not in seen:
            seen.add(problem.text)
            found.append(problem)
    return found
