"""Answer patterns (`env.answer_pattern`), and the answer that most give."""

from __future__ import annotations

import re
from collections.abc import Iterable


def check_pattern(pattern: str) -> str:
    """Return a pattern that can be searched for.

    Raises:
        ValueError: it is no regular expression, or has more than one group.
    """
    try:
        groups = re.compile(pattern).groups
    except re.error as exc:
        raise ValueError(f"({pattern!r}) is not a regular expression: {exc}; correct it") from exc
    if groups > 1:
        raise ValueError(
            f"({pattern!r}) has {groups} groups; the answer is what its one group matches: write "
            "(?:...) for the others"
        )
    return pattern


def most_frequent(answers: Iterable[str | None], weights: Iterable[float] | None = None) -> int:
    """Return the index of the first answer that most say, 0 where all are empty or None.

    Args:
        answers: in their order.
        weights: what the vote of each counts, above 0; None counts all alike.

    Source: self-consistency, arXiv:2203.11171.
    """
    said = [" ".join((answer or "").casefold().split()) for answer in answers]
    votes: dict[str, float] = {}
    for answer, weight in zip(said, weights or [1.0] * len(said), strict=True):
        if answer:
            votes[answer] = votes.get(answer, 0.0) + weight
    return said.index(max(votes, key=votes.__getitem__)) if votes else 0
