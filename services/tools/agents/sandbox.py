"""The sandbox of the agents: starts it, starts attempts in it, ends them.

tool.py asks for attempts; the other end is `inside.py`. One sandbox serves all attempts of a
service, each in namespaces of its own, so an attempt costs a fork, and what the agent's class
imports is imported once. A sandbox that has ended is started again for the next attempt.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib.util
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import struct
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import agent_r1_proto
from agent_r1.sandbox import bubblewrap
from agent_r1.sandbox.interpreter import Interpreter, ask_interpreter
from agent_r1.sandbox.processes import (
    adopt_orphans,
    count_user_tasks,
    end_orphans,
    find_tree,
    hide_from_user,
)
from agent_r1.sandbox.seccomp import compile_filter
from agent_r1.sandbox.worker import FIRST_UID, UIDS, memory_file
from agent_r1.tools.agents.settings import FILES, OPEN_FILES, AgentSettings
from agent_r1_proto.agents import MAX_OUTPUT_CHARS

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Longest time until the agent's class is imported."""
BEGIN_TIMEOUT_S = 30.0
"""Longest time until an attempt has its namespaces."""
STARTS_AT_ONCE = 16
"""More starts wait for each other: the kernel makes namespaces one after the other."""
STOP_TIMEOUT_S = 10.0
REPORT_BYTES = 32 << 20
RESULT_BYTES = 8 * MAX_OUTPUT_CHARS
"""Most bytes of what a class returned, as JSON."""
_OURS = "agent_r1"
_MODULE = f"{_OURS}.tools.agents.inside"
_CODE = "code"
"""Folder of the code beside the agent's class."""
_OUTPUT_BYTES = 4 * MAX_OUTPUT_CHARS
_READ_BYTES = 1 << 16
_FLOOD_PAUSE_S = 0.05
"""After so much at once, an output is read on: a flood waits for its reader."""
_TELEMETRY_OFF = {
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "OTEL_SDK_DISABLED": "true",
    "ANONYMIZED_TELEMETRY": "false",
    "CREWAI_DISABLE_TELEMETRY": "true",
}

Json = dict[str, Any]


class AgentSandboxError(Exception):
    """The sandbox does not start, or has ended under an attempt; the text says what to do."""


@dataclass(frozen=True)
class _Plan:
    settings: AgentSettings
    interpreter: Interpreter
    bwrap: str | None
    """None runs without bubblewrap, in a container of its own."""
    uid: int | None
    """The user that only this sandbox has; None where the service is not root."""
    folder: str | None
    """Holds the attempts' folders where there are no namespaces; None where there are."""
    code: dict[str, Path]
    """What the process imports, by its path in `inside`."""

    @property
    def inside(self) -> Path:
        """Return the folder of what the process imports, as it sees that."""
        return bubblewrap.INSIDE if self.folder is None else Path(self.folder, "sandbox")

    def link_code(self) -> None:
        """Put the code where the process looks for it, unless bubblewrap shows it there."""
        if self.folder is None:
            return
        for name, path in self.code.items():
            (self.inside / name).parent.mkdir(parents=True, exist_ok=True)
            (self.inside / name).symlink_to(path)


