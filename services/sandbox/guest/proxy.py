"""Stands for an object of the other process of a test, and asks `peer.py` for what is done to it.

A proxy of an object that derives from a type that cannot change (`FIXED_BASES`) is itself of that
type, so that `str.join` or `range` take it.

Where an operation has a value of this side as its other operand, an object of the other side is the
plain value it derives from, or the operation fails: see `_make_binary`.
"""

from __future__ import annotations

import builtins
import collections
import copy
import functools
import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

from .asserts import check_kept
from .values import FIXED_BASES, RefusedValue

if TYPE_CHECKING:
    from .peer import Peer

MOST_AHEAD = 256
"""Most items of an iterator that are fetched at once."""

_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_ARITHMETIC = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("and_", "or_", "xor", "lshift", "rshift"),
)
UNARY: dict[str, Callable[..., Any]] = {
    **{name: getattr(builtins, name) for name in ("iter", "len", "str", "repr", "bool", "hash")},
    **{name: getattr(builtins, name) for name in ("int", "float", "complex", "abs", "round")},
    **{name: getattr(builtins, name) for name in ("reversed", "bytes", "format")},
    **{name: getattr(operator, name) for name in ("neg", "pos", "invert", "index")},
    **{name: getattr(operator, name) for name in ("getitem", "setitem", "delitem")},
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "doc": lambda value: value.__doc__,
    "aiter": lambda value: type(value).__aiter__(value),
    "enter": lambda value: type(value).__enter__(value),
}
BINARY = {name: getattr(operator, name) for name in (*_COMPARISONS, *_ARITHMETIC)}


@dataclass(eq=False)
class Remote:
    """Stand-in for an object of the other side, with what is known of it here."""

    peer: Peer
    number: int
    kind: int
    kind_name: str
    base: type | None
    snapshot: tuple[Any] | None
    shown: type | None = None
    """The class of the standard library that it is an object of."""
    ahead: collections.deque[Any] = field(default_factory=collections.deque)
    ended: bool = False
    fetched: int = 0

    def plain(self, proxy: Proxy) -> Any:
        """Return the value as the builtin type it derives from.

        Raises:
            RefusedValue: the other side says something else.
        """
        if self.snapshot is not None:
            return self.snapshot[0]
        value = self.peer.request("plain", proxy)
        if type(value) is not self.base:
            raise RefusedValue("a value of another type than it had")
        return value

    def fetch(self, proxy: Proxy) -> None:
        """Get the next items of an iterator: one by one at first, then more at once."""
        count = min(MOST_AHEAD, max(1, self.fetched - 4))
        items, self.ended = self.peer.request("take", proxy, count)
        self.fetched += len(items)
        self.ahead.extend(items)


