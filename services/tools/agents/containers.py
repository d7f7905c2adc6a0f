"""Containers of agents: an attempt is one container of `agent.image`, on Docker or on Kubernetes.

tool.py asks for attempts, as it asks sandbox.py; docker.py and kubernetes.py are the engines. In a
container, process 1 is a shell with the script below. It writes the task, starts the program, ends
it at its limit, kills what it left, and prints the files that are wanted.

    service --environment, script, command--> engine --> shell --> program
    service <--log: what the program prints, then one line of the script-- engine
    program --requests--> listening socket of the service (relay.py) --> gateway
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import math
import os
import secrets
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent_r1.runtime.agent_settings import OPEN_FILES, AgentSettings
from agent_r1.sandbox.worker import SandboxStartError
from agent_r1.tools.agents.docker import Docker
from agent_r1.tools.agents.engine import Container, EngineError, render
from agent_r1.tools.agents.kubernetes import Kubernetes
from agent_r1.tools.agents.variables import FIND, TELEMETRY_OFF, agent_variables
from agent_r1_proto.agents import MAX_OUTPUT_CHARS

logger = logging.getLogger(__name__)

Json = dict[str, Any]

STARTS_AT_ONCE = 16
STOP_GRACE_S = 5.0
"""Time after an attempt's limit in which the script must have ended it."""
PROBE_TIMEOUT_S = 600.0
"""Longest time until the first container has run: nodes of a cluster may have to pull its image."""
GIVEN_BYTES = 1_000_000
"""Most bytes of a task: it travels in environment variables, which a cluster stores."""
HOST, PROCESS, UNTIL = "agent-r1/host", "agent-r1/process", "agent-r1/until"
"""Labels: of which machine and process a container is, and when its time is up."""
_FILE_BYTES = 4 * MAX_OUTPUT_CHARS
_VARIABLE_CHARS = 100_000
"""The kernel takes at most 128 KiB."""
_MARK = "agent-r1-report"
_WORK, _ERRORS = "/tmp/work", "/tmp/errors"
_TASK, _PROMPT = "/tmp/task.json", "/tmp/prompt"


class ContainerRunner:
    """Starts attempts in containers, and removes what a service that died has left."""

    def __init__(self, settings: AgentSettings) -> None:
        self.settings = settings
        self._engine: Docker | Kubernetes | None = None
        self._places = asyncio.Semaphore(STARTS_AT_ONCE)
        self._host = ""
        self._left: set[str] = set()
        """Containers that could not be removed."""

    async def start(self) -> None:
        """Connect, remove what is left of earlier services, and try a container.

        Raises:
            ValueError: no container runs here; the text says why.
        """
        order: Json = {"task": {}, "prompt": "", "key": "", "model": ""}
        order["command"] = [*FIND, self.settings.program]
        try:
            self._engine = make_engine(self.settings)
            self._host = await asyncio.to_thread(_own_address, await self.engine.connect())
            await self._remove_orphans()
            attempt = await self.begin(
                order | {"path": "", "context": 1, "timeout_s": PROBE_TIMEOUT_S}
            )
            try:
                report = await attempt.report()
            finally:
                await attempt.end()
        except (EngineError, SandboxStartError, OSError) as exc:
            await self.stop()
            raise ValueError(f"agent.runner ({self.settings.runner}): {exc}") from exc
        if report.get("status") != 0:
            await self.stop()
            raise ValueError(
                f"agent.image ({self.settings.image}) cannot run agent.command "
                f"({self.settings.program}): "
                f"{report.get('lost') or report.get('output', '').strip() or 'it is not there'}; "
                "the image needs it, sh and base64"
            )

    @property
    def engine(self) -> Docker | Kubernetes:
        """Return the engine, once started."""
        assert self._engine is not None
        return self._engine

    async def stop(self) -> None:
        """Close the connection to the engine."""
        if self._engine is not None:
            await self._engine.close()

    async def remove(self, name: str) -> None:
        """Kill and remove a container, now or with one of the next."""
        for one in (name, *self._left):
            try:
                await self.engine.remove(one)
                self._left.discard(one)
            except EngineError as exc:
                self._left.add(one)
                logger.error("a container of an agent is not removed name=%s: %s", one, exc)

    async def _remove_orphans(self) -> None:
        for name, labels in (await self.engine.find()).items():
            if is_orphan(labels):
                logger.warning("container of an earlier service is removed name=%s", name)
                await self.remove(name)

    async def begin(self, order: Json) -> ContainerAttempt:
        """Start a container for an attempt.

        Args:
            order: command, task, prompt, key, model, path of the URL, and time limit.

        Raises:
            SandboxStartError: it does not start.
        """
        try:
            listener = socket.create_server((self._host, 0), backlog=128)
        except OSError as exc:
            raise SandboxStartError(f"no port at {self._host} for an agent: {exc}") from exc
        try:
            container = make_container(self.settings, order, listener.getsockname(), self.engine)
        except SandboxStartError:
            listener.close()
            raise
        deadline = asyncio.get_running_loop().time() + order["timeout_s"] + STOP_GRACE_S
        attempt = ContainerAttempt(self, container.name, listener, deadline)
        async with self._places:
            creating = asyncio.ensure_future(self.engine.create(container))
            try:
                await asyncio.shield(creating)
            except BaseException as exc:
                # What is being made cannot be removed yet.
                await asyncio.gather(creating, return_exceptions=True)
                await attempt.end()
                if isinstance(exc, EngineError):
                    raise SandboxStartError(str(exc)) from exc
                raise
        return attempt


