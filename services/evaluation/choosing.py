"""Choosing one of several answers to a question, which were sampled and stored.

`summary.py` says what each way of choosing gets right. `agent-r1 matrix` samples a pool once; every
way to choose, with every scorer and every number of candidates, then looks at the same answers.
What an answer costs is what all answers cost that were chosen from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from math import fsum
from statistics import fmean

from agent_r1.evaluation.answer_file import Answer
from agent_r1.text.reading import most_frequent

SCORERS = ("reward_model", "critic", "judge")
"""Reward components that can choose among answers: they need not know the right one."""


def majority(answers: Sequence[Answer]) -> Answer:
    """Return an answer that most say; the first where several are, or where all are empty."""
    return answers[most_frequent(answer.prediction for answer in answers)]


def best_by(answers: Sequence[Answer], component: str) -> Answer | None:
    """Return the answer that a component scores highest; None where it has not scored them all."""
    if any(component not in answer.components for answer in answers):
        return None
    return max(answers, key=lambda answer: answer.components[component])


def choose(answers: Iterable[Answer], candidates: int, scorer: str | None) -> list[Answer]:
    """Return one answer a question: the best, or the most frequent, of the first so many.

    Args:
        answers: of the pool, in any order.
        candidates: answers to a question that are chosen from.
        scorer: component that says which is the best; None takes the most frequent.

    Raises:
        ValueError: the scorer has not scored an answer.
    """
    return [_chosen(of_one[:candidates], scorer) for of_one in _by_question(answers)]


def enough(
    answers: Iterable[Answer], cost: Callable[[Answer], int], least: float, fewest: int
) -> int:
    """Return how many answers to a question cost so much, on average.

    Args:
        answers: of the pool, in any order.
        cost: of one answer: `tokens_of` or `calls_of`.
        least: cost that must be reached.
        fewest: the least that is returned.

    Returns:
        The size of the pool, where all of it costs less.
    """
    questions = [of_one for of_one in _by_question(answers) if not any(a.failed for a in of_one)]
    size = max(map(len, questions), default=fewest)
    for number in range(fewest, size):
        if fmean(sum(map(cost, of_one[:number])) for of_one in questions) >= least:
            return number
    return size


def tokens_of(answer: Answer) -> int:
    """Return the tokens that were sampled for an answer."""
    return answer.sampled_tokens or 0


def calls_of(answer: Answer) -> int:
    """Return the calls that tools answered for an answer."""
    return sum(answer.calls.values())


def _by_question(answers: Iterable[Answer]) -> list[list[Answer]]:
    ordered = sorted(answers, key=lambda answer: answer.key)
    return [list(members) for _, members in groupby(ordered, key=lambda answer: answer.key[:2])]


def _chosen(answers: Sequence[Answer], scorer: str | None) -> Answer:
    failed = next((answer for answer in answers if answer.failed), None)
    if failed is not None:
        return failed.model_copy(update={"attempt": 0})
    found = majority(answers) if scorer is None else best_by(answers, scorer)
    if found is None:
        raise ValueError(
            f"the pool's answers to {answers[0].id!r} have no component {scorer!r}; name it in "
            "reward.components, and discard the pool with --overwrite"
        )
    calls = sum(map(calls_of, answers))
    return found.model_copy(
        update={
            "attempt": 0,
            "sampled_tokens": sum(map(tokens_of, answers)),
            "discarded_calls": calls - sum(found.calls.values()),
            "scorer_tokens": sum(a.component_tokens.get(scorer or "", 0) for a in answers),
            "scores": len(answers) if scorer else 0,
            "seconds": fsum(answer.seconds or 0.0 for answer in answers),
        }
    )
