"""How tests are split into what the sandbox computes and what stays here, and the value format."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.tools.sandbox import guest
from agent_r1.tools.sandbox.checks import MAX_TEST_CHARS, Check, decode, read_checks


def read_one(test: str) -> Check:
    (check,) = read_checks({"tests": [test]})[1]
    return check


def report(value: Any) -> dict[str, Any]:
    return json.loads(json.dumps({"passed": True, "value": guest.encode(value)}))


@pytest.mark.parametrize(
    ("test", "mode", "source"),
    [
        ("assert f(2) == 4", "value", "f(2)"),
        ("assert f( [1,2] )==[1, (2, 'x')], 'why'", "value", "f([1, 2])"),
        ("assert abs(f(1) - 0.5) < 1e-6", "value", "abs(f(1) - 0.5)"),
        ("assert f(1) is True", "value", "f(1)"),
        ("assert f(1)", "truth", "f(1)"),
        ("assert not f(1)", "truth", "f(1)"),
        ("assert f(1) and g(2)", "truth", "f(1) and g(2)"),
        ("assert f(1) == g(1)", "run", "assert f(1) == g(1)"),
        ("assert 1 < f(1) < 3", "run", "assert 1 < f(1) < 3"),
        ("assert f(1) in [1, 2]", "run", "assert f(1) in [1, 2]"),
        ("x = 1\nassert f(x) == 1", "run", "x = 1\nassert f(x) == 1"),
    ],
)
def test_what_the_sandbox_gets_of_a_test(test: str, mode: str, source: str):
    check = read_one(test)
    assert (check.mode, check.source) == (mode, source)


def test_the_expected_value_is_not_sent():
    assert "12345" not in json.dumps(read_one("assert f(2) == 12345").secret())


@pytest.mark.parametrize(
    ("test", "value", "problem"),
    [
        ("assert f(2) == 4", 4, None),
        ("assert f(2) == 4", 4.0, None),
        ("assert f(2) == 4", 5, "got 5"),
        ("assert f(2) == [1, 2]", (1, 2), "got (1, 2)"),
        ("assert f(2) == {'a': 1}", {"a": 1}, None),
        ("assert f(2) < 0.5", 0.25, None),
        ("assert f(2) < 0.5", "x", "got 'x': '<' not supported"),
        ("assert f(2) is True", 1, "got 1"),
        ("assert f(2)", True, None),
        ("assert not f(2)", True, "got True"),
        ("assert f(2) == 4", object(), 'got an object of type "object", expected 4'),
    ],
)
def test_values_are_judged_here(test: str, value: Any, problem: str | None):
    found = read_one(test).judge(report(value))
    assert found == problem or (found is not None and found.startswith(str(problem)))


@pytest.mark.parametrize("answer", [{}, {"passed": False}, {"passed": 1, "value": ["int", "4"]}])
def test_a_test_that_did_not_come_to_its_end_has_failed(answer: dict[str, Any]):
    assert read_one("assert f(2) == 4").judge(answer) == "it did not come to its end"


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
    assert (check.mode, check.source) == ("run", f"{source}\ncheck(f)")


@pytest.mark.parametrize(
    ("context", "problem"),
    [
        (None, "does not fit code_tests"),
        ({}, "has no tests"),
        ({"tests": "assert f(1)"}, "tests: Input should be a valid list"),
        ({"tests": ["assert f(1"]}, "is not Python"),
        ({"check": "def check(c): pass"}, "both check and entry_point"),
        ({"tests": [f"x = '{'x' * MAX_TEST_CHARS}'"]}, "the limit is 500000"),
    ],
)
def test_a_wrong_context_says_what_to_mend(context: Any, problem: str):
    with pytest.raises(ValueError, match=problem):
        read_checks(context)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
    | st.fractions(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers() | st.text(), inner)
        | st.sets(st.integers() | st.text())
    ),
    max_leaves=20,
)


@given(PLAIN)
def test_plain_values_arrive_as_they_were(value: Any):
    found = decode(json.loads(json.dumps(guest.encode(value))))
    assert found == value
    assert type(found) is type(value)


def test_subclasses_count_as_what_they_derive_from():
    class Any4(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    class Words(dict):  # type: ignore[type-arg]
        pass

    assert decode(guest.encode(Any4(3))) != 4
    assert decode(guest.encode(Words(a=1))) == {"a": 1}
    assert decode(guest.encode(10**5000)) == 10**5000
    assert decode(guest.encode(Fraction(1, 3))) == Fraction(1, 3)


@pytest.mark.parametrize(
    "tagged", [None, [], ["int"], ["int", "zz"], ["constant", 7], ["set", [["list", []]]], [[]], 3]
)
def test_nonsense_from_the_sandbox_is_no_value(tagged: Any):
    check = read_one("assert f(2) == 4")
    assert "cannot be read" in str(check.judge({"passed": True, "value": tagged}))
