"""What crosses between the code and its tests: plain values, references, refusals."""

from __future__ import annotations

import array
import collections
import contextlib
import datetime
import json
import pathlib
import queue
import re
import threading
import types
import uuid
import zoneinfo
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import dateutil.tz
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.sandbox.guest.peer import Peer
from agent_r1.sandbox.guest.tester import run_test
from agent_r1.sandbox.guest.values import (
    MAX_DEPTH,
    MAX_ITEMS,
    Reader,
    RefusedValue,
    Writer,
)


def refuse(*_: Any) -> Any:
    raise RefusedValue("a reference")


def cross(value: Any) -> Any:
    return Reader(refuse).read(json.loads(json.dumps(Writer(refuse).write(value))))


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
    | st.fractions()
    | st.decimals(allow_nan=False)
    | st.datetimes()
    | st.timedeltas(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers() | st.text(), inner)
        | st.sets(st.integers() | st.text())
    ),
    max_leaves=8,
)


@settings(max_examples=50)
@given(PLAIN)
def test_plain_values_arrive_as_they_were(value: Any):
    found = cross(value)
    assert found == value
    assert type(found) is type(value)


UTC = datetime.timezone(datetime.timedelta(hours=1))


@pytest.mark.parametrize(
    "value",
    [
        10**5000,
        float("inf"),
        -0.0,
        "\ud800",
        Decimal("3.50"),
        Fraction(1, 3),
        range(3, 9, 2),
        bytearray(b"x"),
        frozenset({(1, 2)}),
        collections.OrderedDict(b=1, a=2),
        collections.Counter("aab"),
        collections.deque([1, 2], 3),
        collections.UserList([1, [2]]),
        collections.UserDict(a=1),
        collections.UserString("x"),
        datetime.date(2024, 2, 29),
        datetime.time(1, 2, 3, 4),
        datetime.datetime(2024, 2, 29, 1, tzinfo=UTC),
        re.compile("a+", re.I),
        types.SimpleNamespace(a=1, b=types.SimpleNamespace()),
        collections.ChainMap({"a": 1}, {"b": 2}),
        UTC,
        datetime.timezone(datetime.timedelta(hours=1), "here"),
        zoneinfo.ZoneInfo("Europe/Paris"),
        pathlib.Path("a/b"),
        pathlib.PurePosixPath("a"),
        pathlib.PureWindowsPath("a"),
        uuid.UUID(int=7),
        array.array("d", [1.5]),
        memoryview(b"abc"),
        int,
        dict,
        ...,
        {1: 2}.keys(),
        {1: 2}.items(),
    ],
    ids=lambda value: f"{type(value).__name__}",
)
def test_standard_types_compare_as_before(value: Any):
    found = cross(value)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("kind", [datetime.datetime, datetime.time])
def test_times_keep_their_zone_and_fold(kind: type):
    # 2:30 in Paris on 27 October 2024 comes twice; with fold 1 summer time is over.
    day = datetime.datetime(2024, 10, 27, 2, 30, fold=1)
    value = day if kind is datetime.datetime else day.time()
    for zone in (zoneinfo.ZoneInfo("Europe/Paris"), datetime.timezone(datetime.timedelta(), "X")):
        found = cross(value.replace(tzinfo=zone))
        assert (found.tzinfo, found.fold, found.tzname()) == (
            zone,
            1,
            value.replace(tzinfo=zone).tzname(),
        )
    # Of a zone of another class, what it is at that time.
    found = cross(day.replace(tzinfo=dateutil.tz.gettz("Europe/Paris")))
    assert (found.utcoffset(), found.tzname()) == (datetime.timedelta(hours=1), "CET")


def test_what_python_finds_equal_stays_equal_and_no_more():
    assert cross(Decimal("3.5")) == 3.5
    assert cross({1: 0, 2: 0}.keys()) == {1, 2}
    assert cross(collections.UserList([1])) == [1]
    assert cross(memoryview(b"ab")) == b"ab"
    assert cross(collections.defaultdict(int, a=1)) == {"a": 1}
    assert cross(datetime.UTC) is datetime.UTC
    assert cross(range(3)) != [0, 1, 2]
    assert cross((1, 2)) != [1, 2]
    assert list(cross({1: 5}.values())) == [5]


def test_numpy_values_arrive_with_type_and_shape():
    assert cross(np.float64(0.5)) == 0.5
    assert cross([np.int64(3), np.bool_(False)]) == [3, False]
    found = cross(np.arange(6, dtype=np.int16).reshape(2, 3))
    assert found.dtype == np.int16
    assert found.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_an_array_of_a_class_of_its_own_is_an_array():
    class Agreeing(np.ndarray):
        def __eq__(self, other: object) -> Any:
            return np.array([True])

        __hash__ = None  # type: ignore[assignment]

    found = cross(np.array([1, 2]).view(Agreeing))
    assert type(found) is np.ndarray
    assert found.tolist() == [1, 2]


def nest(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (nest(MAX_DEPTH + 1), "nested more than 100 deep"),
        (nest(100_000), "nested more than 100 deep"),
        ([0] * (MAX_ITEMS + 1), "more than 1000000 items"),
        (memoryview(bytes(4)).cast("B", (2, 2)), "several dimensions"),
    ],
    ids=["deep", "very deep", "long", "memoryview"],
)
def test_what_is_too_large_is_refused_when_it_is_written(value: Any, problem: str):
    with pytest.raises(RefusedValue, match=problem):
        Writer(refuse).write(value)


@pytest.mark.parametrize(
    "written",
    [
        {},
        {"int": "zz"},
        {"int": 3},
        {"nonsense": []},
        {"set": [[]]},
        {"tuple": "ab"},
        {"dict": [[1]]},
        {"dict": {"a": 1}},
        {"builtin": "print"},
        {"builtin": "no such type"},
        {"Fraction": ["1", "0"]},
        {"Decimal": "x"},
        {"deque": []},
        {"ndarray": ["O", [1], ""]},
        {"ndarray": ["<i8", [10**9], ""]},
        {"Generator": [{"dict": []}]},
        {"Generator": [{"dict": [["bit_generator", "MT19937"], ["state", 1]]}]},
        {"mpf": ["x", 0]},
        {"datetime": ["2024-01-01T00:00:00", 2, None]},
        {"Pattern": ["(", 0]},
        {"a": 1, "b": 2},
        nest(MAX_DEPTH + 1),
    ],
    ids=str,
)
def test_nonsense_is_refused_when_it_is_read(written: Any):
    with pytest.raises(RefusedValue):
        Reader(refuse).read(written)


