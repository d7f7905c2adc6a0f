"""Runs one test: names that it does not define are the code's, reached through `peer.py`."""

from __future__ import annotations

import ast
import builtins
import importlib
import sys
from typing import Any

from .peer import TEST_MODULE, Peer
from .proxy import kind_of, plain_of
from .values import STANDARD_TYPES

TEST_NAME = "<test>"
SHOWN_CHARS = 200
_LEFT, _FAILED = "@left", "@failed"
"""Names that no program can write."""


class CheckFailedError(AssertionError):
    """An assert of the test does not hold."""

    def __init__(self, value: object) -> None:
        super().__init__(f"got {show(value)}")
        self.agent_r1_text = str(self)


def run_test(request: dict[str, Any], peer: Peer) -> None:
    """Run a test.

    Args:
        request: `setup` and `test`, the sources; `builtins`, names of builtins that the code
            under test is to define.
        peer: reaches the code.

    Raises:
        BaseException: the test has failed.
    """
    setup = ast.parse(request["setup"], TEST_NAME)
    test = ast.parse(request["test"], TEST_NAME)
    modules, names, bound = find_names(setup, test)
    own = dict(vars(builtins))
    own.update({name: importlib.import_module(name) for name in modules})
    if set(names) - bound - STANDARD_TYPES.keys() - own.keys():  # something else is under test
        own.update(STANDARD_TYPES)
    theirs = [name for name in names if name not in own]
    own.update(peer.names(theirs + request["builtins"]))
    scope: dict[str, Any] = {"__name__": TEST_MODULE, "__builtins__": own, _FAILED: fail}
    exec(compile(setup, TEST_NAME, "exec"), scope)
    shown = ast.fix_missing_locations(ShowValues().visit(test))
    exec(compile(shown, TEST_NAME, "exec"), scope)


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


class ShowValues(ast.NodeTransformer):
    """Lets an assert that fails say which value it got."""

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        """Return the statement that does the same and keeps the value it looks at."""
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


def _keep(expression: ast.expr) -> ast.expr:
    return ast.NamedExpr(ast.Name(_LEFT, ast.Store()), expression)


def fail(value: object) -> None:
    """End the test.

    Raises:
        CheckFailedError: always.
    """
    raise CheckFailedError(value)


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
