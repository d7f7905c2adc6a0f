"""Process 1 of the agents' sandbox: forks a process for each attempt, in namespaces of its own.

The service (sandbox.py) starts it, and it imports the class of the agent once. For an attempt it
gets a channel. What it forks makes namespaces (user, mount, pid, net, ipc), becomes process 1 in
them (the *keeper*), hands out the listening socket that relay.py serves, and starts the agent below
itself. The keeper runs nothing of the agent's, cannot be reached by it, watches its limits, and
takes every process of the attempt with it when it ends.

    service --{"task", "command", ...}--> keeper --{"folder"}, the socket--> service
    service --"go"--> keeper --{"why", "status", "result", "output", "errors", "files"}--> service

Standard library only, but for the messages and the user's class.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ctypes
import fcntl
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
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from agent_r1.sandbox.guest import main as guest
from agent_r1.sandbox.guest.process import PR_SET_DUMPABLE, PR_SET_PDEATHSIG
from agent_r1.sandbox.processes import (
    count_user_tasks,
    find_tree,
    measure_memory,
    measure_shares,
)
from agent_r1.tools.agents.variables import agent_variables

Json = dict[str, Any]

RESULT = 3
"""File that the agent's process leaves its result in; closed where it starts a program."""
WATCH_PERIOD_S = 0.5
ERROR_CHARS = 1000
TAIL_BYTES = 1 << 18
"""Of each output, so much of the end is kept."""
_READ_BYTES = 1 << 16
_NEW_NET = 0x40000000
_NEW_OTHERS = 0x10000000 | 0x20000 | 0x20000000 | 0x08000000  # user, mount, pid, ipc
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC = 1, 2, 4, 8, 4096, 16384
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_CAPABILITY_VERSION_3 = 0x20080522

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Set up, then start attempts until the service closes the socket."""
    control = socket.socket(fileno=os.dup(0))
    os.closerange(control.fileno() + 1, 256)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)  # or every fork kept it open
    config, _ = guest.receive(control)
    try:
        if config["uid"] is not None and config["private_proc"]:
            # bwrap has covered parts of it from root: below them no attempt could have its own.
            mount("proc", "/proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
        guest.set_up(config)  # it imports the class
        prctl(guest.PR_SET_CHILD_SUBREAPER, 0)  # the service ends what a keeper leaves
        module, _, name = (config["type"] or "").partition(":")
        kind = getattr(sys.modules[module], name) if module else None
    except BaseException as exc:  # noqa: BLE001 - the service says it
        guest.send(control, {"ready": False, "problem": last_line(exc)})
        return
    guest.send(control, {"ready": True})
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers need not be waited for
    while True:
        _, files = guest.receive(control)
        if os.fork() == 0:
            control.close()
            begin_attempt(config, kind, socket.socket(fileno=files[0]))
        os.close(files[0])


# --- the keeper of an attempt -------------------------------------------------------------------


def begin_attempt(config: Json, kind: type | None, channel: socket.socket) -> NoReturn:
    """Become the keeper of one attempt; ends with it."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.nice(5)  # the services of the run go first
        if config["container"]:
            prctl(guest.PR_SET_CHILD_SUBREAPER, 1)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            folder = Path(tempfile.mkdtemp(dir=config["folder"]))
        else:
            folder = enter_namespaces(config)
        report = keep(config, kind, folder, channel)
    except BaseException as exc:  # noqa: BLE001 - whatever it is, this process must end here
        report = {"problem": last_line(exc)}
    with contextlib.suppress(OSError):
        channel.sendall(json.dumps(report).encode())
    os._exit(0)


