"""One sandbox: starts it, starts runs in it, watches what they use, ends it.

`pool.py` keeps workers; the other end of the control socket is process 1 of the sandbox
(`guest/main.py`). A worker that is killed takes every process of its sandbox with it.
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
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agent_r1.sandbox import bubblewrap
from agent_r1.sandbox.bubblewrap import GUEST
from agent_r1.sandbox.interpreter import Interpreter
from agent_r1.sandbox.processes import (
    count_user_tasks,
    end_orphans,
    find_tree,
    measure_memory,
)
from agent_r1.sandbox.program_run import Run, RunResult, open_run
from agent_r1.sandbox.seccomp import compile_filter
from agent_r1.sandbox.settings import FILES, OPEN_FILES, SandboxSettings

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
ANSWER_GRACE_S = 2.0
"""Longest time between a run's limit and the guest's answer."""
WATCH_PERIOD_S = 0.1
_COMPLAINT_BYTES = 1 << 14
_PACKET_BYTES = 1 << 16
# Users that exist on no machine: above every range handed out by useradd and subuid.
_FIRST_UID, _UIDS = 2_000_000_000, 100_000_000

Json = dict[str, Any]


class SandboxStartError(Exception):
    """A sandbox could not be started; the text says why and what to do."""


class SandboxEndedError(Exception):
    """A sandbox ended during a run: something killed it, perhaps the program itself."""


@dataclass(frozen=True)
class SandboxPlan:
    """Plan from which every sandbox of a service is made."""

    settings: SandboxSettings
    interpreter: Interpreter
    bwrap: str | None
    """Path of bubblewrap; None runs without it, in a container of its own."""
    own_user: bool
    """The service is root: each sandbox changes to a user of its own."""
    private_proc: bool = True
    """False leaves /proc empty."""
    module: str = bubblewrap.GUEST_MODULE
    """Module that runs inside; its `main` is called."""
    shown: Mapping[str, Path] = field(default_factory=lambda: {GUEST.name: GUEST})
    """Paths that it imports, besides the installed packages, by their path in the folder
    `inside`."""
    nests: bool = False
    """Whether it makes namespaces for what it starts, in which IP sockets are allowed."""
    network: bool = False
    """The sandbox has the machine's network."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings that it is told besides."""

    def inside(self, folder: str | None) -> Path:
        """Return the folder of what it imports, as it sees that."""
        if folder is None:
            return bubblewrap.INSIDE
        return Path(folder, "sandbox") if self.nests else GUEST.parent


@dataclass(eq=False)
class Worker:
    """A started sandbox. Make one with `Worker.start`."""

    plan: SandboxPlan
    process: asyncio.subprocess.Process
    control: socket.socket
    folder: str | None
    uid: int | None

    def __post_init__(self) -> None:
        self._calls = 0
        self._runs = 0
        self._clean = True
        self._base_memory = 0
        self._complaint = b""
        # Not Process.kill: it may reap the process before asyncio does.
        self._pidfd = _open_pidfd(self.process.pid)
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, plan: SandboxPlan) -> Worker:
        """Start a sandbox and wait until it takes runs.

        Raises:
            SandboxStartError: it did not start; the text says why and what to do.
        """
        uid = _FIRST_UID + secrets.randbelow(_UIDS) if plan.own_user else None
        folder = None if plan.bwrap else tempfile.mkdtemp(prefix="agent-r1-sandbox-")
        if folder is not None and uid is not None:
            os.chown(folder, uid, uid)
        control, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        try:
            with inside:
                process = await _spawn(plan, uid, folder, inside)
        except OSError as exc:
            control.close()
            _remove_folder(folder)
            raise SandboxStartError(f"the sandbox cannot be started: {exc}") from exc
        worker = cls(plan, process, control, folder, uid)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                worker._send(_set_up_message(plan, uid, folder))
                answer = await worker._receive()
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
        """Return whether nothing is left of the last call, and another one is allowed."""
        return self._clean and self._calls < self.plan.settings.reuse_calls

    @property
    def usable(self) -> bool:
        """Return whether the last run of this call has left the sandbox empty, for the next one."""
        return self._clean

    def begin_call(self) -> None:
        """Count a call; it may be several runs."""
        self._calls += 1

    @property
    def complaint(self) -> str:
        """Output and errors that the sandbox wrote outside of runs."""
        return self._complaint.decode(errors="replace")

    async def run_program(self, code: str, *, wall_s: float) -> RunResult:
        """Run one program; always returns soon after `wall_s`.

        Raises:
            SandboxEndedError: the sandbox ended; perhaps the program's doing.
        """
        async with self.run("program", wall_s=wall_s) as run:
            await run.send({"code": code})
            return await self.finish(run, await run.receive_report())

    @asynccontextmanager
    async def run(
        self, kind: Literal["program", "solution", "tester"], *, wall_s: float
    ) -> AsyncIterator[Run]:
        """Start a process in the sandbox; whoever leaves before `finish` uses the sandbox up.

        Raises:
            SandboxEndedError: the sandbox has ended.
        """
        self._clean = False
        self._runs += 1
        self._began = time.monotonic()
        try:
            run = await open_run(self._runs, self.control, kind)
        except OSError as exc:
            raise self._ended_error() from exc
        guard = asyncio.create_task(self._guard(run, wall_s))
        try:
            yield run
        finally:
            guard.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await guard
            run.close()

    async def finish(self, run: Run, report: Json) -> RunResult:
        """Wait until a run has ended, and say how; `report` is what its process said of itself.

        Raises:
            SandboxEndedError: the sandbox ended; perhaps the program's doing.
        """
        try:
            ending = await self._receive()
        except (OSError, EOFError) as exc:
            if run.why != "ended":
                return RunResult(why=run.why, wall_s=time.monotonic() - self._began)
            raise self._ended_error() from exc
        self._clean = ending["clean"]
        return run.result(ending, report, time.monotonic() - self._began)

    async def kill(self) -> None:
        """End every process of the sandbox."""
        self._kill_processes()
        self.control.close()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self.process.wait()
                await self._end_rest()
                await self._listener
        except TimeoutError:
            logger.error("a sandbox does not end pid=%d", self.process.pid)
            self._listener.cancel()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        _remove_folder(self.folder)

    def _tree(self) -> list[int]:
        return find_tree(self.process.pid)

    def _kill_processes(self) -> None:
        if self.process.returncode is None:
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

    async def _end_rest(self) -> None:
        """End what outlives process 1 of the sandbox, where no namespace does."""
        if self.plan.bwrap is None:
            await end_orphans(self.uid)

    async def _guard(self, run: Run, wall_s: float) -> None:
        """End a run that takes too much; no program can reach this process."""
        # A fork counts the pages it shares with the guest as its own.
        limit = (self.plan.settings.memory_mb << 20) + 2 * self._base_memory
        deadline = time.monotonic() + wall_s
        while not run.stopping.is_set() and self.process.returncode is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                run.stop("wall")
                break
            with contextlib.suppress(TimeoutError):
                # Not wait_for: it swallows a cancellation that comes with the event.
                async with asyncio.timeout(min(WATCH_PERIOD_S, left_s)):
                    await run.stopping.wait()
                    break
            tree = self._tree()
            if measure_memory(tree) > limit:
                run.stop("memory")
            elif self.plan.bwrap and _count_files(tree) > FILES:
                run.stop("files")
        if run.why in ("memory", "files"):  # the sandbox is not used again
            self._kill_processes()
            return
        if self.process.returncode is not None:
            await self._end_rest()
            return
        with contextlib.suppress(OSError):
            self._send({"stop": run.number})
        await asyncio.sleep(ANSWER_GRACE_S)
        self._kill_processes()

    def _ended_error(self) -> SandboxEndedError:
        return SandboxEndedError(f"the sandbox ended during a run: {self.complaint[-500:]}")

    def _send(self, message: Json) -> None:
        self.control.send(json.dumps(message).encode())

    async def _receive(self) -> Json:
        loop = asyncio.get_running_loop()
        packet = await loop.sock_recv(self.control, _PACKET_BYTES)
        if not packet:
            raise EOFError("the sandbox has ended")
        return json.loads(packet)

    async def _listen(self) -> None:
        assert self.process.stdout is not None
        while chunk := await self.process.stdout.read(_COMPLAINT_BYTES):
            self._complaint = (self._complaint + chunk)[-_COMPLAINT_BYTES:]


