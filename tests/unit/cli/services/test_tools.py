"""`agent-r1 tools`: what is refused before Redis is asked, and what is shown of reports."""

from __future__ import annotations

import pytest

from agent_r1.cli.main import main

POOL = ("--redis", "redis://127.0.0.1:1/0", "--pool", "p")


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (["2=nan"], "weight of version 2 (nan) must be a number >= 0"),
        (["2=inf"], "weight of version 2 (inf) must be a number >= 0"),
        (["2=-1"], "weight of version 2 (-1.0) must be a number >= 0"),
        (["1=0", "2=0"], "give no version any traffic"),
        (["=1"], "version ('') must be a name without blanks"),
        (["1=1", "1=2"], "version '1' is given twice"),
        (["1"], "'1' is not VERSION=WEIGHT, such as 1.2=0.1"),
        ([], "give VERSION=WEIGHT, once or more, or --newest"),
    ],
)
def test_weights_that_mean_nothing_are_refused_with_what_is_wrong(
    weights: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["tools", "weight", "search", *weights, *POOL]) == 2
    assert message in capsys.readouterr().err
