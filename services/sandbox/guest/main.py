"""Process 1 of a sandbox: starts a process for each run, ends it, cleans up after it.

The service (`worker.py`) sends packets to standard input, a Unix socket, and reads packets from it.
A packet that starts a run brings the files of that run: standard output, standard error and the
channel. This process hands them to a fork and keeps none, so what a program is given, prints and
answers never passes through here, and nothing of one call is left for the next. Programs have this
process's user but cannot reach it: it is not dumpable, so /proc shows them neither its files nor
its memory, and the kernel keeps their signals from process 1.
"""

from __future__ import annotations

import base64
import builtins
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from typing import Any

from .process import PR_SET_DUMPABLE, PR_SET_PDEATHSIG, run_child

Json = dict[str, Any]

PACKET_BYTES = 1 << 17
RUN_FILES = 3
KILL_ROUNDS = 1000
KILL_PAUSE_S = 0.001
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38


def main() -> None:
    """Set up, then start runs until the service closes the socket."""
    control = socket.socket(fileno=os.dup(0))
    os.closerange(control.fileno() + 1, 256)
    config, _ = receive(control)
    try:
        set_up(config)
    except BaseException as exc:  # noqa: BLE001 - the service says it
        send(control, {"ready": False, "problem": f"{type(exc).__name__}: {exc}"})
        return
    send(control, {"ready": True})
    while True:
        message, files = receive(control)
        if "run" in message:  # a request to stop may come after the run has ended by itself
            send(control, run(control, message, files, config))


def receive(control: socket.socket) -> tuple[Json, list[int]]:
    """Return the next packet and its files; ends the process where the service has gone."""
    data, files, _, _ = socket.recv_fds(control, PACKET_BYTES, RUN_FILES)
    if not data:
        os._exit(0)
    return json.loads(data), files


def send(control: socket.socket, message: Json) -> None:
    """Answer the service."""
    try:
        control.send(json.dumps(message).encode())
    except OSError:  # it has gone
        os._exit(0)


# --- set-up -------------------------------------------------------------------------------------


def set_up(config: Json) -> None:
    """Give up privileges, hide from the programs, import what was asked for."""
    if config["uid"] is not None:
        os.setgroups([])
        os.setresgid(config["uid"], config["uid"], config["uid"])
        os.setresuid(config["uid"], config["uid"], config["uid"])
    libc = ctypes.CDLL(None, use_errno=True)
    prctl(libc, PR_SET_NO_NEW_PRIVS, 1)
    prctl(libc, PR_SET_DUMPABLE, 0)
    prctl(libc, PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user has cleared bubblewrap's
    # Process 1 gets no signal from inside that it has no handler for.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if config["container"]:
        check_readable(config)
        prctl(libc, PR_SET_CHILD_SUBREAPER, 1)
        install_filter(libc, base64.b64decode(config["seccomp"]))
    os.umask(0o077)
    os.chdir(config["folder"])
    sys.path[:] = [*[path for path in sys.path if os.path.isabs(path)], *config["paths"]]
    sys.dont_write_bytecode = True
    for name in ("exit", "quit"):
        setattr(builtins, name, sys.exit)
    for name in config["preload"]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def check_readable(config: Json) -> None:
    """Check that the sandbox's user may read the interpreter and its packages.

    Raises:
        ValueError: it may not; a program could import nothing.
    """
    for folder in (os.path.dirname(os.__file__), *config["paths"]):
        if not os.access(folder, os.R_OK | os.X_OK):
            raise ValueError(
                f"the user of the sandbox ({os.getuid()}) cannot read {folder} of python "
                f"({config['python']!r}); set python to an interpreter that every user can read, "
                "such as '/usr/bin/python3', or open the folders above it to all users"
            )


def prctl(libc: ctypes.CDLL, option: int, value: int) -> None:
    """Call prctl, or raise."""
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def install_filter(libc: ctypes.CDLL, program: bytes) -> None:
    """Filter the system calls of this process and of all it starts (where bwrap does not)."""

    class Program(ctypes.Structure):
        _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_char_p))

    argument = Program(len(program) // 8, program)
    if libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(argument), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")


# --- one run ------------------------------------------------------------------------------------


def run(control: socket.socket, message: Json, files: list[int], config: Json) -> Json:
    """Start a process, wait until it ends or must end, and say how it ended."""
    pid = os.fork()
    if pid == 0:
        run_child(message["kind"], config, files)
    for fd in files:
        os.close(fd)
    pidfd = os.pidfd_open(pid)
    try:
        wait_for_end(control, pidfd, message["run"])
    finally:
        os.close(pidfd)
    status, cpu_s = end_all(pid, config)
    return {
        "ended": message["run"],
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        "exit_code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        "cpu_s": cpu_s,
        "clean": empty_folders(config["writable"]),
    }


def wait_for_end(control: socket.socket, pidfd: int, number: int) -> None:
    """Return once the process has ended, or the service says that it must."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(control, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poll.poll()]
        if pidfd in ready:
            return
        if receive(control)[0].get("stop") == number:
            return


def end_all(pid: int, config: Json) -> tuple[int, float]:
    """Kill all that a run has left; return its own wait status and CPU time."""
    shared = config["container"] and config["uid"] is None
    if shared:
        kill_descendants()
    else:
        # Every process but this one of the namespace, or of the user that only this sandbox has.
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    # Orphans are adopted by this process: once it has no child, nothing of the run is left.
    flags = os.WNOHANG if shared else 0
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, flags)[0]:
            pass
    return status, usage.ru_utime + usage.ru_stime


def kill_descendants() -> None:
    """Kill what descends from this process, where others have its user and namespace."""
    for _ in range(KILL_ROUNDS):
        children = find_children()
        if not children:
            return
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        time.sleep(KILL_PAUSE_S)  # a killed process is gone only once the kernel has run it


def find_children() -> list[int]:
    """Return this process's living children and theirs."""
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        with contextlib.suppress(OSError):
            parent = waiting.pop()
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children", encoding="utf-8") as file:
                    waiting += [int(child) for child in file.read().split()]
            if parent != os.getpid() and not is_zombie(parent):
                found.append(parent)
    return found


def is_zombie(pid: int) -> bool:
    """Tell whether the process has ended and only waits to be reaped."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0] in "ZX"


def empty_folders(folders: dict[str, list[str]]) -> bool:
    """Remove what the program wrote; tell whether nothing is left but what must stay."""
    clean = True
    for folder, kept in folders.items():
        for entry in os.scandir(folder):
            if entry.name in kept:
                continue
            with contextlib.suppress(OSError, RecursionError):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)
        clean = clean and set(os.listdir(folder)) <= set(kept)
    return clean
