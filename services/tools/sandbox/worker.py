"""One sandbox: starts it, sends it runs, watches what it uses, ends it.

`pool.py` keeps workers; the other side of the pipes is `guest.py`. Whatever a program does to the
guest, a worker that is killed takes every process of its sandbox with it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from agent_r1.tools.sandbox import bubblewrap
from agent_r1.tools.sandbox.interpreter import Interpreter
from agent_r1.tools.sandbox.seccomp import compile_filter
from agent_r1.tools.sandbox.settings import FILES, OPEN_FILES, OUTPUT_BYTES, SandboxSettings
from agent_r1.tools.sandbox.usage import count_user_tasks, find_tree, measure_memory

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
ANSWER_GRACE_S = 2.0
"""Longest time between a run's limit and the guest's answer."""
WATCH_PERIOD_S = 0.1
MAX_FRAME_BYTES = 32 << 20
_COMPLAINT_BYTES = 1 << 14
# Users that exist on no machine: above every range handed out by useradd and subuid.
_FIRST_UID, _UIDS = 2_000_000_000, 100_000_000

Json = dict[str, Any]


class SandboxStartError(Exception):
    """A sandbox could not be started; the text says why and what to do."""


class SandboxEndedError(Exception):
    """A sandbox ended during a run: something killed it, perhaps the program itself."""


@dataclass(frozen=True)
class SandboxPlan:
    """What every sandbox of a service is made of."""

    settings: SandboxSettings
    interpreter: Interpreter
    bwrap: str | None
    """None runs without bubblewrap, in a container of its own."""
    own_user: bool
    """The service is root: each sandbox changes to a user of its own."""
    private_proc: bool = True
    """False leaves /proc empty."""


class RunResult(BaseModel):
    """How one run ended."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    why: Literal["ended", "wall", "output", "memory", "files", "killed"]
    """`ended` by itself; the others name the limit; `killed`: it ended its own sandbox."""
    signal: int | None = None
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""
    report: Json = {}
    """What the child itself says: error, exit code, value. It may lie."""
    cpu_s: float = 0.0
    wall_s: float = 0.0
    clean: bool = False
    """Nothing is left of the run; the sandbox may be used again."""


class Worker:
    """A started sandbox. Make one with `Worker.start`."""

    def __init__(self, plan: SandboxPlan, process: asyncio.subprocess.Process) -> None:
        self._calls = 0
        self._clean = True
        self._plan = plan
        self._process = process
        self._folder: str | None = None
        self._base_memory = 0
        self._complaint = b""
        # Not Process.kill: it may reap the process before asyncio does.
        self._pidfd = _open_pidfd(process.pid)
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, plan: SandboxPlan) -> Worker:
        """Start a sandbox and wait until it takes runs.

        Raises:
            SandboxStartError: it did not start; the text says why and what to do.
        """
        uid = _FIRST_UID + secrets.randbelow(_UIDS) if plan.own_user else None
        folder = None if plan.bwrap else _make_folder(uid)
        try:
            process = await _spawn(plan, uid, folder)
        except OSError as exc:
            _remove_folder(folder)
            raise SandboxStartError(f"the sandbox cannot be started: {exc}") from exc
        worker = cls(plan, process)
        worker._folder = folder
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await worker._write(_set_up_message(plan, uid, folder))
                answer = await worker._read()
            if not answer["ready"]:
                raise SandboxStartError(f"the sandbox cannot be set up: {answer['problem']}")
            worker._base_memory = measure_memory(worker._tree())
        except TimeoutError as exc:
            await worker.kill()
            raise SandboxStartError(
                f"the sandbox did not start within {START_TIMEOUT_S:g} s"
            ) from exc
        except (OSError, EOFError, ValueError, KeyError) as exc:
            await worker.kill()
            raise SandboxStartError(bubblewrap.explain_refusal(worker.complaint)) from exc
        except BaseException:
            await worker.kill()
            raise
        return worker

    @property
    def reusable(self) -> bool:
        """Whether nothing is left of the last call, and another one is allowed."""
        return self._clean and self._calls < self._plan.settings.reuse_calls

    @property
    def usable(self) -> bool:
        """Whether the last run of this call has left the sandbox empty, for the next one."""
        return self._clean

    def begin_call(self) -> None:
        """Count a call; it may be several runs."""
        self._calls += 1

    @property
    def complaint(self) -> str:
        """What the sandbox wrote to standard error outside of runs."""
        return self._complaint.decode(errors="replace")

    async def run(self, request: Json, *, wall_s: float, secret: Json | None = None) -> RunResult:
        """Run one program; always returns soon after `wall_s`.

        Args:
            request: `kind` (`program` or `test`) and `code`.
            wall_s: time it may take, in seconds.
            secret: the test; the guest learns it once the code's process exists.

        Raises:
            SandboxEndedError: the sandbox ended or answered nonsense; perhaps the program's doing.
        """
        self._clean = False
        watcher = asyncio.create_task(self._watch())
        try:
            async with asyncio.timeout(wall_s + ANSWER_GRACE_S):
                await self._write(request | {"wall_s": wall_s, "output_bytes": OUTPUT_BYTES})
                if secret is not None:
                    await self._write(secret)
                answer = await self._read()
            result = RunResult.model_validate(answer)
            self._clean = result.clean
            return result
        except TimeoutError:  # the program has stopped the guest
            return RunResult(why="wall", wall_s=wall_s)
        except (OSError, EOFError, ValueError) as exc:
            if watcher.done() and not watcher.cancelled():
                return RunResult(why=watcher.result())
            raise SandboxEndedError(
                f"the sandbox ended during a run: {self.complaint[-500:]}"
            ) from exc
        finally:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher

    async def kill(self) -> None:
        """End every process of the sandbox."""
        self._kill_processes()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._process.wait()
                await self._listener
        except TimeoutError:
            logger.error("a sandbox does not end pid=%d", self._process.pid)
            self._listener.cancel()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        _remove_folder(self._folder)

    def _tree(self) -> list[int]:
        return find_tree(self._process.pid)

    def _kill_processes(self) -> None:
        if self._process.returncode is None:
            # Children first: once their parent is gone, they cannot be found. In a namespace all
            # die with its process 1, which --die-with-parent ends; but that process runs with the
            # program's rights, so its word is not taken for it.
            for pid in reversed(self._tree()[1:]):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        if self._pidfd is None:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def _watch(self) -> Literal["memory", "files"]:
        """End the sandbox once it takes too much; no program can reach this process."""
        # A fork counts the pages it shares with the guest as its own.
        limit = (self._plan.settings.memory_mb << 20) + 2 * self._base_memory
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            tree = self._tree()
            if measure_memory(tree) > limit:
                self._kill_processes()
                return "memory"
            if self._plan.bwrap and _count_files(tree) > FILES:
                self._kill_processes()
                return "files"

    async def _write(self, message: Json) -> None:
        assert self._process.stdin is not None
        body = json.dumps(message).encode()
        self._process.stdin.write(len(body).to_bytes(4, "big") + body)
        await self._process.stdin.drain()

    async def _read(self) -> Json:
        assert self._process.stdout is not None
        head = await self._process.stdout.readexactly(4)
        size = int.from_bytes(head, "big")
        if size > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {size} bytes")
        answer = json.loads(await self._process.stdout.readexactly(size))
        if not isinstance(answer, dict):
            raise ValueError(f"a frame that is no object: {answer!r:.100}")
        return answer

    async def _listen(self) -> None:
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(_COMPLAINT_BYTES):
            self._complaint = (self._complaint + chunk)[-_COMPLAINT_BYTES:]


