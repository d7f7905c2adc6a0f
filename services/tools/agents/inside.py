"""Process 1 of the agents' sandbox: forks a process for each attempt, in namespaces of its own.

The service (sandbox.py) starts it with bubblewrap. It imports the class of the agent once. For an
attempt it gets three files: a channel and two outputs. What it forks makes namespaces (user, mount,
pid, net, ipc), becomes process 1 in them (the *keeper*), hands out the listening socket that
relay.py serves, and starts the agent below itself. The keeper runs nothing of the agent's, cannot
be reached by it, and takes every process of the attempt with it when it ends.

    service --{"task", "command", ...}\\n--> keeper --{"folder"}\\n, socket--> service
    service --"stop\\n"--> keeper --{"status", "result", "files"}--> service

Standard library only, but for the messages and the user's class.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import math
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NoReturn

from agent_r1.sandbox.guest.main import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_NO_NEW_PRIVS,
    end_all,
    install_filter,
    prctl,
    receive,
    send,
)
from agent_r1.sandbox.guest.process import PR_SET_DUMPABLE, PR_SET_PDEATHSIG

Json = dict[str, Any]

CONTROL = 3
"""File that the service's socket becomes. Not standard input, which bwrap itself would keep: that
the socket is closed is how the service sees that this process has ended."""
RESULT = 3
"""File that the agent's process leaves its result in; closed where it starts a program."""
ERROR_CHARS = 1000
_NEW_NET = 0x40000000
_NEW_OTHERS = 0x10000000 | 0x20000 | 0x20000000 | 0x08000000  # user, mount, pid, ipc
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC = 2, 4, 8, 4096, 16384
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_CAPABILITY_VERSION_3 = 0x20080522
_PROMPT_BYTES = 100_000
"""Longer prompts do not fit into an environment variable."""

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Set up, then start attempts until the service closes the socket."""
    given = int(sys.argv.pop())
    control = socket.socket(fileno=os.dup2(given, CONTROL))
    os.closerange(CONTROL + 1, max(given + 1, 256))
    config, _ = receive(control)
    try:
        kind = set_up(config)
    except BaseException as exc:  # noqa: BLE001 - the service says it
        send(control, {"ready": False, "problem": last_line(exc)})
        return
    send(control, {"ready": True})
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers need not be waited for
    while True:
        _, files = receive(control)
        if os.fork() == 0:
            control.close()
            begin_attempt(config, kind, files)
        for fd in files:
            os.close(fd)


def set_up(config: Json) -> type | None:
    """Give up privileges; import the agent's class, if it is one."""
    uid = config["uid"]
    if uid is not None:
        if not config["container"]:
            # bwrap has covered parts of it from root: below them no attempt could have its own.
            mount("proc", "/proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    prctl(libc, PR_SET_NO_NEW_PRIVS, 1)
    prctl(libc, PR_SET_DUMPABLE, 0)
    prctl(libc, PR_SET_PDEATHSIG, signal.SIGKILL)
    os.umask(0o077)
    os.chdir(config["folder"])
    sys.path[:] = [*filter(os.path.isabs, sys.path), *config["paths"]]
    sys.dont_write_bytecode = True
    kind = None
    if config["type"] is not None:
        module, _, name = config["type"].partition(":")
        kind = getattr(importlib.import_module(module), name)
    gc.collect()
    gc.freeze()
    return kind


# --- the keeper of an attempt -------------------------------------------------------------------


def begin_attempt(config: Json, kind: type | None, files: list[int]) -> NoReturn:
    """Become the keeper of one attempt; ends with it."""
    channel = socket.socket(fileno=files[0])
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        if config["container"]:
            folder = Path(tempfile.mkdtemp(dir=config["folder"]))
        else:
            folder = enter_namespaces(config)
        keep(config, kind, folder, channel, files[1:])
    except BaseException as exc:  # noqa: BLE001 - whatever it is, this process must end here
        with contextlib.suppress(OSError):
            channel.sendall(json.dumps({"problem": last_line(exc)}).encode())
    os._exit(0)


def enter_namespaces(config: Json) -> Path:
    """Go on as process 1 of new namespaces, without a capability in them."""
    uid, gid = os.getuid(), os.getgid()
    prctl(libc, PR_SET_DUMPABLE, 1)  # or the maps belong to root
    call("unshare", _NEW_OTHERS | (0 if config["network"] else _NEW_NET))
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        Path("/proc/self", name).write_text(text, encoding="ascii")
    if os.fork() != 0:
        os._exit(0)
    prctl(libc, PR_SET_DUMPABLE, 0)
    mount("proc", "/proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    mount("devpts", "/dev/pts", _MS_NOSUID | _MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    sizes = f"size={config['limits']['file_bytes']},nr_inodes={config['limits']['files']}"
    for path, kept in config["writable"].items():
        # What is shown of the machine below a private folder is shown again.
        held = {name: os.open(f"{path}/{name}", os.O_PATH) for name in kept}
        mount("tmpfs", path, _MS_NOSUID | _MS_NODEV, f"{sizes},mode=700")
        for name, fd in held.items():
            os.mkdir(f"{path}/{name}")
            mount(f"/proc/self/fd/{fd}", f"{path}/{name}", _MS_BIND | _MS_REC)
            os.close(fd)
    if not config["network"]:
        with socket.socket() as any_socket:
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    call("capset", header, bytes(24))
    return Path("/tmp")


def mount(source: str, target: str, flags: int, data: str = "") -> None:
    """Mount a file system of the type `source`, or with MS_BIND the folder `source`."""
    call("mount", source.encode(), target.encode(), source.encode(), flags, data.encode())


def call(name: str, *arguments: object) -> None:
    """Call a function of libc, or raise."""
    if getattr(libc, name)(*arguments) != 0:
        where = f" {arguments[1]!r}" if name == "mount" else ""
        raise OSError(ctypes.get_errno(), f"{name}{where}: {os.strerror(ctypes.get_errno())}")


def keep(
    config: Json, kind: type | None, folder: Path, channel: socket.socket, outputs: list[int]
) -> None:
    """Start the agent, wait until it ends or must end, end what it left, report."""
    order = json.loads(read_line(channel))
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    port = listener.getsockname()[1]
    if config["container"]:
        prctl(libc, PR_SET_CHILD_SUBREAPER, 1)
        prctl(libc, PR_SET_PDEATHSIG, signal.SIGKILL)
    hello = json.dumps({"folder": str(folder)}) + "\n"
    socket.send_fds(channel, [hello.encode()], [listener.fileno()])
    listener.close()
    work = folder / "work"
    for made in (work, folder / "home"):
        made.mkdir()
    task = folder / "task.json"
    task.write_text(json.dumps(order["task"]), encoding="utf-8")
    base_url = f"http://127.0.0.1:{port}{order['path']}"
    environment = make_environment(config, order, folder, base_url)
    with (
        tempfile.TemporaryFile(dir=folder) as given,
        tempfile.TemporaryFile(dir=folder) as result,
    ):
        given.write(order["prompt"].encode())
        given.seek(0)
        install_filter(libc, base64.b64decode(config["seccomp"]))
        pid = os.fork()
        if pid == 0:
            channel.close()
            files = [given.fileno(), *outputs, result.fileno()]
            run_agent(config, kind, order, environment, work, files)
        for fd in outputs:
            os.close(fd)
        wait_for_end(pid, channel)
        status, _ = end_all(pid, {"container": config["container"], "uid": None})
        result.seek(0)
        said = result.read(config["limits"]["result_bytes"]).decode(errors="replace")
    report = {
        "status": status,
        "result": said,
        "files": read_files(work, config["files"], config["limits"]["text_chars"]),
    }
    channel.sendall(json.dumps(report).encode())


def read_line(channel: socket.socket) -> bytes:
    """Read up to a newline, behind which nothing comes before the answer."""
    data = b""
    while not data.endswith(b"\n"):
        if not (chunk := channel.recv(1 << 16)):
            os._exit(0)  # the service has gone
        data += chunk
    return data


def make_environment(config: Json, order: Json, folder: Path, base_url: str) -> dict[str, str]:
    """Return the environment of the agent: nothing of the service's."""
    environment = {
        **config["environment"],
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder),
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": order["key"],
        "OPENAI_MODEL": order["model"],
        "AGENT_R1_TASK": str(folder / "task.json"),
    }
    prompt = order["prompt"]
    if len(prompt.encode()) <= _PROMPT_BYTES and "\0" not in prompt:
        environment["AGENT_R1_PROMPT"] = prompt
    return environment


def wait_for_end(pid: int, channel: socket.socket) -> None:
    """Return once the agent's process has ended, or the service says that it must, or has gone."""
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(channel, select.POLLIN)
    poll.poll()
    os.close(pidfd)


def read_files(work: Path, names: list[str], max_chars: int) -> dict[str, str]:
    """Read what the agent left, if it is an ordinary file of its own; no process is left now."""
    found = {}
    for name in names:
        path = os.path.realpath(work / name)
        with contextlib.suppress(OSError):
            if path.startswith(f"{work}/") and stat.S_ISREG(os.stat(path).st_mode):
                with open(path, encoding="utf-8", errors="replace") as file:
                    found[name] = file.read(max_chars)
    return found


# --- the agent ----------------------------------------------------------------------------------


def run_agent(
    config: Json,
    kind: type | None,
    order: Json,
    environment: dict[str, str],
    work: Path,
    files: list[int],
) -> NoReturn:
    """Become the process of the agent."""
    code = 1
    try:
        os.setsid()
        arrange_files(files)
        limit_process(config["limits"], in_container=config["container"])
        os.chdir(work)
        os.environ.clear()
        os.environ.update(environment)
        command = order["command"]
        if command is None:
            prctl(libc, PR_SET_DUMPABLE, 1)
            code = run_class(kind, order, environment)
        else:
            start_program(command, environment)
    except BaseException:  # noqa: BLE001 - whatever it is, this process must end here
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    os._exit(code)


def arrange_files(files: list[int]) -> None:
    """Keep standard input, output and error, and the file of the result."""
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in files]
    for target, source in enumerate(moved):
        os.dup2(source, target, inheritable=target != RESULT)
    os.closerange(RESULT + 1, 256)


