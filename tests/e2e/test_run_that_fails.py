"""A training run that cannot succeed: from some step on, every call of its tool raises."""

from __future__ import annotations

import json

import pytest

from tests.e2e.conftest import FailedRun

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_tool_whose_call_raises_always_stops_the_run_with_the_reason(failed_run: FailedRun):
    assert failed_run.returncode != 0, failed_run.output
    # Two batches of 4 groups of 2 samples.
    assert "each of the last 16 calls of tool 'search' ended in an error" in failed_run.output
    assert "KeyError: 'no such index'" in failed_run.output
    summary = json.loads((failed_run.folder / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "tool 'search' ended in an error" in summary["reason"]
    assert "no such index" in (failed_run.folder / "logs" / "search.log").read_text()  # traceback