async def _spawn(
    plan: SandboxPlan, uid: int | None, folder: str | None, control: socket.socket
) -> asyncio.subprocess.Process:
    files: dict[str, int] = {}
    environment: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        if plan.bwrap is None:
            assert folder is not None
            inside = plan.inside(folder)
            for name, path in plan.shown.items() if plan.nests else ():
                (inside / name).parent.mkdir(parents=True, exist_ok=True)
                (inside / name).symlink_to(path)
            command = bubblewrap.python_command(plan.interpreter, inside, plan.module)
            environment = bubblewrap.ENVIRONMENT | {"HOME": folder, "TMPDIR": folder}
        else:
            contents = bubblewrap.user_files(bubblewrap.SANDBOX_UID if uid is None else uid)
            contents["seccomp"] = compile_filter(private_dev=True)
            files = {name: _memory_file(stack, data) for name, data in contents.items()}
            command = bubblewrap.command_line(
                plan.bwrap,
                plan.interpreter,
                file_mb=plan.settings.file_mb,
                uid=uid,
                files=files,
                private_proc=plan.private_proc,
                module=plan.module,
                shown=plan.shown,
                nests=plan.nests,
                network=plan.network,
            )
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=control.fileno(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            pass_fds=tuple(files.values()),
            env=environment,
            cwd="/",
        )


def _set_up_message(plan: SandboxPlan, uid: int | None, folder: str | None) -> Json:
    settings = plan.settings
    container = plan.bwrap is None
    seccomp = b""
    if container or plan.nests:
        seccomp = compile_filter(private_dev=not container, internet=plan.nests)
    inside = plan.inside(folder)
    processes = settings.processes + 1  # the guest
    if container and uid is None:
        processes += count_user_tasks(os.getuid())  # the limit counts those of the whole user
    return {
        "uid": uid,
        "container": container,
        "private_proc": plan.private_proc and not container,
        "seccomp": base64.b64encode(seccomp).decode(),
        "folder": folder or "/tmp",
        "writable": {folder: []} if folder else bubblewrap.private_folders(plan.interpreter),
        "python": str(plan.interpreter.executable),
        "paths": [str(inside)] * plan.nests + [str(path) for path in plan.interpreter.packages],
        "preload": settings.preload,
        "limits": {
            "cpu_s": settings.cpu_s,
            "memory_bytes": settings.memory_mb << 20,
            "file_bytes": settings.file_mb << 20,
            "processes": processes,
            "open_files": OPEN_FILES,
        },
        **plan.config,
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


def _remove_folder(folder: str | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _count_files(tree: list[int]) -> int:
    """Return the number of files in the fuller one of the sandbox's writable folders."""
    for pid in reversed(tree):
        with contextlib.suppress(OSError):
            root = f"/proc/{pid}/root"
            found = [os.statvfs(root + folder) for folder in bubblewrap.PRIVATE_FOLDERS]
            return max(folder.f_files - folder.f_ffree for folder in found)
    return 0
