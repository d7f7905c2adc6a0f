"""Hidden tests as data: splits asserts into what the sandbox computes and what it must not see.

`CodeTests` reads the task's tests, sends `Check.secret()` to a sandbox and judges what comes back
here, in the service. For `assert f(3) == 9` the sandbox only ever gets `f(3)`: the 9 stays here, so
code can neither read it nor report a pass without having computed it, and an object that claims to
equal everything does not arrive. Only a test of another shape is judged in the sandbox.
"""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Json = dict[str, Any]

MAX_TEST_CHARS = 500_000
_SHOWN_VALUE_CHARS = 200
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class TestContext(BaseModel):
    """The `tool_context` of a task for `code_tests`; other keys are for others."""

    __test__ = False  # not a class of pytest's

    model_config = ConfigDict(frozen=True, strict=True)

    tests: list[str] = []
    """Asserts, one test each (MBPP)."""
    setup: str = ""
    """Runs after the code and before each test (MBPP's `test_setup_code`)."""
    prompt: str = ""
    """Put before the code, which may go on where it ends (HumanEval's `prompt`)."""
    entry_point: str | None = Field(default=None, pattern=r"^[A-Za-z_]\w*$")
    """Name of the function that `check` tests."""
    check: str | None = None
    """Defines `check(candidate)` (HumanEval's `test`)."""


@dataclass(frozen=True)
class Check:
    """One test."""

    text: str
    """What the model reads when it fails."""
    mode: Literal["value", "truth", "run"]
    """`value` and `truth` compute an expression and are judged here; `run` judges itself."""
    source: str
    """What the sandbox gets: an expression, or the whole test."""
    setup: str = ""
    """Statements that run before it."""
    compare: Callable[[Any, Any], bool] = operator.eq
    expected: Any = None

    def secret(self) -> Json:
        """Return what the sandbox is told once the code's process exists."""
        return {"mode": self.mode, "test": self.source, "setup": self.setup}

    def judge(self, report: Json) -> str | None:
        """Return what is wrong with the answer to this test; None when it passes."""
        if report.get("passed") is not True:
            return "it did not come to its end"
        if self.mode == "run":
            return None
        try:
            value = decode(report.get("value"))
        except _OpaqueValueError as exc:
            return f"got {exc}, expected {_show(self.expected)}"
        try:
            passed = bool(self.compare(value, self.expected))
        except TypeError as exc:
            return f"got {_show(value)}: {exc}"
        return None if passed else f"got {_show(value)}"


def read_checks(context: object) -> tuple[TestContext, list[Check]]:
    """Read the tests of a task.

    Raises:
        ValueError: the context has no tests, or they are not Python; the text says what to mend.
    """
    try:
        parsed = TestContext.model_validate(context)
    except ValidationError as exc:
        problems = "; ".join(
            f"{'.'.join(map(str, error['loc'])) or 'tool_context'}: {error['msg']}"
            for error in exc.errors(include_url=False)
        )
        raise ValueError(
            f"tool_context does not fit code_tests ({problems}); it is an object with tests, or "
            "with check and entry_point, and optionally setup and prompt"
        ) from exc
    if (parsed.check is None) != (parsed.entry_point is None):
        raise ValueError("tool_context must have both check and entry_point, or neither")
    checks: list[Check] = []
    try:
        for test in parsed.tests:
            checks.append(_read_test(test, parsed.setup))
        if parsed.check is not None and parsed.entry_point is not None:
            checks += _split_check(parsed.check, parsed.entry_point, parsed.setup)
    except (SyntaxError, ValueError, RecursionError) as exc:
        raise ValueError(f"a test in tool_context is not Python: {exc}; correct the data") from exc
    if not checks:
        raise ValueError("tool_context has no tests; give tests, or check and entry_point")
    longest = max(len(check.source) + len(check.setup) for check in checks)
    if longest > MAX_TEST_CHARS:
        raise ValueError(
            f"a test in tool_context has {longest} characters; the limit is {MAX_TEST_CHARS}"
        )
    return parsed, checks