class ContainerAttempt:
    """One container, until it is removed."""

    def __init__(
        self, runner: ContainerRunner, name: str, listener: socket.socket, deadline: float
    ) -> None:
        self._runner = runner
        self._name = name
        self._deadline = deadline
        self.listener = listener
        """Accepts the agent's connections."""

    async def report(self) -> Json:
        """Return what came of it, once it has ended or its time is up."""
        try:
            ended = await self._runner.engine.wait(self._name, self._deadline)
            output, errors = await self._runner.engine.read_log(self._name)
            report = read_report(self._runner.settings, ended.why, ended.code, output, errors)
            # Its script was ended too, or has ended it before its limit.
            is_cut = ended.why == "ended" and (ended.code != 0 or report.get("why") == "timeout")
            if is_cut and await self._runner.engine.was_stopped(self._name):
                return {"lost": "the container was stopped from outside"}
        except EngineError as exc:
            return {"lost": str(exc)}
        return report

    async def end(self) -> None:
        """Kill and remove the container, if it is there."""
        self.listener.close()
        await self._runner.remove(self._name)


def make_engine(settings: AgentSettings) -> Docker | Kubernetes:
    """Return the engine that `agent.runner` names.

    Raises:
        EngineError: this is no place for it.
    """
    return Docker(settings) if settings.runner == "container" else Kubernetes(settings)


