"""The report of the diagnosis: report.json for programs, report.txt for people."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agent_r1.runtime.files.writing import write_atomically
from scripts.gpu_test.parts import PASSED, ROOT, Part

JSON, TEXT = "report.json", "report.txt"
MACHINE = "machine"
HEAD = re.compile(r"(passed|failed|not finished) on \w+, revision ")
"""A report begins with."""


def passed(parts: Sequence[Part]) -> bool:
    """Whether something ran besides the look at the machine, and all that ran passed."""
    ran = [part for part in parts if part.outcome == PASSED and part.name != MACHINE]
    return bool(ran) and not any(part.failed for part in parts)


def line(part: Part) -> str:
    """Return one line about a part."""
    return f"{part.name}: {part.outcome} ({part.seconds:.0f} s)"


def revision() -> str:
    """Return the commit of this checkout."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return "unknown"


def is_there(out: Path) -> bool:
    """Whether a folder holds a report of ours, or the beginning of one."""
    file = out / TEXT
    return file.is_file() and HEAD.match(file.read_text("utf-8", "replace")) is not None


def begin(out: Path, device: str) -> None:
    """Write a report that says that the diagnosis has not ended."""
    (out / JSON).unlink(missing_ok=True)
    write_atomically(out / TEXT, f"not finished on {device}, revision {revision()}\n")


def write(out: Path, device: str, parts: Sequence[Part]) -> str:
    """Write both files; return the text, and where they are or why not."""
    machine = next((part.figures for part in parts if part.name == MACHINE), {})
    report: dict[str, Any] = {
        "outcome": PASSED if passed(parts) else "failed",
        "device": device,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": revision(),
        MACHINE: machine,
        "memory": [entry for part in parts for entry in part.memory],
        "parts": [part.as_json() for part in parts],
    }
    text = as_text(report)
    try:
        write_atomically(out / JSON, json.dumps(report, indent=1) + "\n")
        write_atomically(out / TEXT, text)
    except OSError as exc:
        return f"{text}the report cannot be written ({exc}); name another folder with --out\n"
    return f"{text}attach {out / JSON} to a bug\n"


def as_text(report: Mapping[str, Any]) -> str:
    """Return the report for a reader; the logs of what failed come last."""
    lines = [f"{report['outcome']} on {report['device']}, revision {report['revision']}"]
    tails: dict[str, list[str]] = {}
    for part in report["parts"]:
        lines += ["", f"{part['name']}: {part['outcome']} ({part['seconds']:.0f} s)"]
        lines += [f"  {name}: {_shown(value)}" for name, value in part["figures"].items()]
        lines += [
            f"  {entry['what']}: {entry['measured_gb']:.2f} GB, estimated "
            f"{entry['estimated_gb']:.2f} GB"
            for entry in part["memory"]
        ]
        if part["outcome"] != PASSED:
            tails |= part["tails"]
    for name, log in tails.items():
        lines += ["", f"--- {name}", *log]
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
