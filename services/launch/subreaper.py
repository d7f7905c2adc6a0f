"""A process around each service, so that nothing the service started outlives it.

    python subreaper.py --parent PID --grace-s S [--cores 0,1] -- COMMAND [ARGUMENT ...]

launcher --> subreaper --> service --> its children (vLLM's engine, DeepSpeed's ranks). Whatever the
service starts, however it detaches itself, stays below the subreaper. When the service ends, the
subreaper ends the rest; when the launcher dies, however it dies, the subreaper stops the service
and the rest. Standard library only, run as a file, so that it starts in milliseconds.

Signals: SIGTERM and SIGINT are passed to the service, once; SIGQUIT kills everything below at once.
Exit status: the service's own, or 128 + n when signal n ended it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

PARENT_VARIABLE = "AGENT_R1_PARENT_PID"
"""Environment variable that tells a service which process it must not outlive."""

POLL_S = 0.05
LEFTOVER_GRACE_S = 1.0
"""Time that processes a service left behind get to end by themselves."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_HANDLED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl({option}): {os.strerror(errno)}")


def set_parent_death_signal(sig: signal.Signals) -> None:
    """Have the kernel send `sig` to this process when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, int(sig))


def become_subreaper() -> None:
    """Have orphans below this process become its children instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


class _Process(NamedTuple):
    pid: int
    state: str
    parent: int
    session: int

    @property
    def alive(self) -> bool:
        return self.state not in "ZX"


def _processes() -> list[_Process]:
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The name, in brackets, may itself hold brackets and blanks.
            fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        found.append(_Process(int(entry.name), fields[0].decode(), int(fields[1]), int(fields[3])))
    return found


def descendants(root: int) -> list[int]:
    """Return the processes below `root`, parents before children, without zombies."""
    children: dict[int, list[_Process]] = {}
    for process in _processes():
        children.setdefault(process.parent, []).append(process)
    found: list[_Process] = []
    level = [root]
    while level:
        below = [process for pid in level for process in children.get(pid, [])]
        found += below
        level = [process.pid for process in below]
    return [process.pid for process in found if process.alive]


def session_members(session: int) -> list[int]:
    """Return the processes of one session, without zombies."""
    return [process.pid for process in _processes() if process.session == session and process.alive]


def signal_all(pids: list[int], sig: signal.Signals) -> None:
    """Send a signal to processes, skipping those that are gone."""
    for pid in pids:
        try:
            os.kill(pid, sig)
        except ProcessLookupError:
            continue


def _reap(main: int) -> int | None:
    """Collect ended children; return the wait status of `main` once it is among them."""
    status = None
    while True:
        try:
            pid, raw = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == main:
            status = raw


def kill_below(root: int, grace_s: float) -> None:
    """End every process below `root`: SIGTERM first, SIGKILL after `grace_s` seconds.

    `root` must be this process, so that what ends is collected.
    """
    deadline = time.monotonic() + grace_s
    told: set[int] = set()
    while pids := descendants(root):
        if time.monotonic() >= deadline:
            signal_all(pids, signal.SIGKILL)
        else:
            signal_all([pid for pid in pids if pid not in told], signal.SIGTERM)
            told.update(pids)
        _reap(0)
        time.sleep(POLL_S)
    _reap(0)


def _start(command: list[str]) -> int:
    subreaper = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        set_parent_death_signal(signal.SIGTERM)
        if os.getppid() != subreaper:
            os._exit(1)
        for sig in _HANDLED:
            signal.signal(sig, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        os.environ[PARENT_VARIABLE] = str(subreaper)
        os.execvp(command[0], command)
    except OSError as exc:
        sys.stderr.write(f"cannot start {command[0]!r}: {exc.strerror}\n")
        sys.stderr.flush()
    os._exit(127)


def _supervise(service: int, parent: int, grace_s: float) -> int:
    """Pass signals on until the service has ended; return its wait status."""
    told = False
    kill_at: float | None = None
    while True:
        received = signal.sigtimedwait(_HANDLED, 1.0 if kill_at is None else POLL_S)
        number = received.si_signo if received is not None else None
        orphaned = os.getppid() != parent
        if orphaned and kill_at is None:
            kill_at = time.monotonic() + grace_s
        if number == signal.SIGQUIT or (kill_at is not None and time.monotonic() >= kill_at):
            signal_all([service, *descendants(os.getpid())], signal.SIGKILL)
        elif not told and (orphaned or number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)):
            signal_all([service], signal.SIGTERM)
            told = True
        status = _reap(service)
        if status is not None:
            return status


def run(command: list[str], parent: int, grace_s: float) -> int:
    """Run `command` until it ends, and end whatever it leaves behind.

    Args:
        command: program and arguments.
        parent: process id of the launcher; when it is gone the service is stopped.
        grace_s: seconds the service gets to stop once the launcher is gone.

    Returns:
        Exit status for this process.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    become_subreaper()
    set_parent_death_signal(signal.SIGTERM)
    if os.getppid() != parent:
        return 1
    status = _supervise(_start(command), parent, grace_s)
    kill_below(os.getpid(), LEFTOVER_GRACE_S)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--grace-s", type=float, required=True)
    parser.add_argument("--cores", default="")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if arguments.cores:  # whatever it starts inherits them
        os.sched_setaffinity(0, {int(core) for core in arguments.cores.split(",")})
    command = [part for i, part in enumerate(arguments.command) if i or part != "--"]
    return run(command, arguments.parent, arguments.grace_s)


if __name__ == "__main__":
    sys.exit(main())
