"""The process of one run: limits itself, reads what to do from its channel, does it, ends.

Three kinds: a `program` runs and reports; a `solution` loads code and then answers what a tester
asks of it; a `tester` runs one test. Each frame of the channel is a letter, 4 bytes of length and
JSON. The other end is the service, which trusts a solution's or a program's answers for no more
than what they say about themselves.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import ctypes
import fcntl
import functools
import io
import json
import linecache
import math
import os
import resource
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any, NoReturn

from .asserts import SETUP_NAME, TEST_NAME, TEST_NAMES
from .peer import Peer
from .tester import prepare_test, run_test
from .values import FRAME_BYTES, RefusedValue

Json = dict[str, Any]

SOURCE_NAME = "<code>"
CHANNEL = 3
REPORT, MESSAGE = b"R", b"M"
"""Kinds of frames: for the service itself, or for the other process of a test."""
ERROR_CHARS = 60_000
TRACEBACK_FRAMES = 8
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4


def run_child(kind: str, config: Json, files: list[int]) -> NoReturn:
    """Become the process of one run, do it, end."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        become_child(config["limits"], files)
        libc = ctypes.CDLL(None)
        if config["container"]:  # where no namespace ends with the guest
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # A tester is no business of any other process; without namespaces, nothing is.
        elif kind != "tester":
            libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        forget_guest()
        code = {"program": do_program, "solution": do_solution, "tester": do_test}[kind]()
    except BaseException:  # noqa: BLE001 - whatever it is, this process must end here
        with contextlib.suppress(BaseException):
            write_all(2, traceback.format_exc().encode(errors="replace"))
    os._exit(code)


def become_child(limits: Json, files: list[int]) -> None:
    """Arrange files and limits; nothing of the guest's own stays open."""
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in files]
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in enumerate((null, *moved)):
        os.dup2(source, target, inheritable=target != CHANNEL)
    os.closerange(CHANNEL + 1, 256)
    with contextlib.suppress(OSError):
        os.nice(5)
    cpu_s = math.ceil(limits["cpu_s"])
    for name, value in (
        ("CPU", (cpu_s, cpu_s + 1)),
        ("AS", limits["memory_bytes"]),
        ("FSIZE", limits["file_bytes"]),
        ("NOFILE", limits["open_files"]),
        ("CORE", 0),
        ("MEMLOCK", 0),
        ("MSGQUEUE", 0),
        ("NPROC", limits["processes"]),
    ):
        pair = value if isinstance(value, tuple) else (value, value)
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), pair)
    sys.argv = [SOURCE_NAME]
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True, errors="backslashreplace")


def forget_guest() -> None:
    """Leave the names of these modules to the program."""
    package = __package__ or ""
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]:
        del sys.modules[name]


# --- the kinds ----------------------------------------------------------------------------------


def do_program() -> int:
    """Run a program and report; return its exit code."""
    pid = os.getpid()
    source = read_frame()["code"]
    report = attempt("code", lambda: run_program(source))
    flush()
    try:
        if os.getpid() != pid:  # a fork of the program that has come to its end
            raise OSError
        write_frame(REPORT, report)
    except OSError:  # or the program has closed every file
        write_all(2, report.get("error", "").encode(errors="replace"))
    return report.get("exit_code", 0)


def do_solution() -> int:
    """Load code and answer what the tester asks of it, for as long as it asks."""
    source = read_frame()["code"]
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    remember_lines(source, SOURCE_NAME)
    outputs = {"stdout": Recorder(sys.stdout), "stderr": Recorder(sys.stderr)}
    sys.stdout, sys.stderr = (output.text for output in outputs.values())
    report = attempt("code", lambda: load_solution(source, module.__dict__))
    write_frame(REPORT, report)
    if not report:
        take_output(outputs)  # the test has not been there yet
        peer = Peer(
            write_message,
            read_frame,
            scope=module.__dict__,
            describe=format_error,
            printed=functools.partial(take_output, outputs),
        )
        sys.stdin = TestInput(peer)
        peer.serve()
    flush()
    return report.get("exit_code", 0)


def load_solution(source: str, scope: Json) -> None:
    """Run the code under test, so that it defines its names."""
    exec(compile(source, SOURCE_NAME, "exec", dont_inherit=True), scope)


