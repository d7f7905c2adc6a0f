"""Hidden tests as data: reads the tests of a task and makes a list of what is run one by one.

`CodeTests` sends `Check.request()` to the sandbox of the tests (`guest/tester.py`); nothing of it
ever reaches the sandbox of the code.
"""

from __future__ import annotations

import ast
import builtins
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

Json = dict[str, Any]

MAX_TEST_CHARS = 40_000
"""Most characters of a test, with what runs before it. The parser lets nothing else run, a quarter
of a second at most for so many; those of HumanEval and MBPP have 3,000."""
BYTE_ORDER_MARK = "\ufeff"
"""Stands at the beginning of some files, which Python then does not compile from text."""
Source = Annotated[str, AfterValidator(lambda text: text.removeprefix(BYTE_ORDER_MARK))]
MAX_TESTS = 20_000
"""Most tests of a task: so many take a second or two to read, and far longer to run."""
MAX_ALL_CHARS = 5_000_000
"""Most characters of all tests of a task, each with what runs before it."""


class TestContext(BaseModel):
    """The `tool_context` of a task for `code_tests`; other keys are for others."""

    __test__ = False  # not a class of pytest's

    model_config = ConfigDict(frozen=True, strict=True)

    tests: list[Source] = []
    """Asserts, one test each (MBPP)."""
    setup: Source = ""
    """Runs before each test, with the tests (MBPP's `test_setup_code`)."""
    prompt: Source = ""
    """Put before the code, which may continue where it ends (HumanEval's `prompt`)."""
    entry_point: str | None = Field(default=None, pattern=r"^[A-Za-z_]\w*$")
    """Name of the function that `check` tests."""
    check: Source | None = None
    """Defines `check(candidate)` (HumanEval's `test`)."""


@dataclass(frozen=True)
class Check:
    """One test, as the sandbox of the tests gets it."""

    text: str
    """Text that the model reads when it fails."""
    test: str
    setup: str = ""
    """Runs before it: helpers of the prompt, the task's set-up, the names around a `check`."""
    builtins: tuple[str, ...] = ()
    """Builtin names that mean a function of the code's."""

    def request(self) -> Json:
        """Return what the process of the test is told."""
        return {"setup": self.setup, "test": self.test, "builtins": list(self.builtins)}


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
    _check_size(parsed)
    try:
        setup = "\n".join(filter(None, (_find_helpers(parsed), parsed.setup)))
        before = list(ast.walk(ast.parse(setup)))
        checks = [_read_test(test, setup, before, ast.parse(test)) for test in parsed.tests]
        if parsed.check is not None and parsed.entry_point is not None:
            checks += _split_check(parsed.check, parsed.entry_point, setup)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as exc:
        # A MemoryError is what the parser makes of code that is nested too deeply.
        problem = str(exc) or "it is nested too deeply"
        raise ValueError(
            f"a test in tool_context is not Python: {problem}; correct the data"
        ) from exc
    if not checks:
        raise ValueError("tool_context has no tests; give tests, or check and entry_point")
    longest = max(len(check.test) + len(check.setup) for check in checks)
    if longest > MAX_TEST_CHARS:
        raise ValueError(
            f"a test in tool_context has {longest} characters; the limit is {MAX_TEST_CHARS}"
        )
    return parsed, checks


def _check_size(context: TestContext) -> None:
    """Refuse what takes seconds to parse, before it is parsed."""
    if len(context.tests) > MAX_TESTS:
        raise ValueError(
            f"tool_context has {len(context.tests)} tests; the limit is {MAX_TESTS}; leave some "
            "out of the data of the task"
        )
    shared = len(context.setup) + len(context.prompt)
    tests = [*context.tests, *([] if context.check is None else [context.check])]
    sizes = [shared + len(test) for test in tests]
    for size, limit, what in (
        (max(sizes, default=0), MAX_TEST_CHARS, "a test in tool_context has"),
        (sum(sizes), MAX_ALL_CHARS, f"the {len(sizes)} tests in tool_context have"),
    ):
        if size > limit:
            raise ValueError(
                f"{what} {size} characters with what runs before; the limit is {limit}; shorten "
                "the data of the task"
            )


def _read_test(source: str, setup: str, before: list[ast.AST], tree: ast.Module) -> Check:
    text = source.strip()
    if len(tree.body) == 1 and isinstance(tree.body[0], ast.Assert):
        text = _show_assert(tree.body[0])
    return Check(text, source, setup, _find_builtins(before, tree))


def _show_assert(node: ast.Assert) -> str:
    return f"assert {ast.unparse(node.test)}"


def _find_builtins(before: list[ast.AST], tree: ast.Module) -> tuple[str, ...]:
    """Return the builtins that a test calls where it names nothing else: they are under test."""
    nodes = [*before, *ast.walk(tree)]
    read = {node.id for node in nodes if isinstance(node, ast.Name)}
    if any(not hasattr(builtins, name) for name in read):
        return ()
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    innermost = [call for call in calls if not any(_calls_in(arg) for arg in call.args)]
    return tuple(sorted({call.func.id for call in innermost if isinstance(call.func, ast.Name)}))


def _calls_in(node: ast.expr) -> bool:
    return any(isinstance(inner, ast.Call) for inner in ast.walk(node))


def _find_helpers(context: TestContext) -> str:
    """Return what a prompt defines besides what is asked for: its tests must not take the code's.

    Classes are left out: their objects must be the code's, which works on them.
    """
    try:
        body = ast.parse(context.prompt).body
    except SyntaxError:  # it ends where the code continues
        return ""
    helpers = [node for node in body if _is_helper(node, context.entry_point)]
    return "\n".join(map(ast.unparse, helpers))


def _is_helper(node: ast.stmt, entry_point: str | None) -> bool:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return node.name != entry_point and not all(map(_is_no_test, node.body))
    return isinstance(node, (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign))


def _split_check(source: str, entry_point: str, setup: str) -> list[Check]:
    """Make one check of each assert of `check(candidate)`, where it is nothing but asserts."""
    own = (entry_point,) if hasattr(builtins, entry_point) else ()
    whole = Check(f"check({entry_point})", f"{source}\ncheck({entry_point})", setup, own)
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
        checks.append(Check(_show_assert(node), ast.unparse(node), before, own))
    return checks


def _is_no_test(node: ast.stmt) -> bool:
    """Tell whether this is a docstring, `pass`, or an assert of a constant."""
    if isinstance(node, ast.Assert):
        return isinstance(node.test, ast.Constant) and bool(node.test.value)
    return isinstance(node, ast.Pass) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )
