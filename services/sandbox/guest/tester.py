"""Runs one test: names that it does not define are the code's, reached through `peer.py`."""

from __future__ import annotations

import ast
import builtins
import contextlib
import copy
import functools
import importlib
import random  # noqa: F401 - its seeds are shared with the code
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from types import (
    AsyncGeneratorType,
    CodeType,
    CoroutineType,
    FunctionType,
    GeneratorType,
    MethodType,
)
from typing import Any

from .asserts import SETUP_NAME, TEST_NAME, TEST_NAMES, CheckFailedError, Mark, find_marks
from .peer import TEST_MODULE, Peer
from .proxy import is_proxy, kind_of, plain_of, type_of
from .values import STANDARD_TYPES

SHOWN_CHARS = 200
_LEFT, _FAILED, _TYPE, _LEAN, _ABSENT = "@left", "@failed", "@type", "@lean", "@absent"
"""Names that no program can write."""

_SEEDS = (("random", "seed"), ("random", "setstate"), ("numpy.random", "seed"))
_PATCHED = ("builtins", "datetime", "random", "time", "numpy.random")
"""Modules whose functions a test replaces for the code too."""
_LOOPS = ("all", "any", "enumerate", "filter", "map", "range", "reversed", "zip")
"""Builtins that say something of each item: of no item, anything."""
_LOOP_NODES = (ast.For, ast.AsyncFor, ast.While)


@dataclass(frozen=True)
class Prepared:
    """A test that has been compiled."""

    sources: list[CodeType]
    """The set-up and the test."""
    names: list[str]
    """All names that they read."""
    modules: list[str]
    """Standard modules that they use as such."""
    bound: set[str]
    """Names that they define."""
    imported: set[str]
    """Packages that they import."""
    marks: set[str]
    """Names that mark their asserts, and more."""


def prepare_test(request: dict[str, Any]) -> Prepared:
    """Compile a test.

    Raises:
        Exception: it cannot be compiled, which is not the code's fault.
    """
    files = {"setup": SETUP_NAME, "test": TEST_NAME}
    trees = [ast.parse(request[part], name) for part, name in files.items()]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    modules, names, bound = find_names(nodes)
    imported = find_imports(nodes)
    known = {*vars(builtins), *STANDARD_TYPES, *modules, *imported}
    derived = find_derived(nodes, known, bound)
    watch = WatchTest(derived, own_type="type" in {*bound, *request["builtins"]})
    watched = [ast.fix_missing_locations(watch.visit(tree)) for tree in trees]
    sources = [
        compile(tree, name, "exec", dont_inherit=True)
        for tree, name in zip(watched, files.values(), strict=True)
    ]
    return Prepared(sources, names, modules, bound, imported, watch.marks)


def run_test(request: dict[str, Any], peer: Peer) -> None:
    """Run a test.

    Args:
        request: `setup` and `test`, the sources; `builtins`, names of builtins that the code
            under test is to define.
        peer: reaches the code.

    Raises:
        BaseException: the test has failed.
    """
    test = prepare_test(request)
    own = dict(vars(builtins))
    own.update({name: importlib.import_module(name) for name in test.modules})
    if set(test.names) - test.bound - STANDARD_TYPES.keys() - own.keys():
        own.update(STANDARD_TYPES)  # something else is under test
    theirs = [name for name in test.names if name not in own]
    own.update(peer.names(theirs + request["builtins"]))
    judged: dict[str, float] = {}
    scope: dict[str, Any] = {"__name__": TEST_MODULE, "__builtins__": own}
    scope |= {_FAILED: fail, _TYPE: type_of, _LEAN: functools.partial(lean, peer)}
    scope[_ABSENT] = functools.partial(absent, peer)
    scope |= {name: functools.partial(note_judged, judged, name) for name in test.marks}
    if "numpy" in test.imported:
        with contextlib.suppress(ImportError):  # which the test itself will raise
            importlib.import_module("numpy.random")
    with sharing_random(peer), peer.watching(_PATCHED):
        for source in test.sources:
            exec(source, scope)
    check_judged(peer, judged, scope)


@contextlib.contextmanager
def sharing_random(peer: Peer) -> Iterator[None]:
    """Seed the code's random generators with the test's."""
    with contextlib.ExitStack() as stack:
        for module, name in _SEEDS:
            if (owner := sys.modules.get(module)) is not None:
                function = getattr(owner, name)
                stack.callback(setattr, owner, name, function)
                setattr(owner, name, _share(peer, module, name, function))
        yield


