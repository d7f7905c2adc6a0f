"""Containers that both the code and the test hold.

`peer.py` reads an attribute or an item of an object of the code, or the code keeps an argument. A
list or dict crosses as a copy; here both are kept the same, for as long as the test holds its own.
"""

from __future__ import annotations

import array
import collections
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .asserts import is_failure
from .values import RefusedValue, is_generator

CHANGEABLE = (
    *(list, dict, set, bytearray, array.array, types.SimpleNamespace),
    *(collections.deque, collections.OrderedDict, collections.defaultdict, collections.Counter),
)
"""Types of containers that cross as copies and can change."""
READS = ("get", "getitem", "global", "kept")
MOST_LENT = 16
MOST_ITEMS = 256
"""Most items of an argument that is kept: each call looks at all of them."""


@dataclass
class Lent:
    """One copy."""

    operation: str
    operands: tuple[Any, ...]
    """Operands with which it was read."""
    value: Any
    written: Any
    """Value that it had when the two sides were last the same."""

    def is_of(self, operation: str, operands: tuple[Any, ...]) -> bool:
        """Tell whether it was read in this way."""
        owner, key = self.operands
        return (
            operation == self.operation
            and operands[0] is owner
            and type(operands[1]) is type(key)
            and operands[1] == key
        )


class LentContainers:
    """All copies of a test.

    Args:
        exchange: lets the code do something.
        write: returns a value as it crosses.
        change: makes a container of the test what the code's has become.
    """

    def __init__(
        self,
        exchange: Callable[..., Any],
        write: Callable[[Any], Any],
        change: Callable[[Any, Any], None],
    ) -> None:
        self._exchange = exchange
        self._write = write
        self._change = change
        self._lent: list[Lent] = []

    def request(self, operation: str, operands: tuple[Any, ...]) -> Any:
        """Let the code do something, with its containers as the test has left its copies."""
        self._write_back()
        value = self._exchange(operation, *operands)
        self._refresh()
        return self.lend(operation, operands, value) if operation in READS else value

    def lend(self, operation: str, operands: tuple[Any, ...], value: Any) -> Any:
        """Return what was read; of a container that the test holds already, the same copy."""
        if not can_change(value):
            return value
        for lent in self._lent:
            if lent.is_of(operation, operands) and type(lent.value) is type(value):
                return lent.value
        self._lent.append(Lent(operation, operands, value, self._write(value)))
        del self._lent[:-MOST_LENT]
        return value

    def find_arguments(self, operands: Sequence[Any]) -> list[Any]:
        """Return where the arguments of a call are, and how they were read, that are copies."""
        arguments = [*enumerate(operands[1]), *operands[2].items()]
        return [
            [key, lent.operation, list(lent.operands)]
            for key, value in arguments
            for lent in self._lent
            if lent.value is value
        ]

    def lend_argument(self, number: int, value: Any) -> None:
        """Note an argument that the code keeps; only the copy that it was given last counts."""
        self._lent = [lent for lent in self._lent if lent.value is not value]
        self._lent.append(Lent("kept", (None, number), value, self._write(value)))

    def _write_back(self) -> None:
        """Do to the code's containers what the test has done to its copies."""
        waiting, self._lent = self._lent, []
        for lent in waiting:
            written = self._write(lent.value)
            if written != lent.written:
                lent.written = written
                self._exchange("change", lent.operation, list(lent.operands), lent.value)
            if sys.getrefcount(lent.value) > 2:  # this call's argument and `lent`: nobody else's
                self._lent.append(lent)

    def _refresh(self) -> None:
        """Do to the test's copies what the code has done to its containers."""
        for lent in self._lent:
            try:
                new = self._exchange(lent.operation, *lent.operands)
            except Exception as exc:  # the code's: it has it no more
                if is_failure(exc):
                    raise
                continue
            if type(new) is type(lent.value):
                self._change(lent.value, new)
                lent.written = self._write(new)


def is_small(container: Any) -> bool:
    """Tell whether a container has so few items that each call may look at them."""
    return is_generator(container) or len(getattr(container, "__dict__", container)) <= MOST_ITEMS


def can_change(value: Any) -> bool:
    """Tell whether a value crosses as a copy and can change."""
    return type(value) in CHANGEABLE or is_generator(value)


def change(container: Any, new: Any) -> None:
    """Make a container what its copy on the other side has become.

    Raises:
        RefusedValue: it cannot become that.
    """
    if type(container) is not type(new) or not can_change(new):
        raise RefusedValue("a change of an argument")
    if is_generator(new):
        container.bit_generator.state = new.bit_generator.state
        return
    if isinstance(container, (list, bytearray, array.array)):
        container[:] = new
        return
    if isinstance(container, types.SimpleNamespace):
        container, new = vars(container), vars(new)
    container.clear()
    if isinstance(container, collections.deque):
        container.extend(new)
    else:
        container.update(new)


def has_leaves(value: Any) -> bool:
    """Tell whether a value holds anything but empty containers."""
    if not isinstance(value, (*CHANGEABLE, tuple, frozenset)):
        return True
    value = vars(value) if isinstance(value, types.SimpleNamespace) else value
    return any(map(has_leaves, value.values() if isinstance(value, dict) else value))
