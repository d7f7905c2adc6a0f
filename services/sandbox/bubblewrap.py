"""Bubblewrap: finds `bwrap`, writes its command line, reads its complaints.

A sandbox is a process tree in namespaces of its own (mount, pid, net, ipc, uts, cgroup; user too,
unless the service is root) with a read-only root that holds the interpreter and nothing else of
the machine, a private /tmp, /dev and /proc, no capability and a system-call filter.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from agent_r1.sandbox.interpreter import Interpreter
from agent_r1.sandbox.settings import SHM_MB

GUEST = Path(__file__).with_name("guest")
"""The package that runs inside."""
INSIDE = Path("/sandbox")
"""Path inside the sandbox."""
GUEST_MODULE = f"{GUEST.name}.main"
PRIVATE_FOLDERS = ("/tmp", "/dev/shm")
_START_GUEST = (
    "import sys; sys.path.insert(0, sys.argv.pop()); from {0} import main; del sys.path[0]; main()"
)
SANDBOX_UID = 65534
"""The user inside, where the sandbox has a user namespace of its own."""
_SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_LOADER_CACHE = "/etc/ld.so.cache"
_NETWORK_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl")
_CAP_SETGID, _CAP_SETUID, _CAP_SYS_ADMIN = 6, 7, 21
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    # One thread: a thread counts as a process, and its stack as memory.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def find_bwrap(configured: str | None) -> str:
    """Return the path of `bwrap`.

    Raises:
        ValueError: there is none; the text says how to install it.
    """
    if configured is not None:
        if os.access(configured, os.X_OK):
            return configured
        raise ValueError(
            f"bwrap ({configured!r}) is not an executable file; set it to the path of bubblewrap's "
            "bwrap, or leave it out to use the one on PATH"
        )
    beside = Path(sys.prefix, "bin", "bwrap")
    found = shutil.which("bwrap") or (str(beside) if os.access(beside, os.X_OK) else None)
    if found is None:
        raise ValueError(
            f"bubblewrap is not installed: no bwrap on PATH and none at {beside}. Run `make "
            "setup`, or `apt-get install bubblewrap` (Debian, Ubuntu), `dnf install bubblewrap` "
            '(Fedora, RHEL). In a container of its own, sandbox = "container" runs without it, '
            "with weaker limits (docs/sandbox.md)"
        )
    return found


def gives_own_users(*, container: bool) -> bool:
    """Tell whether each sandbox gets a user of its own: where this process is root.

    Args:
        container: no namespaces are made, so the right to make them is not needed.

    Raises:
        ValueError: it is root without the capabilities for it.
    """
    if os.geteuid() != 0:
        return False
    needed = 1 << _CAP_SETUID | 1 << _CAP_SETGID
    if not container:
        needed |= 1 << _CAP_SYS_ADMIN
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    effective = int(status.partition("CapEff:")[2].split()[0], 16)
    if effective & needed == needed:
        return True
    raise ValueError(
        "the service runs as root without CAP_SYS_ADMIN (or CAP_SETUID), so it can make no "
        "sandbox; run it as another user (in a container: `USER` of the Dockerfile or `user:` of "
        "compose)"
    )


def command_line(
    bwrap: str,
    interpreter: Interpreter,
    *,
    file_mb: int,
    uid: int | None,
    files: dict[str, int],
    private_proc: bool,
    module: str,
    shown: Mapping[str, Path],
    nests: bool,
    network: bool,
) -> list[str]:
    """Return the command that starts the guest in a sandbox.

    Args:
        bwrap: path of the program.
        interpreter: what runs the guest.
        file_mb: size of /tmp, in MiB.
        uid: the user the guest changes to itself; None where a user namespace has it already.
        files: open files with the content of `seccomp`, `passwd` and `group`.
        private_proc: False leaves /proc empty, for containers that forbid mounting it; a guest that
            nests needs the one that is there, and hides it from what it starts.
        module: of the guest; its `main` is called.
        shown: what `module` needs, by the name it has in `INSIDE`.
        nests: the guest makes namespaces of their own for what it starts. It installs the filter
            itself, and changes its user even where it has the right to mount.
        network: the sandbox has the machine's.
    """
    command = [bwrap, *_isolate(uid=uid, seccomp=files["seccomp"], nests=nests, network=network)]
    for name, value in ENVIRONMENT.items():
        command += ["--setenv", name, value]
    command += _show_system()
    # Before the interpreter, which may itself be installed below one of its folders.
    command += _mount_own(file_mb, private_proc=private_proc, nests=nests)
    command += _show_paths([*interpreter.prefixes, *interpreter.packages])
    for path in (_LOADER_CACHE, *(_NETWORK_FILES if network else ())):
        command += ["--ro-bind-try", path, path]
    for name in ("passwd", "group"):
        command += ["--perms", "0444", "--ro-bind-data", str(files[name]), f"/etc/{name}"]
    for name, path in shown.items():
        place = INSIDE / name
        command += ["--perms", "0755", "--dir", str(place.parent)]
        command += ["--ro-bind", str(path), str(place)]
    command += ["--chdir", "/tmp", "--remount-ro", "/", "--as-pid-1", "--"]
    return [*command, *python_command(interpreter, INSIDE, module)]


def _isolate(*, uid: int | None, seccomp: int, nests: bool, network: bool) -> list[str]:
    """Return the options for namespaces, user, capabilities and filter of the guest."""
    options = ["--unshare-ipc", "--unshare-pid", "--unshare-uts"]
    options += [] if network else ["--unshare-net"]
    options += ["--unshare-cgroup-try", "--hostname", "sandbox", "--die-with-parent"]
    options += ["--new-session", "--clearenv", "--cap-drop", "ALL"]
    if uid is None:
        options += ["--unshare-user", "--uid", str(SANDBOX_UID), "--gid", str(SANDBOX_UID)]
    else:
        options += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        options += ["--cap-add", "CAP_SYS_ADMIN"] if nests else []
    return options + ([] if nests else ["--seccomp", str(seccomp)])


def _show_system() -> list[str]:
    """Return the options that show the machine's programs and libraries, read-only."""
    options: list[str] = []
    for folder in _SYSTEM_FOLDERS:
        if os.path.islink(folder):
            options += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            options += ["--ro-bind", folder, folder]
    return options


