"""`sandbox = "container"`: limits hold without bubblewrap; isolation is the container's business.

As root the code changes to a user of its own, which may not reach this interpreter; then the one
of the system is taken. All processes of any other user count against `processes`, and the tests
that run beside this one have some hundreds, which come and go: no test sets the limit near.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
import venv
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_r1.sandbox.processes import find_orphans
from agent_r1.tools.base import CallContext
from agent_r1.tools.sandbox.python_exec import PythonExec

PYTHONS = (None, "/usr/bin/python3", "/usr/local/bin/python3")


FORK_BOMB = "import os\nwhile True:\n    os.fork()"
SHARED = "import mmap, os\nmmap.mmap({}, 1 << 20)"


@contextlib.asynccontextmanager
async def started(
    *, processes: int = 4096, memory_mb: int = 192, seconds: float = 2.0
) -> AsyncIterator[PythonExec]:
    problems: list[str] = []
    for python in PYTHONS:
        if python is not None and shutil.which(python) is None:
            continue
        tool = PythonExec(
            sandbox="container",
            python=python,
            cpu_s=seconds,
            wall_s=seconds,
            memory_mb=memory_mb,
            processes=processes,
            max_workers=1,
        )
        try:
            await tool.start()
        except ValueError as exc:
            problems.append(str(exc))
            continue
        try:
            yield tool
        finally:
            await tool.stop()
        return
    pytest.skip("; ".join(problems))


async def run(tool: PythonExec, code: str) -> str:
    return (await tool.call({"code": code}, CallContext("r/0/0/0/0", 0, None, 30.0))).text()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (FORK_BOMB, r"BlockingIOError"),
        ("x = bytearray(10**10)", r"MemoryError"),
        ("while True:\n    print('x' * 1000)", r"wrote more than"),
        ("while True:\n    pass", r"CPU time|ran longer"),
        ("import time\ntime.sleep(99)", r"ran longer than 2 s"),
        ("import socket\nsocket.socket()", r"Address family not supported"),
        ("import os\nos.chroot('/tmp')", r"PermissionError"),
        (SHARED.format(-1), r"PermissionError"),
        (SHARED.format("os.open('/dev/zero', os.O_RDWR)"), r"PermissionError"),
        (
            "import multiprocessing as m\nwith m.Pool(2) as p:\n    print(p.map(abs, [-1]))",
            r"^\[1\]$",
        ),
        ("import os\nos.kill(os.getppid(), 9)", r"ended the sandbox"),
        ("open('/proc/SERVICE/mem', 'rb')", r"PermissionError"),
        ("import os\nprint(os.listdir('/proc/SERVICE/fd'))", r"PermissionError"),
        ("import os\nopen(f'/proc/{os.getppid()}/mem', 'rb')", r"PermissionError"),
        ("import os\nprint('HOME' in os.environ, 'LEFT' in os.environ)", r"^True False$"),
    ],
)
async def test_limits_hold_and_the_next_call_is_answered(
    monkeypatch: pytest.MonkeyPatch, code: str, expected: str
):
    monkeypatch.setenv("LEFT", "1")
    # Pages that 64 forks share count for each of them, so the memory must suffice for that.
    # On a busy machine they take their time.
    bounds = {"processes": 64, "memory_mb": 4096, "seconds": 20.0} if code == FORK_BOMB else {}
    async with started(**bounds) as tool:
        code = code.replace("SERVICE", str(os.getpid()))
        assert re.search(expected, await run(tool, code))
        assert await run(tool, "6 * 7") == "42"


async def test_a_daemon_is_killed_and_the_folder_removed():
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        time.sleep(60)\n    os._exit(0)\nopen('left', 'w')\ntime.sleep(0.2)\n"
        "print(os.getcwd())"
    )
    async with started() as tool:
        folder = await run(tool, code)
        assert os.path.dirname(folder) == tempfile.gettempdir()
    assert os.path.basename(folder) not in os.listdir(tempfile.gettempdir())
    assert not _is_in_an_environment(folder)


LEAVE = """
import os, time
guest = os.getppid()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.close(os.open(f"FOLDER/{os.getpid()}", os.O_CREAT))
        os.kill(guest, 9)
        MORE
    os._exit(0)
time.sleep(99)
"""


CHAINS = """for _ in range(5): os.fork()
        while True:
            try:
                if os.fork(): os._exit(0)
            except OSError: pass"""
"""In each of 32, a process starts the next one and ends, faster than anybody looks."""


@pytest.mark.parametrize("more", ["time.sleep(99)", "while True: os.fork()", CHAINS])
async def test_what_kills_its_guest_is_killed_and_the_next_call_is_answered(more: str):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        code = LEAVE.replace("FOLDER", folder).replace("MORE", more)
        limits = {"processes": 64, "memory_mb": 4096} if "fork" in more else {}
        async with started(**limits) as tool:
            began = time.monotonic()
            assert "ended the sandbox" in await run(tool, code)
            assert time.monotonic() - began < 10.0  # two runs, which do not take their wall_s
            assert await run(tool, "6 * 7") == "42"  # in a sandbox that replaces an ended one
            left = set(os.listdir(folder))
            assert left
            assert left.isdisjoint(os.listdir("/proc"))
            assert find_orphans() == []


async def test_an_interpreter_that_a_sandbox_cannot_read_is_named():
    if os.getuid() != 0:
        pytest.skip("only root gives each sandbox a user of its own")
    with tempfile.TemporaryDirectory() as folder:  # its mode is 0700
        copy = Path(folder, "python")
        venv.create(copy, with_pip=False, symlinks=True)
        tool = PythonExec(sandbox="container", python=str(copy / "bin" / "python"))
        with pytest.raises(ValueError, match=r"cannot read .*; set python to an interpreter that"):
            await tool.start()


def _is_in_an_environment(text: str) -> bool:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if text.encode() in Path("/proc", pid, "environ").read_bytes():
                return True
    return False
