"""The sandbox of the agents: starts it, starts attempts in it, ends them.

tool.py asks for attempts; the other end is `inside.py`. One sandbox serves all attempts of a
service, each in namespaces of its own, so an attempt costs a fork, and what the agent's class
imports is imported once. A sandbox that has ended is started again for the next attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import shutil
import signal
import socket
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import agent_r1_proto
from agent_r1.runtime.agent_settings import FILES, OPEN_FILES, AgentSettings
from agent_r1.sandbox import bubblewrap
from agent_r1.sandbox.pool import find_working_plan, make_plan
from agent_r1.sandbox.processes import end_orphans, find_tree
from agent_r1.sandbox.settings import SandboxSettings
from agent_r1.sandbox.worker import SandboxPlan, SandboxStartError, Worker
from agent_r1.tools.agents.variables import FIND, TELEMETRY_OFF
from agent_r1_proto.agents import MAX_OUTPUT_CHARS

logger = logging.getLogger(__name__)

BEGIN_TIMEOUT_S = 30.0
"""Longest time until an attempt has its namespaces."""
STARTS_AT_ONCE = 16
"""More starts wait for each other: the kernel makes namespaces one after the other."""
STOP_TIMEOUT_S = 10.0
PROBE = {
    **{"command": ["true"], "timeout_s": 60.0},
    **{"task": {}, "prompt": "", "key": "", "model": "", "path": "", "context": 1},
}
"""Attempt that shows whether the sandbox works."""
REPORT_BYTES = 32 << 20
_READ_BYTES = 1 << 16
_OURS = "agent_r1"

Json = dict[str, Any]


class AgentSandbox:
    """The process that attempts are forked from."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._plan: SandboxPlan | None = None
        self._worker: Worker | None = None
        self._starting = asyncio.Lock()
        self._places = asyncio.Semaphore(STARTS_AT_ONCE)

    async def start(self) -> None:
        """Start the sandbox; the agent's class is imported when this returns.

        Raises:
            ValueError: it does not start here, or the class cannot be imported in it; the text says
                what to do.
        """
        settings = self._settings
        shared = settings.model_dump(include={"sandbox", "cpu_s", "memory_mb", "processes"})
        modules = [] if settings.type is None else [settings.type.partition(":")[0]]
        limits = SandboxSettings(file_mb=settings.file_mb, preload=modules, **shared)
        plan = await make_plan(limits)
        interpreter = plan.interpreter
        show = [*map(absolute, settings.show)]
        shown = [interpreter.environment, *show]
        shown += [absolute(word) for word in settings.command or () if is_file(word)]
        interpreter = replace(interpreter, prefixes=(*interpreter.prefixes, *shown))
        folders = [*filter(Path.is_dir, show), interpreter.environment / "bin"]
        path = ":".join(map(str, [*folders, "/usr/local/bin", "/usr/bin", "/bin"]))
        plan = replace(
            plan,
            interpreter=interpreter,
            module=f"{_OURS}.tools.agents.inside",
            shown=_find_code(settings.type),
            nests=True,
            network=settings.network,
            config={
                "type": settings.type,
                "network": settings.network,
                "environment": bubblewrap.ENVIRONMENT | {"PATH": path} | TELEMETRY_OFF,
                "env": settings.env,
                "files": settings.files,
                "max_files": FILES,
                "max_chars": MAX_OUTPUT_CHARS,
                "open_files": OPEN_FILES,
            },
        )
        self._plan = await find_working_plan(plan, self._try_plan)
        self._worker = await Worker.start(self._plan)
        if settings.command:
            await self._find(settings.program, path)

    async def _find(self, program: str, path: str) -> None:
        """Refuse a program that is not in the sandbox."""
        word = str(absolute(program)) if is_file(program) else program
        attempt = await self.begin(PROBE | {"command": [*FIND, word]})
        try:
            report = await attempt.report()
        finally:
            await attempt.end()
        if report is None or report.get("status") != 0:
            await self.stop()
            raise ValueError(
                f"agent.command ({program}) is no program that the sandbox has (PATH {path}); "
                "install it, or add its folder to agent.show"
            )

    async def _try_plan(self, plan: SandboxPlan) -> None:
        """Make a trivial attempt."""
        self._plan = plan
        try:
            attempt = await self.begin(PROBE)
            report = await attempt.report()
            await attempt.end()
        finally:
            await self.stop()
        if report is None or report.get("status") != 0:
            raise SandboxStartError(
                f"the sandbox of the agents cannot run a trivial program: {report}; check "
                "memory_mb, processes and file_mb"
            )

    async def stop(self) -> None:
        """End every process of the sandbox."""
        if self._worker is not None:
            await self._worker.kill()
            self._worker = None

    @property
    def process(self) -> int | None:
        """Return the outermost process of the sandbox; None while there is none."""
        return None if self._worker is None else self._worker.process.pid

    async def begin(self, order: Json) -> Attempt:
        """Start an attempt.

        Args:
            order: task, prompt, key, model, path of the URL, time limit, and the command; None is
                the class.

        Raises:
            SandboxStartError: it does not start.
        """
        async with self._places:
            async with self._starting:
                if self._worker is None or self._worker.process.returncode is not None:
                    assert self._plan is not None
                    await self.stop()
                    self._worker = await Worker.start(self._plan)
                worker = self._worker
            ours, theirs = socket.socketpair()
            attempt = Attempt(ours, container=worker.plan.bwrap is None)
            try:
                with theirs:
                    socket.send_fds(worker.control, [b"{}"], [theirs.fileno()])
                async with asyncio.timeout(BEGIN_TIMEOUT_S):
                    await attempt.begin(order)
            except (OSError, TimeoutError) as exc:
                attempt.close()
                said = str(exc) or f"no answer within {BEGIN_TIMEOUT_S:g} s"
                raise SandboxStartError(
                    f"an attempt does not start: {said}; docs/sandbox.md says what it needs"
                ) from exc
            except BaseException:
                attempt.close()
                raise
            return attempt