class Recorder(io.BufferedWriter):
    """The buffer of a stream, which also keeps what is printed, for the test."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream.buffer.raw)
        self._printed = bytearray()
        self.text = io.TextIOWrapper(self, "utf-8", "backslashreplace", line_buffering=True)

    def write(self, data: Any, /) -> int:
        """Write to both."""
        self._printed += data
        return super().write(data)

    def take(self) -> str:
        """Return what has been printed since the last call."""
        self.text.flush()
        printed, self._printed = self._printed.decode(errors="backslashreplace"), bytearray()
        return printed


def take_output(outputs: dict[str, Recorder]) -> dict[str, str]:
    """Return what has been printed since the last call, of the streams that have any."""
    return {name: text for name, output in outputs.items() if (text := output.take())}


class TestInput(io.TextIOBase):
    """Standard input of the code: that of the test, which may have replaced it."""

    __test__ = False  # not a class of pytest's

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def readable(self) -> bool:
        """Return True."""
        return True

    def readline(self, size: int = -1, /) -> str:  # type: ignore[reportIncompatibleMethodOverride]
        """Return the next line."""
        return self._peer.request("readline", size)

    def read(self, size: int | None = -1, /) -> str:
        """Return all lines, or the beginning of the next one."""
        return self.readline(size) if size and size > 0 else "".join(self)


def do_test() -> int:
    """Run one test against the solution of another sandbox; only a test that passes says so."""
    request = read_frame()
    peer = Peer(write_message, read_frame, scope=None, describe=name_error)
    remember_lines(request["setup"], SETUP_NAME)
    remember_lines(request["test"], TEST_NAME)
    # Alone first: a test that cannot be compiled is no fault of the code.
    report = attempt("data", lambda: prepare_test(request))
    report = report or attempt("test", lambda: run_test(request, peer))
    write_frame(REPORT, report or {"passed": True})
    return 0


def attempt(stage: str, action: Callable[[], object]) -> Json:
    """Run `action`; return {} when it comes to its end, else what went wrong."""
    try:
        action()
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
        if exc.code is not None and not isinstance(exc.code, int):
            print(exc.code, file=sys.stderr)  # noqa: T201 - as Python does
        return {"stage": stage, "exit_code": code & 0xFF}
    except BaseException as exc:  # noqa: BLE001 - the program's own, KeyboardInterrupt included
        return {"stage": stage, "error": format_error(exc), "error_type": type(exc).__name__}
    return {}


def run_program(source: str) -> None:
    """Run a program as `__main__`; the value of a last expression is printed, as in a notebook."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    remember_lines(source, SOURCE_NAME)
    tree = ast.parse(source, SOURCE_NAME)
    ending = None
    if tree.body and isinstance(last := tree.body[-1], ast.Expr):
        del tree.body[-1]
        ending = compile(ast.Expression(last.value), SOURCE_NAME, "eval", dont_inherit=True)
    body = compile(tree, SOURCE_NAME, "exec", dont_inherit=True)
    exec(body, module.__dict__)
    if ending is not None:
        value = eval(ending, module.__dict__)
        if value is not None:
            print(repr(value))  # noqa: T201 - to the program's own output
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the program's threads
    atexit._run_exitfuncs()


# --- frames -------------------------------------------------------------------------------------


def read_frame() -> Json:
    """Return the next frame's content; ends the process where the service has closed the run."""
    head = _read_exactly(5)
    size = int.from_bytes(head[1:], "big")
    try:
        return json.loads(_read_exactly(size))
    except (ValueError, RecursionError) as exc:
        raise RefusedValue("an answer that cannot be read") from exc


def write_message(content: object) -> None:
    """Send a frame to the other process of the test.

    Raises:
        RefusedValue: it is too large; nothing has been sent.
    """
    write_frame(MESSAGE, content)


def write_frame(kind: bytes, content: object) -> None:
    """Send a frame."""
    body = json.dumps(content).encode()
    if len(body) > FRAME_BYTES:
        raise RefusedValue(f"a value of more than {FRAME_BYTES} bytes")
    write_all(CHANNEL, kind + len(body).to_bytes(4, "big") + body)


def _read_exactly(count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        chunk = os.read(CHANNEL, min(count - len(data), 1 << 20))
        if not chunk:
            flush()
            os._exit(0)
        data += chunk
    return bytes(data)


def write_all(fd: int, data: bytes) -> None:
    """Write all of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


# --- texts --------------------------------------------------------------------------------------


def remember_lines(source: str, name: str) -> None:
    """Let tracebacks show the lines of a program that is in no file."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)


def format_error(error: BaseException) -> str:
    """Return the traceback without our own frames."""
    if (told := getattr(error, "agent_r1_text", None)) is not None:  # by the other process
        return str(told)[:ERROR_CHARS]
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename not in (SOURCE_NAME, *TEST_NAMES):
        frame = frame.tb_next
    try:
        shown = traceback.TracebackException(type(error), error, frame, compact=True)
        return shorten("".join(limit_frames(shown).format()))
    except BaseException:  # noqa: BLE001 - an exception's own __str__ may raise, or memory may be short
        return f"{type(error).__name__}\n"


def name_error(error: BaseException) -> str:
    """Return what the code under test may read of an error of the tests: no line of theirs."""
    if (told := getattr(error, "agent_r1_text", None)) is not None:
        return str(told)[:ERROR_CHARS]
    return shorten("".join(traceback.format_exception_only(error)))


def limit_frames(shown: traceback.TracebackException) -> traceback.TracebackException:
    """Keep the first and the last frames of a long traceback."""
    half = TRACEBACK_FRAMES // 2
    if len(shown.stack) > TRACEBACK_FRAMES:
        shown.stack[half:-half] = []
    return shown


def shorten(text: str) -> str:
    """Cut a text in the middle."""
    half = ERROR_CHARS // 2
    return text if len(text) <= ERROR_CHARS else f"{text[:half]}\n…\n{text[-half:]}"


def flush() -> None:
    """Flush the program's streams, whatever it has done to them."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
