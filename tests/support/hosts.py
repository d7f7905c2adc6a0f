"""Hosts on one machine: network namespaces joined by a bridge, with nothing shared.

    with Hosts(tmp_path / "hosts", ["learner", "rollout"], Link(mbit=100, loss=0.01)) as hosts:
        hosts["learner"].start(["redis-server", ...], log="redis")
        hosts["rollout"].run(["redis-cli", "-h", "learner", "ping"])

A host has an address, a name that the others resolve, and files of its own: what the machine has
installed is read-only, /tmp, /var/tmp and the home folder are a folder of the host, /dev/shm and
/run are empty. Everything is inside a network namespace of the test's own and ends with it. It
works as root, and as an ordinary user where the kernel allows user namespaces (`why_not`).

Not every kernel has netem, so delay is a relay (delay_relay.py) that a host's TCP connections to
other hosts pass through.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PROGRAMS = ("ip", "tc", "iptables", "unshare", "nsenter", "setpriv", "mount", "hostname")
SYSTEM_PATH = "/usr/sbin:/sbin"
NETWORK = "10.77.0"
PREFIX_BITS = 24
RELAY_PORT = 64_123
RELAY_MARK = 77
STEP_TIMEOUT_S = 60.0
POLL_S = 0.01
OWN_FOLDERS = ("/tmp", "/var/tmp")
DISK_TYPES = "ext2|ext3|ext4|xfs|btrfs|overlay|tmpfs|zfs|9p|virtiofs|fuse.*"


@dataclass(frozen=True)
class Link:
    """How a host is connected to the bridge."""

    mbit: float | None = None
    """Bandwidth in each direction, in Mbit/s; None is as fast as the machine."""
    loss: float = 0.0
    """Share of the packets to the host that are lost."""
    delay_s: float = 0.0
    """Delay of TCP in each direction, in seconds, of connections that the host opens."""


def _as_root(command: Sequence[str]) -> list[str]:
    """Return a command that makes namespaces; an ordinary user makes a user namespace first."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, "--net", "--mount", "--uts", *command]


