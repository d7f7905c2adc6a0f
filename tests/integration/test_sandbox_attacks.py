"""Escape and exhaustion attempts through the real service and the real sandbox.

Every attempt must be contained, and the service must answer the next call. The limits are small, so
that an attempt that is not contained does little harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from agent_r1.tools.app import ToolService, create_app
from agent_r1.tools.sandbox.python_exec import PythonExec
from agent_r1_proto.tools import CallReply, ToolResult
from tests.support.learner_fakes import eventually

REPOSITORY = Path(__file__).resolve().parents[2]
LIMITS: dict[str, Any] = {
    "cpu_s": 1.0,
    "wall_s": 3.0,
    "memory_mb": 192,
    "processes": 8,
    "file_mb": 8,
    "max_workers": 2,
}
CALL_TIMEOUT_S = 30.0
GONE_TIMEOUT_S = 10.0
POLL_S = 0.02

SYSCALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    found = libc.syscall(number, *arguments)
    return "done" if found >= 0 else os.strerror(ctypes.get_errno())
"""
REFUSED = r"^Operation not permitted$"
# Six processes of 160 MiB each, which no process has in its page tables, of at most 192 MiB.
DROP_SHARED = (
    "import mmap, os, time\nfor _ in range(6):\n    if os.fork() == 0:\n        break\n"
    "shared = mmap.mmap({}, 160 << 20)\nshared[::4096] = bytes(len(shared) // 4096)\n"
    "shared.madvise(mmap.MADV_DONTNEED)\nprint('ESCAPED')\ntime.sleep(1)"
)