def _mount_own(file_mb: int, *, private_proc: bool, nests: bool) -> list[str]:
    """Return the options for /proc, /dev and the folders in memory of the sandbox."""
    without_own = ["--bind", "/proc", "/proc"] if nests else ["--dir", "/proc"]
    options = ["--proc", "/proc"] if private_proc else without_own
    # Shared mappings of /dev/zero are memory that no limit counts; /dev/full reads the same.
    options += ["--dev", "/dev", "--dev-bind", "/dev/full", "/dev/zero", "--remount-ro", "/dev"]
    for folder, size_mb in (("/dev/shm", SHM_MB), ("/tmp", file_mb)):
        options += ["--size", str(size_mb << 20), "--perms", "1777", "--tmpfs", folder]
    return options


def _show_paths(paths: list[Path]) -> list[str]:
    """Return the options that show these folders of the machine, and no others beside them."""
    shown = _outside_of_usr(paths)
    covers = sorted({cover for path in shown if (cover := _find_cover(path))})
    options: list[str] = []
    for cover in covers:
        options += ["--perms", "0755", "--tmpfs", str(cover)]
    # Left to itself, bwrap makes the folders above a private one private as well.
    parents = {parent for path in shown for parent in path.parents if parent.name}
    for parent in sorted(parents | {Path("/etc"), INSIDE} - {*map(Path, PRIVATE_FOLDERS)}):
        options += ["--perms", "0755", "--dir", str(parent)]
    for path in shown:
        options += ["--ro-bind", str(path), str(path)]
    for cover in covers:
        options += ["--remount-ro", str(cover)]
    return options


def _find_cover(path: Path) -> Path | None:
    """Return the folder in a writable one that holds `path`; it is made read-only."""
    for folder in map(Path, PRIVATE_FOLDERS):
        if path.is_relative_to(folder) and path != folder:
            return folder / path.relative_to(folder).parts[0]
    return None


def private_folders(interpreter: Interpreter) -> dict[str, list[str]]:
    """Return the folders a program may write to, each with the names in it that stay."""
    covers = [_find_cover(path) for path in (*interpreter.prefixes, *interpreter.packages)]
    return {
        folder: sorted({cover.name for cover in covers if cover and str(cover.parent) == folder})
        for folder in PRIVATE_FOLDERS
    }


def python_command(interpreter: Interpreter, folder: Path, module: str) -> list[str]:
    """Return the command of the guest itself: no environment, no site, no folder of the script."""
    start = _START_GUEST.format(module)
    return [str(interpreter.executable), "-I", "-S", "-X", "utf8", "-c", start, str(folder)]


def _outside_of_usr(paths: Iterable[Path]) -> list[Path]:
    shown = [Path("/usr")]
    for path in sorted(set(paths)):
        if not any(path.is_relative_to(parent) for parent in shown):
            shown.append(path)
    return shown[1:]


def user_files(uid: int) -> dict[str, bytes]:
    """Return /etc/passwd and /etc/group of the sandbox."""
    return {
        "passwd": f"sandbox:x:{uid}:{uid}::/tmp:/usr/sbin/nologin\n".encode(),
        "group": f"sandbox:x:{uid}:\n".encode(),
    }


def explain_refusal(complaint: str) -> str:
    """Return what bubblewrap said, with what to do about it."""
    said = complaint.strip()[-500:] or "it printed nothing"
    text = complaint.lower()
    if "unknown option" in text:
        remedy = "install bubblewrap 0.8 or newer"
    elif any(word in text for word in ("namespace", "uid map", "permi", "loopback")):
        remedy = (
            "the kernel or a container refuses namespaces. On the machine itself: `sysctl -w "
            "kernel.unprivileged_userns_clone=1` (Debian), `sysctl -w "
            "kernel.apparmor_restrict_unprivileged_userns=0` (Ubuntu 24.04), and "
            "user.max_user_namespaces above 0. In Docker: `security_opt: "
            "[seccomp=deploy/docker/seccomp-python-exec.json, apparmor=unconfined]`, as "
            'docs/sandbox.md shows. Where neither can be had, sandbox = "container" is a choice '
            "with weaker limits, for a container that holds nothing else"
        )
    else:
        remedy = "docs/sandbox.md explains what the sandbox needs"
    return f"the sandbox cannot be started: bwrap said {said!r}; {remedy}"