# --- both sides, each in a thread of its own ----------------------------------------------------


class _Closed(BaseException):
    """The channel is closed: ends the thread of the code."""


class Pair:
    """A test's process and the code's, without sandboxes."""

    def __init__(self, code: str) -> None:
        scope: dict[str, Any] = {"__name__": "solution"}
        exec(compile(code, "<code>", "exec", dont_inherit=True), scope)
        self._to_code: queue.Queue[str | None] = queue.Queue()
        self._to_tests: queue.Queue[str] = queue.Queue()
        self.sent_to_code: list[str] = []
        self.code = Peer(
            lambda message: self._to_tests.put(json.dumps(message)),
            self._receive_in_code,
            scope=scope,
            describe=repr,
        )
        self.tests = Peer(
            self._send_to_code,
            lambda: json.loads(self._to_tests.get(timeout=10.0)),
            scope=None,
            describe=repr,
        )
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def run(self, test: str, setup: str = "") -> None:
        run_test({"setup": setup, "test": test, "builtins": []}, self.tests)

    def close(self) -> None:
        self._to_code.put(None)
        self._thread.join()
        self.tests.close()

    def _send_to_code(self, message: Any) -> None:
        self.sent_to_code.append(json.dumps(message))
        self._to_code.put(self.sent_to_code[-1])

    def _receive_in_code(self) -> Any:
        message = self._to_code.get(timeout=10.0)
        if message is None:
            raise _Closed
        return json.loads(message)

    def _serve(self) -> None:
        with contextlib.suppress(_Closed):
            self.code.serve()


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    found = Pair(request.param)
    yield found
    found.close()


CODE = """
import asyncio, collections, contextlib, enum
import numpy as np

Point = collections.namedtuple("Point", "x y")

class Color(enum.Enum):
    RED = 1

class Stack(list):
    def push(self, item):
        self.append(item)

class Vector:
    def __init__(self, x):
        self.x = x
    def __add__(self, other):
        return Vector(self.x + other.x)
    def __eq__(self, other):
        return isinstance(other, Vector) and self.x == other.x
    def __hash__(self):
        return hash(self.x)
    def __len__(self):
        return self.x
    def __getitem__(self, index):
        return index * self.x
    def __enter__(self):
        return self
    def __exit__(self, *error):
        self.x = 0
    def __str__(self):
        return f"<{self.x}>"

class Failure(ValueError):
    def __init__(self, code):
        super().__init__(f"failed with {code}")
        self.code = code

class AnyValue:
    __hash__ = object.__hash__
    def __eq__(self, other):
        return True
    def __lt__(self, other):
        return True
    __ge__ = __le__ = __gt__ = __contains__ = __lt__
    def __sub__(self, other):
        return 0.0
    __rsub__ = __add__ = __mul__ = __sub__

class AnyNumber(int):
    def __eq__(self, other):
        return True
    __hash__ = int.__hash__
    def __sub__(self, other):
        return 0

class Counter:
    def __init__(self, items):
        self.items = items
    def __eq__(self, other):
        return True
    def first(self):
        return self.items[0]

FOUR = np.array([4])

class Memory:
    __array_interface__ = FOUR.__array_interface__

class Stop(StopIteration):
    pass

def stop(*_): raise StopIteration
def stop_too(*_): raise Stop
def same(value): return value
def fail(code): raise Failure(code)
def divide(x): return 1 / x
def count(n): yield from range(n)
def sort(values): values.sort()
def add_key(table, *, key): table[key] = 1
def apply(function, *args): return function(*args)
def adder(n): return lambda x: x + n
async def later(x):
    await asyncio.sleep(0)
    return x
def depth(node): return 0 if node is None else 1 + depth(node.next)
def look(node): return [node.value, hasattr(node, "_hidden"), hasattr(node, "__dict__")]
def probe(node): return hasattr(node, "check")
def peek(function): return function.__globals__
import sympy
class Word(str):
    def shout(self): return self.upper() + "!"
    def lower(self): return "own"
class Size(int):
    pass
class Table:
    "A table."
    def __init__(self):
        self.rows, self.counts = [], {"a": [1]}
    def __getitem__(self, key): return self.counts[key]
    def add(self, row): self.rows.append(row)
    def width(self): "How wide."; return len(self.rows)
class Door:
    async def __aenter__(self): return 3
    async def __aexit__(self, *error): return True
def half(): return sympy.Rational(1, 2)
def four(): return sympy.Integer(4)
def root(): return sympy.sqrt(2)
def word(text): return Word(text)
def default(): return collections.defaultdict(lambda: 7, a=1)
def count_in(table): table["x"] += 1; return table
async def ticks(n):
    for i in range(n):
        await asyncio.sleep(0)
        yield i
async def total(source): return sum([x async for x in source])
class Suppress:
    def __enter__(self):
        return self
    def __exit__(self, *error):
        return True
class Undecided:
    answers = [True, False]
    def __enter__(self): return self
    def __exit__(self, *error): return self
    def __bool__(self): return self.answers.pop()
def forget(later):
    if asyncio.iscoroutine(later):
        later.close()
def swallow(function, *args):
    try:
        return function(*args)
    except BaseException:
        return None
def excuse(function):
    try:
        function()
    except AssertionError as e:
        raise ValueError from e
def skip(function): return lambda *args: None
def wrap(function): return lambda *args: function(*args)
def clear(*containers, key=None):
    for container in (*containers, key or []):
        container.clear()
    return []
def clear_rows(rows):
    for row in rows:
        row.clear()
    return sum(rows, [])
def consume(values):
    found = []
    while values:
        found.append(values.pop(0))
    return found
def divide_or(x, default):
    try:
        return 1 / x
    except ZeroDivisionError:
        return default
def both(*functions):
    for function in functions:
        swallow(function)
def convert(function):
    try:
        return function()
    except Exception:
        raise ValueError
class Convert:
    def __enter__(self): return self
    def __exit__(self, kind, *error):
        if kind:
            raise ValueError
class Ignore(contextlib.ContextDecorator):
    def __init__(self, *kinds): self.kinds = kinds or (Exception,)
    def __enter__(self): return self
    def __exit__(self, kind, *error): return kind is not None and issubclass(kind, self.kinds)
def replace(cls):
    class New:
        def check(self): pass
        def verify(self): pass
    return New
def collect(items):
    found = []
    with contextlib.suppress(BaseException):
        for item in items:
            found.append(item)
    return found
def pop(values): return values.pop()
def remove(values, value):
    while value in values:
        values.remove(value)
    return len(values)
def retry(function):
    def call():
        while True:
            try:
                return function()
            except ValueError:
                pass
    return call
def deep():
    value = []
    for _ in range(200):
        value = [value]
    return value
def root_of(x):
    import mpmath
    return mpmath.sqrt(x)
def fill(space): space.b = 2
def roll(generator): return int(np.random.default_rng(generator).integers(1000))
history = []
def note(x): history.append(x)
def forge(node):
    node.check = lambda: True
def make(node): return type(node)(1)
import dataclasses, io, json, threading, traceback
@contextlib.contextmanager
def managed(log):
    log.append("in")
    try:
        yield log
    except ValueError as e:
        log.append(str(e))
        if e.args == ("pass",): raise
    finally:
        log.append("out")
@contextlib.asynccontextmanager
async def amanaged(kind):
    try:
        yield 3
    except kind:
        pass
def gen():
    got = []
    while True:
        try:
            got.append((yield len(got)))
        except ValueError as e:
            got.append(e)
            yield str(e)
class AppError(Exception): pass
class NotFound(AppError, KeyError):
    def __init__(self, key, hint=None):
        super().__init__(key)
        self.key, self.hint = key, hint
    def __str__(self): return f"no {self.key}"
def find(key): raise NotFound(key)
def chain(x):
    try: return 1 / x
    except ZeroDivisionError as e: raise AppError("chain") from e
def group(): raise ExceptionGroup("g", [ValueError(1), NotFound("k")])
def errors(): return [ValueError("a"), NotFound("b")]
def cause_of(f):
    try: f()
    except Exception as e: return [type(e.__cause__).__name__, str(e.__cause__)]
def split(f):
    found = []
    try: f()
    except* ValueError as g: found += [str(e) for e in g.exceptions]
    except* TypeError as g: found.append("type")
    return found
def parse(text): return json.loads(text)
@dataclasses.dataclass(frozen=True)
class P:
    x: int
def setx(p): p.x = 3
def opened(): return open("/no/such/file")
def noted():
    e = ValueError("n"); e.add_note("here"); e.code = 7
    raise e
@dataclasses.dataclass
class DataError(Exception):
    x: int
def data_error(x): return DataError(x)
class Log:
    def __init__(self): self.seen = []
    def __enter__(self): return self
    def __exit__(self, kind, error, place):
        self.seen = [kind is ValueError, isinstance(error, ValueError), place is not None]
        self.seen.append("ValueError" in traceback.format_exc())
        return True
class Obs:
    def __init__(self, log): self.log = log
    def notify(self, x): self.log.append(x)
    def clear(self): self.log.clear()
def buf(): return io.BytesIO(b"abc")
class Th(threading.Thread): pass
from collections.abc import Mapping
class M(Mapping):
    def __getitem__(self, k): return 1
    def __iter__(self): return iter([1])
    def __len__(self): return 1
class Meth:
    async def am(self): return 1
    def gm(self): yield 1
    def m(self): return 1
def grow(a): a.append(1); return a
def raiser(e): raise e
def same_error(e): return e
def caught(f):
    try: f()
    except Exception as e: return e
def later_raise(f):
    try: f()
    except KeyError as e: raise e
import unittest
def skip_test(*_): raise unittest.SkipTest
"""