def _read_test(source: str, setup: str) -> Check:
    tree = ast.parse(source)
    if len(tree.body) == 1 and isinstance(tree.body[0], ast.Assert):
        return _read_assert(tree.body[0], setup)
    return Check(source.strip(), "run", source, setup)


def _read_assert(statement: ast.Assert, setup: str) -> Check:
    text = f"assert {ast.unparse(statement.test)}"
    match statement.test:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            expected = _read_literal(right)
            if type(op) in _COMPARISONS and expected is not None:
                compare = _COMPARISONS[type(op)]
                return Check(text, "value", ast.unparse(left), setup, compare, expected[0])
            if isinstance(op, ast.Is) and expected in ((True,), (False,), (None,)):
                return Check(text, "value", ast.unparse(left), setup, operator.is_, expected[0])
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return Check(text, "truth", ast.unparse(operand), setup, operator.is_, False)
        case test if not isinstance(test, ast.Compare):
            return Check(text, "truth", ast.unparse(test), setup, operator.is_, True)
    return Check(text, "run", ast.unparse(statement), setup)


def _read_literal(node: ast.expr) -> tuple[Any] | None:
    try:
        return (ast.literal_eval(node),)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _split_check(source: str, entry_point: str, setup: str) -> list[Check]:
    """Make one check of each assert of `check(candidate)`, where it is nothing but asserts."""
    whole = Check(f"check({entry_point})", "run", f"{source}\ncheck({entry_point})", setup)
    tree = ast.parse(source)
    functions = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"
    ]
    if len(functions) != 1 or len(functions[0].args.args) != 1:
        return [whole]
    asserts = [node for node in functions[0].body if not _is_no_test(node)]
    if not asserts:
        return [whole]
    others = [node for node in tree.body if node is not functions[0]]
    alias = f"{functions[0].args.args[0].arg} = {entry_point}"
    before = "\n".join(filter(None, (setup, *map(ast.unparse, others), alias)))
    checks: list[Check] = []
    for node in asserts:
        if not isinstance(node, ast.Assert):
            return [whole]
        checks.append(_read_assert(node, before))
    return checks


def _is_no_test(node: ast.stmt) -> bool:
    """Tell whether this is a docstring, `pass`, or an assert of a constant."""
    if isinstance(node, ast.Assert):
        return isinstance(node.test, ast.Constant) and bool(node.test.value)
    return isinstance(node, ast.Pass) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )


class _OpaqueValueError(Exception):
    """The value is not plain data; the text says what it is."""


def decode(tagged: object) -> Any:
    """Return the value that `guest.encode` wrote; nothing of the program runs here.

    Raises:
        _OpaqueValueError: it is not plain data.
    """
    try:
        return _decode(tagged)
    except (TypeError, ValueError, KeyError, IndexError, RecursionError) as exc:
        raise _OpaqueValueError("a value that cannot be read") from exc


def _decode(tagged: Any) -> Any:
    kind, *rest = tagged
    match kind:
        case "constant" if rest[0] in (True, False, None):
            return rest[0]
        case "int":
            return int(rest[0], 16)
        case "float":
            return float.fromhex(rest[0])
        case "complex":
            return complex(float.fromhex(rest[0]), float.fromhex(rest[1]))
        case "str" if isinstance(rest[0], str):
            return rest[0]
        case "bytes":
            return bytes.fromhex(rest[0])
        case "fraction":
            return Fraction(int(rest[0], 16), int(rest[1], 16))
        case "dict":
            return {_decode(key): _decode(value) for key, value in rest[0]}
        case "list" | "tuple" | "set" | "frozenset":
            make = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind]
            return make(_decode(item) for item in rest[0])
        case "other":
            raise _OpaqueValueError(f"an object of type {json.dumps(rest[0])}")
    raise ValueError(kind)


def _show(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer too long to print
        text = f"a {type(value).__name__} of more digits than can be shown"
    if len(text) > _SHOWN_VALUE_CHARS:
        text = f"{text[:_SHOWN_VALUE_CHARS]}…"
    return text