# What is tried, and what the model must read; `ESCAPED` must never be printed.
ATTEMPTS: dict[str, tuple[str, str]] = {
    "fork bomb": (
        "import os\nwhile True:\n    os.fork()",
        r"BlockingIOError|ran longer than 3 s",
    ),
    "fork bomb that swallows errors": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        r"ran longer than 3 s|CPU time",
    ),
    "thread bomb": (
        "import threading, time\n"
        "for _ in range(100):\n    threading.Thread(target=time.sleep, args=(9,)).start()",
        r"can't start new thread",
    ),
    "memory of one process": ("x = bytearray(10**10)", r"MemoryError\nMemory is limited to 192 MB"),
    "memory of many processes": (
        "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n        break\n"
        "x = bytearray(100 << 20)\nx[::4096] = bytes(len(x[::4096]))\ntime.sleep(9)",
        r"used more than 192 MB of memory",
    ),
    "shared memory dropped from the page tables": (DROP_SHARED.format("-1"), r"PermissionError"),
    "shared memory of the device zero": (
        DROP_SHARED.format("os.open('/dev/zero', os.O_RDWR)"),
        r"No such device",
    ),
    "what the device zero reads": ("print(open('/dev/zero', 'rb').read(2) == bytes(2))", r"^True$"),
    "memory in pipes": (SYSCALL + "print(call(278, 0, 0, 0, 0))", REFUSED),
    "memory that belongs to no process": (
        SYSCALL + "print(call(319, b'x', 0))",
        REFUSED,
    ),
    "System V shared memory": (SYSCALL + "print(call(29, 0, 1 << 30, 0o1600))", REFUSED),
    "full disk": (
        "for number in range(100):\n    with open(f'/tmp/{number}', 'wb') as file:\n"
        "        file.write(bytes(1 << 20))\nprint('ESCAPED')",
        r"No space left on device",
    ),
    "full shared memory folder": (
        "for number in range(100):\n    with open(f'/dev/shm/{number}', 'wb') as file:\n"
        "        file.write(bytes(1 << 20))\nprint('ESCAPED')",
        r"No space left on device",
    ),
    "one large file": (
        "with open('/tmp/x', 'wb') as file:\n    file.seek(100 << 20)\n    file.write(b'x')\n"
        "print('ESCAPED')",
        r"File too large",
    ),
    "all inodes": (
        "number = 0\nwhile True:\n    open(f'/tmp/{number}', 'w').close()\n    number += 1",
        r"made more than 10000 files|ran longer than 3 s|CPU time",
    ),
    "all inodes of the shared memory folder": (
        "number = 0\nwhile True:\n    open(f'/dev/shm/{number}', 'w').close()\n    number += 1",
        r"made more than 10000 files",
    ),
    "all file descriptors": (
        "files = []\nwhile True:\n    files.append(open('/dev/null'))",
        r"Too many open files",
    ),
    "infinite output": ("while True:\n    print('x' * 1000)", r"wrote more than 1048576 bytes"),
    "infinite error output": (
        "import sys\nwhile True:\n    print('x' * 1000, file=sys.stderr)",
        r"wrote more than 1048576 bytes",
    ),
    "sleeping forever": ("import time\ntime.sleep(10**6)", r"ran longer than 3 s"),
    "ignoring signals": (
        "import signal, time\n"
        "for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        "while True:\n    time.sleep(1)",
        r"ran longer than 3 s",
    ),
    "burning CPU past the soft limit": (
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True:\n    pass",
        r"CPU time|ran longer than 3 s",
    ),
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\nf = lambda n: f(n + 1)\nf(0)",
        # CPython has places where memory that runs out is a SystemError.
        r"MemoryError|RecursionError|SystemError[^$]*limited to 192 MB|SIGSEGV|CPU time|ran longer",
    ),
    "deep recursion in C": (
        "import sys\nsys.setrecursionlimit(10**9)\nx = []\n"
        "for _ in range(3 * 10**5):\n    x = [x]\n"
        "repr(x)",
        r"MemoryError|RecursionError|SIGSEGV|CPU time|ran longer",
    ),
    "huge integer": ("x = 10 ** 10 ** 9", r"MemoryError|CPU time|ran longer than 3 s"),
    "raising its own limits": (
        "import resource\nfor name in ('NPROC', 'AS', 'CPU', 'FSIZE', 'NOFILE', 'CORE'):\n"
        "    number = getattr(resource, 'RLIMIT_' + name)\n    try:\n"
        "        resource.setrlimit(number, (resource.RLIM_INFINITY,) * 2)\n"
        "        print('ESCAPED', name)\n    except ValueError:\n        print('refused')",
        r"^(refused\n?){6}$",
    ),
    "TCP to the outside": (
        "import socket\nsocket.create_connection(('192.0.2.1', 80), 1)",
        r"Address family not supported",
    ),
    "name lookup": (
        "import socket\nprint(socket.getaddrinfo('example.com', 80))",
        r"gaierror",
    ),
    "raw sockets and netlink": (
        "import socket\nfor family in (16, 17, 40):\n    try:\n"
        "        socket.socket(family, socket.SOCK_RAW)\n        print('ESCAPED', family)\n"
        "    except OSError as error:\n        print(error.strerror)",
        r"^(Address family not supported by protocol\n?){3}$",
    ),
    "network interfaces": (
        "print(open('/proc/net/dev').read().count(':'))",  # only its own loopback
        r"^1$",
    ),
    "/etc/shadow": ("open('/etc/shadow').read()", r"FileNotFoundError"),
    "/etc": ("import os\nprint(sorted(os.listdir('/etc')))", r"^\['group', 'ld.so.cache', 'pass"),
    "who it is": (
        "import getpass, os, pwd\nprint(pwd.getpwuid(os.getuid()).pw_name, getpass.getuser())",
        r"^sandbox sandbox$",
    ),
    "the home of root": (
        "import os\nprint([x for x in os.listdir('/root') if x != '.pyenv'])"
        if os.path.isdir("/root")
        else "print([])",
        r"^\[\]$|FileNotFoundError|PermissionError",
    ),
    "the repository": (
        f"open({str(REPOSITORY / 'pyproject.toml')!r}).read()",
        r"FileNotFoundError",
    ),
    "the environment of process 1": (
        "print(repr(open('/proc/1/environ').read()))",
        r"^''$|PermissionError",
    ),
    "processes of the machine": (
        "import os\nprint(len([x for x in os.listdir('/proc') if x.isdigit()]))",
        r"^2$",  # the guest, which is process 1, and this program
    ),
    "writing outside of /tmp": (
        "import os, sys\nfor folder in ('/', '/usr', '/etc', '/dev', os.path.dirname(os.__file__)):"
        "\n    try:\n        open(folder + '/x', 'w')\n        print('ESCAPED', folder)\n"
        "    except OSError:\n        print('refused')",
        r"^(refused\n?){5}$",
    ),
    "a symbolic link out of /tmp": (
        "import os\nos.symlink('/etc/shadow', '/tmp/x')\nopen('/tmp/x').read()",
        r"FileNotFoundError",
    ),
    "killing the guest": (
        "import os, signal\nassert os.getppid() == 1\nfor number in signal.valid_signals():\n"
        "    os.kill(1, number)\nprint('still here')",
        r"^still here$",  # the kernel keeps these from process 1
    ),
    "killing every process": (
        "import os, signal\ntry:\n    os.kill(-1, signal.SIGKILL)\nexcept ProcessLookupError:\n"
        "    print('alone')",
        r"^(alone|\(the code printed nothing\))$",
    ),
    "the guest's limits": (
        "import resource\nresource.prlimit(1, resource.RLIMIT_NPROC, (0, 0))",
        r"PermissionError",
    ),
    "the guest's priority": ("import os\nos.setpriority(os.PRIO_PROCESS, 1, 19)", r"Permission"),
    "the guest's processors": ("import os\nos.sched_setaffinity(1, {0})", r"PermissionError"),
    "killing a process of the machine": (
        f"import os, signal\nos.kill({os.getpid()}, signal.SIGKILL)",
        r"ProcessLookupError|PermissionError",
    ),
    "ptrace": (SYSCALL + "print(call(101, 16, os.getppid(), 0, 0))", REFUSED),
    "reading another process's memory": (
        SYSCALL + "print(call(310, os.getppid(), 0, 0, 0, 0, 0))",
        REFUSED,
    ),
    "the guest's memory through /proc": (
        "import os\nopen(f'/proc/{os.getppid()}/mem', 'rb')",
        r"PermissionError",
    ),
    "the guest's files through /proc": (
        "import os\nopen(f'/proc/{os.getppid()}/fd/1', 'wb')",
        r"PermissionError",
    ),
    "mount": (SYSCALL + "print(call(165, b'none', b'/tmp', b'tmpfs', 0, 0))", REFUSED),
    "a user namespace": (SYSCALL + "print(call(272, 0x10000000))", REFUSED),
    "clone with namespaces": (SYSCALL + "print(call(56, 0x10000011, 0, 0, 0, 0))", REFUSED),
    "clone3": (SYSCALL + "print(call(435, 0, 0))", r"^Function not implemented$"),
    "entering another namespace": (SYSCALL + "print(call(308, 0, 0))", REFUSED),
    "chroot": ("import os\nos.chroot('/tmp')", r"PermissionError"),
    "pivot_root": (SYSCALL + "print(call(155, b'/tmp', b'/tmp'))", REFUSED),
    "becoming root": (
        "import os\nassert os.getuid() != 0\nos.setuid(0)",
        r"PermissionError|Invalid argument",  # a user namespace has no root at all
    ),
    "capabilities": (
        "print([line.split()[1] for line in open('/proc/self/status')"
        " if line.startswith(('CapEff', 'CapPrm', 'CapAmb'))])",
        r"^\['0{16}', '0{16}', '0{16}'\]$",
    ),
    "kernel settings": (
        "open('/proc/sys/kernel/core_pattern', 'w').write('|/tmp/x')",
        r"OSError|PermissionError|Read-only",
    ),
    "sysrq": (
        "open('/proc/sysrq-trigger', 'w').write('b')",
        r"OSError|Permission|Read-only|FileNot",
    ),
    "devices of the machine": (
        "import os\nprint([x for x in ('mem', 'kmem', 'kmsg', 'port', 'sda', 'vda', 'fuse', 'kvm')"
        " if os.path.exists('/dev/' + x)])",
        r"^\[\]$",
    ),
    "making a device": ("import os\nos.mknod('/tmp/x', 0o60666, os.makedev(8, 0))", r"Permission"),
    "the kernel's log": (SYSCALL + "print(call(103, 3, 0, 0))", REFUSED),
    "keyctl": (SYSCALL + "print(call(250, 0, -3, 0))", REFUSED),
    "add_key": (SYSCALL + "print(call(248, b'user', b'x', b'x', 1, -3))", REFUSED),
    "io_uring": (SYSCALL + "print(call(425, 1, 0))", REFUSED),
    "bpf": (SYSCALL + "print(call(321, 0, 0, 0))", REFUSED),
    "perf events": (SYSCALL + "print(call(298, 0, 0, -1, -1, 0))", REFUSED),
    "userfaultfd": (SYSCALL + "print(call(323, 0))", REFUSED),
    "loading a module": (SYSCALL + "print(call(313, 0, b'', 0))", REFUSED),
    "reboot": (SYSCALL + "print(call(169, 0, 0, 0, 0))", REFUSED),
    "calls newer than the filter": (SYSCALL + "print(call(500))", r"^Function not implemented$"),
    "typing into the terminal": (
        "import fcntl, os\nmaster, slave = os.openpty()\nfcntl.ioctl(slave, 0x5412, b'x')",
        r"PermissionError",
    ),
    "a core dump": (
        "import os, resource\nprint(resource.getrlimit(resource.RLIMIT_CORE), flush=True)\n"
        "os.abort()",
        r"^\(0, 0\)\nError: the code was ended by SIGABRT\.$",
    ),
    "closing every file": (
        "import os\nos.closerange(3, 1000)\nprint('still here')",
        r"^still here$",
    ),
    "answering for the guest": (
        "import json, os\n"
        "answer = {'ended': 1, 'signal': None, 'exit_code': 0, 'cpu_s': 0.0, 'clean': True,\n"
        "          'ready': True, 'why': 'ended', 'stdout': 'ESCAPED', 'error': 'ESCAPED' * 0}\n"
        "body = json.dumps(answer).encode()\nsize = len(body).to_bytes(4, 'big')\n"
        "files = [f'/proc/1/fd/{fd}' for fd in range(9)]\n"
        "files += [os.dup(fd) for fd in range(3, 9) if os.path.exists(f'/proc/self/fd/{fd}')]\n"
        "for file in files:\n    for data in (body, size + body):\n        try:\n"
        "            with open(file, 'wb', buffering=0) as opened:\n"
        "                opened.write(data)\n"
        "        except OSError:\n            pass",
        r"^\(the code printed nothing\)$",
    ),
    "a report nested deeply": (
        "import os\nbody = b'[' * 980 + b']' * 980\n"
        "_ = os.write(3, b'R' + len(body).to_bytes(4, 'big') + body)",
        r"^\(the code printed nothing\)$",
    ),
    "a report without an end": (
        "import os\n_ = os.write(3, b'R' + (1 << 31).to_bytes(4, 'big'))\n"
        "for _ in range(100):\n    os.write(3, bytes(1 << 20))",
        r"ran longer|BrokenPipe|ConnectionReset|printed nothing",
    ),
}
# The numbers of system calls above are x86-64's.
X86_ONLY = pytest.mark.skipif(os.uname().machine != "x86_64", reason="system calls of x86-64")