class Attempt:
    """The service's end of an attempt: its channel to the keeper."""

    def __init__(self, channel: socket.socket, *, container: bool) -> None:
        channel.setblocking(False)
        # Its first message then says which process the keeper is, as this one sees it.
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._channel = channel
        self._container = container
        self._folder = ""
        self._keeper = 0
        self._pidfd: int | None = None
        self.listener: socket.socket | None = None
        """Accepts the agent's connections."""

    async def begin(self, order: Json) -> None:
        """Say what to do; returns when the agent starts.

        Raises:
            OSError: it does not.
        """
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._channel, json.dumps(order).encode() + b"\n")
        ready = asyncio.Event()
        loop.add_reader(self._channel, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._channel)
        space = socket.CMSG_SPACE(struct.calcsize("i")) + socket.CMSG_SPACE(struct.calcsize("3i"))
        data, ancillary, _, _ = self._channel.recvmsg(_READ_BYTES, space)
        for _, kind, content in ancillary:
            if kind == socket.SCM_RIGHTS:
                self.listener = socket.socket(fileno=struct.unpack("i", content)[0])
            else:
                self._keeper = struct.unpack("3i", content)[0]
        hello = json.loads(data or b"{}")
        if "folder" not in hello:
            raise OSError(hello.get("problem", "the sandbox has ended"))
        self._folder = hello["folder"]
        self._pidfd = os.pidfd_open(self._keeper)
        await loop.sock_sendall(self._channel, b"go\n")

    async def report(self) -> Json | None:
        """Return what the keeper says once nothing of the agent is left; None: it was killed."""
        loop = asyncio.get_running_loop()
        data = bytearray()
        with contextlib.suppress(OSError):
            while len(data) < REPORT_BYTES:
                if not (chunk := await loop.sock_recv(self._channel, _READ_BYTES)):
                    return json.loads(data) if data else None
                data += chunk
        return None

    async def end(self) -> None:
        """Kill what is left of the attempt, wait until it is gone, and remove its folder."""
        if self._pidfd is not None:
            loop = asyncio.get_running_loop()
            gone = asyncio.Event()
            loop.add_reader(self._pidfd, gone.set)
            try:
                with contextlib.suppress(ProcessLookupError):
                    self._kill(self._pidfd)
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await gone.wait()
                    if self._container:
                        await end_orphans(None)
                        shutil.rmtree(self._folder, ignore_errors=True)
            except TimeoutError:
                logger.error("an agent does not end pid=%d", self._keeper)
            finally:
                loop.remove_reader(self._pidfd)
        self.close()

    def _kill(self, keeper: int) -> None:
        signal.pidfd_send_signal(keeper, 0)  # its number may be that of another by now
        if self._container:  # without a namespace, what is below could not be found afterwards
            for pid in reversed(find_tree(self._keeper)[1:]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        signal.pidfd_send_signal(keeper, signal.SIGKILL)

    def close(self) -> None:
        """Close the files; the keeper ends the agent, if it still runs."""
        self._channel.close()
        if self.listener is not None:
            self.listener.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def _find_code(name: str | None) -> dict[str, Path]:
    """Return our packages, and the Python files and packages beside the module of `module:Name`.

    Not its whole folder: data of the task may lie there, which a policy must not read.
    """
    found = {_OURS: Path(__file__).parents[2], "agent_r1_proto": Path(agent_r1_proto.__path__[0])}
    top = (name or "").partition(":")[0].partition(".")[0]
    spec = importlib.util.find_spec(top) if top not in ("", _OURS) else None
    if spec is None or spec.origin is None:
        return found
    origin = Path(spec.origin)
    folder = origin.parents[1] if spec.submodule_search_locations else origin.parent
    if "site-packages" in folder.parts:
        return found
    for path in folder.iterdir():
        if path.suffix == ".py" or (path / "__init__.py").is_file():
            found.setdefault(path.name, path.resolve())
    return found


def is_file(word: str) -> bool:
    """Tell whether a word of a command is the path of something that is there."""
    return os.sep in word and os.path.exists(word)


def absolute(path: str | Path) -> Path:
    """Return a path that means the same in every folder."""
    return Path(os.path.abspath(path))