@pytest.mark.parametrize("pair", [CODE], indirect=True, ids=["code"])
@pytest.mark.parametrize(
    "test",
    [
        "assert Point(1, 2) == (1, 2) and (1, 2) == Point(1, 2)",
        "assert [Point(1, 2)] == [(1, 2)] and isinstance(Point(1, 2), tuple)",
        "x, y = Point(1, 2)\nassert (x, y, Point(1, 2).y) == (1, 2, 2)",
        "assert sorted([Point(2, 1), Point(1, 1)]) == [(1, 1), (2, 1)]",
        "assert Color.RED is Color.RED and Color(1) == Color.RED and Color.RED.value == 1",
        "assert Color.RED != 1",
        "s = Stack()\ns.push(3)\nassert s == [3] and s[0] == 3 and len(s) == 1 and 3 in s",
        "assert Vector(1) + Vector(2) == Vector(3) and Vector(1) != Vector(2)",
        "assert Vector(1) != 1 and (Vector(1) + Vector(2)).x == 3",
        "assert len({Vector(1), Vector(1)}) == 1",
        "assert len(Vector(4)) == 4 and Vector(4)[2] == 8 and str(Vector(4)) == '<4>'",
        "assert isinstance(Vector(1), Vector) and not isinstance(3, Vector)",
        "v = Vector(1)\nv.x = 9\nassert v.x == 9 and hasattr(v, 'x') and not hasattr(v, 'y')",
        "with Vector(2) as v:\n    assert v.x == 2\nassert v.x == 0",
        "import copy\nv = Vector(2)\nw = copy.deepcopy(v)\nw.x = 3\nassert v.x == 2 and w.x == 3",
        "try:\n    fail(7)\nexcept Failure as e:\n    assert e.code == 7 and 'with 7' in str(e)\n"
        "else:\n    assert False",
        "try:\n    fail(7)\nexcept ValueError:\n    pass\nelse:\n    assert False",
        "import unittest\nwith unittest.TestCase().assertRaises(ZeroDivisionError):\n    divide(0)",
        "assert list(count(1000)) == list(range(1000))",
        "c = count(9)\nassert next(c) == 0 and next(c) == 1 and sum(c) == 35",
        "x = [3, 1, 2]\nassert sort(x) is None and x == [1, 2, 3]",
        "x = {}\nadd_key(x, key='a')\nassert x == {'a': 1}",
        "assert apply(lambda x: x * 2, 4) == 8 and apply(len, 'abc') == 3",
        "seen = []\napply(seen.append, 3)\nassert seen == [3]",
        "assert adder(2)(3) == 5 and apply(adder(2), 3) == 5",
        "def bad(): raise KeyError('x')\ntry:\n    apply(bad)\nexcept KeyError as e:\n"
        "    assert e.args == ('x',)\nelse:\n    assert False",
        "import asyncio\nassert asyncio.run(later(3)) == 3",
        "class Node:\n    def __init__(self, next): self.next = next\n"
        "assert depth(Node(Node(None))) == 2",
        "class Node:\n    value = 5\n    _hidden = 6\nassert look(Node()) == [5, False, False]",
        "assert same(3.0) == 3 and same(int) is int and same(None) is None",
        "assert four() == 4 and 4 == four() and four() + 1 == 5 and [1, 2, 3, 4, 5][four()] == 5",
        "assert half() == 0.5 and abs(half() - 0.5) < 1e-9 and str(half()) == '1/2'",
        "import math\nassert math.isclose(root(), 1.41421356, rel_tol=1e-6) and root() != 1",
        "import sympy\nassert half() == sympy.Rational(1, 2) and four() == sympy.Integer(4)",
        "assert '-'.join([word('a'), word('b')]) == 'a-b' and 'x'.startswith(word('x'))",
        "assert word('a').shout() == 'A!' and word('A').lower() == 'own' and word('a') in 'cab'",
        "assert list(range(Size(3))) == [0, 1, 2] and 'ab' * Size(2) == 'abab'",
        "assert '%s %s' % Point(1, 2) == '1 2' and Point(1, 2)._asdict() == {'x': 1, 'y': 2}",
        "d = default()\nassert d['b'] == 7 and d == {'a': 1, 'b': 7}",
        "import collections\nd = collections.defaultdict(lambda: 2)\n"
        "assert count_in(d) == {'x': 3} and d == {'x': 3}",
        "from collections import Counter as C\nc = C('a')\ncount_in(c)\nassert c == C('ax')",
        "import asyncio\nasync def run(): return [x async for x in ticks(3)]\n"
        "assert asyncio.run(run()) == [0, 1, 2]",
        "import asyncio\nasync def run():\n    t = ticks(2)\n"
        "    return [await t.__anext__(), await t.asend(None), await t.aclose()]\n"
        "assert asyncio.run(run()) == [0, 1, None]",
        "import asyncio\nasync def mine():\n    yield 2\n    yield 3\n"
        "assert asyncio.run(total(mine())) == 5",
        "import asyncio\nasync def run():\n    async with Door() as d:\n        divide(0)\n"
        "    return d\nassert asyncio.run(run()) == 3",
        "assert Table.__doc__ == 'A table.' and Table().width.__doc__ == 'How wide.'",
        "assert count.__doc__ is None and count.__name__ == 'count'",
        "assert type(Vector(1)) is Vector and type(Vector(1)) != Stack and type(same(1)) is int",
        "assert type(Point(1, 2)) is Point and type(word('a')) is Word and type('a') is str",
        "assert Vector(1).__class__ is Vector and type(Vector(1)).__name__ == 'Vector'",
        "try:\n    fail(7)\nexcept ValueError as e:\n    assert type(e) is Failure",
        "t = Table()\nt.rows.append(3)\nassert t.rows == [3] and t.width() == 1",
        "t = Table()\nrows = t.rows\nt.rows.append(3)\nrows.append(4)\nassert t.rows == [3, 4]",
        "t = Table()\nt.rows.append(Vector(2))\nassert t.rows[0].x == 2 and t.width() == 1",
        "t = Table()\nrows = t.rows\nt.add(3)\nassert rows == [3] and rows is t.rows",
        "t = Table()\nt['a'].append(2)\nassert t['a'] == [1, 2]",
        "t = Table()\nt.counts['a'].append(2)\nassert t.counts == {'a': [1, 2]}",
        # An argument that is used up.
        "x = [3, 1]\nassert consume(x) == [3, 1] and x == [] and len(x) == 0 and not x",
        "x = [3, 1]\nassert (consume(x), x) == ([3, 1], [])\nassert list(x) == []",
        "from collections import deque\nx = deque([3])\nclear(x)\nassert x == deque()",
        "x = [3, 1]\nfor y in consume(x):\n    assert y in (3, 1)\nassert x == []",
        "x = [3, 1]\nfound = []\nwhile x:\n    found.append(pop(x))\nassert found == [1, 3]",
        "x = [3]\nclear(x)\nx.append(4)\nassert all(y == 4 for y in x) and x == sorted(x)",
        "x = [1, 1]\nremove(x, 1)\nassert 1 not in x and not 1 in x and 2 not in [1]",
        "x = {'a': 1}\nclear(x)\nassert 'a' not in x and not x",
        "x = [3, 1]\nclear(x)\nx.append(4)\nassert 3 not in x and not 5 in [x]",
        "x = []\nclear(x)\nassert x == sorted(x) and all(y == 4 for y in x)",
        "for x, want in (([1, 1], []), ([1, 2], [2])):\n    remove(x, 1)\n    assert x == want",
        "import unittest\nt = unittest.TestCase()\nx = [3]\nclear(x)\nt.assertEqual(x, [])\n"
        "t.assertFalse(x)\nt.assertEqual(len(x), 0)",
        "x = {'a': 1}\nassert all(v == 2 for v in x.values()) or clear(key=x) or not x",
        # Exceptions that are meant, and asserts that they do not keep back.
        "for kind in (KeyError, ValueError):\n    assert same(1) == 1\n    with Ignore(kind):\n"
        "        raise kind\n    assert same(2) == 2",
        "import unittest\nwith unittest.TestCase().assertRaises(ValueError):\n"
        "    with Convert():\n        raise KeyError",
        "try:\n    with Ignore(KeyError):\n        assert divide(0) == 1\n"
        "except ZeroDivisionError:\n    pass",
        "tries = []\n@retry\ndef work():\n    tries.append(1)\n    if len(tries) < 3:\n"
        "        raise ValueError\n    return 7\nassert work() == 7 and len(tries) == 3",
        "def check(x):\n    y = divide(x)\n    assert y == 1\n    return y\n"
        "try:\n    apply(check, 0)\nexcept ZeroDivisionError: pass\nassert apply(check, 1) == 1",
        # Exceptions of either side, on the other one.
        "log = []\nwith managed(log):\n    raise ValueError('a')",
        "try:\n    with managed([]):\n        raise ValueError('pass')\n"
        "except ValueError as e:\n    assert e.args == ('pass',)\nelse:\n"
        "    assert False",
        "e = ValueError('pass')\ntry:\n    with managed([]):\n        raise e\n"
        "except ValueError as f:\n    assert e is f\nelse:\n    assert False",
        "try:\n    with managed([]):\n        raise KeyError('a')\n"
        "except KeyError: pass\nelse:\n    assert False",
        "import asyncio\nasync def run():\n    async with amanaged(KeyError) as x:\n"
        "        raise KeyError('q')\n    return 5\nassert asyncio.run(run()) == 5",
        "import asyncio\nasync def run():\n    async with amanaged(KeyError) as x:\n"
        "        raise OSError('q')\n    return 5\ntry:\n    asyncio.run(run())\n"
        "except OSError: pass\nelse: assert False",
        "class Mine(Exception): pass\nimport asyncio\nasync def run():\n"
        "    async with amanaged(Mine) as x:\n        raise Mine('q')\n    return 5\n"
        "assert asyncio.run(run()) == 5",
        "g = gen()\nassert next(g) == 0\nassert g.throw(ValueError('x')) == 'x'",
        "g = gen()\nnext(g)\nassert g.throw(ValueError) == ''",
        "g = gen()\nnext(g)\ntry:\n    g.throw(KeyError('x'))\nexcept KeyError as e:\n"
        "    assert e.args == ('x',)\nelse: assert False",
        "try:\n    find('k')\nexcept AppError as e:\n"
        "    assert e.key == 'k' and str(e) == 'no k'\nelse: assert False",
        "try:\n    find('k')\nexcept KeyError as e:\n"
        "    assert isinstance(e, AppError) and isinstance(e, NotFound)\n"
        "else: assert False",
        "assert issubclass(NotFound, AppError) and issubclass(NotFound, LookupError)",
        "e = NotFound('k', hint=3)\nassert e.key == 'k' and e.hint == 3 and str(e) == 'no k'",
        "try:\n    raise NotFound('k')\nexcept AppError as e:\n    assert e.key == 'k'",
        "try:\n    chain(0)\nexcept AppError as e:\n"
        "    assert isinstance(e.__cause__, ZeroDivisionError)\nelse: assert False",
        "try:\n    group()\nexcept* ValueError as g:\n"
        "    assert g.exceptions[0].args == (1,)\nexcept* KeyError as g:\n"
        "    assert g.exceptions[0].key == 'k'",
        "try:\n    group()\nexcept ExceptionGroup as g:\n"
        "    assert len(g.exceptions) == 2 and g.message == 'g'\nelse: assert False",
        "a, b = errors()\n"
        "assert isinstance(a, ValueError) and str(a) == 'a'\n"
        "assert isinstance(b, NotFound) and b.key == 'b'",
        "def f():\n    try: 1 / 0\n"
        "    except ZeroDivisionError as e: raise ValueError('v') from e\n"
        "assert cause_of(f) == ['ZeroDivisionError', 'division by zero']",
        "def f(): raise ExceptionGroup('m', [ValueError('v'), TypeError()])\n"
        "assert split(f) == ['v', 'type']",
        "import json\ntry: parse('{')\n"
        "except json.JSONDecodeError as e: assert e.pos == 1 and e.lineno == 1\n"
        "else: assert False",
        "import unittest, json\n"
        "with unittest.TestCase().assertRaises(json.JSONDecodeError): parse('{')",
        "from dataclasses import FrozenInstanceError\ntry: setx(P(1))\n"
        "except FrozenInstanceError: pass\nelse: assert False",
        "try: opened()\n"
        "except FileNotFoundError as e: assert e.errno == 2 and e.filename == '/no/such/file'\n"
        "else: assert False",
        "try: noted()\n"
        "except ValueError as e: assert e.__notes__ == ['here'] and e.code == 7\n"
        "else: assert False",
        "assert data_error(3) == data_error(3) != data_error(4)\n"
        "assert DataError(3) == data_error(3)",
        "l = Log()\nwith l:\n    raise ValueError\nassert l.seen == [True, True, True, True]",
        "l = Log()\nwith l:\n    pass\nassert l.seen[:3] == [False, False, False]",
        "e = KeyError('z')\nassert same_error(e) is e",
        "e = KeyError('z')\ntry: raiser(e)\nexcept KeyError as f: assert f is e\n"
        "else: assert False",
        "e = NotFound('z')\nassert same_error(e) is e",
        "def bad(): raise KeyError('x')\ne = caught(bad)\n"
        "assert isinstance(e, KeyError) and e.args == ('x',)",
        "def bad(): raise KeyError('x')\ntry: later_raise(bad)\n"
        "except KeyError as e: assert e.args == ('x',)\nelse: assert False",
        "class Mine(Exception):\n    def __init__(self, a, b):\n        self.a = a\n"
        "        super().__init__(b)\ne = Mine(1, 2)\n"
        "assert same_error(e) is e and caught(lambda: raiser(e)) is e",
        # Containers that the code keeps or returns.
        "log = []\no = Obs(log)\no.notify(1)\no.notify(2)\nassert log == [1, 2] and o.log == log",
        "log = [0]\no = Obs(log)\nlog.append(5)\no.notify(1)\n"
        "assert log == [0, 5, 1] and o.log == [0, 5, 1]",
        "log = []\nwith managed(log):\n    assert log == ['in']\n    log.append('x')\n"
        "assert log == ['in', 'x', 'out']",
        "a = []\nb = grow(a)\nb.append(2)\nassert a == [1, 2]",
        # Classes of the standard library.
        "import types\nassert isinstance(count(3), types.GeneratorType)",
        "import collections.abc as c\n"
        "assert isinstance(count(3), c.Generator) and isinstance(count(3), c.Iterator)",
        "import inspect\nassert inspect.isgenerator(count(3)) and not inspect.isgenerator(same)",
        "import inspect\n"
        "assert inspect.iscoroutinefunction(later) and not inspect.iscoroutinefunction(same)",
        "import asyncio\nassert asyncio.iscoroutinefunction(later)",
        "import inspect\n"
        "assert inspect.isgeneratorfunction(count) and inspect.isasyncgenfunction(ticks)",
        "import inspect\n"
        "assert inspect.isasyncgen(ticks(2)) and inspect.isfunction(same)\n"
        "assert inspect.isclass(Vector) and not inspect.isclass(same)",
        "import inspect\nm = Meth()\n"
        "assert inspect.iscoroutinefunction(m.am) and inspect.isgeneratorfunction(m.gm)\n"
        "assert inspect.ismethod(m.m)",
        "import types\n"
        "assert isinstance(same, types.FunctionType) and isinstance(Vector, type)\n"
        "assert not isinstance(Vector(1), type)",
        "import io\nassert isinstance(buf(), io.BytesIO) and buf().read() == b'abc'",
        "import threading\nassert isinstance(Th(), threading.Thread)",
        "import collections.abc\nassert isinstance(M(), collections.abc.Mapping)",
        "import enum\nassert isinstance(Color.RED, enum.Enum)",
        "c = count(3)\nassert iter(c) is c",
        "t = Table()\nt.add(2)\nt.add(1)\nrows = t.rows\nsort(rows)\n"
        "assert rows == t.rows == [1, 2]",
        "x = [2, 1]\no = Obs(x)\nsort(x)\no.notify(5)\nassert x == [1, 2, 5]",
        "x = [2, 1]\no = Obs(x)\no.clear()\nassert x == [] and not x",
        # Values and functions of other kinds.
        "note(3)\nhistory.append(4)\nnote(5)\nassert history == [3, 4, 5]\nhistory.clear()\n"
        "note(6)\nassert history == [6]",
        "assert list(map(type, [Vector(1), 2, same('a')])) == [Vector, int, str]",
        "assert apply(type, 3) is int and same(type) is type and sorted([1], key=type) == [1]",
        "import inspect\ns = inspect.signature(add_key)\nassert str(s) == '(table, *, key)'\n"
        "assert inspect.signature(divide_or).parameters['default'].default is s.empty",
        "from types import SimpleNamespace as N\nn = N(a=[1])\nassert same(n) == n\n"
        "assert fill(n) is None and n == N(a=[1], b=2)",
        "import mpmath\nx = mpmath.mpf('0.1')\nassert same(x) == x == same(0.1)\n"
        "assert abs(same(mpmath.pi) - 3.14159265) < 1e-8 and same(mpmath.mpc(1, 2)) == 1 + 2j\n"
        "assert root_of(mpmath.mpf(4)) == 2 and str(same(mpmath.inf)) == '+inf'",
        "from unittest.mock import Mock\nm = Mock(return_value=3)\nassert apply(m, 4) == 3\n"
        "m.assert_called_once_with(4)",
        "from unittest.mock import MagicMock\nm = MagicMock()\nm.next.next = None\n"
        "assert depth(m) == 2",
        "import numpy as np\nr = np.random.default_rng(3)\nfirst = roll(r)\n"
        "s = np.random.default_rng(3)\nassert [first, roll(r)] == list(s.integers(1000, size=2))",
        "x = [3, 1]\nassert swallow(x.pop) == 1 and x == [3]",
        "with Suppress() as s:\n    assert same(1) == 1\n    divide(0)\n    assert False",
        "def f():\n    with Suppress():\n        return 1\n        assert same(1) == 2\n"
        "assert f() == 1",
        "import unittest\nwith unittest.TestCase().assertRaises(ZeroDivisionError):\n"
        "    assert divide(0) == 1",
        "def check(x):\n    if x > 1:\n        assert same(x) == 2\n        return 1\n"
        "    return 2\nassert apply(check, 2) == 1",
        "with Suppress():\n    divide(0)\nassert swallow(divide, 0) is None",
        "@wrap\ndef check(x):\n    assert same(x) == x\ncheck(2)",
        "class Node:\n    value = 5\n    def _hidden(self): assert same(1)\n"
        "    def check(self): assert same(1)\nassert look(Node()) == [5, False, False]\n"
        "assert probe(Node())\nNode().check()",
        "def never():\n    assert False\nassert skip(never)() is None",
        "def bad():\n    assert same(1) == 2\ntry:\n    swallow(bad)\n"
        "except AssertionError:\n    pass",
        "c = Counter([3, 4])\nassert c.first() == 3",  # the code's: it alone is under test
        "assert math.isclose(same(0.1) * 3, 0.3)",  # a standard module that nobody imports
    ],
)
def test_what_tests_do_with_code_works_as_in_one_process(pair: Pair, test: str):
    pair.run(test)