def make_container(
    settings: AgentSettings, order: Json, address: tuple[str, int], engine: Docker | Kubernetes
) -> Container:
    """Return the container of one attempt.

    Args:
        settings: of the agent.
        order: what `ContainerRunner.begin` takes.
        address: where the service accepts the agent's connections.
        engine: that it is for.

    Raises:
        SandboxStartError: the task is too long.
    """
    pieces: dict[str, str] = {}
    given: dict[str, list[str]] = {}
    for path, text in ((_TASK, json.dumps(order["task"])), (_PROMPT, order["prompt"])):
        coded = base64.b64encode(text.encode(errors="replace")).decode()
        starts = range(0, len(coded) or 1, _VARIABLE_CHARS)
        given[path] = [f"AGENT_R1_GIVEN_{len(pieces) + n}" for n in range(len(starts))]
        parts = [coded[start : start + _VARIABLE_CHARS] for start in starts]
        pieces |= zip(given[path], parts, strict=True)
    if (size := sum(map(len, pieces.values()))) > GIVEN_BYTES:
        raise SandboxStartError(
            f"a task and its prompt take {size} bytes in a container's environment, which must be "
            f'at most {GIVEN_BYTES}; shorten the task, or set agent.runner = "process"'
        )
    limit_s = math.ceil(order["timeout_s"])
    script = render(
        "container.sh.jinja",
        mark=_MARK,
        files=[_ERRORS, *(f"{_WORK}/{name}" for name in settings.files)],
        work=_WORK,
        errors_file=_ERRORS,
        prompt_file=_PROMPT,
        divides=engine.joins_outputs and settings.answer == "output",
        file_bytes=_FILE_BYTES,
        given=given,
        limit_s=limit_s,
        open_files=OPEN_FILES,
        cpu_s=math.ceil(settings.cpu_s),
    )
    host, port = address[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    variables = agent_variables(
        *(url + order["path"], order["key"], order["model"], order["context"]),
        *(_TASK, order["prompt"]),
    )
    folders = {"HOME": "/tmp/home", "TMPDIR": "/tmp"}
    return Container(
        name=f"agent-r1-{secrets.token_hex(8)}",
        labels={
            HOST: host_name(),
            PROCESS: _process(os.getpid()),
            UNTIL: str(math.ceil(time.time() + order["timeout_s"] + 2 * STOP_GRACE_S)),
        },
        command=["/bin/sh", "-c", script, "agent", *order["command"]],
        environment={**TELEMETRY_OFF, **settings.env, **folders, **variables, **pieces},
        limit_s=limit_s,
    )


def read_report(settings: AgentSettings, why: str, code: int, output: bytes, errors: bytes) -> Json:
    """Return what describe_end reads of an attempt: of its log, which the agent may forge.

    Args:
        settings: of the agent.
        why: `ended`, or the limit that it reached.
        code: exit status of the container, which counts where the script could not report.
        output: the end of what was printed.
        errors: the same of standard error, where the engine has it apart.
    """
    printed, mark, line = output.rpartition(f"\n{_MARK} ".encode())
    if not mark:
        if why == "ended" and code == 0:  # only the script's report ends so
            return {"lost": "the log of the container has no report"}
        printed, line = output, b""
    word, *fields = line.decode("ascii", "replace").split() or [str(code)]
    if why == "ended" and word == "timeout":
        why = "timeout"
    texts = [_decode(field) for field in fields]
    files = dict(zip(["", *settings.files], texts, strict=False))
    printed_errors = files.pop("", None) or _text(errors)
    report = {
        "why": why,
        "status": _wait_status(int(word) if word.isdigit() else code),
        "output": _text(printed),
        "errors": printed_errors,
        "files": {name: text for name, text in files.items() if text is not None},
    }
    if word == "missing":
        problem = f"{(settings.command or [''])[0]}: not found in {settings.image}"
        report["result"] = json.dumps({"not_started": problem})
    return report


def _decode(field: str) -> str | None:
    """Return the content of a file; None: it is not there."""
    with contextlib.suppress(ValueError):
        if field.startswith("+"):
            return _text(base64.b64decode(field[1:]))
    return None


def _text(data: bytes) -> str:
    return data.decode(errors="replace")[-MAX_OUTPUT_CHARS:]


def _wait_status(code: int) -> int:
    """Return the status of a process as the kernel has it, from what a shell makes of it."""
    number = code - 128
    return number if number in {*signal.Signals} else (code & 0xFF) << 8


def is_orphan(labels: Mapping[str, str]) -> bool:
    """Tell whether the service that started a container has gone, or must have removed it."""
    if labels.get(HOST) == host_name():
        process = labels.get(PROCESS, "")
        if process != _process(int(process.partition("-")[0] or 0)):
            return True
    return float(labels.get(UNTIL, "inf")) < time.time()


def host_name() -> str:
    """Return what names the machine, and those of its processes that this one sees."""
    return f"{socket.gethostname()}-{Path('/proc/self/ns/pid').stat().st_ino}"


def _process(pid: int) -> str:
    """Return what names a process of this machine for ever: its number, and when it began."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
    except OSError:
        return f"{pid}-gone"
    return f"{pid}-{stat.rpartition(')')[2].split()[19]}"


def _own_address(host: str) -> str:
    """Return the address of this process on the way to a host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, 9))  # sends nothing
        return way.getsockname()[0]