async def _spawn(
    plan: SandboxPlan, uid: int | None, folder: str | None
) -> asyncio.subprocess.Process:
    if plan.bwrap is None:
        assert folder is not None
        command = bubblewrap.python_command(plan.interpreter, str(bubblewrap.GUEST))
        environment = bubblewrap.ENVIRONMENT | {"HOME": folder, "TMPDIR": folder}
        return await _start_process(command, environment, ())
    contents = bubblewrap.user_files(bubblewrap.SANDBOX_UID if uid is None else uid)
    with contextlib.ExitStack() as stack:
        files = {"seccomp": _memory_file(stack, compile_filter())}
        files |= {name: _memory_file(stack, data) for name, data in contents.items()}
        command = bubblewrap.command_line(
            plan.bwrap,
            plan.interpreter,
            plan.settings,
            uid=uid,
            files=files,
            private_proc=plan.private_proc,
        )
        return await _start_process(command, {}, tuple(files.values()))


async def _start_process(
    command: list[str], environment: dict[str, str], files: tuple[int, ...]
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        pass_fds=files,
        env=environment,
        cwd="/",
    )


def _set_up_message(plan: SandboxPlan, uid: int | None, folder: str | None) -> Json:
    settings = plan.settings
    container = plan.bwrap is None
    processes = settings.processes + 2  # the guest, and bubblewrap's process 1
    if container and uid is None:
        processes += count_user_tasks(os.getuid())  # the limit counts those of the whole user
    return {
        "uid": uid,
        "container": container,
        "seccomp": base64.b64encode(compile_filter()).decode() if container else None,
        "folder": folder or "/tmp",
        "writable": [folder] if folder else ["/tmp", "/dev/shm"],
        "paths": [str(path) for path in plan.interpreter.packages],
        "preload": settings.preload,
        "limits": {
            "cpu_s": settings.cpu_s,
            "memory_bytes": settings.memory_mb << 20,
            "file_bytes": settings.file_mb << 20,
            "processes": processes,
            "open_files": OPEN_FILES,
        },
    }


def _memory_file(stack: contextlib.ExitStack, data: bytes) -> int:
    fd = os.memfd_create("sandbox")
    stack.callback(os.close, fd)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:  # it ended at once
        return None


def _make_folder(uid: int | None) -> str:
    folder = tempfile.mkdtemp(prefix="agent-r1-sandbox-")
    if uid is not None:
        os.chown(folder, uid, uid)
    return folder


def _remove_folder(folder: str | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _count_files(tree: list[int]) -> int:
    for pid in reversed(tree):
        with contextlib.suppress(OSError):
            found = os.statvfs(Path("/proc", str(pid), "root/tmp"))
            return found.f_files - found.f_ffree
    return 0