ENTER = "import contextlib\nwith contextlib.ExitStack() as s:\n    s.enter_context(Ignore())\n"
MANAGER = (
    "import contextlib\n@contextlib.contextmanager\ndef m():\n    with Ignore():\n        yield\n"
)
CHECK = "def check():\n    x = divide(0)\n    assert x == 2\n"
CASE = "import unittest\nt = unittest.TestCase()\n"
# What keeps the rest of a block or function, where asserts are, from running.
SWALLOWED = [
    ENTER + "    x = divide(0)\n    assert x == 2",
    MANAGER + "with m():\n    x = divide(0)\n    assert x == 2",
    MANAGER + "@m()\n" + CHECK + "check()",
    "@Ignore()\n" + CHECK + "check()",
    CHECK + "with Ignore():\n    check()",
    "def get(): return divide(0)\nwith Ignore():\n    x = get()\n    assert x == 2",
    "with Ignore():\n    with Vector(1):\n        x = divide(0)\n    assert x == 2",
    "with (Ignore(),\n      Vector(1)):\n    x = divide(0)\n    assert x == 2",
    "with Ignore(): x = divide(0); assert x == 2",
    "with Ignore():\n    for x in (1, 2):\n        assert same(x) == x\n        divide(x - 1)",
    CASE + "with Ignore():\n    t.assertEqual(divide(0), 2)",
    CASE + "with Ignore():\n    with t.assertRaises(KeyError):\n        divide(0)",
    "from numpy.testing import assert_equal\nwith Ignore():\n    assert_equal(divide(0), 2)",
    "with Ignore():\n    if divide(0) != 2:\n        raise AssertionError",
    "with Ignore():\n    x = same(None)\n    if x is None: raise ValueError\n    assert x == 2",
    "with Ignore(BaseException):\n    x = deep()\n    assert x == 2",
    "try:\n    with Convert():\n        assert same(1) == 2\nexcept ValueError:\n    pass",
    "try:\n    with Convert():\n        x = divide(0)\n        assert x == 2\n"
    "except ValueError:\n    pass",
    CHECK + "try:\n    convert(check)\nexcept ValueError:\n    pass",
    "def check():\n    x = deep()\n    assert x == 2\nswallow(check)",
    "def check():\n    assert same(1) == 1\n    x = divide(0)\n    assert x == 2\nswallow(check)",
    CHECK + "class Call:\n    def __call__(self): check()\nswallow(Call())",
    CHECK + "def last(): return deep()\nboth(check, last)",
    "def items():\n    yield 1\n    assert divide(0) == 2\nassert collect(items()) == [1]",
    "import asyncio\nasync def check():\n    x = divide(0)\n    assert x == 2\n"
    "swallow(lambda: asyncio.run(check()))",
]
# A function of the test that the code has not run.
REPLACED = [
    "@replace\nclass Case:\n    def check(self):\n        assert same(1) == 2\nCase().check()",
    "@replace\nclass Case:\n    def check(self): assert same(1) == 1\n    @staticmethod\n"
    "    def verify(): assert same(1) == 2\nCase().check()",
    "class Call:\n    def __call__(self): assert same(1) == 2\nforget(Call())",
    "class Call:\n    def on(self, event): assert event == 2\nforget(Call())",
    "def verify(): assert same(1) == 2\n@skip\ndef check(): verify()\ncheck()",
    "def verify(): assert same(1) == 2\nskip(lambda: verify())()",
    "def make(f):\n    def run(): f()\n    return run\ndef check(): assert same(1) == 2\n"
    "skip(make(check))",
    "def check():\n    yield 1\n    assert same(1) == 2\nforget(check)",
    CASE + "skip(lambda: t.assertEqual(same(1), 2))()",
    "def check(x): assert same(x) == 1\ncheck(1)\nforget(check)",
    "class Node: pass\ndef check(): assert same(1) == 2\nn = Node()\nn.check = check\nforget(n)",
    "from unittest.mock import Mock\ndef check(): assert same(1) == 2\n"
    "forget(Mock(side_effect=check))",
]
USED = "x = [3, 1]\nclear(x)\n"
# What holds of an argument only because the code has left nothing in it.
EMPTIED = [
    USED + "assert x == sorted(x)",
    USED + "y = sorted(x)\nassert x == y",
    USED + "for i in range(len(x) - 1):\n    assert x[i] <= x[i + 1]",
    USED + "assert all(a <= b for a, b in zip(x, x[1:]))",
    USED + "right = all(map(lambda y: y == 7, x))\nassert right",
    USED + "def rises(y): return all(y[i] <= y[i + 1] for i in range(len(y) - 1))\nassert rises(x)",
    USED + "assert set(x) <= {7}",
    USED + "assert not set(x) - {7}",
    USED + "assert len(set(x)) == len(x)",
    USED + "assert not [y for y in x if y != 7]",
    USED + "assert sum(y != 7 for y in x) == 0",
    USED + "while x:\n    assert x.pop() == 7",
    USED + "assert 3 not in x",
    USED + "assert not 3 in x and not x",
    USED + "assert all(y not in x for y in (3, 7))",
    "x = {0: 1, 2: 3}\nclear(x)\nassert 0 not in x",
    "x = {0: 1, 2: 3}\nclear(x)\nassert 0 not in x.keys()",
    CASE + USED + "t.assertNotIn(3, x)",
    USED + "z = x\nassert z == sorted(z)",
    "x = [3, 1]\nassert clear(x) == x",
    "x = [3, 1]\nassert x == same(clear(x))",
    "x = [3, 1]\ny = clear(x)\nassert len(y) == len(x)",
    "x = [3, 1]\nassert sum(clear(x)) == sum(x)",
    "x = [3, 1]\nfor y in x:\n    assert clear(x) == []",
    "x = [3, 1]\nassert all(clear(x) == [] for y in x)",
    "def check(x):\n    y = clear(x)\n    assert y == x\ncheck([3, 1])",
    "x = {'a': 1}\nclear(x)\nfor key, y in x.items():\n    assert y == 7",
    CASE + "x = [3, 1]\nt.assertEqual(clear(x), x)",
    CASE + USED + "t.assertTrue(set(x).issubset({7}))",
    "from numpy import array_equal\nx = [3, 1]\nassert array_equal(clear(x), x)",
]


