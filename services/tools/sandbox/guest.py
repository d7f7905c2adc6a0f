"""What runs inside a sandbox: takes programs from the service, runs each in a process of its own.

The service (`worker.py`) writes frames to standard input and reads frames from standard output: 4
bytes of length, then JSON. The first frame sets the sandbox up, each further one is a run. This
process never runs a program itself: it forks, the child limits itself and runs the program, and
all that the program left behind is killed before the answer goes back.

Standard library only: this file is started by whichever interpreter runs the code, without the
packages of the service.
"""

from __future__ import annotations

import ast
import atexit
import base64
import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import linecache
import math
import operator
import os
import resource
import select
import shutil
import signal
import sys
import threading
import time
import traceback
import types
from fractions import Fraction
from typing import Any, NoReturn

Json = dict[str, Any]

SOURCE_NAME = "<code>"
TEST_NAME = "<test>"
RESULT_BYTES = 1 << 20
PIPE_BYTES = 1 << 16
READ_BYTES = 1 << 16
DRAIN_ROUNDS = 64
KILL_ROUNDS = 1000
KILL_PAUSE_S = 0.001
TRACEBACK_FRAMES = 8
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
F_SETPIPE_SZ = 1031


# --- frames -------------------------------------------------------------------------------------


def read_exactly(count: int) -> bytes:
    """Read bytes from standard input; ends the process where the service has closed it."""
    data = b""
    while len(data) < count:
        chunk = os.read(0, count - len(data))
        if not chunk:
            os._exit(0)
        data += chunk
    return data


def read_frame() -> bytes:
    """Return the body of the next frame."""
    return read_exactly(int.from_bytes(read_exactly(4), "big"))


def write_all(fd: int, data: bytes) -> None:
    """Write all of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_frame(message: Json) -> None:
    """Answer the service."""
    body = json.dumps(message).encode()
    write_all(1, len(body).to_bytes(4, "big") + body)


# --- set-up -------------------------------------------------------------------------------------


def set_up(config: Json) -> None:
    """Give up privileges, hide from the programs, import what was asked for."""
    if config["uid"] is not None:
        os.setgroups([])
        os.setresgid(config["uid"], config["uid"], config["uid"])
        os.setresuid(config["uid"], config["uid"], config["uid"])
    libc = ctypes.CDLL(None, use_errno=True)
    prctl(libc, PR_SET_NO_NEW_PRIVS, 1)
    # Programs have this process's user; not dumpable means that they cannot open its memory or
    # its files through /proc.
    prctl(libc, PR_SET_DUMPABLE, 0)
    if config["container"]:
        prctl(libc, PR_SET_PDEATHSIG, signal.SIGKILL)
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


# --- one run, seen from outside -----------------------------------------------------------------


def run(request: Json, config: Json) -> Json:
    """Run one program in a child and say how it ended."""
    started = time.monotonic()
    readers, writers = zip(*(os.pipe() for _ in range(3)), strict=True)
    secret_read, secret_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        run_child(request, config, writers, secret_read)
    for fd in (*writers, secret_read):
        os.close(fd)
    token = ""
    if request["kind"] != "program":
        # Neither the test nor the token is in the child's memory while it loads the code.
        token = os.urandom(16).hex()
        hand_over(secret_write, json.loads(read_frame()) | {"token": token})
    os.close(secret_write)
    collected, why = collect(pid, readers, started + request["wall_s"], request["output_bytes"])
    kill_others(config)
    status, cpu_s = reap(pid)
    for index, fd in enumerate(readers):
        drain(fd, collected[index])
        os.close(fd)
    answer = describe(collected, why, status, token)
    clean = empty_folders(config["writable"])
    return answer | {"clean": clean, "cpu_s": cpu_s, "wall_s": time.monotonic() - started}


def hand_over(fd: int, secret: Json) -> None:
    """Put the test into the child's pipe; a child that is gone has failed already."""
    data = json.dumps(secret).encode()
    if len(data) > PIPE_BYTES:
        fcntl.fcntl(fd, F_SETPIPE_SZ, len(data))
    os.set_blocking(fd, False)
    with contextlib.suppress(BrokenPipeError):
        if os.write(fd, data) < len(data):
            raise OSError(f"the test ({len(data)} bytes) does not fit into a pipe")


