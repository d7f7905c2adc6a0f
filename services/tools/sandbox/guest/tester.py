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
from types import (
    AsyncGeneratorType,
    CodeType,
    CoroutineType,
    FunctionType,
    GeneratorType,
    MethodType,
)
from typing import Any

from .peer import TEST_MODULE, Peer
from .proxy import is_proxy, kind_of, plain_of, type_of
from .values import STANDARD_TYPES

TEST_NAME = "<test>"
SHOWN_CHARS = 200
_LEFT, _FAILED, _JUDGED, _TYPE = "@left", "@failed", "@judged", "@type"
_MANAGER, _REACHED = "@manager", "@reached"
"""Names that no program can write."""

_SEEDS = (("random", "seed"), ("random", "setstate"), ("numpy.random", "seed"))


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
    watch = WatchTest(own_type="type" in {*bound, *request["builtins"]})
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
    judged: set[CodeType] = set()
    scope: dict[str, Any] = {"__name__": TEST_MODULE, "__builtins__": own}
    scope |= {_FAILED: fail, _TYPE: type_of, _MANAGER: note_manager, _REACHED: check_reached}
    scope[_JUDGED] = lambda: judged.add(sys._getframe(1).f_code)
    if "numpy" in test.imported:
        with contextlib.suppress(ImportError):  # which the test itself will raise
            importlib.import_module("numpy.random")
    with sharing_seeds(peer):
        for source in test.sources:
            exec(source, scope)
    check_judged(peer, judged)


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


def check_judged(peer: Peer, judged: set[CodeType]) -> None:
    """Check that the code has run the tests' functions that it was given, as a decorator is.

    Args:
        peer: has given them.
        judged: functions of which an assert has been judged.

    Raises:
        CheckFailedError: no assert of one has.
    """
    for value in peer.handed_over():
        code = find_code(value)
        if code is not None and _JUDGED in code.co_names and code not in judged:
            raise CheckFailedError(f"the code has kept {code.co_name} from its asserts")


def find_code(value: object) -> CodeType | None:
    """Return the code of a function, coroutine or generator; None of anything else."""
    match value:
        case functools.partial():
            return find_code(value.func)
        case MethodType():
            return find_code(value.__func__)
        case FunctionType():
            return value.__code__
        case CoroutineType():
            return value.cr_code
        case GeneratorType():
            return value.gi_code
        case AsyncGeneratorType():
            return value.ag_code
    return None


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
    """Notes the asserts that are judged, and lets one that fails say which value it got.

    After a `with` block of the code's, its asserts must have been reached; `type(x)` is the class
    that an object has on its own side.

    Args:
        own_type: the test has a `type` of its own.
    """

    def __init__(self, *, own_type: bool) -> None:
        self._own_type = own_type
        self._blocks = 0

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
        return _call(_TYPE, node.value)

    def visit_With(self, node: ast.With) -> list[ast.stmt]:
        """Return the block, after which its asserts must have been reached."""
        return self._watch_block(node)

    def visit_AsyncWith(self, node: ast.AsyncWith) -> list[ast.stmt]:
        """Return the block, as that of `with`."""
        return self._watch_block(node)

    def _watch_block(self, node: ast.With | ast.AsyncWith) -> list[ast.stmt]:
        asserting = [place for place, one in enumerate(node.body) if has_asserts(one)]
        behind = len(node.body) - asserting[-1] - 1 if asserting else 0
        self.generic_visit(node)
        if not asserting:
            return [node]
        self._blocks += 1
        note = f"@block{self._blocks}"
        for item in node.items:
            item.context_expr = _call(_MANAGER, ast.Name(note, ast.Load()), item.context_expr)
        reached = ast.Assign([ast.Name(note, ast.Store())], ast.List([], ast.Load()))
        node.body.insert(len(node.body) - behind, reached)
        begin = ast.Assign([ast.Name(note, ast.Store())], ast.List([], ast.Load()))
        return [begin, node, ast.Expr(_call(_REACHED, ast.Name(note, ast.Load())))]

    def visit_Expr(self, node: ast.Expr) -> list[ast.stmt]:
        """Return the statement; one that calls an assert's method is noted."""
        judged = [ast.Expr(_call(_JUDGED))] if has_asserts(node) else []
        self.generic_visit(node)
        return [node, *judged]

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        """Return statements that do the same, note it, and keep the value it looks at."""
        judged = [ast.Expr(_call(_JUDGED))] if has_asserts(node) else []
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
        failure = _call(_FAILED, ast.Name(_LEFT, ast.Load()))
        failed = ast.If(ast.UnaryOp(ast.Not(), holds), [*judged, ast.Expr(failure)], [])
        return [ast.copy_location(failed, node), *judged]


def has_asserts(statement: ast.stmt) -> bool:
    """Tell whether a statement has asserts, besides those that say that nothing comes there."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        match waiting.pop():
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                pass
            case ast.Assert(test=ast.Constant(value=value)) if not value:
                pass
            case ast.Assert():
                return True
            case ast.Call(func=ast.Attribute(attr=name)) if name.startswith("assert"):
                return True
            case node:
                waiting += ast.iter_child_nodes(node)
    return False


def note_manager(note: list[object], manager: Any) -> Any:
    """Return a context manager, noted if it is the code's."""
    if is_proxy(manager):
        note.append(manager)
    return manager


def check_reached(note: list[object]) -> None:
    """Check that a block whose context manager is the code's has come to its last assert.

    Raises:
        CheckFailedError: the context manager has ended it before.
    """
    if note:
        raise CheckFailedError("the code has ended a `with` block before its asserts")


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