@contextlib.asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(ToolService(PythonExec(**(LIMITS | settings)), instance="here-1"))
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://tool", timeout=60.0) as client,
    ):
        yield client


async def run_code(client: httpx.AsyncClient, code: str) -> ToolResult:
    call = {"name": "python_exec", "arguments": {"code": code}, "rollout_id": "r/0/0/0/0"}
    body = {"calls": [call | {"turn": 0, "timeout_s": CALL_TIMEOUT_S}]}
    response = await client.post("/call", json=body)
    assert response.status_code == 200, response.text
    return CallReply.model_validate_json(response.content).results[0]


async def assert_it_answers(client: httpx.AsyncClient) -> None:
    assert (await run_code(client, "6 * 7")).text() == "42"


@pytest.fixture(scope="module", autouse=True)
def _usable_sandbox() -> None:
    """Skip where no sandbox can run, with the reason."""

    async def start() -> None:
        async with serving(max_workers=1):
            pass

    try:
        asyncio.run(start())
    except ValueError as exc:
        pytest.skip(str(exc))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lasting_client() -> AsyncIterator[httpx.AsyncClient]:
    """A client of one service for all attempts, which it must outlive."""
    async with serving(max_workers=1) as client:
        yield client


@X86_ONLY
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", ATTEMPTS)
async def test_an_attempt_is_contained_and_the_next_call_is_answered(
    name: str, lasting_client: httpx.AsyncClient
):
    code, expected = ATTEMPTS[name]
    text = (await run_code(lasting_client, code)).text()
    assert "ESCAPED" not in text
    assert re.search(expected, text), text
    await assert_it_answers(lasting_client)