def collect(
    pid: int, readers: tuple[int, ...], deadline: float, output_bytes: int
) -> tuple[list[bytearray], str]:
    """Read what the child writes until it ends, takes too long or prints too much."""
    collected = [bytearray() for _ in readers]
    limits = [output_bytes, output_bytes, RESULT_BYTES]
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    for fd in readers:
        os.set_blocking(fd, False)
        poll.register(fd, select.POLLIN)
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return collected, "wall"
            ready = [fd for fd, _ in poll.poll(left * 1000)]
            for index, fd in enumerate(readers):
                if fd not in ready:
                    continue
                chunk = read_some(fd)
                if chunk == b"":
                    poll.unregister(fd)
                collected[index] += chunk or b""
                if len(collected[index]) > limits[index]:
                    return collected, "output"
            if pidfd in ready:
                return collected, "ended"
    finally:
        os.close(pidfd)


def read_some(fd: int) -> bytes | None:
    """Return what is there, `b""` at the end, None when nothing is there."""
    try:
        return os.read(fd, READ_BYTES)
    except BlockingIOError:
        return None


def drain(fd: int, data: bytearray) -> None:
    """Read what is left in the pipe."""
    for _ in range(DRAIN_ROUNDS):
        chunk = read_some(fd)
        if not chunk:
            return
        data += chunk


def kill_others(config: Json) -> None:
    """Kill every process but this one (and process 1 of the namespace)."""
    if not config["container"]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        return
    # No namespace: only what descends from here. Orphans are adopted by this process.
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
                with open(f"/proc/{parent}/task/{thread}/children", encoding="ascii") as file:
                    waiting += [int(child) for child in file.read().split()]
            if parent != os.getpid() and not is_zombie(parent):
                found.append(parent)
    return found


def is_zombie(pid: int) -> bool:
    """Tell whether the process has ended and only waits to be reaped."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0] in "ZX"


def reap(pid: int) -> tuple[int, float]:
    """Return the child's wait status and the CPU time it took; reaps orphans as well."""
    _, status, usage = os.wait4(pid, 0)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return status, usage.ru_utime + usage.ru_stime


def empty_folders(folders: list[str]) -> bool:
    """Remove what the program wrote; tell whether nothing is left."""
    for folder in folders:
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError, RecursionError):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)
    return not any(os.listdir(folder) for folder in folders)


def describe(collected: list[bytearray], why: str, status: int, token: str) -> Json:
    """Return the answer to the service."""
    report: object = None
    with contextlib.suppress(ValueError, RecursionError):
        report = json.loads(collected[2])
    if not isinstance(report, dict):
        report = {}
    report["passed"] = bool(token) and report.pop("token", None) == token
    return {
        "why": why,
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        "exit_code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        "stdout": collected[0].decode(errors="replace"),
        "stderr": collected[1].decode(errors="replace"),
        "report": report,
    }


# --- the child ----------------------------------------------------------------------------------


def run_child(request: Json, config: Json, writers: tuple[int, ...], secret_fd: int) -> NoReturn:
    """Become the process of one program, run it, report, end."""
    try:
        os.setsid()
        pid = os.getpid()
        result_fd = become_child(config["limits"], writers, secret_fd)
        report = execute(request, result_fd + 1)
        flush()
        try:
            if os.getpid() != pid:  # a fork of the program that has come to its end
                raise OSError
            write_all(result_fd, json.dumps(report).encode())
        except OSError:  # or the program has closed every file
            write_all(2, report.get("error", "").encode(errors="replace"))
    except BaseException:  # noqa: BLE001 - whatever it is, this process must end here
        with contextlib.suppress(BaseException):
            write_all(2, traceback.format_exc().encode(errors="replace"))
        os._exit(1)
    os._exit(report.get("exit_code", 0))


def become_child(limits: Json, writers: tuple[int, ...], secret_fd: int) -> int:
    """Arrange files and limits; the result goes to the returned file, the secret is the next."""
    stdout, stderr, result = (fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in writers)
    secret = fcntl.fcntl(secret_fd, fcntl.F_DUPFD, 10)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (stdout, 1), (stderr, 2), (result, 3), (secret, 4)):
        os.dup2(source, target, inheritable=target < 3)
    os.closerange(5, 256)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
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
    return 3


def execute(request: Json, secret_fd: int) -> Json:
    """Run a program, or load code and run one test on it."""
    if request["kind"] == "program":
        return attempt("code", lambda: run_program(request["code"]))
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    scope = module.__dict__
    report = attempt("code", lambda: exec(compile_named(request["code"], SOURCE_NAME), scope))
    if "error" in report or "exit_code" in report:
        return report
    text = b""
    while chunk := os.read(secret_fd, READ_BYTES):
        text += chunk
    secret = json.loads(text)
    return attempt("test", lambda: run_test(secret, scope))


