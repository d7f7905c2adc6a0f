"""Runs one test: names that it does not define are the code's, reached through `peer.py`."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib
import random  # noqa: F401 - its seeds are shared with the code
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeVar

from .peer import TEST_MODULE, Peer
from .proxy import kind_of, plain_of, type_of
from .values import STANDARD_TYPES

TEST_NAME = "<test>"
SHOWN_CHARS = 200
_LEFT, _FAILED, _ENTERED, _TYPE = "@left", "@failed", "@entered", "@type"
"""Names that no program can write."""

_SEEDS = (("random", "seed"), ("random", "setstate"), ("numpy.random", "seed"))
F = TypeVar("F", ast.FunctionDef, ast.AsyncFunctionDef)


class CheckFailedError(AssertionError):
    """An assert of the test does not hold."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.agent_r1_text = str(self)


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


def prepare_test(request: dict[str, Any]) -> Prepared:
    """Compile a test.

    Raises:
        Exception: it cannot be compiled, which is not the code's fault.
    """
    trees = [ast.parse(request[part], TEST_NAME) for part in ("setup", "test")]
    modules, names, bound = find_names(*trees)
    watch = WatchTest(own_type="type" in bound)
    watched = [ast.fix_missing_locations(watch.visit(tree)) for tree in trees]
    sources = [compile(tree, TEST_NAME, "exec") for tree in watched]
    return Prepared(sources, names, modules, bound, find_imports(*trees))


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
    entered: set[CodeType] = set()
    scope: dict[str, Any] = {"__name__": TEST_MODULE, "__builtins__": own, _FAILED: fail}
    scope[_TYPE] = type_of
    scope[_ENTERED] = lambda: entered.add(sys._getframe(1).f_code)
    if "numpy" in test.imported:
        with contextlib.suppress(ImportError):  # which the test itself will raise
            importlib.import_module("numpy.random")
    with sharing_seeds(peer):
        for source in test.sources:
            exec(source, scope)
    check_entered(peer, entered)


@contextlib.contextmanager
def sharing_seeds(peer: Peer) -> Iterator[None]:
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


def check_entered(peer: Peer, entered: set[CodeType]) -> None:
    """Check that the code has run the tests' functions that it was given, as a decorator is.

    Raises:
        CheckFailedError: asserts of one have never been reached.
    """
    for value in peer.handed_over():
        function = value.__func__ if isinstance(value, MethodType) else value
        if not isinstance(function, FunctionType) or function.__code__ in entered:
            continue
        if _ENTERED in function.__code__.co_names:
            raise CheckFailedError(f"the code has not run {function.__name__}, which has asserts")


def find_names(*trees: ast.Module) -> tuple[list[str], list[str], set[str]]:
    """Return the standard modules that the test uses as such, all its names, and those it binds."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
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


def find_imports(*trees: ast.Module) -> set[str]:
    """Return the packages that the test imports."""
    found: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.Import(names=names):
                found |= {alias.name.partition(".")[0] for alias in names}
            case ast.ImportFrom(module=str(module)):
                found.add(module.partition(".")[0])
    return found


class WatchTest(ast.NodeTransformer):
    """Lets an assert that fails say which value it got, a function that it was run, and `type(x)`
    be the class that an object has on its own side.

    Args:
        own_type: the test has a `type` of its own.
    """

    def __init__(self, *, own_type: bool) -> None:
        self._own_type = own_type

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """Return the call; `type` of one argument is ours."""
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Name("type") as name, args=[_], keywords=[]):
                name.id = "type" if self._own_type else _TYPE
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """Return the attribute; `x.__class__` is `type(x)`."""
        self.generic_visit(node)
        if node.attr != "__class__" or not isinstance(node.ctx, ast.Load):
            return node
        return ast.Call(ast.Name(_TYPE, ast.Load()), [node.value], [])

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Return the function; one with asserts first notes that it was run."""
        return self._watch(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AsyncFunctionDef:
        """Return the coroutine or asynchronous generator, as a function."""
        return self._watch(node)

    def _watch(self, node: F) -> F:
        asserts = has_asserts(node)
        self.generic_visit(node)
        if asserts:
            at = int(ast.get_docstring(node, clean=False) is not None)
            node.body.insert(at, ast.Expr(ast.Call(ast.Name(_ENTERED, ast.Load()), [], [])))
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        """Return the statement that does the same and keeps the value it looks at."""
        self.generic_visit(node)
        match node.test:
            case ast.Compare(left=left, ops=[_], comparators=[_]) as compare:
                compare.left = _keep(left)
                holds: ast.expr = compare
            case ast.UnaryOp(op=ast.Not(), operand=operand) as negation:
                negation.operand = _keep(operand)
                holds = negation
            case expression:
                holds = _keep(expression)
        got = ast.Name(_LEFT, ast.Load())
        failure = ast.Call(ast.Name(_FAILED, ast.Load()), [got], [])
        failed = ast.If(ast.UnaryOp(ast.Not(), holds), [ast.Expr(failure)], [])
        return ast.copy_location(failed, node)


def has_asserts(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Tell whether a function has asserts of its own, besides one that says it must not run."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        match waiting.pop():
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                pass
            case ast.Assert(test=ast.Constant(value=value)) if not value:
                return False
            case ast.Assert():
                return True
            case ast.Call(func=ast.Attribute(attr=name)) if name.startswith("assert"):
                return True
            case node:
                waiting += ast.iter_child_nodes(node)
    return False


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