async def test_others_are_answered_while_one_call_attacks():
    async with serving() as client:
        attack = asyncio.create_task(run_code(client, ATTEMPTS["fork bomb"][0]))
        started = time.monotonic()
        await assert_it_answers(client)
        assert time.monotonic() - started < 3.0
        await attack


async def test_the_services_environment_is_not_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("API_KEY", "secret-of-the-host")
    async with serving() as client:
        text = (await run_code(client, "import os\nprint(dict(os.environ))")).text()
    assert "HOME" in text
    assert "secret-of-the-host" not in text
    assert "API_KEY" not in text


async def test_a_file_in_the_machines_tmp_is_not_there(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("secret-of-the-host")
    async with serving() as client:
        text = (await run_code(client, f"print(open({str(secret)!r}).read())")).text()
    assert "FileNotFoundError" in text


@pytest.fixture
def tcp_server() -> Iterator[tuple[int, list[bytes]]]:
    """A listening port of this machine, and what was first sent to it on each connection: a client
    of another test may still look for one that had the port before."""
    got: list[bytes] = []
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(0.05)
    stopping = threading.Event()

    def accept() -> None:
        while not stopping.is_set():
            with contextlib.suppress(TimeoutError):
                connection, _ = server.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(1)
                    got.append(connection.recv(64))

    thread = threading.Thread(target=accept)
    thread.start()
    yield server.getsockname()[1], got
    stopping.set()
    thread.join()
    server.close()


async def test_a_port_of_the_machine_cannot_be_reached(tcp_server: tuple[int, list[bytes]]):
    port, received = tcp_server
    code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1).send(b'ESCAPED')"
    async with serving() as client:
        assert "OSError" in (await run_code(client, code)).text()
        await assert_it_answers(client)
    with socket.create_connection(("127.0.0.1", port)) as own:
        own.send(b"mine")
    await eventually(lambda: b"mine" in received)
    assert b"ESCAPED" not in received


