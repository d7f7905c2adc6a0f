"""Durations as people read them."""

from __future__ import annotations

import pytest

from agent_r1.runtime.durations import format_duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.6, "1m00s"), (200, "3m20s"), (3720, "1h02m"), (-5, "0s")],
)
def test_durations_are_short(seconds: float, text: str):
    assert format_duration(seconds) == text