class AgentSandbox:
    """The process that attempts are forked from."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._plan: _Plan | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._complaint: Tail | None = None
        self._starting = asyncio.Lock()
        self._places = asyncio.Semaphore(STARTS_AT_ONCE)

    async def start(self) -> None:
        """Start the sandbox; the agent's class is imported when this returns.

        Raises:
            ValueError: it does not start here; the text says what to do.
            AgentSandboxError: the class cannot be imported in it.
        """
        settings = self._settings
        container = settings.sandbox == "container"
        own_user = bubblewrap.gives_own_users(container=container)
        interpreter = await ask_interpreter(None)
        uid = FIRST_UID + secrets.randbelow(UIDS) if own_user else None
        folder = None
        if container:
            logger.warning('sandbox = "container": agents see all that this container holds')
            adopt_orphans()
            if not own_user:
                hide_from_user()
            folder = tempfile.mkdtemp(prefix="agent-r1-agents-")
            if uid is not None:
                os.chown(folder, uid, uid)
        shown = [interpreter.environment, *map(absolute, settings.show)]
        shown += [absolute(word) for word in settings.command or () if is_file(word)]
        self._plan = _Plan(
            settings,
            replace(interpreter, prefixes=(*interpreter.prefixes, *shown)),
            None if container else bubblewrap.find_bwrap(None),
            uid,
            folder,
            _find_packages() | _find_code(settings.type),
        )
        self._plan.link_code()
        await self._start_process()

    async def stop(self) -> None:
        """End every process of the sandbox."""
        await self._end_process()
        if self._plan is not None and self._plan.folder is not None:
            shutil.rmtree(self._plan.folder, ignore_errors=True)

    async def begin(self, order: Json) -> Attempt:
        """Start an attempt.

        Args:
            order: task, prompt, key, model, path of the URL, and the command; None is the class.

        Raises:
            AgentSandboxError: it does not start.
        """
        async with self._starting:
            if self._has_ended():
                await self._end_process()
                await self._start_process()
        async with self._places:
            return await self._begin(order)

    async def _begin(self, order: Json) -> Attempt:
        assert self._control is not None
        attempt, files = _open_attempt(container=self._settings.sandbox == "container")
        try:
            try:
                socket.send_fds(self._control, [b"{}"], files)
            finally:
                for fd in files:
                    os.close(fd)
            async with asyncio.timeout(BEGIN_TIMEOUT_S):
                await attempt.begin(order)
        except (OSError, TimeoutError) as exc:
            attempt.close()
            said = str(exc) or f"no answer within {BEGIN_TIMEOUT_S:g} s"
            raise AgentSandboxError(
                f"an attempt does not start: {said}; docs/sandbox.md says what the sandbox needs"
            ) from exc
        except BaseException:
            attempt.close()
            raise
        return attempt

    async def _start_process(self) -> None:
        plan = self._plan
        assert plan is not None
        control, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        self._control = control
        read_end, write_end = os.pipe()
        self._complaint = Tail(read_end)
        try:
            with inside:
                self._process = await _spawn(plan, inside.fileno(), write_end)
        finally:
            os.close(write_end)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                control.send(json.dumps(_set_up_message(plan)).encode())
                packet = await asyncio.get_running_loop().sock_recv(control, _READ_BYTES)
            answer = json.loads(packet)
        except TimeoutError as exc:
            await self._end_process()
            raise AgentSandboxError(
                f"the sandbox did not start within {START_TIMEOUT_S:g} s; import less in "
                f"{plan.settings.type}"
            ) from exc
        except (OSError, ValueError) as exc:
            said = bubblewrap.explain_refusal(self._complaint.text())
            await self._end_process()
            raise AgentSandboxError(said) from exc
        if not answer["ready"]:
            await self._end_process()
            raise AgentSandboxError(
                f"type ({plan.settings.type}) cannot be used in the sandbox: {answer['problem']}; "
                "it sees the installed packages, the Python files beside it, and what agent.show "
                "names"
            )

    def _has_ended(self) -> bool:
        if self._control is None:
            return True
        try:
            return not self._control.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    async def _end_process(self) -> None:
        if self._control is not None:
            self._control.close()  # its end is the end of process 1, and of all below it
            self._control = None
        if self._process is not None:
            tree = find_tree(self._process.pid) if self._process.returncode is None else []
            for pid in reversed(tree):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await self._process.wait()
            self._process = None
        if self._complaint is not None:
            self._complaint.close()
            self._complaint = None


class Attempt:
    """The service's end of an attempt: its channel to the keeper, and what the agent prints."""

    def __init__(
        self, channel: socket.socket, output: Tail, errors: Tail, *, container: bool
    ) -> None:
        self._channel = channel
        self._container = container
        self.output, self.errors = output, errors
        self.listener: socket.socket | None = None
        """Accepts the agent's connections."""
        self.folder = ""
        """Holds the attempt's files, where no namespace does."""
        self.keeper = 0
        """Process 1 of the attempt, as this process sees it."""
        self._pidfd: int | None = None

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
        ancillary_bytes = socket.CMSG_SPACE(4) + socket.CMSG_SPACE(struct.calcsize("3i"))
        data, ancillary, _, _ = self._channel.recvmsg(_READ_BYTES, ancillary_bytes)
        hello = json.loads(data or b"{}")
        if "folder" not in hello:
            raise OSError(hello.get("problem", "the sandbox has ended"))
        self.folder = hello["folder"]
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self.listener = socket.socket(fileno=struct.unpack("i", content)[0])
            elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                self.keeper = struct.unpack("3i", content)[0]
        self._pidfd = os.pidfd_open(self.keeper)

    async def report(self) -> Json | None:
        """Return what the keeper says when nothing of the attempt is left; None: it was killed."""
        loop = asyncio.get_running_loop()
        data = bytearray()
        with contextlib.suppress(OSError):
            while chunk := await loop.sock_recv(self._channel, _READ_BYTES):
                data += chunk
                if len(data) > REPORT_BYTES:
                    return None
        return json.loads(data) if data else None

    async def ask_to_stop(self) -> Json | None:
        """End the agent, and return the report; None where the keeper does not answer in time."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await asyncio.get_running_loop().sock_sendall(self._channel, b"stop\n")
                return await self.report()
        return None

    async def end(self) -> None:
        """Kill what is left of the attempt, wait until it is gone, and remove its folder."""
        if self._pidfd is not None:
            loop = asyncio.get_running_loop()
            gone = asyncio.Event()
            loop.add_reader(self._pidfd, gone.set)
            try:
                with contextlib.suppress(ProcessLookupError):
                    self._kill()
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await gone.wait()
                    if self._container:
                        await end_orphans(None)
                        shutil.rmtree(self.folder, ignore_errors=True)
            except TimeoutError:
                logger.error("an agent does not end pid=%d", self.keeper)
            finally:
                loop.remove_reader(self._pidfd)
        self.close()

    def _kill(self) -> None:
        assert self._pidfd is not None
        signal.pidfd_send_signal(self._pidfd, 0)  # its number may be that of another by now
        if self._container:  # without a namespace, what is below could not be found afterwards
            for pid in reversed(find_tree(self.keeper)[1:]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Close the files."""
        self._channel.close()
        for output in (self.output, self.errors):
            output.close()
        if self.listener is not None:
            self.listener.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def _open_attempt(*, container: bool) -> tuple[Attempt, list[int]]:
    """Return our end of an attempt's files, and the keeper's: channel, output, errors."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    # The first message of the keeper then says which process it is, as this one sees it.
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    (output, output_inside), (errors, errors_inside) = os.pipe(), os.pipe()
    attempt = Attempt(ours, Tail(output), Tail(errors), container=container)
    return attempt, [theirs.detach(), output_inside, errors_inside]


class Tail:
    """The end of what comes through a pipe; whoever writes faster than it is read waits."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd
        self._data = bytearray()
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._read_more)

    def text(self) -> str:
        """Return the end of what has come so far."""
        while self._read() == _READ_BYTES:
            pass
        return self._data.decode(errors="replace")[-MAX_OUTPUT_CHARS:]

    def close(self) -> None:
        """Close the pipe."""
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None

    def _read_more(self) -> None:
        if self._fd is not None and self._read() == _READ_BYTES:
            self._loop.remove_reader(self._fd)
            self._loop.call_later(_FLOOD_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._fd is not None:
            self._loop.add_reader(self._fd, self._read_more)

    def _read(self) -> int:
        if self._fd is None:
            return 0
        try:
            chunk = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return 0
        if not chunk:
            self.close()
        self._data += chunk
        del self._data[:-_OUTPUT_BYTES]
        return len(chunk)


async def _spawn(plan: _Plan, control: int, complaint: int) -> asyncio.subprocess.Process:
    files: dict[str, int] = {}
    environment: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        if plan.folder is not None:
            command = bubblewrap.python_command(plan.interpreter, plan.inside, _MODULE)
            environment = bubblewrap.ENVIRONMENT | {"HOME": plan.folder, "TMPDIR": plan.folder}
        else:
            assert plan.bwrap is not None
            uid = bubblewrap.SANDBOX_UID if plan.uid is None else plan.uid
            contents = bubblewrap.user_files(uid)
            files = {name: memory_file(stack, data) for name, data in contents.items()}
            command = bubblewrap.command_line(
                plan.bwrap,
                plan.interpreter,
                file_mb=plan.settings.file_mb,
                uid=plan.uid,
                files=files,
                private_proc=True,
                module=_MODULE,
                shown=plan.code,
                nests=True,
                network=plan.settings.network,
            )
        return await asyncio.create_subprocess_exec(
            *command[:-1],
            str(control),
            command[-1],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=complaint,
            stderr=complaint,
            pass_fds=(control, *files.values()),
            env=environment,
            cwd="/",
        )


def _set_up_message(plan: _Plan) -> Json:
    settings = plan.settings
    container = plan.folder is not None
    processes = settings.processes + 1  # the keeper
    if container and plan.uid is None:
        processes += count_user_tasks(os.getuid())  # the limit counts those of the whole user
    path = f"{plan.interpreter.environment}/bin:/usr/local/bin:/usr/bin:/bin"
    return {
        "type": settings.type,
        "uid": plan.uid,
        "container": container,
        "network": settings.network,
        "folder": plan.folder or "/tmp",
        "writable": bubblewrap.private_folders(plan.interpreter),
        "paths": [
            *(str(plan.inside / folder) for folder in ("", _CODE)),
            *map(str, plan.interpreter.packages),
        ],
        "seccomp": base64.b64encode(
            compile_filter(private_dev=not container, internet=True)
        ).decode(),
        "environment": bubblewrap.ENVIRONMENT | {"PATH": path} | _TELEMETRY_OFF | settings.env,
        "files": settings.files,
        "limits": {
            "cpu_s": settings.cpu_s,
            "memory_bytes": settings.memory_mb << 20,
            "file_bytes": settings.file_mb << 20,
            "files": FILES,
            "processes": processes,
            "open_files": OPEN_FILES,
            "text_chars": MAX_OUTPUT_CHARS,
            "result_bytes": RESULT_BYTES,
        },
    }


def _find_packages() -> dict[str, Path]:
    """Return our own packages, which may be installed from anywhere."""
    return {_OURS: Path(__file__).parents[2], "agent_r1_proto": Path(agent_r1_proto.__path__[0])}


def _find_code(name: str | None) -> dict[str, Path]:
    """Return the Python files and packages beside the module of `module:Name`.

    Not its whole folder: data of the task may lie there, which a policy must not read.
    """
    top = (name or "").partition(":")[0].partition(".")[0]
    spec = importlib.util.find_spec(top) if top and top != _OURS else None
    if spec is None or spec.origin is None:
        return {}
    origin = Path(spec.origin)
    folder = origin.parents[1] if spec.submodule_search_locations else origin.parent
    if "site-packages" in folder.parts:
        return {}
    return {
        f"{_CODE}/{path.name}": path.resolve()
        for path in sorted(folder.iterdir())
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }


def is_file(word: str) -> bool:
    """Tell whether a word of a command is the path of something that is there."""
    return os.sep in word and os.path.exists(word)


def absolute(path: str) -> Path:
    """Return a path that means the same in every folder."""
    return Path(os.path.abspath(path))
