"""What a new version of a tool is given, and what the others keep."""

from __future__ import annotations

import pytest

from agent_r1_proto.tool_pool import NewVersionRule, ToolState
from tests.unit.attempts.test_tool_discovery import instance


@pytest.mark.parametrize(
    ("rule", "parts"),
    [
        # 9 : 1 are parts of .9 and .1; the rule leaves them all, or three quarters of it.
        ("none", {"1": 0.9, "2": 0.1, "3": 0.0}),
        (0.25, {"1": 0.675, "2": 0.075, "3": 0.25}),
    ],
)
@pytest.mark.parametrize("live", [["1", "2"], ["1"], ["2"]])
def test_a_version_that_is_away_keeps_its_weight(
    live: list[str], rule: NewVersionRule, parts: dict[str, float]
):
    before = ToolState([instance(v, v) for v in live], ["1", "2"], {"1": 9.0, "2": 1.0})
    assert before.weights_with("3", rule) == pytest.approx(parts)


def test_a_version_that_stands_in_for_another_keeps_everything():
    # 1 is away, and 2, to which the weights give nothing, stands in for it.
    before = ToolState([instance("b", "2")], ["1", "2"], {"1": 1.0, "2": 0.0})
    weights = before.weights_with("3", "none")
    assert weights is not None
    now = ToolState([instance("b", "2"), instance("c", "3")], ["1", "2", "3"], weights)
    assert now.shares() == {"2": 1.0}


def test_weights_that_name_the_new_version_decide():
    before = ToolState([instance("a", "1")], ["1"], {"1": 9.0, "2": 1.0})
    assert before.weights_with("2", "none") is None
    assert before.weights_with("2", 0.5) is None


def test_the_only_version_needs_no_weight():
    assert ToolState().weights_with("1", "none") is None