def attempt(stage: str, action: Any) -> Json:
    """Run `action`; return its report, or the error with the frames of the program."""
    try:
        return action() or {}
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
        if exc.code is not None and not isinstance(exc.code, int):
            print(exc.code, file=sys.stderr)  # noqa: T201 - as Python does
        return {"stage": stage, "exit_code": code & 0xFF}
    except BaseException as exc:  # noqa: BLE001 - the program's own, KeyboardInterrupt included
        return {"stage": stage, "error": format_error(exc), "error_type": type(exc).__name__}


def run_program(source: str) -> None:
    """Run a program as `__main__`; the value of a last expression is printed, as in a notebook."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    remember_lines(source, SOURCE_NAME)
    tree = ast.parse(source, SOURCE_NAME)
    ending = None
    if tree.body and isinstance(last := tree.body[-1], ast.Expr):
        del tree.body[-1]
        ending = compile(ast.Expression(last.value), SOURCE_NAME, "eval")
    body = compile(tree, SOURCE_NAME, "exec")
    exec(body, module.__dict__)
    if ending is not None:
        value = eval(ending, module.__dict__)
        if value is not None:
            print(repr(value))  # noqa: T201 - to the program's own output
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the program's threads
    atexit._run_exitfuncs()


def run_test(secret: Json, scope: Json) -> Json:
    """Run one test; what it compares with stays with the service where that is possible."""
    if secret["setup"]:
        exec(compile_named(secret["setup"], TEST_NAME), scope)
    if secret["mode"] == "run":
        exec(compile_named(secret["test"], TEST_NAME), scope)
        return {"token": secret["token"]}
    remember_lines(secret["test"], TEST_NAME)
    value = eval(compile(secret["test"], TEST_NAME, "eval"), scope)
    if secret["mode"] == "truth":
        value = bool(value)
    return {"value": encode(value), "token": secret["token"]}


def compile_named(source: str, name: str) -> types.CodeType:
    """Compile a program so that tracebacks show its lines."""
    remember_lines(source, name)
    return compile(source, name, "exec")


def remember_lines(source: str, name: str) -> None:
    """Let tracebacks show the lines of a program that is in no file."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)


def format_error(error: BaseException) -> str:
    """Return the traceback without our own frames."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename not in (SOURCE_NAME, TEST_NAME):
        frame = frame.tb_next
    try:
        shown = traceback.TracebackException(type(error), error, frame, compact=True)
        return "".join(limit_frames(shown).format())
    except BaseException:  # noqa: BLE001 - an exception's own __str__ may raise, or memory may be short
        return f"{type(error).__name__}\n"


def limit_frames(shown: traceback.TracebackException) -> traceback.TracebackException:
    """Keep the first and the last frames of a long traceback."""
    half = TRACEBACK_FRAMES // 2
    if len(shown.stack) > TRACEBACK_FRAMES:
        shown.stack[half:-half] = []
    return shown


def flush() -> None:
    """Flush the program's streams, whatever it has done to them."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()


def encode(value: Any) -> list[Any]:
    """Return a plain value as tagged JSON; `["other", type]` for anything else.

    Subclasses count as what they derive from, so no method of the program takes part.
    """
    if value is None or isinstance(value, bool):
        return ["constant", value]
    if isinstance(value, int):
        return ["int", int.__format__(value, "x")]
    if isinstance(value, float):
        return ["float", float.hex(value)]
    if isinstance(value, complex):
        return ["complex", float.hex(value.real), float.hex(value.imag)]
    if isinstance(value, str):
        return ["str", str.__str__(value)]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, Fraction):
        return ["fraction", f"{value.numerator:x}", f"{value.denominator:x}"]
    if isinstance(value, dict):
        return ["dict", [[encode(key), encode(item)] for key, item in dict.items(value)]]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            items: Any = kind.__iter__
            return [kind.__name__, [encode(item) for item in items(value)]]
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return encode(value.item())
    try:
        return ["int", format(operator.index(value), "x")]
    except TypeError:
        return ["other", type(value).__name__]


def main() -> None:
    """Set up, then answer requests until the service closes the pipe."""
    os.closerange(3, 256)
    config = json.loads(read_frame())
    try:
        set_up(config)
    except BaseException as exc:  # noqa: BLE001 - the service says it
        write_frame({"ready": False, "problem": f"{type(exc).__name__}: {exc}"})
        return
    write_frame({"ready": True})
    while True:
        write_frame(run(json.loads(read_frame()), config))


if __name__ == "__main__":
    main()