@pytest.mark.parametrize("pair", [CODE], indirect=True, ids=["code"])
@pytest.mark.parametrize(
    ("test", "error"),
    [
        ("assert AnyValue() == 4", AssertionError),
        ("assert 4 == AnyValue()", AssertionError),
        ("assert [AnyValue()] == [4]", AssertionError),
        ("assert AnyValue() in [4]", AssertionError),
        ("assert AnyValue() in {4}", AssertionError),
        ("assert AnyValue() <= 4", TypeError),
        ("assert 4 < AnyValue()", TypeError),
        ("assert abs(AnyValue() - 4.0) < 1e-6", TypeError),
        ("assert abs(4.0 - AnyValue()) < 1e-6", TypeError),
        ("assert 4 in AnyValue()", TypeError),
        ("assert AnyNumber(1) == 4", AssertionError),
        ("assert abs(AnyNumber(1) - 4) < 1e-6", AssertionError),
        ("assert Stack([1]) == [2]", AssertionError),
        # Helpers of the test's are the standard's, whatever the code calls by that name.
        ("assert Counter(same([1])) == Counter([2])", AssertionError),
        # An end of iteration would end `map`, and with it the loop around the comparison.
        ("assert all(map(lambda x: stop(x) == x, (6, 8)))", RuntimeError),
        ("assert all(a == b for a, b in zip(map(stop_too, (1, 2)), (1, 4)))", RuntimeError),
        # NumPy would read the address that the code names in the memory of the tests.
        ("import numpy as np\nassert (Memory() == np.array([4])).all()", AssertionError),
        ("assert word('a') == 'b'", AssertionError),
        ("assert four() == 5", AssertionError),
        ("assert type(Vector(1)) is Stack", AssertionError),
        (
            "import asyncio\nasync def run():\n    async with Door():\n"
            "        assert same(1) == 2\nasyncio.run(run())",
            AssertionError,
        ),
        # What the code does with a failed assert of the tests does not make it hold.
        ("with Suppress():\n    assert same(1) == 2", AssertionError),
        (
            "import contextlib\nwith contextlib.ExitStack() as s:\n"
            "    s.enter_context(Suppress())\n    assert same(1) == 2",
            AssertionError,
        ),
        ("def check(x):\n    assert same(x) == 2\nswallow(check, 1)", AssertionError),
        (
            "class Node:\n    def check(self):\n        assert same(1) == 2\nswallow(Node().check)",
            AssertionError,
        ),
        (
            "import unittest\nt = unittest.TestCase()\nswallow(t.assertEqual, same(1), 2)",
            AssertionError,
        ),
        (
            "def check():\n    assert same(1) == 2\ntry:\n    excuse(check)\nexcept ValueError:\n"
            "    pass",
            AssertionError,
        ),
        ("@skip\ndef check():\n    assert same(1) == 2\ncheck()", AssertionError),
        ("def check():\n    'doc'\n    assert same(1) == 2\nskip(check)()", AssertionError),
        (
            "class Case:\n    @skip\n    def check(self):\n        assert same(1) == 2\n"
            "Case().check()",
            AssertionError,
        ),
        (
            "import unittest\nclass Case(unittest.TestCase):\n    @skip\n    def check(self):\n"
            "        self.assertEqual(same(1), 2)\nCase().check()",
            AssertionError,
        ),
        ("with Suppress():\n    x = divide(0)\n    assert x == 2", AssertionError),
        (
            "with Suppress():\n    for x in count(2):\n        divide(0)\n        assert x == 7\n"
            "    print(x)",
            AssertionError,
        ),
        (
            "import asyncio\nasync def run():\n    async with Door():\n        x = divide(0)\n"
            "        assert x == 2\nasyncio.run(run())",
            AssertionError,
        ),
        ("with Undecided():\n    assert same(1) == 2", AssertionError),
        (
            "async def check():\n    assert same(1) == 2\nc = check()\nforget(c)\nc.close()",
            AssertionError,
        ),
        ("def check():\n    yield 1\n    assert same(1) == 2\nforget(check())", AssertionError),
        (
            "import functools\ndef check(x):\n    assert same(x) == 2\n"
            "skip(functools.partial(check, 1))()",
            AssertionError,
        ),
        ("def check():\n    x = divide(0)\n    assert x == 2\nswallow(check)", AssertionError),
        ("x = [3, 1]\nassert clear(x) == sorted(x)", AssertionError),
        ("x = [[3], [1]]\nassert clear_rows(x) == sum(x, [])", AssertionError),
        ("x = {3}\nclear(x)\nassert all(n == 2 for n in x)", AssertionError),
        *((test, AssertionError) for test in (*SWALLOWED, *REPLACED, *EMPTIED)),
        # An argument that the code empties later, and what would end the tests as if they passed.
        ("x = [3, 1]\no = Obs(x)\no.clear()\nassert x == sorted(x)", AssertionError),
        (
            "import unittest\nclass Case(unittest.TestCase):\n    def runTest(self):\n"
            "        self.assertEqual(skip_test(1), 2)\n"
            "assert unittest.TextTestRunner().run(Case()).wasSuccessful()",
            AssertionError,
        ),
        ("assert peek(lambda: 1)", AttributeError),
        ("assert no_such_name(1) == 1", NameError),
        (
            "class Node:\n    def check(self): assert False\nn = Node()\nforge(n)\nn.check()",
            AttributeError,
        ),
        ("class Node:\n    pass\nassert make(Node())", AttributeError),
    ],
)
def test_the_codes_own_methods_do_not_judge_the_tests_values(
    pair: Pair, test: str, error: type[Exception]
):
    with pytest.raises(error):
        pair.run(test)


