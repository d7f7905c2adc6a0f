"""Choices of the list of trajectories: address of a page --> `Filter` --> question for the index.

Every choice stands in the address, so that a link shows the same rows to others. Values that come
from runs are carried as `key_of` writes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from urllib.parse import urlencode

from agent_r1.console.pages import name_of
from agent_r1.runs.index import COMPONENT, SORTED, Query, Range
from agent_r1.runs.store import StoredFile

STEPS = "steps"
"""Value of `of` for the samples of steps; an evaluation is `eval:NAME`, and "" is everything."""
EVALUATION = "eval:"
EXACT = {"set": "set", "task": "task_id", "status": "status", "tool": "tool"}
"""Choices of one value, and their columns."""
RANGES = {"reward": "reward", "tokens": "num_tokens", "staleness": "staleness"}
"""Choices of a range, NAME and NAME_to, and their columns."""
FIELDS = (
    *("text", "of", *EXACT, "group", "version", "component", "sort", "order"),
    *(name for one in ("step", *RANGES, "value") for name in (one, f"{one}_to")),
)
"""Names in the address; `value` is the range of `component`."""


class Filter:
    """Choices of a page.

    Args:
        chosen: as the address has them; an empty one is none.
    """

    def __init__(self, chosen: Mapping[str, str]) -> None:
        self.chosen = {name: chosen.get(name, "").strip() for name in FIELDS}
        self.sort = name_of(self.chosen["sort"]) or "step"
        """Column of the order."""
        self.descending = self.chosen["order"] != "up"
        """Whether the greatest comes first."""

    def address(self, **changes: object) -> str:
        """Return the query of an address with these choices, but for some; "" without any."""
        chosen = {name: value for name, value in (self.chosen | changes).items() if value}
        return f"?{urlencode(chosen)}" if chosen else ""

    def sorted_by(self, column: str) -> str:
        """Return the query of an address with another order; the same column turns it around."""
        turned = "up" if column == self.sort and self.descending else ""
        return self.address(sort=column, order=turned)

    def query(self, limit: int, offset: int) -> Query:
        """Return the question for rows.

        Raises:
            ValueError: a number is none.
        """
        equal: dict[str, str | int | bool | None] = {
            column: name_of(self.chosen[name])
            for name, column in EXACT.items()
            if self.chosen[name]
        }
        if (group := self._number("group")) is not None:
            equal["group_id"] = int(group)
        of = name_of(self.chosen["of"])
        if of:
            equal["evaluation"] = None if of == STEPS else of.removeprefix(EVALUATION)
        return Query(
            equal, self._ranges(), self.chosen["text"], self.sort, self.descending, limit, offset
        )

    def wants(self, file: StoredFile) -> bool:
        """Return whether a file belongs to the chosen steps, or to the chosen evaluation."""
        of, (first, last) = name_of(self.chosen["of"]), self.steps()
        if file.step is None:
            return of == f"{EVALUATION}{file.evaluation}"
        after, before = first is None or first <= file.step, last is None or file.step <= last
        return of in ("", STEPS) and after and before

    def _ranges(self) -> dict[str, Range]:
        ranges = {column: self._range(name) for name, column in RANGES.items()}
        ranges["step"] = self.steps()
        if component := name_of(self.chosen["component"]):
            ranges[COMPONENT + component] = self._range("value")
        if (version := self._number("version")) is not None:
            ranges |= {"first_version": (None, version), "last_version": (version, None)}
        # A component without bounds still leaves out the rows that lack it.
        return {
            column: bounds
            for column, bounds in ranges.items()
            if bounds != (None, None) or column not in SORTED
        }

    def steps(self) -> Range:
        """Return the first and the last step; one alone is one step."""
        first, last = self._range("step")
        return first, first if last is None else last

    def _range(self, name: str) -> Range:
        return self._number(name), self._number(f"{name}_to")

    def _number(self, name: str) -> float | None:
        text = self.chosen[name]
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not abs(value) < 2**53:
            raise ValueError(
                f"{name} ({text[:40]!r}) must be a number below 2^53; leave it empty for any"
            )
        return value