async def test_an_abstract_socket_of_the_machine_cannot_be_reached():
    name = f"\0agent-r1-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        code = f"import socket\nsocket.socket(socket.AF_UNIX).connect({name!r})\nprint('ESCAPED')"
        async with serving() as client:
            assert "ConnectionRefusedError" in (await run_code(client, code)).text()


async def test_a_daemon_does_not_outlive_its_call():
    mark = f"daemon-{secrets.token_hex(8)}"
    code = (
        "import os, sys, time\n"
        f"command = ['python', '-c', 'import time; time.sleep(60)', {mark!r}]\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        os.execv(sys.executable, command)\n    os._exit(0)\n"
        "time.sleep(0.3)\nprint('started')"
    )
    async with serving() as client:
        assert (await run_code(client, code)).text() == "started"
        deadline = time.monotonic() + GONE_TIMEOUT_S
        while _is_running(mark) and time.monotonic() < deadline:  # noqa: ASYNC110 - no event
            await asyncio.sleep(POLL_S)
        assert not _is_running(mark)


def _is_running(mark: str) -> bool:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mark.encode() in Path("/proc", pid, "cmdline").read_bytes():
                return True
    return False


@pytest.mark.parametrize("reuse_calls", [1, 5])
async def test_nothing_stays_from_one_call_to_the_next(reuse_calls: int):
    leave = (
        "import builtins, math, os\nbuiltins.left = math.left = 1\nos.environ['LEFT'] = '1'\n"
        "os.makedirs('/tmp/a/b')\nopen('/tmp/a/b/left', 'w')\nos.chmod('/tmp/a', 0)\n"
        "open('/dev/shm/left', 'w')\n"
        "if os.fork() == 0:\n    import time\n    time.sleep(60)\nprint('left')"
    )
    look = (
        "import builtins, math, os\nprint(hasattr(builtins, 'left'), hasattr(math, 'left'), "
        "'LEFT' in os.environ, os.path.exists('/tmp/a'), os.path.exists('/dev/shm/left'), "
        "len([x for x in os.listdir('/proc') if x.isdigit()]))"
    )
    async with serving(max_workers=1, reuse_calls=reuse_calls) as client:
        for _ in range(3):
            assert (await run_code(client, leave)).text() == "left"
            assert (await run_code(client, look)).text() == "False False False False False 2"


async def test_two_calls_at_once_do_not_see_each_others_files():
    write = "import time\nopen('/tmp/secret', 'w').write('x')\ntime.sleep(1)\nprint('done')"
    look = "import os, time\ntime.sleep(0.5)\nprint(os.path.exists('/tmp/secret'))"
    async with serving() as client:
        first, second = await asyncio.gather(run_code(client, write), run_code(client, look))
    assert (first.text(), second.text()) == ("done", "False")
