"""How the suite is spread over processes by pytest-xdist, and its time by package.

The tests of a file stay together in one process, and so do all that share one costly server. A
training run of its own goes wherever there is room.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import PurePosixPath

import psutil
import pytest

GIB_PER_PROCESS = 5
"""A training run with its learner and engine, at its largest."""
MOST_PROCESSES = 8
SHARED_RUNS = {"engine", "resumed_run"}
"""Fixtures with vLLM that many tests share."""


def processes(cores: int, memory_gib: float) -> int:
    """Return how many processes run the suite.

    Tests wait for half of their time, so one more than there are cores.
    """
    return max(1, min(cores + 1, int(memory_gib / GIB_PER_PROCESS), MOST_PROCESSES))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Answer `-n auto`."""
    return processes(len(os.sched_getaffinity(0)), psutil.virtual_memory().available / 2**30)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Name the group of every test for `--dist loadgroup`."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))


def _group(item: pytest.Item) -> str:
    if item.get_closest_marker("elasticsearch"):
        return "elasticsearch"
    if item.get_closest_marker("vllm"):
        shared = SHARED_RUNS.intersection(getattr(item, "fixturenames", ()))
        return shared.pop() if shared else item.nodeid
    return item.nodeid.partition("::")[0]


def seconds_by_package(durations: list[tuple[str, float]]) -> dict[str, float]:
    """Add up seconds by folder below tests/, two levels deep; the largest sum first."""
    sums: dict[str, float] = defaultdict(float)
    for nodeid, seconds in durations:
        folders = PurePosixPath(nodeid.partition("::")[0]).parent.parts[1:3]
        sums["/".join(folders) or "."] += seconds
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print where the time went, when more than a few tests ran."""
    reports = [
        (report.nodeid, report.duration)
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport)
    ]
    sums = seconds_by_package(reports)
    if len(sums) > 1:
        terminalreporter.section("seconds by package")
        for package, seconds in sums.items():
            terminalreporter.write_line(f"{seconds:8.1f} {package}")