def enter_namespaces(config: Json) -> Path:
    """Go on as process 1 of new namespaces, without a capability in them."""
    uid, gid = os.getuid(), os.getgid()
    prctl(PR_SET_DUMPABLE, 1)  # or the maps belong to root
    call("unshare", _NEW_OTHERS | (0 if config["network"] else _NEW_NET))
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        Path("/proc/self", name).write_text(text, encoding="ascii")
    if os.fork() != 0:
        os._exit(0)
    prctl(PR_SET_DUMPABLE, 0)
    mount("devpts", "/dev/pts", _MS_NOSUID | _MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    sizes = f"size={config['limits']['file_bytes']},nr_inodes={config['max_files']}"
    for path, kept in config["writable"].items():
        # What is shown of the machine below a private folder is shown again.
        held = {name: os.open(f"{path}/{name}", os.O_PATH) for name in kept}
        mount("tmpfs", path, _MS_NOSUID | _MS_NODEV, f"{sizes},mode=700")
        for name, fd in held.items():
            os.mkdir(f"{path}/{name}")
            mount(f"/proc/self/fd/{fd}", f"{path}/{name}", _MS_BIND | _MS_REC)
            os.close(fd)
    if config["private_proc"]:
        mount("proc", "/proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    else:
        mount("tmpfs", "/proc", _MS_RDONLY, "size=4k")
    if not config["network"]:
        with socket.socket() as any_socket:
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    call("capset", struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24))
    guest.install_filter(libc, base64.b64decode(config["seccomp"]))
    return Path("/tmp")


def mount(source: str, target: str, flags: int, data: str = "") -> None:
    """Mount a file system of the type `source`, or with MS_BIND the folder `source`."""
    call("mount", source.encode(), target.encode(), source.encode(), flags, data.encode())


def prctl(option: int, value: int) -> None:
    """Call prctl, or raise."""
    guest.prctl(libc, option, value)


def call(name: str, *arguments: object) -> None:
    """Call a function of libc, or raise."""
    if getattr(libc, name)(*arguments) != 0:
        where = f" {arguments[1]!r}" if name == "mount" else ""
        raise OSError(ctypes.get_errno(), f"{name}{where}: {os.strerror(ctypes.get_errno())}")


def keep(config: Json, kind: type | None, folder: Path, channel: socket.socket) -> Json:
    """Start the agent, wait until it ends or must end, end what it left; return the report."""
    order = json.loads(read_line(channel))
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        base_url = f"http://127.0.0.1:{listener.getsockname()[1]}{order['path']}"
        hello = json.dumps({"folder": str(folder)}).encode()
        socket.send_fds(channel, [hello], [listener.fileno()])
    read_line(channel)  # until then this process must not end: the service looks for it
    work = folder / "work"
    for made in (work, folder / "home"):
        made.mkdir()
    (folder / "task.json").write_text(json.dumps(order["task"]), encoding="utf-8")
    # This process ends with them.
    given, result = (tempfile.TemporaryFile(dir=folder) for _ in range(2))  # noqa: SIM115
    given.write(order["prompt"].encode())
    given.seek(0)
    outputs = [os.pipe(), os.pipe()]
    pid = os.fork()
    if pid == 0:
        channel.close()
        files = [given.fileno(), *(inside for _, inside in outputs), result.fileno()]
        environment = make_environment(config, order, folder, base_url)
        run_agent(config, kind, order, environment, work, files)
    for _, inside in outputs:
        os.close(inside)
    tails = {outside: bytearray() for outside, _ in outputs}
    why = watch(pid, channel, tails, order["timeout_s"], config["limits"]["memory_bytes"])
    status, _ = guest.end_all(pid, {"container": config["container"], "uid": None})
    for outside, tail in tails.items():
        while read_more(outside, tail):
            pass
    result.seek(0)
    output, errors = (bytes(tail).decode(errors="replace") for tail in tails.values())
    return {
        "why": why,
        "status": status,
        "result": result.read(8 * config["max_chars"]).decode(errors="replace"),
        "output": output[-config["max_chars"] :],
        "errors": errors[-config["max_chars"] :],
        "files": read_files(work, config["files"], config["max_chars"]),
    }


def read_line(channel: socket.socket) -> bytes:
    """Read up to a newline, behind which nothing comes before the answer."""
    data = b""
    while not data.endswith(b"\n"):
        if not (chunk := channel.recv(_READ_BYTES)):
            os._exit(0)  # the service has gone
        data += chunk
    return data


def watch(
    pid: int,
    channel: socket.socket,
    tails: dict[int, bytearray],
    timeout_s: float,
    memory_bytes: int,
) -> str:
    """Read what the agent prints until its process has ended, it must end, or the service has gone.

    Returns:
        `ended`, or the limit that it has reached.
    """
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    for fd in (pidfd, channel.fileno(), *tails):
        poll.register(fd, select.POLLIN)
    end = time.monotonic() + timeout_s
    look = 0.0
    while (now := time.monotonic()) < end:
        if now >= look:
            look = now + WATCH_PERIOD_S
            tree = find_tree(os.getpid())
            # The first counts what a fork shares with the process it comes from as its own.
            if measure_memory(tree) > memory_bytes and measure_shares(tree) > memory_bytes:
                return "memory"
        ready = [fd for fd, _ in poll.poll(1000 * (min(look, end) - now))]
        if pidfd in ready or channel.fileno() in ready:
            return "ended"
        for fd in ready:
            if not read_more(fd, tails[fd]):
                poll.unregister(fd)
    return "timeout"


def read_more(fd: int, tail: bytearray) -> bool:
    """Read what comes through a pipe and keep its end; tell whether more may come."""
    chunk = os.read(fd, _READ_BYTES)
    tail += chunk
    del tail[:-TAIL_BYTES]
    return bool(chunk)


def make_environment(config: Json, order: Json, folder: Path, base_url: str) -> dict[str, str]:
    """Return the environment of the agent: nothing of the service's."""
    task_file = str(folder / "task.json")
    return {
        **config["environment"],
        **config["env"],
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder),
        **agent_variables(
            *(base_url, order["key"], order["model"], order["context"]),
            *(task_file, order["prompt"]),
        ),
    }


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
        limit_process(config)
        os.chdir(work)
        os.environ.clear()
        os.environ.update(environment)
        command = order["command"]
        if command is None:
            prctl(PR_SET_DUMPABLE, 1)
            code = run_class(kind, order, environment["OPENAI_BASE_URL"], config["max_chars"])
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


def limit_process(config: Json) -> None:
    """Set the limits that everything the agent starts inherits."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config["container"]:  # where no namespace ends with the keeper
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    limits = config["limits"]
    others = count_user_tasks(os.getuid()) if config["container"] else 0
    limited = {
        # Not the address space, of which some runtimes reserve far more than they use.
        resource.RLIMIT_DATA: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: config["open_files"],
        resource.RLIMIT_NPROC: limits["processes"] + others,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for kind, value in limited.items():
        resource.setrlimit(kind, (value, value))
    cpu_s = math.ceil(limits["cpu_s"])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))


def start_program(command: list[str], environment: dict[str, str]) -> NoReturn:
    """Become the program."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environment)
    except OSError as exc:
        leave({"not_started": f"{command[0]}: {exc.strerror}"})
        os._exit(127)


def run_class(kind: Any, order: Json, base_url: str, max_chars: int) -> int:
    """Construct the class and let it work; return the exit code."""
    from agent_r1.tools.agents.agent import Model
    from agent_r1_proto.agents import AgentTask

    model = Model(base_url, order["key"], order["model"], order["context"])
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
        leave({"answer": None if answer is None else answer[:max_chars]})
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
