"""Exceptions of the other process of a test: `peer.py` makes them here as real ones.

They are of the same class where that is a builtin or of the standard library, else of one that is
made of the same name and bases. Each keeps a proxy of the exception that it stands for.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from .peer import Peer

_OWN = "agent_r1_"
"""Begins the names of what is kept in an exception besides its own attributes."""


def is_exception_class(value: object) -> TypeGuard[type[BaseException]]:
    """Tell whether a value is a class of exceptions."""
    return issubclass(type(value), type) and issubclass(value, BaseException)  # type: ignore[arg-type]


def read_args(error: BaseException) -> tuple[Any, ...]:
    """Return what a builtin exception is made of: an OSError is of its file too."""
    return OSError.__reduce__(error)[1] if isinstance(error, OSError) else error.args  # type: ignore[return-value]


def read_state(error: BaseException) -> dict[str, Any]:
    """Return the attributes of an exception, such as its notes."""
    return {name: value for name, value in vars(error).items() if not name.startswith(_OWN)}


def make_exception(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Return an exception, without a call of the class's own methods."""
    base: Any = kind
    while base.__module__ != "builtins":
        base = base.__base__
    try:
        made = base.__new__(kind, *args)
        base.__init__(made, *args)
    except Exception:  # noqa: BLE001 - its class wants other arguments
        made = base.__new__(kind)
        made.args = args
    return made


def make_exception_class(
    peer: Peer, name: str, bases: tuple[type[BaseException], ...]
) -> type[BaseException]:
    """Return what stands for a class of exceptions that the other side has defined."""

    def new(kind: Any, *args: Any, **kwargs: Any) -> Any:
        if kind is made:
            return peer.request("call", made, list(args), kwargs)
        return super(made, kind).__new__(kind, *args)  # a class of this side derives from it

    def init(error: Any, *args: Any, **_: Any) -> None:
        if type(error) is not made:
            super(made, error).__init__(*args)

    methods = {"__new__": new, "__init__": init, "__getattr__": _get_attribute, "__eq__": _is_equal}
    shown = {f"__{act.__name__}__": _ask(act) for act in (str, repr, hash)}
    made: Any = type(name, bases, methods | shown)
    return made


def _get_attribute(error: Any, name: str) -> Any:
    if name.startswith(_OWN):
        raise AttributeError(name)
    return getattr(error.agent_r1_proxy, name)


def _is_equal(error: Any, other: Any) -> Any:
    if type(other) is not type(error) or not hasattr(error, "agent_r1_proxy"):
        return NotImplemented
    return operator.eq(error.agent_r1_proxy, other.agent_r1_proxy)


def _ask(act: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a method that the other side answers, if the exception comes from there."""

    def method(error: Any) -> Any:
        if hasattr(error, "agent_r1_proxy"):
            return act(error.agent_r1_proxy)
        return getattr(BaseException, f"__{act.__name__}__")(error)

    return method


def leave_block(method: Callable[..., Any], manager: Any, kind: Any, error: Any) -> Any:
    """Let a context manager leave a block, with a traceback of this side."""
    if error is None:
        return method(manager, kind, None, None)
    try:
        raise error
    except BaseException as exc:  # noqa: BLE001 - the manager decides
        return method(manager, type(exc), exc, exc.__traceback__)
