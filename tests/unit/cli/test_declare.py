"""Numbers on the command line: what is outside its limits is refused before a command runs."""

from __future__ import annotations

import pytest

from agent_r1.cli.declare import integer, number
from agent_r1.cli.parser import build_parser
from tests.support.parsers import parsers

CHECK = ("check", "run.toml")
EVALUATE = ("evaluate", "run.toml", "--out", "o.jsonl")
WHOLE = "must be a whole number of 1 or more"


@pytest.mark.parametrize(
    ("command", "option", "value", "said"),
    [
        (CHECK, "--gpus", "0", "0 must be a whole number from 1 to 1000"),
        (CHECK, "--gpus", "-1", "-1 must be a whole number from 1 to 1000"),
        (CHECK, "--gpus", "1.5", "1.5 must be a whole number from 1 to 1000"),
        (CHECK, "--boxes", "0", "0 must be a whole number from 1 to 1000"),
        *((CHECK, "--gpu-gb", bad, bad) for bad in ("inf", "nan", "-5", "0", "1e300", "x")),
        *((CHECK, "--memory-gb", bad, bad) for bad in ("inf", "nan", "-5", "0")),
        (EVALUATE, "--attempts", "0", WHOLE),
        (EVALUATE, "--decode-fit", "nan", "nan must be a number from 0.01 to 2"),
        (EVALUATE, "--decode-beta", "-1", "-1 must be a number of 0 or more"),
        (("chat", "run"), "--temperature", "-1", "-1 must be 0 or a number from 0.01 to 2"),
        (("chat", "run"), "--temperature", "3", "3 must be 0 or a number from 0.01 to 2"),
        (("try", "run.toml"), "-n", "0", WHOLE),
        (("try", "run.toml"), "--samples", "0", WHOLE),
        (("show", "run"), "--limit", "0", WHOLE),
        (("rollout", "drain", "one"), "--timeout-s", "-1", "-1 must be a number of 0 or more"),
        (("tools", "drain", "search"), "--timeout-s", "nan", "nan must be a number of 0 or more"),
    ],
)
def test_what_is_outside_the_limits_is_refused(
    command: tuple[str, ...], option: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args([*command, f"{option}{'=' if '--' in option else ''}{value}"])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert f"argument {option}" in error
    assert said in error


def test_what_is_on_a_limit_is_taken():
    assert (integer(1)("1"), integer(1, 8)("8")) == (1, 8)
    assert (number(0.5)("0.5"), number(0.5, 2, or_0=True)("0")) == (0.5, 0)


def test_every_number_has_limits():
    actions = [action for one in parsers(build_parser()) for action in one._actions]
    assert len(actions) > 100
    assert [action.dest for action in actions if action.type in (int, float)] == []
