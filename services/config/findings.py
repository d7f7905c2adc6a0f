"""Findings of the checks of a configuration and of this machine, a `Check` for each thing.

checks.py collects them from machine.py, redis_server.py and code.py; `agent-r1 check` prints them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from agent_r1_proto.tools import ToolSpec


@dataclass(frozen=True)
class Check:
    """One thing that was looked at, and what came of it."""

    name: str
    found: str
    """Finding, in a few words."""
    problems: Sequence[str] = ()
    """Problems that keep a command from working: value, limit and remedy."""
    notes: Sequence[str] = ()
    """Notes on what may be wrong, and stops nothing."""
    here: bool = True
    """The problems are those of this machine; False: of the configuration, wherever it is used."""

    def lines(self) -> Iterator[str]:
        """Yield its state, then each problem and note with its remedy."""
        state = "problem" if self.problems else "note" if self.notes else "ok"
        yield f"{state:<8} {self.name:<18} {self.found}".rstrip()
        for text in (*self.problems, *self.notes):
            what, _, remedy = text.partition("; ")
            yield f"{'':<8} {what}"
            if remedy:
                yield f"{'':<8} remedy: {remedy}"


@dataclass
class Findings:
    """Findings of several checks."""

    checks: list[Check] = field(default_factory=list)
    specs: dict[str, ToolSpec] = field(default_factory=dict)
    """Specs that the tools give of themselves, by name, as far as they are known without serving
    them."""

    @property
    def problems(self) -> list[str]:
        """Problems wherever the configuration is used."""
        return _once(text for check in self.checks if not check.here for text in check.problems)

    @property
    def machine(self) -> list[str]:
        """Problems on this machine."""
        return _once(text for check in self.checks if check.here for text in check.problems)

    @property
    def notes(self) -> list[str]:
        """Notes of what could not be checked, or may be wrong."""
        return _once(text for check in self.checks for text in check.notes)

    def add(self, other: Findings) -> None:
        """Take up what another check has found, once."""
        self.checks += [check for check in other.checks if check not in self.checks]
        self.specs |= other.specs

    def text(self) -> str:
        """Return the problems, one a line, those of this machine in a section of their own."""
        lines = self.problems
        if self.machine:
            lines.append("on this machine (skipped by `agent-r1 check --elsewhere`):")
            lines += [f"  {problem}" for problem in self.machine]
        return "\n".join(lines)


def _once(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))
