"""`agent-r1 search`: the lines that say how far an index has come."""

from __future__ import annotations

from agent_r1.cli.services.search import progress_lines


def test_progress_is_a_line_per_stage_and_one_every_few_seconds():
    lines: list[str] = []
    now = 100.0
    report = progress_lines(lines.append, clock=lambda: now)
    report("checking the corpus", 0, None)
    now = 102.0
    report("checking the corpus", 2000, None)  # too soon for another line
    now = 110.0
    report("checking the corpus", 5000, None)
    report("loading", 1000, 13000)  # 1000 were there from an earlier load
    now = 120.0
    report("loading", 7000, 13000)
    now = 121.0
    report("loading", 13000, 13000)
    # By hand: 5000 in 10 s; 6000 in 10 s, so 6000 more in 10 s = 0.2 min; 12000 in 11 s.
    assert lines == [
        "checking the corpus",
        "checking the corpus: 5,000 passages, 500 passages/s",
        "loading: 1,000 of 13,000 passages",
        "loading: 7,000 of 13,000, 600 passages/s, 0.2 min left",
        "loading: 13,000 of 13,000, 1,091 passages/s",
    ]
