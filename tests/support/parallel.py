"""How the suite is spread over processes by pytest-xdist, and its time by package.

The tests of a file stay together in one process, and so do files that share something costly.
"""

from __future__ import annotations

import gc
import os
import re
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path, PurePosixPath
from typing import Any

import psutil
import pytest
from xdist.scheduler import LoadScopeScheduling

TESTS = Path(__file__).resolve().parents[1]
GIB_PER_PROCESS = 5
"""A training run with its learner and engine, at its largest."""
MOST_PROCESSES = 8
SHARED_SERVERS = {
    "elasticsearch": re.compile(r"integration/test_(elasticsearch_\w+|search_tool)\.py"),
    "runs of e2e/conftest.py": re.compile(
        r"e2e/test_(training_run|deterministic_run|run_that_fails|observed_run|export)\.py"
    ),
    "the engine of live_engine": re.compile(r"integration/test_(vllm_\w+|weight_transfer)\.py"),
    "a deep world": re.compile(r"unit/examples/test_deep_world\w*\.py"),
}


def processes(cores: int, memory_gib: float) -> int:
    """Return how many processes run the suite.

    Tests wait for half of their time, so two more than there are cores.
    """
    return max(1, min(cores + 2, int(memory_gib / GIB_PER_PROCESS), MOST_PROCESSES))


class FileScheduling(LoadScopeScheduling):
    """Hands out whole files, in order: the longest come first."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        for server, files in SHARED_SERVERS.items():
            if files.search(file):
                return server
        return file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling:
    """Answer `--dist loadfile`."""
    config.option.loadscopereorder = False
    return FileScheduling(config, log)


def pytest_xdist_auto_num_workers() -> int:
    """Answer `-n auto`."""
    return processes(len(os.sched_getaffinity(0)), psutil.virtual_memory().available / 2**30)


def pytest_configure(config: pytest.Config) -> None:
    """Collect no garbage while tests are collected: every process imports torch and much else."""
    gc.disable()
    worker = getattr(config, "workerinput", None)
    if worker is not None and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        config.args = files_from(int(worker["workerid"].removeprefix("gw")), worker["workercount"])


def files_from(worker: int, count: int) -> list[str]:
    """Return all test files, in the order in which one of so many processes collects them.

    pytest rewrites the assertions of each file, a third of the time of a collection, and keeps the
    result for later. As each process begins elsewhere, none does what another one has done.
    """
    files = sorted(map(str, TESTS.rglob("test_*.py")))
    first = len(files) * worker // count
    return files[first:] + files[:first]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the tests of all processes into one order."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path.parts)


def pytest_collection_finish() -> None:
    """Collect garbage again, but never look at what has been imported."""
    gc.freeze()
    gc.enable()


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Replace lone surrogates in captured output, which no report can carry between processes."""
    report = yield
    report.sections = [
        (name, text.encode(errors="replace").decode()) for name, text in report.sections
    ]
    return report
