"""Names under which services read streams: the same after a restart, and of nobody else."""

from __future__ import annotations

from pathlib import Path

from agent_r1.runtime.announcements import make_consumer_name


def test_a_service_that_is_restarted_keeps_its_name_and_no_other_has_it(tmp_path: Path):
    first = make_consumer_name("reward", tmp_path / "reward-1")
    assert first == make_consumer_name("reward", tmp_path / "." / "reward-1")
    assert first != make_consumer_name("reward", tmp_path / "reward-2")
    assert first.startswith("reward-")


def test_a_process_that_nobody_restarts_has_a_name_of_its_own():
    assert make_consumer_name("reward", None) != make_consumer_name("reward", None)
