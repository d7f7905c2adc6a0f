"""Reward components: the table of built-in ones, and loading of the user's.

A component reads one finished interaction (`ScoreRequest`: the task's payload and the model's
turns) and returns a number; `scorer.py` weighs and sums them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import cast

from agent_r1.reward import scoring
from agent_r1.reward.math_equal import math_equal
from agent_r1.reward.reported import reported
from agent_r1.reward.tests_passed import all_tests_passed, tests_passed
from agent_r1.runtime.user_code import check_call, import_named
from agent_r1.text.reading import of_read_turns
from agent_r1_proto.rewards import ScoreRequest, ScoreTurn

Scored = float | tuple[float, str]
"""A score; or with it why, in words, for people alone."""
Component = Callable[[ScoreRequest], Scored | Awaitable[Scored]]
"""A component of a user's: a function or an `async` function."""


READS_TOKENS = "reads_tokens"
"""Attribute of a component that reads `ScoreTurn.token_ids`, where it is true."""
BuiltIn = Callable[[ScoreRequest], float]
"""A built-in component; the answer that counts is the last turn's."""


def _of_answer(score: Callable[[str | None, Sequence[str]], float]) -> BuiltIn:
    return lambda request: score(
        request.turns[-1].answer, scoring.accepted_answers(request.payload)
    )


def _of_turns(score: Callable[[Sequence[ScoreTurn]], float]) -> BuiltIn:
    return lambda request: score(request.turns)


def _tool_efficiency(request: ScoreRequest) -> float:
    return scoring.useful_share(
        [(c.tool, c.arguments, c.status) for turn in request.turns for c in turn.calls]
    )


_MEASURES: dict[str, BuiltIn] = {
    "exact_match": _of_answer(scoring.exact_match),
    "f1": _of_answer(scoring.f1),
    "substring_match": _of_answer(scoring.substring_match),
    "format": _of_turns(scoring.format_score),
    "reasoning_format": _of_turns(scoring.reasoning_share),  # share that opens with a thought
    # 1.0 when the last turn gives a non-empty answer
    "answered": lambda request: float(bool(request.turns[-1].answer)),
    # number of calls, failed and malformed ones included
    "tool_calls": lambda request: float(sum(turn.num_calls for turn in request.turns)),
    "tool_efficiency": _tool_efficiency,  # share of the calls that worked and repeat none before
}
BUILT_IN = {name: of_read_turns(measure) for name, measure in _MEASURES.items()}

TIMED: dict[str, Component] = {
    "math_equal": math_equal,  # 1.0 when the boxed or final answer equals the payload's, as maths
    "tests_passed": tests_passed,  # share of tests that the last call of code_tests passed
    "all_tests_passed": all_tests_passed,  # 1.0 when it passed them all
    "reported": reported,  # what a program that is started elsewhere gave its own work
}
"""Built-in components that are run like a user's own: in a thread and under
`component_timeout_s`."""

ASKING = ("judge", "reward_model", "critic")
"""Built-in components that ask a language model; `[reward.servers]` has a table of each name."""

COMPARES_WORDS = frozenset({"exact_match", "f1", "substring_match"})
"""Built-in components that compare the answer with the right one as words."""
COMPARES_ANSWER = COMPARES_WORDS | {"math_equal"}
"""Built-in components that say nothing without the right answer."""


def load_component(name: str) -> Component:
    """Return a component of TIMED, or the function that `module:Name` names.

    Raises:
        ValueError: it cannot be loaded, is no function, or does not take a request.
    """
    if name in TIMED:
        return TIMED[name]
    found = import_named(name, f"reward.components ({name})")
    if not callable(found) or isinstance(found, type):
        raise ValueError(
            f"reward.components: {name!r} is not a function; it must take a ScoreRequest and "
            "return a number"
        )
    check_call(found, "request", name=f"reward.components: {name}")
    return cast(Component, found)