def limit_process(limits: Json, *, in_container: bool) -> None:
    """Set the limits that everything the agent starts inherits."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if in_container:  # where no namespace ends with the keeper
        prctl(libc, PR_SET_PDEATHSIG, signal.SIGKILL)
    cpu_s = math.ceil(limits["cpu_s"])
    for name, soft, hard in (
        ("CPU", cpu_s, cpu_s + 1),
        # Not the address space, of which some runtimes reserve far more than they use.
        ("DATA", limits["memory_bytes"], limits["memory_bytes"]),
        ("FSIZE", limits["file_bytes"], limits["file_bytes"]),
        ("NOFILE", limits["open_files"], limits["open_files"]),
        ("CORE", 0, 0),
        ("MEMLOCK", 0, 0),
        ("MSGQUEUE", 0, 0),
        ("NPROC", limits["processes"], limits["processes"]),
    ):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (soft, hard))


def start_program(command: list[str], environment: dict[str, str]) -> NoReturn:
    """Become the program."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environment)
    except OSError as exc:
        leave({"not_started": f"{command[0]}: {exc.strerror}"})
        os._exit(127)


def run_class(kind: Any, order: Json, environment: dict[str, str]) -> int:
    """Construct the class and let it work; return the exit code."""
    from agent_r1.tools.agents.agent import Model
    from agent_r1_proto.agents import AgentTask

    model = Model(environment["OPENAI_BASE_URL"], order["key"], order["model"])
    try:
        agent = kind()
    except BaseException as exc:  # noqa: BLE001 - the user's
        traceback.print_exc()
        leave({"not_started": f"{kind.__name__}() raised {last_line(exc)}"})
        return 1
    code = 0
    try:
        answer = asyncio.run(agent.run(AgentTask.model_validate(order["task"]), model))
        if answer is not None and not isinstance(answer, str):
            raise TypeError(f"run returned {type(answer).__name__}; it must return a str or None")
        leave({"answer": None if answer is None else answer[: order["answer_chars"]]})
    except BaseException as exc:  # noqa: BLE001 - the user's
        traceback.print_exc()
        leave({"error": last_line(exc)})
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code


def leave(result: Json) -> None:
    """Write the result where the keeper finds it."""
    os.write(RESULT, json.dumps(result).encode())


def last_line(exc: BaseException) -> str:
    """Return the last line of an exception's traceback."""
    return " ".join(traceback.format_exception_only(exc)[-1].split())[:ERROR_CHARS]
