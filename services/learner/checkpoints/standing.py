"""State of a run folder before anything starts: is its ledger whole, what is trained again?

The checks before a start, the launcher and the learner ask here. Nothing is loaded or written.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from agent_r1.learner.checkpoints.ledger import Ledger, LedgerNumbers
from agent_r1.learner.checkpoints.run_checkpoint import (
    STEP_NAME,
    checkpoint_name,
    complete_steps,
    newest_state,
    read_scores,
)
from agent_r1.learner.outcome import read_summary
from agent_r1.runtime.files.run_folder import (
    CHECKPOINTS_DIR,
    LEDGER_FILE,
    METRICS_FILE,
    STATE_FILE,
    SUMMARY_FILE,
)
from agent_r1.runtime.files.state import parse_objects

_VERSION = re.compile(r'"policy[_/]version": *(\d+)')
_SPARE = 1000
"""Numbers that are left out where nobody knows which were used."""


def state_problem(folder: Path, *, stored: bool = False) -> str | None:
    """Say why a run folder cannot be continued; None when it can.

    Args:
        folder: of the run; may be new.
        stored: the run store has its numbers as well.
    """
    problem = ledger_problem(folder, stored=stored)
    if problem is not None:
        return problem
    try:
        newest_state(folder / CHECKPOINTS_DIR)
        read_scores(folder / CHECKPOINTS_DIR)
    except (OSError, ValueError) as exc:
        return str(exc)
    return None


def ledger_problem(folder: Path, *, stored: bool = False) -> str | None:
    """Say why no start of a run can be numbered; None when it can.

    Args:
        folder: of the run.
        stored: the run store has the numbers as well, so that a missing ledger is no harm.
    """
    path = folder / LEDGER_FILE
    trained = has_trained(folder)
    if trained and not stored and not path.exists():
        return f"{path} is missing, so {_used_twice(folder)}"
    try:
        ledger = Ledger(folder)
    except (ValueError, OSError) as exc:
        remedy = f"delete {path}: the run store has them" if stored else _remedy(folder)
        return f"{path} cannot be read ({exc.__cause__ or exc}); {remedy}"
    if stored or not trained:
        return None
    if ledger.starts < 1:
        return f"{path} counts no start and the run has trained, so {_used_twice(folder)}"
    if ledger.last_policy_version < _highest_version(folder):
        return f"{path} is older than what is beside it, so {_used_twice(folder)}"
    return None


def has_trained(folder: Path) -> bool:
    """Say whether a learner has left anything in a run folder that a new run would mix with."""
    return any(True for _ in traces(folder))


def traces(folder: Path) -> Iterator[str]:
    """Yield the names of what a learner that has trained leaves in a run folder."""
    yield from (name for name in (METRICS_FILE, SUMMARY_FILE) if (folder / name).exists())
    if any((folder / CHECKPOINTS_DIR).glob("step_*")):
        yield CHECKPOINTS_DIR


def _used_twice(folder: Path) -> str:
    return f"numbers of this run would be used a second time; {_remedy(folder)}"


def _remedy(folder: Path) -> str:
    """Say how to get a ledger whose numbers are higher than any that the run has used."""
    numbers = LedgerNumbers(
        incarnation=_SPARE, last_policy_version=_highest_version(folder) + _SPARE
    )
    text = numbers.model_dump_json(exclude_defaults=True)
    return (
        "restore it from a backup, or write one with higher numbers than the run has used: "
        f"`echo '{text}' > {shlex.quote(str(folder / LEDGER_FILE))}`"
    )


def _highest_version(folder: Path) -> int:
    """Return the highest policy version that checkpoints and metrics name."""
    files = [*(folder / CHECKPOINTS_DIR).glob(f"step_*/{STATE_FILE}"), folder / METRICS_FILE]
    texts = (file.read_text(errors="replace") for file in files if file.is_file())
    return max((int(found) for text in texts for found in _VERSION.findall(text)), default=0)


def resume_notes(folder: Path) -> Iterator[str]:
    """Yield what a user should know of the step from which a run folder continues."""
    yield from _damaged_summary(folder)
    steps = complete_steps(folder / CHECKPOINTS_DIR)
    newest, last = max(steps, default=0), last_step(folder)
    for step in _incomplete(folder):
        if step > newest:
            path = folder / CHECKPOINTS_DIR / checkpoint_name(step)
            yield f"!! {path} has no {STATE_FILE}, so training cannot continue from it"
    if not steps and has_trained(folder):
        where = folder / CHECKPOINTS_DIR
        yield f"!! {where} has no checkpoint: training begins anew{_again(1, last)}"
    elif steps:
        loud = "!! " if last > newest else ""
        yield f"{loud}continuing from the checkpoint of step {newest}{_again(newest + 1, last)}"


def _damaged_summary(folder: Path) -> Iterator[str]:
    try:
        read_summary(folder)
    except OSError:
        return
    except ValueError as exc:
        yield f"!! {folder / SUMMARY_FILE} cannot be read ({exc}); the run's end writes it again"


def _again(first: int, last: int) -> str:
    if last < first:
        return ""
    steps = f"step {last} is" if first == last else f"steps {first} to {last} are"
    return f"; {steps} trained again"


def _incomplete(folder: Path) -> list[int]:
    matches = (STEP_NAME.match(path.name) for path in (folder / CHECKPOINTS_DIR).glob("step_*"))
    found = {int(match[1]) for match in matches if match is not None}
    return sorted(found - set(complete_steps(folder / CHECKPOINTS_DIR)))


def last_step(folder: Path) -> int:
    """Return the last step that `metrics.jsonl` has; 0 where it has none."""
    try:
        text = (folder / METRICS_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    steps = [values.get("step") for values in parse_objects(text)]
    return next((step for step in reversed(steps) if isinstance(step, int)), 0)
