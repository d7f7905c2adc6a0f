"""Values as plain data: what crosses between the code under test and its tests.

`Writer` turns a value into JSON, `Reader` makes the same value of it, of the exact builtin or
standard type, so that it compares as Python would have compared it. Nothing of either side runs on
the other: what has behaviour of its own crosses as a reference, which `peer.py` makes and resolves.
"""

from __future__ import annotations

import array
import builtins
import collections
import datetime
import importlib
import pathlib
import re
import sys
import types
import uuid
import zoneinfo
from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

FRAME_BYTES = 16 << 20
"""Largest frame, and so roughly the largest value."""
MAX_ITEMS = 1_000_000
MAX_DEPTH = 100
_JSON_INT = 1 << 53
_COPIES: dict[type, Callable[[Any], Any]] = {
    int: int.__pos__,
    float: float.__pos__,
    complex: lambda value: complex.__add__(value, 0j),
    str: str.__str__,
    bytes: lambda value: bytes(memoryview(value)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    bytearray: lambda value: bytearray(memoryview(value)),
    list: lambda value: list(list.__iter__(value)),
    dict: lambda value: dict(dict.items(value)),
    set: lambda value: set(set.__iter__(value)),
}
_STANDARD_MODULES = sys.stdlib_module_names - {"unittest"}
"""Without what decides whether a test has passed."""
_INTERPRETER_TYPES = {kind.__name__: kind for kind in vars(types).values() if type(kind) is type}
PLAIN_BASES = tuple(_COPIES)
"""Classes that the solution's own may derive from: the first seven cannot change."""
FIXED_BASES = PLAIN_BASES[:7]


class RefusedValue(BaseException):
    """A value does not cross; no test can mistake this for an exception of the code."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.agent_r1_text = f"Error: the tests cannot read {what}"


class Writer:
    """Writes one message.

    Args:
        refer: writes a value that is not plain data.
    """

    def __init__(self, refer: Callable[[Any], Any]) -> None:
        self._refer = refer
        self._items = 0

    def write(self, value: Any, depth: int = 0) -> Any:
        """Return the JSON of a value.

        Raises:
            RefusedValue: it has too many items or is nested too deeply.
        """
        kind = type(value)
        if value is None or kind in (bool, str, float):
            return value
        if kind is int:
            return value if -_JSON_INT < value < _JSON_INT else {"int": format(value, "x")}
        if depth > MAX_DEPTH:
            raise RefusedValue(f"a value nested more than {MAX_DEPTH} deep")
        if kind is list:
            return self.write_all(value, depth)
        if kind in _ATOMS:
            name, write_atom, _ = _ATOMS[kind]
            return {name: write_atom(value)}
        if kind in _CONTAINERS:
            name, items_of, _ = _CONTAINERS[kind]
            return {name: self.write_all(items_of(value), depth)}
        if kind in _MAPPINGS:
            pairs = [self.write_all(pair, depth) for pair in kind.items(value)]
            return {kind.__name__: pairs}
        if issubclass(kind, type) and getattr(builtins, value.__name__, None) is value:
            return {"builtin": value.__name__}
        return self._write_numpy(value, depth) or _write_mpmath(value) or self._refer(value)

    def write_all(self, values: Iterable[Any], depth: int = 0) -> list[Any]:
        """Write the items of a container."""
        written: list[Any] = []
        for value in values:
            self._items += 1
            if self._items > MAX_ITEMS:
                raise RefusedValue(f"a value of more than {MAX_ITEMS} items")
            written.append(self.write(value, depth + 1))
        return written

    def _write_numpy(self, value: Any, depth: int) -> Any:
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return None
        if isinstance(value, numpy.generic):
            item = value.item()
            return {"plain": self.write(item if type(item) in _SCALARS else float(item), depth)}
        if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufcSU":
            array = numpy.asarray(value)  # not of a class of the code's
            return {"ndarray": [array.dtype.str, list(array.shape), array.tobytes().hex()]}
        if is_generator(value):
            return {"Generator": self.write_all([value.bit_generator.state], depth)}
        return None


class Reader:
    """Reads one message.

    Args:
        resolve: returns what a reference stands for, given its name and content; raises KeyError
            for names it does not know.
    """

    def __init__(self, resolve: Callable[[str, Any], Any]) -> None:
        self._resolve = resolve

    def read(self, written: Any) -> Any:
        """Return the value.

        Raises:
            RefusedValue: this is not what `Writer` writes.
        """
        try:
            return self._read(written, 0)
        except (
            TypeError,
            ValueError,
            AttributeError,
            LookupError,
            ArithmeticError,
            re.error,
        ) as exc:
            raise RefusedValue("a value that cannot be read") from exc

    def _read(self, written: Any, depth: int) -> Any:
        if written is None or type(written) in (bool, int, float, str):
            return written
        if depth > MAX_DEPTH:
            raise RefusedValue(f"a value nested more than {MAX_DEPTH} deep")
        if type(written) is list:
            return [self._read(item, depth + 1) for item in written]
        ((name, content),) = written.items()
        if name in _ATOM_READERS:
            return _ATOM_READERS[name](content)
        if name in _CONTAINER_READERS:
            return _CONTAINER_READERS[name](self._read(_as_list(content), depth))
        if name in _MAPPING_READERS:
            pairs = [self._read(_as_list(pair), depth + 1) for pair in _as_list(content)]
            return _MAPPING_READERS[name](pairs)
        if name == "plain":
            return self._read(content, depth)
        return self._resolve(name, content)


def _as_list(content: Any) -> list[Any]:
    if type(content) is not list:
        raise ValueError("no list")
    return content


def write_plain_base(value: Any) -> Any:
    """Return a copy of `value` as the builtin type it derives from.

    No method of the value's own class takes part.

    Raises:
        TypeError: it derives from none.
    """
    for base, copy in _COPIES.items():
        if isinstance(value, base):
            return copy(value)
    raise TypeError(f"{type(value).__name__!r} derives from no plain type")


def name_standard(kind: type) -> str | None:
    """Return the module and name of the class of the standard library that a class derives from."""
    for base in kind.__mro__[:-1]:
        if str(base.__module__).partition(".")[0] in _STANDARD_MODULES:
            return f"{base.__module__}.{base.__qualname__}"
    return None


def find_standard(module: str, name: str) -> type | None:
    """Return a class of the standard library, or of the interpreter, that is known here by now."""
    if module.partition(".")[0] not in _STANDARD_MODULES:
        return None
    found = getattr(sys.modules.get(module), name, None)
    found = _INTERPRETER_TYPES.get(name) if module == "builtins" and found is None else found
    return found if isinstance(found, type) and found not in PLAIN_BASES else None


def read_number(value: Any) -> bool | int | Fraction | float | complex | None:
    """Return the plain number that a number of SymPy equals; None of anything else."""
    sympy = sys.modules.get("sympy")
    if sympy is None or not isinstance(value, sympy.Basic):
        return None
    if value in (sympy.true, sympy.false):
        return bool(value)
    if not value.is_number:
        return None
    if value.is_Rational:
        number = Fraction(int(value.p), int(value.q))
        return number.numerator if value.is_Integer else number
    try:
        return float(value)
    except TypeError:
        return complex(value)


def _write_view(view: memoryview) -> list[Any]:
    if view.ndim != 1:
        raise RefusedValue("a memoryview of several dimensions")
    return [view.tobytes().hex(), view.format]


def _read_array(content: Any) -> Any:
    import numpy

    dtype, shape, data = content
    if numpy.dtype(dtype).kind not in "biufcSU":
        raise ValueError(dtype)
    return numpy.frombuffer(bytes.fromhex(data), dtype).reshape(shape).copy()


def _read_builtin(content: Any) -> type:
    found = getattr(builtins, content)
    if not isinstance(found, type):
        raise ValueError(content)
    return found


def is_generator(value: Any) -> bool:
    """Tell whether a value is what NumPy's `default_rng` makes: of others, C reads the state."""
    random = sys.modules.get("numpy.random")
    if random is None or type(value) is not random.Generator:
        return False
    return type(value.bit_generator) is random.PCG64


def _read_generator(items: list[Any]) -> Any:
    import numpy.random

    bits = numpy.random.PCG64()
    bits.state = items[0]
    return numpy.random.Generator(bits)


def _write_mpmath(value: Any) -> Any:
    mpmath = sys.modules.get("mpmath")
    if mpmath is not None and isinstance(value, mpmath.mpc):
        return {"complex": [float(value.real), float(value.imag)]}
    if mpmath is None or not isinstance(value, mpmath.mpf):
        return None
    sign, number, exponent, _ = (+value)._mpf_  # of a constant, its value
    if not mpmath.isfinite(value):
        return {"mpf": [str(value), 0]}
    return {"mpf": [f"{-number if sign else number:x}", int(exponent)]}


def _read_mpmath(content: Any) -> Any:
    mpmath: Any = importlib.import_module("mpmath")
    text, exponent = content
    if text in ("+inf", "-inf", "nan"):
        return mpmath.mpf(text)
    return mpmath.make_mpf(mpmath.libmp.from_man_exp(int(text, 16), int(exponent)))


def _write_clock(value: Any) -> tuple[Any, ...]:
    zone = value.tzinfo
    if type(zone) not in (type(None), datetime.timezone, zoneinfo.ZoneInfo):
        offset = value.utcoffset()  # at this time, which is all that crosses of other zones
        zone = None if offset is None else datetime.timezone(offset, value.tzname() or "")
    return value.replace(tzinfo=None).isoformat(), value.fold, zone


def _read_clock(kind: Any, items: list[Any]) -> Any:
    text, fold, zone = items
    return kind.fromisoformat(text).replace(fold=fold, tzinfo=zone)


def _no_items(value: Any) -> Any:
    return value


_SCALARS = (bool, int, float, complex, str, bytes, datetime.datetime, datetime.timedelta)
# type: (name, write, read). What has no items of its own.
_ATOMS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    int: ("int", lambda value: format(value, "x"), lambda text: int(text, 16)),
    complex: (
        "complex",
        lambda value: [value.real, value.imag],
        lambda parts: complex(float(parts[0]), float(parts[1])),
    ),
    bytes: ("bytes", bytes.hex, bytes.fromhex),
    bytearray: ("bytearray", bytearray.hex, bytearray.fromhex),
    memoryview: (
        "memoryview",
        _write_view,
        lambda parts: memoryview(bytes.fromhex(parts[0])).cast(parts[1]),
    ),
    array.array: (
        "array",
        lambda value: [value.typecode, value.tobytes().hex()],
        lambda parts: array.array(parts[0], bytes.fromhex(parts[1])),
    ),
    Fraction: (
        "Fraction",
        lambda value: [f"{value.numerator:x}", f"{value.denominator:x}"],
        lambda parts: Fraction(int(parts[0], 16), int(parts[1], 16)),
    ),
    Decimal: ("Decimal", str, Decimal),
    range: (
        "range",
        lambda value: [f"{part:x}" for part in (value.start, value.stop, value.step)],
        lambda parts: range(*(int(part, 16) for part in parts)),
    ),
    datetime.date: ("date", datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.timedelta: (
        "timedelta",
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: datetime.timedelta(*map(int, parts)),
    ),
    pathlib.PurePosixPath: ("PurePosixPath", str, pathlib.PurePosixPath),
    pathlib.PureWindowsPath: ("PureWindowsPath", str, pathlib.PureWindowsPath),
    pathlib.PosixPath: ("Path", str, pathlib.Path),
    uuid.UUID: ("UUID", str, uuid.UUID),
    zoneinfo.ZoneInfo: ("ZoneInfo", lambda value: value.key, zoneinfo.ZoneInfo),
    type(...): ("Ellipsis", lambda _: None, lambda _: ...),
    type(NotImplemented): ("NotImplemented", lambda _: None, lambda _: NotImplemented),
}
_ATOM_READERS: dict[str, Callable[[Any], Any]] = {
    **{name: read for name, _, read in _ATOMS.values()},
    "builtin": _read_builtin,
    "ndarray": _read_array,
    "mpf": _read_mpmath,
}
# type: (name, items, read).
_CONTAINERS: dict[type, tuple[str, Callable[[Any], Iterable[Any]], Callable[[Any], Any]]] = {
    tuple: ("tuple", _no_items, tuple),
    set: ("set", _no_items, set),
    frozenset: ("frozenset", _no_items, frozenset),
    slice: ("slice", lambda value: (value.start, value.stop, value.step), lambda v: slice(*v)),
    collections.deque: (
        "deque",
        lambda value: (value.maxlen, *value),
        lambda items: collections.deque(items[1:], items[0]),
    ),
    collections.defaultdict: (
        "defaultdict",
        lambda value: (value.default_factory, *dict.items(value)),
        lambda items: collections.defaultdict(items[0], items[1:]),
    ),
    datetime.timezone: (
        "timezone",
        lambda value: value.__getinitargs__(),
        lambda items: datetime.timezone(*items),
    ),
    datetime.time: ("time", _write_clock, partial(_read_clock, datetime.time)),
    datetime.datetime: ("datetime", _write_clock, partial(_read_clock, datetime.datetime)),
    re.Pattern: (
        "Pattern",
        lambda value: (value.pattern, value.flags),
        lambda items: re.compile(*items),
    ),
    types.SimpleNamespace: (
        "SimpleNamespace",
        lambda value: vars(value).items(),
        lambda items: types.SimpleNamespace(**dict(items)),
    ),
    collections.ChainMap: (
        "ChainMap",
        lambda value: value.maps,
        lambda items: collections.ChainMap(*items),
    ),
    collections.UserList: ("UserList", lambda value: value.data, collections.UserList),
    collections.UserString: (
        "UserString",
        lambda value: (value.data,),
        lambda items: collections.UserString(items[0]),
    ),
    type({}.keys()): ("keys", _no_items, lambda items: dict.fromkeys(items).keys()),
    type({}.values()): ("values", _no_items, lambda items: dict(enumerate(items)).values()),
    type({}.items()): ("items", _no_items, lambda items: dict(items).items()),
}
_CONTAINER_READERS = {
    **{name: read for name, _, read in _CONTAINERS.values()},
    "Generator": _read_generator,
}
_MAPPINGS: dict[type, Callable[[Any], Any]] = {
    dict: dict,
    collections.OrderedDict: collections.OrderedDict,
    collections.Counter: lambda pairs: collections.Counter(dict(pairs)),
    collections.UserDict: lambda pairs: collections.UserDict(dict(pairs)),
}
STANDARD_TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (*_ATOMS, *_CONTAINERS, *_MAPPINGS)
    if not hasattr(builtins, kind.__name__) and kind is not re.Pattern  # which nobody calls
}
"""Types that cross as a copy and have to be imported, by name."""
_MAPPING_READERS = {kind.__name__: read for kind, read in _MAPPINGS.items()}
