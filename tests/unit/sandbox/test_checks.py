"""How the tests of a task are read: one by one, with what each needs around it."""

from __future__ import annotations

import ast
import threading
import time
from typing import Any

import pytest

from agent_r1.sandbox.checks import MAX_TEST_CHARS, Check, read_checks
from agent_r1.tools.base import CallContext, ToolUnavailableError
from agent_r1.tools.sandbox import code_tests


def read_one(test: str, **context: Any) -> Check:
    (check,) = read_checks({"tests": [test]} | context)[1]
    return check


@pytest.mark.parametrize(
    ("test", "text"),
    [
        ("assert f( [1,2] )==[1, (2, 'x')], 'why'", "assert f([1, 2]) == [1, (2, 'x')]"),
        ("assert f(1)", "assert f(1)"),
        ("x = 1\nassert f(x) == 1", "x = 1\nassert f(x) == 1"),
    ],
)
def test_the_model_reads_a_test_without_its_message(test: str, text: str):
    assert read_one(test).text == text


@pytest.mark.parametrize(
    ("test", "builtins"),
    [
        ("assert sum(10, 15) == 6", ("sum",)),  # nothing else can be under test
        ("assert abs(sum(10, 15)) == 6", ("sum",)),
        ("assert abs(f(2) - 4.0) < 1e-6", ()),
        ("assert sorted(f(2)) == sorted([1])", ()),
        ("x = 3\nassert f(x) == abs(x)", ()),
    ],
)
def test_a_builtin_is_the_codes_only_where_the_test_names_nothing_else(
    test: str, builtins: tuple[str, ...]
):
    assert read_one(test).builtins == builtins


def test_a_prompts_own_helpers_and_imports_are_the_tests():
    prompt = (
        "import math\nfrom typing import List\n\nclass Node:\n    pass\n\n"
        "def poly(xs, x):\n    return sum(xs)\n\n"
        "def other(x):\n    'to be written as well'\n\n"
        "def f(xs):\n    'find a zero'\n"
    )
    check = "def check(candidate):\n    assert poly([1], candidate([1])) == 0\n"
    context = {"prompt": prompt, "entry_point": "f", "check": check}
    (only,) = read_checks(context)[1]
    assert only.setup == (
        "import math\nfrom typing import List\ndef poly(xs, x):\n    return sum(xs)\ncandidate = f"
    )


def test_a_byte_order_mark_is_no_part_of_a_source():
    marked = {"tests": ["\ufeffassert f(1)"], "setup": "\ufeffx = 1", "prompt": "\ufeffimport math"}
    task, (check,) = read_checks(marked)
    assert (check.test, check.setup) == ("assert f(1)", "import math\nx = 1")
    assert task.prompt == "import math"
    whole = {"entry_point": "f", "check": "\ufeffdef check(c):\n    assert c(1)"}
    assert read_checks(whole)[1][0].text == "assert c(1)"


def test_a_prompt_that_ends_in_the_middle_has_no_helpers():
    assert read_one("assert f(1) == 2", prompt="import math\ndef f(x):\n").setup == ""


def test_a_check_function_of_asserts_is_one_test_for_each():
    context = {
        "entry_point": "f",
        "check": "META = 1\ndef check(candidate):\n    'doc'\n    assert candidate(1) == 1\n"
        "    assert True\n    assert candidate(2) == 4\n",
    }
    checks = read_checks(context)[1]
    assert [check.text for check in checks] == [
        "assert candidate(1) == 1",
        "assert candidate(2) == 4",
    ]
    assert checks[0].setup == "META = 1\ncandidate = f"


def test_a_check_function_with_a_loop_is_one_test():
    source = "def check(candidate):\n    for x in range(3):\n        assert candidate(x) == x\n"
    (check,) = read_checks({"entry_point": "f", "check": source})[1]
    assert check.test == f"{source}\ncheck(f)"


@pytest.mark.parametrize(
    ("context", "problem"),
    [
        (None, "does not fit code_tests"),
        ({}, "has no tests"),
        ({"tests": "assert f(1)"}, "tests: Input should be a valid list"),
        ({"tests": ["assert f(1"]}, "is not Python"),
        ({"tests": [f"assert f({'-' * 30_000}1)"]}, "is not Python: it is nested too deeply"),
        ({"setup": f"x = {'-' * 30_000}1", "tests": ["assert f(1)"]}, "nested too deeply"),
        ({"check": "def check(c): pass"}, "both check and entry_point"),
        ({"tests": [f"x = '{'x' * MAX_TEST_CHARS}'"]}, "the limit is 40000"),
        ({"tests": ["assert f(1)"] * 20_001}, "has 20001 tests; the limit is 20000"),
        ({"tests": ["[]," * 2_700_000]}, "a test in tool_context has 8100000 characters"),
        (
            # 500 x (11 + 10,000) = 5,005,500
            {"tests": ["assert f(1)"] * 500, "setup": "#" * 10_000},
            "the 500 tests in tool_context have 5005500 characters",
        ),
    ],
)
def test_a_wrong_context_says_what_to_mend(context: Any, problem: str):
    with pytest.raises(ValueError, match=problem):
        read_checks(context)


@pytest.mark.parametrize("piece", ["a\n", "f()\n", "x=[[[a]]]\n", "f'{a}'\n"])
def test_no_test_that_is_allowed_keeps_others_waiting_while_it_is_parsed(piece: str):
    source = piece * (MAX_TEST_CHARS // len(piece))
    started = time.thread_time()
    ast.parse(source)
    # Of the processor's time: at most 0.12 s on a machine of 2023; 500,000 characters took 1.5 s.
    assert time.thread_time() - started < 1.0


async def test_tests_are_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch):
    threads: list[threading.Thread] = []

    def read(context: object) -> Any:
        threads.append(threading.current_thread())
        raise ValueError("no tests")

    monkeypatch.setattr(code_tests, "read_checks", read)
    tool = code_tests.CodeTests()
    with pytest.raises(ToolUnavailableError, match="no tests"):
        await tool.call({"code": "pass"}, CallContext("r", 0, {}, 5.0))
    assert threads != [threading.main_thread()]
    assert len(threads) == 1