def _share(peer: Peer, module: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        peer.request("random", module, name, list(args), kwargs)
        return function(*args, **kwargs)

    return call


def check_judged(peer: Peer, judged: dict[str, float], scope: dict[str, Any]) -> None:
    """Check that the code has run the tests' functions that it was given, as a decorator is.

    Args:
        peer: has given them.
        judged: marks of the asserts that have been judged, and when.
        scope: names of the tests.

    Raises:
        CheckFailedError: no assert of one has since it was given.
    """
    for given_at, value in peer.handed_over():
        own = isinstance(value, type) and value.__module__ == TEST_MODULE
        for part in list(vars(value).values()) if own else [value]:
            marks = [mark for code in find_codes(part, scope) for mark in find_marks(code)]
            asserts = [mark.name for mark in marks if mark.kind == "assert"]
            if asserts and all(judged.get(name, 0.0) < given_at for name in asserts):
                name = getattr(part, "__qualname__", type(part).__name__)
                raise CheckFailedError(f"the code has kept {name} from its asserts")


def find_codes(value: object, scope: dict[str, Any]) -> list[CodeType]:
    """Return the functions of the test that run where a value is used, and those that they name."""
    seen: dict[int, object] = {}
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or is_proxy(value):
            continue
        seen[id(value)] = value
        match value:
            case CodeType() if value.co_filename in TEST_NAMES:
                waiting += [*value.co_consts, *map(scope.get, value.co_names)]
            case functools.partial():
                waiting += [value.func, *value.args, *value.keywords.values()]
            case MethodType():
                waiting += [value.__func__, value.__self__]
            case staticmethod() | classmethod():
                waiting.append(value.__func__)
            case property():
                waiting.append(value.fget)
            case FunctionType():
                cells = [cell.cell_contents for cell in value.__closure__ or ()]
                waiting += [value.__code__, *cells]
            case CoroutineType(cr_code=code) | GeneratorType(gi_code=code):
                waiting.append(code)
            case AsyncGeneratorType():
                waiting.append(value.ag_code)
            case type() if value.__module__ == TEST_MODULE:
                waiting += vars(value).values()
            case _ if type(value).__module__ in (TEST_MODULE, "functools", "unittest.mock"):
                attributes = getattr(value, "__dict__", {}).values()
                waiting += [type(value), *filter(callable, attributes)]
    return [value for value in seen.values() if isinstance(value, CodeType)]


def find_names(nodes: list[ast.AST]) -> tuple[list[str], list[str], set[str]]:
    """Return the standard modules that the test uses as such, all its names, and those it binds."""
    read = [node.id for node in nodes if isinstance(node, ast.Name)]
    used = [
        node.value.id
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]
    bound = {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    modules = (set(used) & sys.stdlib_module_names) - bound
    return sorted(modules), sorted(set(read)), bound


def find_imports(nodes: list[ast.AST]) -> set[str]:
    """Return the packages that the test imports, and the names that it gives to what it imports."""
    found: set[str] = set()
    for node in nodes:
        match node:
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {alias.name.partition(".")[0] for alias in names}
                found |= {alias.asname for alias in names if alias.asname}
                found.add((getattr(node, "module", None) or "").partition(".")[0])
    return found


def find_derived(nodes: list[ast.AST], known: set[str], bound: set[str]) -> set[str]:
    """Return the names of the code, and those whose values it has made or been given.

    Args:
        nodes: the test.
        known: names of others than the code and the test.
        bound: names that the test defines.
    """
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    found = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
    found = (found | {node.id for node in nodes if isinstance(node, ast.Name)} - bound) - known
    for node in (*nodes, *nodes):  # twice: a name may be used above where it is made
        made = getattr(node, "targets", [getattr(node, "target", None)])
        of = getattr(node, "iter", getattr(node, "value", None))
        if made != [None] and of is not None and find_all(of) & found:
            found |= find_all(*made)
        if isinstance(node, ast.Call) and find_all(node.func) & found:
            found |= find_all(*node.args, *node.keywords) - known
    return found


def find_all(*nodes: ast.AST) -> set[str]:
    """Return all names in expressions."""
    return {one.id for node in nodes for one in ast.walk(node) if isinstance(one, ast.Name)}


class WatchTest(ast.NodeTransformer):
    """Marks the asserts, and lets one that fails say which value it got.

    What is said of all items of an argument holds of one that the code has emptied, as does what
    is said of two things that come from it. So a test may say only what such an argument is.

    `type(x)` is the class that an object has on its own side.

    Args:
        derived: names whose values come from the code.
        own_type: the test has a `type` of its own.
    """

    def __init__(self, derived: set[str], *, own_type: bool) -> None:
        self._derived = derived
        self._own_type = own_type
        self.marks: set[str] = set()

    def _mark(self, kind: str, node: Any) -> str:
        mark = Mark(kind, node.lineno, node.end_lineno, len(self.marks))
        self.marks.add(mark.name)
        return mark.name

    def _read(self, node: ast.AST) -> set[str]:
        """Return the names that an expression looks at, besides what it gives to the code."""
        match node:
            case ast.Name(id=name, ctx=ast.Load()) if not name.startswith("@"):
                return {name}
            case ast.Lambda():
                return set()
            case ast.Call(func=func) if find_all(func) & self._derived:
                return self._read(func)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                return self._read(node.generators[0].iter)
        return {name for child in ast.iter_child_nodes(node) for name in self._read(child)}

    def _lean(self, node: ast.expr, *looked_at: ast.AST) -> ast.expr:
        """Return an expression that fails where nothing is left in what it looks at."""
        read = {name for one in looked_at for name in self._read(one)}
        names = [ast.Name(name, ast.Load()) for name in sorted(read - vars(builtins).keys())]
        return _call(_LEAN, node, *names) if names else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Return the call, marked if it asserts; `type` in it is ours."""
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        mark = self._mark("assert", node) if name.startswith("assert") or name == "raises" else None
        types = [*node.args, *(keyword.value for keyword in node.keywords)]
        types = [] if name in ("isinstance", "issubclass") else types
        types += [node.func] if len(node.args) == 1 and not node.keywords else []
        for one in types:
            if isinstance(one, ast.Name) and one.id == "type" and not self._own_type:
                one.id = _TYPE
        if mark is None:
            looked_at = node.args if name in _LOOPS else []
        else:
            node.args = node.args if len(node.args) > 1 else [*map(self._watch_truth, node.args)]
            looked_at = self._find_compared(node.args)
        missing = node.args[:2] if name == "assertNotIn" else []
        self.generic_visit(node)
        watched = self._lean(node, *looked_at)
        watched = self._absent(watched, *missing) if len(missing) > 1 else watched
        return watched if mark is None else _call(mark, watched)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """Return the attribute; `x.__class__` is `type(x)`."""
        self.generic_visit(node)
        if node.attr != "__class__" or not isinstance(node.ctx, ast.Load):
            return node
        return _call(_TYPE, node.value)

    def visit_comprehension(self, node: ast.comprehension) -> ast.comprehension:
        """Return the loop, over what the code has not emptied."""
        self.generic_visit(node)
        node.iter = self._lean(node.iter, node.iter)
        return node

    def visit_block(self, node: Any) -> list[ast.stmt]:
        """Return a loop or `with` block, marked."""
        for item in getattr(node, "items", ()):  # one that asserts does so to the end of the block
            item.context_expr.end_lineno = node.end_lineno
        mark = self._mark("loop" if isinstance(node, _LOOP_NODES) else "with", node)
        looked_at = [getattr(node, "iter", getattr(node, "test", ast.Constant(value=None)))]
        before = ast.Expr(self._lean(ast.Name(mark, ast.Load()), *looked_at))
        ast.copy_location(before, node)
        self.generic_visit(node)
        # What is emptied while it is looped over, and not by a loop that waits for its end.
        return [before, node, *([before] if isinstance(node, ast.For) else [])]

    def visit_If(self, node: ast.If) -> ast.If:
        """Return the statement, marked if it is an assert in other words."""
        match node.body:
            case [
                ast.Raise(
                    exc=ast.Name("AssertionError") | ast.Call(func=ast.Name("AssertionError"))
                )
            ]:
                node.test = _call(self._mark("assert", node), node.test)
        self.generic_visit(node)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        """Return the comparison, of what the code has not emptied with what comes from it."""
        ordered = any(isinstance(op, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)) for op in node.ops)
        same = all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops)
        sides = [] if same else [node.left, *node.comparators]
        looked_at = self._find_compared(sides, ordered=ordered)
        missing = [node.left, *node.comparators] if isinstance(node.ops[-1], ast.NotIn) else []
        self.generic_visit(node)
        watched = self._lean(node, *looked_at)
        return self._absent(watched, *missing[-2:]) if missing else watched

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        """Return the operation; `not x in y` is `x not in y`."""
        match node:
            case ast.UnaryOp(op=ast.Not(), operand=ast.Compare(ops=[ast.In()]) as test):
                test.ops = [ast.NotIn()]
                return self.visit(test)
        self.generic_visit(node)
        return node

    def _absent(self, node: ast.expr, item: ast.expr, container: ast.expr) -> ast.expr:
        """Return an expression that fails where the container is empty of more than the item."""
        read = sorted(self._read(container) - vars(builtins).keys())
        plain = not any(isinstance(one, (ast.Call, ast.Await)) for one in ast.walk(item))
        items = ast.Tuple([copy.deepcopy(item)] if plain else [], ast.Load())
        names = [ast.Name(name, ast.Load()) for name in read]
        return _call(_ABSENT, node, items, *names) if names else node

    def _find_compared(self, sides: list[ast.expr], *, ordered: bool = False) -> list[ast.expr]:
        """Return those that are compared with what comes from them or from the code."""
        return [
            side
            for side in sides
            if (ordered and not (_is_plain(side) and isinstance(side, ast.Call)))
            or any(find_all(o) & (self._read(side) | self._derived) for o in sides if o is not side)
        ]

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        """Return a statement that does the same, marked, and keeps the value it looks at."""
        never = isinstance(node.test, ast.Constant) and not node.test.value
        mark = None if never else self._mark("assert", node)
        match self._watch_truth(node.test):
            case ast.Compare(left=left, ops=[_], comparators=[_]) as test:
                test.left = _keep(left)
            case ast.UnaryOp(op=ast.Not(), operand=operand) as test:
                test.operand = _keep(operand)
            case expression:
                test = _keep(expression)
        failed: ast.expr = ast.UnaryOp(ast.Not(), self.visit(test))
        failed = failed if mark is None else _call(mark, failed)
        failure = ast.Expr(_call(_FAILED, ast.Name(_LEFT, ast.Load())))
        return ast.copy_location(ast.If(failed, [failure], []), node)

    def _watch_truth(self, node: ast.expr) -> ast.expr:
        """Return a condition that says of an emptied argument only that it is empty."""
        match node:
            case ast.BoolOp(values=values):
                node.values = [self._watch_truth(value) for value in values]
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                node.operand = self._watch_truth(operand)
            case _ if not isinstance(node, ast.Compare) and not _is_plain(node):
                return self._lean(node, node)
        return node


for _name in ("For", "AsyncFor", "While", "With", "AsyncWith"):
    setattr(WatchTest, f"visit_{_name}", WatchTest.visit_block)


def _is_plain(node: ast.expr) -> bool:
    """Tell whether this says something of a value itself, and not of its items."""
    match node:
        case ast.Call(func=ast.Name(name)):
            return name in ("bool", "isinstance", "len")
    return isinstance(node, ast.Name)


def note_judged(judged: dict[str, float], name: str, value: object) -> object:
    """Note that an assert has been judged, and return the value."""
    judged[name] = perf_counter()
    return value


def lean(peer: Peer, value: object, *looked_at: object) -> object:
    """Return a value that says something of others.

    Raises:
        CheckFailedError: the code has emptied one.
    """
    if any(map(peer.has_emptied, looked_at)):
        raise CheckFailedError("the code has emptied an argument that the test goes on to look at")
    return value


def absent(peer: Peer, value: object, items: tuple[object, ...], *looked_at: object) -> object:
    """Return whether something is not in others.

    Raises:
        CheckFailedError: the code has emptied one that held anything else as well.
    """
    for one in looked_at:
        if peer.has_emptied(one) and any(old not in items for old in peer.content_of(one)):
            raise CheckFailedError("the code has emptied an argument, not removed one item of it")
    return value


def _call(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(args), [])


def _keep(expression: ast.expr) -> ast.expr:
    return ast.NamedExpr(ast.Name(_LEFT, ast.Store()), expression)


def fail(value: object) -> None:
    """End the test.

    Raises:
        CheckFailedError: always.
    """
    raise CheckFailedError(f"got {show(value)}")


def show(value: object) -> str:
    """Return a short text of a value."""
    plain = plain_of(value)
    kind = kind_of(plain)
    if kind is not None:
        return f"an object of type {kind}"
    try:
        text = repr(plain)
    except ValueError:  # an integer too long to print
        return f"a {type(plain).__name__} of more digits than can be shown"
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"