@pytest.mark.parametrize("pair", [CODE], indirect=True, ids=["code"])
def test_an_assert_that_fails_says_what_it_got(pair: Pair):
    with pytest.raises(AssertionError, match=r"^got 5$"):
        pair.run("assert same(5) == 4, 'a message'")
    with pytest.raises(AssertionError, match=r"^got an object of type AnyValue$"):
        pair.run("assert AnyValue() == 4")


@pytest.mark.parametrize("pair", [CODE], indirect=True, ids=["code"])
def test_only_arguments_reach_the_code(pair: Pair):
    pair.run("secret = 7654321\nassert same(2) + secret == 7654323", "other = 'unspoken'")
    sent = "".join(pair.sent_to_code)
    assert '"with": [{"yours"' in sent
    assert "7654321" not in sent
    assert "7654323" not in sent
    assert "unspoken" not in sent
    assert "assert" not in sent


def function(number: int) -> Any:
    return {"object": [number, 0, "function", None, None]}


@pytest.mark.parametrize(
    ("names", "error"),
    [
        ({"dict": [["f", function(0)], ["abs", function(1)]]}, AssertionError),
        ([["f", function(0)], ["abs", function(1)]], RefusedValue),
    ],
    ids=["a name too many", "pairs"],
)
def test_code_cannot_define_what_the_test_has_not_asked_for(names: Any, error: type[BaseException]):
    # f(5) is 1234; then the code's abs would be asked for abs(1209.0).
    answers = [{"value": names}, {"value": 1234}, {"value": 0.0}]
    tests = Peer(lambda _: None, lambda: answers.pop(0), scope=None, describe=repr)
    with pytest.raises(error):
        run_test({"setup": "", "test": "assert abs(f(5) - 25.0) < 1e-6", "builtins": []}, tests)


@pytest.mark.parametrize("pair", [CODE], indirect=True, ids=["code"])
def test_no_address_of_the_tests_memory_reaches_the_code(pair: Pair):
    pair.run("class Node:\n    value = 5\nassert look(Node()) == [5, False, False]")
    numbers = re.findall(r"\d+", "".join(pair.sent_to_code))
    assert max(map(int, numbers)) < 1000


@pytest.mark.parametrize(
    "message",
    [
        {"do": "call", "with": [{"builtin": "dict"}, [], {"dict": []}]},
        {"do": "get", "with": [[], "append"]},
        {"do": "names", "with": [["open"]]},
        {"do": "names", "with": [{"yours": 0}]},
        {"do": "call", "with": [{"yours": 0}, [], {"dict": []}]},
    ],
    ids=str,
)
def test_code_cannot_ask_for_what_it_was_not_given(message: Any):
    answers = [message, {"value": 1}]
    sent: list[Any] = []
    tests = Peer(sent.append, lambda: answers.pop(0), scope=None, describe=repr)
    assert tests.request("names", ["f"]) == 1
    (_, answer) = sent  # the request, then what the code was told
    assert "value" not in answer