class Proxy:
    """An object of the other side; `make_proxy` makes it, its operators are made below."""

    __slots__ = ()

    def __new__(cls, *_: Any) -> Any:
        raise AttributeError("an object of the other side cannot be made here")

    @property
    def __class__(self) -> type:  # type: ignore[reportIncompatibleMethodOverride]
        # So that `isinstance` finds the standard type it derives from.
        return remote_of(self).base or remote_of(self).shown or Proxy

    def __getattr__(self, name: str) -> Any:
        if name == "__signature__":
            return read_signature(remote_of(self).peer.request("signature", self))
        if name.startswith("__array"):  # NumPy would read memory where the other side says
            raise AttributeError(name)
        return remote_of(self).peer.request("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        remote_of(self).peer.request("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        remote_of(self).peer.request("del", self, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return remote_of(self).peer.request("call", self, list(args), kwargs)

    def __instancecheck__(self, value: Any) -> bool:
        return is_proxy(value) and bool(remote_of(self).peer.request("isinstance", value, self))

    def __exit__(self, *error: Any) -> Any:
        return _leave(self, "exit", *error)

    async def __anext__(self) -> Any:
        found = remote_of(self).peer.request("anext", self)
        if not found:
            raise StopAsyncIteration
        return found[0]

    async def __aenter__(self) -> Any:
        return remote_of(self).peer.request("aenter", self)

    async def __aexit__(self, *error: Any) -> Any:
        return _leave(self, "aexit", *error)

    def __deepcopy__(self, _: object) -> Any:
        return remote_of(self).peer.request("deepcopy", self)

    def __hash__(self) -> int:
        remote = remote_of(self)
        if remote.base is not None:
            return hash(remote.plain(self))
        return remote.peer.request("hash", self)

    def __next__(self) -> Any:
        remote = remote_of(self)
        if not remote.ahead and not remote.ended:
            remote.fetch(self)
        if not remote.ahead:
            raise StopIteration
        return remote.ahead.popleft()


def remote_of(proxy: Any) -> Remote:
    return object.__getattribute__(proxy, "agent_r1_remote")


def is_proxy(value: object) -> TypeGuard[Proxy]:
    """Tell whether a value is an object of the other side."""
    return issubclass(type(value), Proxy)


def type_of(value: object) -> Any:
    """Return the class of a value, which of an object of the other side is there too."""
    return remote_of(value).peer.request("type", value) if is_proxy(value) else type(value)


def make_proxy(remote: Remote) -> Proxy:
    """Return what stands for an object of the other side."""
    base: Any = remote.base
    if remote.snapshot is None or base not in _PROXIES:
        proxy = object.__new__(_find_object_proxy(remote.shown))
    else:
        proxy = base.__new__(_PROXIES[base], remote.snapshot[0])
    object.__setattr__(proxy, "agent_r1_remote", remote)
    return proxy


def write_signature(function: Any) -> list[Any]:
    """Return the parameters of a function and what it returns, as `read_signature` takes them."""
    found = inspect.signature(function)
    rows: list[Any] = [
        (one.name, int(one.kind), {"default": one.default, "annotation": one.annotation})
        for one in found.parameters.values()
    ]
    rows.append(("", 0, {"return_annotation": found.return_annotation}))
    empty = inspect.Signature.empty
    return [[*row, {k: v for k, v in rest.items() if v is not empty}] for *row, rest in rows]


def read_signature(rows: list[Any]) -> inspect.Signature:
    """Return the signature of a function of the other side."""
    *rows, (_, _, rest) = rows
    return inspect.Signature([inspect.Parameter(row[0], row[1], **row[2]) for row in rows], **rest)


def kind_of(value: object) -> str | None:
    """Return the name of the class of an object of the other side; None of any other value."""
    return remote_of(value).kind_name if is_proxy(value) else None


def plain_of(value: object) -> Any:
    """Return what a value is without behaviour of its own; the value itself where it has none."""
    if is_proxy(value) and remote_of(value).base is not None:
        return remote_of(value).plain(value)
    return value


def _leave(proxy: Proxy, operation: str, kind: Any, error: BaseException | None, _: Any) -> bool:
    """Leave a `with` block of the test's, and return whether the code swallows its exception."""
    try:
        swallows = bool(remote_of(proxy).peer.request(operation, proxy, kind, error))
    except BaseException as exc:
        check_kept(error, exc)
        raise
    check_kept(error, None if swallows else error)
    return swallows


def _make_unary(operation: str) -> Callable[..., Any]:
    def method(self: Proxy, *rest: Any) -> Any:
        return remote_of(self).peer.request(operation, self, *rest)

    return method


def _make_binary(operation: str, *, reflected: bool) -> Callable[[Proxy, Any], Any]:
    function = BINARY[operation]

    def method(self: Proxy, other: Any) -> Any:
        remote = remote_of(self)
        if is_proxy(other):
            same_kind = remote_of(other).kind == remote.kind
            if same_kind or operation not in _COMPARISONS:
                return remote.peer.request(operation, *_order(self, other, reflected))
            other = plain_of(other)
        if remote.base is None or is_proxy(other):
            return NotImplemented
        return function(*_order(remote.plain(self), other, reflected))

    return method


def _order(first: Any, second: Any, reflected: bool) -> tuple[Any, Any]:
    return (second, first) if reflected else (first, second)


def _get_attribute(proxy: Proxy, name: str) -> Any:
    """Get an attribute of a class's own, not that of the type it derives from."""
    if name.startswith("__"):
        return object.__getattribute__(proxy, name)
    return remote_of(proxy).peer.request("get", proxy, name)


for _name in UNARY:
    if _name not in ("hash", "deepcopy", "doc"):
        setattr(Proxy, f"__{_name}__", _make_unary(_name))
for _name in BINARY:
    _dunder = _name.rstrip("_")
    setattr(Proxy, f"__{_dunder}__", _make_binary(_name, reflected=False))
    if _name in _ARITHMETIC:
        setattr(Proxy, f"__r{_dunder}__", _make_binary(_name, reflected=True))


def _derive(base: type, **namespace: Any) -> type:
    namespace["__doc__"] = property(lambda proxy: remote_of(proxy).peer.request("doc", proxy))
    # The name is how errors of the tests call it.
    return type("object of the code", (Proxy, base), namespace)


@functools.cache
def _find_object_proxy(_: type | None) -> type:
    """Return the class of proxies of objects that are shown as one of the standard library.

    asyncio remembers for a class whether its objects are coroutines, so each has one of its own.
    """
    return _derive(object, __slots__=("__weakref__", "agent_r1_remote"))


_PROXIES = {base: _derive(base, __getattribute__=_get_attribute) for base in FIXED_BASES}
