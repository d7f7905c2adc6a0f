"""Where the answer is in a turn of the model (`env.answer_pattern`), for rollout and reward."""

from __future__ import annotations

import re
from collections import Counter
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


def find_answer(text: str, pattern: str) -> str | None:
    """Return what the group (without one, all) of the last match is, stripped; None without one."""
    found = [match[match.re.groups] for match in re.finditer(pattern, text, re.DOTALL)]
    return (found[-1] or "").strip() if found else None


def most_frequent(answers: Iterable[str | None]) -> int:
    """Return the index of the first answer that most say, 0 where all are empty or None.

    Source: self-consistency, arXiv:2203.11171.
    """
    said = [" ".join((answer or "").casefold().split()) for answer in answers]
    counts = Counter(filter(None, said))
    return said.index(counts.most_common(1)[0][0]) if counts else 0
