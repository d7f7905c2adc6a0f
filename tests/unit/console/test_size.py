"""Pages of many runs and trajectories: small, and found through indexes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import console


async def test_every_page_is_small_and_no_view_walks_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(console, "TASKS", 100)
    runs = console.write_runs(tmp_path, 2, steps=12, trajectories=800)
    rows = await console.measure(runs, 12, 800, rounds=1)
    asked = console.pages_of(runs, 12, 0)
    assert asked.keys() <= {row["page"] for row in rows}
    # 200 answers of evaluations, and 50 of each step: with 50 rows a page, none is nearly empty.
    assert all(row["kB"] > 20 for row in rows if row["page"] in ("a step", "the last page"))


async def test_a_page_that_is_too_large_ends_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(console, "TASKS", 25)
    runs = console.write_runs(tmp_path, 1, steps=1, trajectories=5)
    monkeypatch.setattr(console, "MOST_ROWS", 49)
    with pytest.raises(RuntimeError, match=r"/trajectories: 50 rows"):
        await console.measure(runs, 1, 5, rounds=1)