def _environment() -> dict[str, str]:
    return os.environ | {"PATH": f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"}


@cache
def why_not() -> str | None:
    """Say why this machine cannot have hosts; None where it can."""
    path = _environment()["PATH"]
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        return f"no {', '.join(missing)}; install iproute2, iptables and util-linux"
    steps = (
        "mount -t tmpfs none /run",
        "ip link add bridge0 type bridge",
        "ip link add veth0 type veth peer name veth1",
        "tc qdisc add dev veth0 root tbf rate 1mbit burst 16kb latency 50ms",
        "iptables -A INPUT -m statistic --mode random --probability 0.5 -j DROP",
        "iptables -t nat -A OUTPUT -p tcp -m mark ! --mark 1 -j REDIRECT --to-ports 9",
    )
    tried = subprocess.run(
        _as_root(["sh", "-c", " && ".join(steps)]),
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=STEP_TIMEOUT_S,
        check=False,
    )
    if tried.returncode == 0:
        return None
    return f"namespaces cannot be made or joined here: {tried.stderr.strip()}"


class Host:
    """One host; `Hosts` makes it."""

    def __init__(
        self, name: str, address: str, folder: Path, holder: subprocess.Popen[str]
    ) -> None:
        self.name = name
        self.address = address
        self.folder = folder
        """What the host sees as /tmp, /var/tmp and its home."""
        self.logs = folder.with_name(f"{name}.logs")
        self._holder = holder
        self._started: list[subprocess.Popen[bytes]] = []

    def inside(self, path: str | Path) -> Path:
        """Return where a path below /tmp of the host is for the test."""
        return self.folder / Path(path).relative_to("/tmp")

    def start(
        self,
        command: Sequence[str | Path],
        *,
        log: str,
        env: Mapping[str, str] | None = None,
        cwd: Path = REPOSITORY,
    ) -> subprocess.Popen[bytes]:
        """Start a program; it is killed with the host.

        Args:
            command: and its arguments.
            log: its output is appended to `logs/LOG.log`.
            env: variables beside the test's own.
            cwd: as the host sees it.
        """
        self.logs.mkdir(exist_ok=True)
        with (self.logs / f"{log}.log").open("ab") as output:
            process = subprocess.Popen(
                self._command(command, cwd),
                env=self._env(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._started.append(process)
        return process

    def run(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path = REPOSITORY,
        timeout_s: float = STEP_TIMEOUT_S,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end and return what it printed.

        Raises:
            AssertionError: it failed, and `check` is set.
            subprocess.TimeoutExpired: it took longer than `timeout_s`.
        """
        done = subprocess.run(
            self._command(command, cwd),
            env=self._env(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode != 0:
            raise AssertionError(
                f"{self.name}: {shlex.join(map(str, command))} ended with {done.returncode}:\n"
                f"{done.stdout}{done.stderr}"
            )
        return done

    def log(self, name: str) -> str:
        """Return what a started program has printed."""
        return (self.logs / f"{name}.log").read_text(errors="replace")

    def bytes_on_the_wire(self) -> tuple[int, int]:
        """Return the bytes that the interface has sent and received, headers included."""
        for line in Path(f"/proc/{self._holder.pid}/net/dev").read_text().splitlines():
            name, _, counters = line.strip().partition(":")
            if name == "eth0":
                numbers = counters.split()
                return int(numbers[8]), int(numbers[0])
        raise AssertionError(f"{self.name} has no eth0")

    def lost_packets(self) -> int:
        """Return how many packets to this host the loss rule has dropped."""
        rules = self.run(["iptables", "-nvxL", "INPUT"]).stdout.splitlines()
        return sum(int(rule.split()[0]) for rule in rules if " DROP " in rule)

    def _command(self, command: Sequence[str | Path], cwd: Path) -> list[str]:
        # nsenter cannot pass a signal for its parent's death on, since it may change the user.
        guard = ["setpriv", "--pdeathsig", "KILL", "env", "-C", str(cwd)]
        return [*_enter(self._holder), *guard, *map(str, command)]

    def _env(self, env: Mapping[str, str] | None) -> dict[str, str]:
        own = {"HOME": "/tmp", "TMPDIR": "/tmp", "XTABLES_LOCKFILE": "/run/xtables.lock"}
        return _environment() | own | (dict(env) if env else {})

    def pids(self) -> list[int]:
        """Return the programs that run on the host."""
        network = os.readlink(f"/proc/{self._holder.pid}/ns/net")
        found: list[int] = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.readlink(entry / "ns" / "net") == network:
                    found.append(int(entry.name))
        return [pid for pid in found if pid != self._holder.pid]

    def kill(self) -> None:
        """End every program of the host at once, as when its power fails."""
        deadline = time.monotonic() + STEP_TIMEOUT_S
        while pids := {*self.pids(), *(one.pid for one in self._started if one.poll() is None)}:
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.name}: {pids} cannot be killed")
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)


class Hosts:
    """The hosts of one test and the bridge between them; use as `with`.

    Args:
        folder: for the hosts' files and logs; they stay there.
        names: of the first hosts.
        link: of these hosts.
    """

    def __init__(self, folder: Path, names: Iterable[str], link: Link | None = None) -> None:
        self._folder = folder
        self._first = [(name, link or Link()) for name in names]
        self._hosts: dict[str, Host] = {}
        self._open = ExitStack()
        self._names_file = folder / "etc-hosts"

    def __enter__(self) -> Self:
        """Make the bridge and the first hosts.

        Raises:
            RuntimeError: this machine cannot (`why_not`).
        """
        if (reason := why_not()) is not None:
            raise RuntimeError(reason)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._names_file.write_text("127.0.0.1 localhost\n")
        with ExitStack() as stack:
            self._switch = stack.enter_context(_holder(_as_root([]), "ip link set lo up"))
            self._in_switch("ip link add bridge0 type bridge && ip link set bridge0 up")
            self._open = stack
            for name, link in self._first:
                self.add(name, link)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """End every program and remove hosts and bridge; the files stay."""
        self._open.close()

    def __getitem__(self, name: str) -> Host:
        """Return a host by its name."""
        return self._hosts[name]

    def __iter__(self) -> Iterator[Host]:
        """Iterate over the hosts, in the order in which they came."""
        return iter(self._hosts.values())

    def add(self, name: str, link: Link | None = None) -> Host:
        """Add a host; the others resolve its name at once."""
        link = link or Link()
        number = len(self._hosts) + 1
        address = f"{NETWORK}.{number}"
        folder = self._folder / name
        folder.mkdir()
        make = ["unshare", "--net", "--mount", "--uts"]
        prepare = _private_files(name, folder, self._names_file)
        holder = self._open.enter_context(_holder([*_enter(self._switch), *make], prepare))
        self._in_switch(
            f"ip link add port{number} type veth peer name eth0 netns {holder.pid}"
            f" && ip link set port{number} master bridge0 up && {_shape(f'port{number}', link)}"
        )
        host = self._hosts[name] = Host(name, address, folder, holder)
        self._open.callback(host.kill)
        host.run(["sh", "-ec", f"{_connect(address)}\n{_shape('eth0', link)}\n{_lose(link)}"])
        with self._names_file.open("a") as names:
            names.write(f"{address} {name}\n")
        if link.delay_s:
            self._start_relay(host, link)
        return host

    def _in_switch(self, script: str) -> None:
        subprocess.run(
            [*_enter(self._switch), "sh", "-ec", script],
            env=_environment(),
            check=True,
            timeout=STEP_TIMEOUT_S,
        )

    def _start_relay(self, host: Host, link: Link) -> None:
        relay = Path(__file__).with_name("delay_relay.py")
        arguments = map(str, (RELAY_PORT, link.delay_s, RELAY_MARK))
        process = host.start([sys.executable, relay, *arguments], log="delay-relay")
        deadline = time.monotonic() + STEP_TIMEOUT_S
        while "ready" not in host.log("delay-relay"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the relay did not start: {host.log('delay-relay')}")
            time.sleep(POLL_S)
        host.run(
            shlex.split(
                f"iptables -t nat -A OUTPUT -o eth0 -p tcp -m mark ! --mark {RELAY_MARK}"
                f" -j REDIRECT --to-ports {RELAY_PORT}"
            )
        )


@contextmanager
def _holder(namespaces: list[str], prepare: str) -> Iterator[subprocess.Popen[str]]:
    """Make namespaces, and keep a process in them while the context lasts.

    Args:
        namespaces: the command that makes them and runs what follows it there.
        prepare: shell commands to run there first.
    """
    script = f"{prepare}\necho ready\nexec cat"  # `cat` ends when the test does
    process = subprocess.Popen(
        [*namespaces, "bash", "-ec", script],
        env=_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"a host cannot be made: {process.stderr.read()}")
        yield process
    finally:
        process.stdin.close()
        process.wait(STEP_TIMEOUT_S)
        process.stdout.close()
        process.stderr.close()


def _enter(holder: subprocess.Popen[str]) -> list[str]:
    user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
    return ["nsenter", "--target", str(holder.pid), *user, "--net", "--mount", "--uts", "--"]


def _private_files(name: str, folder: Path, names_file: Path) -> str:
    """Return the commands that give a host files of its own.

    What runs must stay visible where it lies below a folder that becomes the host's own: it is
    held open, and bound again.
    """
    programs = {REPOSITORY, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}
    hidden = [path for path in sorted(programs) if str(path).startswith(OWN_FOLDERS)]
    held = [f"exec {{held{n}}}<{shlex.quote(str(path))}" for n, path in enumerate(hidden)]
    back = [
        f'mkdir -p {shlex.quote(str(path))}\nmount -c --bind "/proc/self/fd/$held{n}" '
        f"{shlex.quote(str(path))}"
        for n, path in enumerate(hidden)
    ]
    own = shlex.quote(str(folder))
    return "\n".join(
        [
            f"hostname {shlex.quote(name)}",
            f"mount --bind {shlex.quote(str(names_file))} /etc/hosts",
            *held,
            f"exec {{own}}<{own}",
            # A user namespace may not change some mounts; those are not where programs write.
            f"while read -r _ at type _; do case $type in {DISK_TYPES})"
            ' mount -o remount,bind,ro "$at" 2>/dev/null || true;; esac; done </proc/self/mounts',
            *(f'mount -c --bind "/proc/self/fd/$own" {path}' for path in OWN_FOLDERS),
            "mount -o remount,bind,rw /tmp && mount -o remount,bind,rw /var/tmp",
            *back,
            "mount -t tmpfs none /dev/shm",
            "mount -t tmpfs none /run",
        ]
    )


def _connect(address: str) -> str:
    return (
        f"ip link set lo up\nip addr add {address}/{PREFIX_BITS} dev eth0\n"
        f"ip link set eth0 up\nip route add default dev eth0"
    )


def _shape(device: str, link: Link) -> str:
    """Return the commands that bound what an interface sends."""
    # Packets as a wire has them: without it, tbf and the loss rule would see up to 64 KiB at once.
    commands = [f"ip link set dev {device} gso_max_segs 1"]
    if link.mbit is not None:
        burst_kb = max(16, round(link.mbit * 1e6 / 8 * 0.01 / 1024))  # 10 ms of the link
        commands.append(
            f"tc qdisc add dev {device} root tbf rate {round(link.mbit * 1000)}kbit "
            f"burst {burst_kb}kb latency 50ms"
        )
    return " && ".join(commands)


def _lose(link: Link) -> str:
    if not link.loss:
        return "true"
    return f"iptables -A INPUT -i eth0 -m statistic --mode random --probability {link.loss} -j DROP"
