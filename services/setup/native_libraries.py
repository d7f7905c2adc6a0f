"""Native libraries that wheels do not carry and small Linux installations lack: finds or fetches.

Called by lock_install.py. vLLM's CPU build links to libnuma.so.1; without it vLLM starts and fails
at the first token. The tools that run code need bubblewrap's `bwrap`. Where apt can fetch the
package, the library is put into the environment and loaded by every Python of it at start (a `.pth`
line), the program into its `bin`; nothing else is changed. Elsewhere the message names the system's
own command.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

LIBRARY = "libnuma.so.1"
DEBIAN_PACKAGE = "libnuma1"
PTH = "agent_r1_libnuma.pth"
APT_TIMEOUT_S = 300
REMEDY = (
    f"the system has no {LIBRARY}, which vLLM's CPU build needs. Install it and run the same "
    "command again: `apt-get install libnuma1` (Debian, Ubuntu), `dnf install numactl-libs` "
    "(Fedora, RHEL), `pacman -S numactl` (Arch), `zypper install libnuma1` (SUSE)"
)
BWRAP = "bwrap"
BWRAP_PACKAGE = "bubblewrap"
BWRAP_REMEDY = (
    "bubblewrap is not installed; only the tools python_exec and code_tests need it, and they will "
    "say so when they start. Install it with `apt-get install bubblewrap` (Debian, Ubuntu), `dnf "
    "install bubblewrap` (Fedora, RHEL), `pacman -S bubblewrap` (Arch), `zypper install "
    "bubblewrap` (SUSE)"
)


class MissingLibraryError(Exception):
    """The library is not there and could not be fetched; the text says what to do."""


def is_loadable(python: Path) -> bool:
    """Tell whether this Python can load the library."""
    program = f"import ctypes; ctypes.CDLL({LIBRARY!r})"
    return subprocess.run([str(python), "-P", "-c", program], capture_output=True).returncode == 0


def fetch_with_apt(
    folder: Path, package: str = DEBIAN_PACKAGE, pattern: str = LIBRARY
) -> Path | None:
    """Download Debian's package and unpack the file that ends with `pattern` into `folder`.

    Returns:
        the file; None when apt is not there or cannot fetch it.
    """
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return None
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch).chmod(0o755)  # apt downloads as a user of its own when root calls it
        download = ["apt-get", "download", "-qq", package]
        refresh = ["apt-get", "update", "-qq"]
        commands = [download] if os.getuid() else [download, refresh, download]
        for command in commands:
            try:
                subprocess.run(command, cwd=scratch, capture_output=True, timeout=APT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                return None
            packages = list(Path(scratch).glob("*.deb"))
            if packages:
                break
        else:
            return None
        unpack = ["dpkg-deb", "-x", str(packages[0]), f"{scratch}/x"]
        subprocess.run(unpack, check=True, capture_output=True)
        found = next(Path(scratch, "x").rglob(pattern), None)
        if found is None:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / Path(pattern).name
        partial = target.with_name(f".{target.name}.partial")
        shutil.copy(found.resolve(), partial)
        partial.replace(target)
    return target


def ensure_libnuma(python: Path, site_packages: Path) -> None:
    """Make sure that every Python of the environment finds libnuma.

    Raises:
        MissingLibraryError: the library is not there and could not be fetched.
    """
    if is_loadable(python):
        return
    print(f"the system has no {LIBRARY}; fetching Debian's into this environment")
    library = fetch_with_apt(site_packages.parent.parent / "native")
    if library is None:
        raise MissingLibraryError(REMEDY)
    try:
        ctypes.CDLL(str(library))
    except OSError as exc:
        raise MissingLibraryError(f"{REMEDY} (the one apt fetched does not load: {exc})") from exc
    # Loaded once, it answers for its name to everything that links to it later.
    line = f"import ctypes; ctypes.CDLL({str(library)!r}, mode=ctypes.RTLD_GLOBAL)\n"
    (site_packages / PTH).write_text(line)
    if not is_loadable(python):
        raise MissingLibraryError(REMEDY)


def ensure_bwrap(scripts: Path) -> None:
    """Make sure that `bwrap` is on PATH or in the environment's `bin`; else say what to do."""
    if shutil.which(BWRAP) or runs(scripts / BWRAP):
        return
    print("the system has no bubblewrap; fetching Debian's into this environment")
    program = fetch_with_apt(scripts, BWRAP_PACKAGE, f"bin/{BWRAP}")
    if program is not None and not runs(program):
        program.unlink()
        program = None
    if program is None:
        print(f"warning: {BWRAP_REMEDY}")


def runs(program: Path) -> bool:
    """Tell whether a program can be started here."""
    try:
        return subprocess.run([str(program), "--version"], capture_output=True).returncode == 0
    except OSError:
        return False
