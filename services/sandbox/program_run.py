"""One run in a sandbox, seen from the service: its channel, its output, how it ended.

`worker.py` starts runs. The program's process holds the other end of the channel and both pipes
directly; that it has ended, and how, is said by process 1 of the sandbox, which no program reaches.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from agent_r1.sandbox.guest.values import FRAME_BYTES
from agent_r1.sandbox.settings import OUTPUT_BYTES

REPORT_BYTES = 256 << 10
"""Largest report, the only kind of frame that is decoded here."""
READ_BYTES = 1 << 16
REPORT = b"R"

Json = dict[str, Any]
Why = Literal["ended", "wall", "output", "memory", "files", "killed"]


class RunResult(BaseModel):
    """Result of one run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    why: Why
    """`ended` by itself; the others name the limit; `killed`: it ended its own sandbox."""
    signal: int | None = None
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""
    report: Json = {}
    """Report of the process itself: error, exit code. A program's may lie."""
    cpu_s: float = 0.0
    wall_s: float = 0.0


@dataclass(frozen=True)
class Frame:
    """One message of a process; `body` is JSON that is not decoded here."""

    kind: bytes
    body: bytes

    def report(self) -> Json:
        """Decode a report; {} where it is none."""
        with contextlib.suppress(ValueError, RecursionError):
            report = json.loads(self.body) if self.kind == REPORT else None
            if isinstance(report, dict):
                return report
        return {}


@dataclass(eq=False)
class Run:
    """The service's end of a run. `Worker.run` makes and closes it."""

    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    outputs: tuple[int, int]

    def __post_init__(self) -> None:
        self.why: Why = "ended"
        self.stopping = asyncio.Event()
        """Event that is set when it must end, for the reason `why`."""
        self._outputs = [_Output(fd, self._exceed) for fd in self.outputs]

    def stop(self, why: Why = "ended") -> None:
        """Let the process be ended; the first reason counts."""
        if not self.stopping.is_set():
            self.why = why
            self.stopping.set()

    async def send(self, message: Json) -> None:
        """Send a message; a process that has gone is found out by `receive`."""
        await self.forward(Frame(b"M", json.dumps(message).encode()))

    async def forward(self, frame: Frame) -> None:
        """Send a frame as it is."""
        self.writer.write(frame.kind + len(frame.body).to_bytes(4, "big") + frame.body)
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()

    async def receive(self) -> Frame | None:
        """Return the next frame; None where there will be none, or it is too large."""
        try:
            kind, *length = await self.reader.readexactly(5)
            size = int.from_bytes(bytes(length), "big")
            if size > (REPORT_BYTES if bytes([kind]) == REPORT else FRAME_BYTES):
                return None
            return Frame(bytes([kind]), await self.reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def receive_report(self) -> Json:
        """Return what the process says about itself; {} where it says nothing."""
        frame = await self.receive()
        return {} if frame is None else frame.report()

    def result(self, ending: Json, report: Json, wall_s: float) -> RunResult:
        """Return how the run ended; nothing of it runs any more."""
        stdout, stderr = (output.close().decode(errors="replace") for output in self._outputs)
        return RunResult(
            why=self.why,
            signal=ending["signal"],
            exit_code=ending["exit_code"],
            cpu_s=ending["cpu_s"],
            wall_s=wall_s,
            stdout=stdout,
            stderr=stderr,
            report=report,
        )

    def close(self) -> None:
        """Close the channel and the pipes."""
        self.writer.transport.abort()
        for output in self._outputs:
            output.close()

    def _exceed(self) -> None:
        self.stop("output")


class _Output:
    """Output of a pipe, up to the limit."""

    def __init__(self, fd: int, exceed: Callable[[], None]) -> None:
        self._fd: int | None = fd
        self._data = bytearray()
        self._exceed = exceed
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._read)

    def close(self) -> bytes:
        """Return all that has come, and what is left in the pipe."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._loop.remove_reader(fd)
            while len(self._data) <= OUTPUT_BYTES and (chunk := _read_some(fd)):
                self._data += chunk
            os.close(fd)
        return bytes(self._data[:OUTPUT_BYTES])

    def _read(self) -> None:
        if self._fd is None:
            return
        chunk = _read_some(self._fd)
        self._data += chunk or b""
        if chunk == b"" or len(self._data) > OUTPUT_BYTES:
            self._loop.remove_reader(self._fd)
        if len(self._data) > OUTPUT_BYTES:
            self._exceed()


def _read_some(fd: int) -> bytes | None:
    try:
        return os.read(fd, READ_BYTES)
    except BlockingIOError:
        return None


async def open_run(number: int, control: socket.socket, kind: str) -> Run:
    """Ask process 1 of a sandbox for a process, and give it its files.

    Raises:
        OSError: the sandbox has gone.
    """
    ours, theirs = socket.socketpair()
    pipes = [os.pipe(), os.pipe()]
    files = [pipes[0][1], pipes[1][1], theirs.fileno()]
    try:
        socket.send_fds(control, [json.dumps({"run": number, "kind": kind}).encode()], files)
        ours.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ours)
    except BaseException:
        ours.close()
        for read_end, _ in pipes:
            os.close(read_end)
        raise
    finally:
        theirs.close()
        for _, write_end in pipes:
            os.close(write_end)
    return Run(number, reader, writer, (pipes[0][0], pipes[1][0]))
