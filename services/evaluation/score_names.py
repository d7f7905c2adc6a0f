"""Scores of a run that are shown: their order, and what they are called.

The configuration says which (`Config.score_names`); the training view, the result of a run and
`agent-r1 evaluate` show them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TITLES = {"exact_match": "EM", "f1": "F1"}
MOST_ON_A_LINE = 4
"""A line shows so many components and so many tools; files have all of them."""


@dataclass(frozen=True)
class ScoreNames:
    """The scores that a configuration names."""

    components: Sequence[str] = ()
    """Names in `reward.components`."""
    tools: Sequence[str] = ()
    """Names of the tools the model is offered."""

    def titles(self) -> dict[str, str]:
        """Return what each component is called: a user's `module:Name` is `Name` if that is clear.

        Returns:
            Titles by component, in the order of the configuration.
        """
        short = {name: TITLES.get(name, name.rpartition(":")[2]) for name in self.components}
        uses = Counter(short.values())
        return {name: title if uses[title] == 1 else name for name, title in short.items()}

    def line(
        self, reward: float | None, components: Mapping[str, float], calls: Mapping[str, float]
    ) -> list[tuple[str, str]]:
        """Return the scores that stand on one line, as (title, number).

        Args:
            reward: mean reward; None where nothing was scored, and nothing else is known then.
            components: means by component.
            calls: answered calls per trajectory by tool; a tool that is missing answered none.
        """
        titles = list(self.titles().items())[:MOST_ON_A_LINE]
        never = None if reward is None else 0.0
        return [
            ("reward", number(reward)),
            *((title, number(components.get(name))) for name, title in titles),
            *((tool, number(calls.get(tool, never), 2)) for tool in self.tools[:MOST_ON_A_LINE]),
        ]


def number(value: float | None, digits: int = 3) -> str:
    """Render a mean; what is not known is a dash."""
    return "-" if value is None else f"{value:.{digits}f}"
