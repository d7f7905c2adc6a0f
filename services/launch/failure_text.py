"""A failure as a person reads it, the moment it happens: what, where, in which log, what to do.

The training view shows lines of `failures.jsonl` this way; `agent-r1 evaluate` and `agent-r1 chat`
show what the failure board says.
"""

from __future__ import annotations

import re
from pathlib import Path

from agent_r1_proto.failures import Failure

INDENT = "   "
SHOWN_LINES = 12
"""Lines of a reason that are shown: its first, and the last ones of its traceback."""

_HEADINGS = {
    "tools": "first error of its kind from a tool (the model reads it as text)",
    "evaluation": "first failure of its kind in the evaluation",
}


def failure_text(one: Failure, *, log: str, next_step: str) -> str:
    """Render the first failure of a kind; every line of it stays on the terminal."""
    heading = _HEADINGS.get(one.where, f"first failure of its kind in {one.where}")
    first, *rest = one.reason.splitlines() or ["no reason given"]
    rest = [line for line in rest if line != first]
    if len(rest) >= SHOWN_LINES:
        rest = ["…", *rest[-SHOWN_LINES + 2 :]]
    sample = f"sample {one.rollout_id}; " if one.rollout_id else ""
    lines = [f"!! {heading}: {first}", *rest, f"{sample}log: {log}", f"next: {next_step}"]
    return f"\n{INDENT}".join(lines)


def log_of(log_dir: Path, one: Failure) -> Path:
    """Return the log that says more about a failure: that of the tool it names, or the service."""
    logs = {path.stem: path for path in sorted(log_dir.glob("*.log"))}
    words = re.findall(r"[\w-]+", one.kind)
    tools = [log for name, log in logs.items() if name in words and words[0].startswith("tool")]
    services = [log for name, log in logs.items() if name.startswith(one.where)]
    return next(iter(tools + services), log_dir)
