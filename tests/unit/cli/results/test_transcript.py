"""What people read of a stored trajectory."""

from __future__ import annotations

from agent_r1.cli.results.transcript import outcome
from agent_r1.learner.reporting.trajectory_log import readable
from tests.support.builders import scored, two_segments


def test_the_segments_of_a_trajectory_are_stored_and_shown():
    record = readable(scored(**two_segments()), step=1, advantage=0.5, trained=True)
    assert record["segment_starts"] == [5]
    # 5 of its 10 tokens were sampled.
    assert "10 tokens (50% sampled) in 2 segments, 2 turns" in outcome(record)
    whole = readable(scored(), step=1, advantage=0.5, trained=True)
    assert "segments" not in outcome(whole)
    older = {name: value for name, value in whole.items() if name != "segment_starts"}
    assert outcome(older) == outcome(whole)
