"""The committed report of a GPU: says how far `agent-r1 check` may be believed for GPUs.

`make test-gpu` writes such a report. Copied beside this module, it is part of the package.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

REPORT = Path(__file__).with_name("gpu_report.json")
TOLERANCE = 0.2
"""Largest error of an estimate, as a share of what was measured."""


def verdict_on_gpus(report: Path = REPORT) -> str:
    """Return the line that says whether figures for GPUs were compared with a GPU."""
    found: dict[str, Any] = {}
    errors: dict[str, float] = {}
    if report.is_file():
        found = json.loads(report.read_text(encoding="utf-8"))
        if found["outcome"] == "passed":
            errors = {entry["what"]: entry["error"] for entry in found["memory"]}
    if not errors:
        return "figures for GPUs are unverified: no report compares them with a GPU"
    what, error = max(errors.items(), key=lambda item: abs(item[1]))
    where = f"{what}, {error:+.0%} of what {found['machine']['device']} took"
    if abs(error) > TOLERANCE:
        return f"figures for GPUs are unverified: one is off by more than {TOLERANCE:.0%} ({where})"
    return f"figures for GPUs were compared with a GPU; the largest error is that of the {where}"
