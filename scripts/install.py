"""Make `.venv`: reads deploy/constraints/cpu.txt, installs exactly that, writes a stamp.

Called by scripts/setup with Python 3.11 or 3.12; standard library only. Nothing is resolved: the
lock is complete. A second run finds the stamp and ends at once; an interrupted run continues, since
pip keeps what it downloaded and skips what is installed. A failure says what to do about it.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from native_libraries import MissingLibraryError, ensure_bwrap, ensure_libnuma

REPOSITORY = Path(__file__).resolve().parent.parent
LOCK = REPOSITORY / "deploy" / "constraints" / "cpu.txt"
PARITY_LOCK = REPOSITORY / "tests" / "parity" / "requirements.txt"
SCRIPTS = (Path(__file__), Path(__file__).with_name("native_libraries.py"))
VENV = REPOSITORY / ".venv"
STAMP = VENV / "agent-r1-setup.txt"
LOG = VENV / "agent-r1-setup.log"
PYTHON = VENV / "bin" / "python"
PYTORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# Short, because the index may be unreachable where PyPI is not; a slow download is no timeout.
PYTORCH_OPTIONS = ("--timeout", "10", "--retries", "1")
# What builds the packages that come as source (DeepSpeed) and this project itself.
BUILD_TOOLS = ("setuptools",)
QUIET_PROGRESS_S = 30.0
# On a terminal, a line of progress takes the place of the one before.
LINE_START = "\r\x1b[2K" if sys.stdout.isatty() else ""
# The lines of pip that say what it is doing.
STEP = re.compile(r"\s*(Collecting|Downloading|Using cached|Building|Installing collected)")

# First match wins: (pattern in pip's output, what to tell the user).
FAILURES = (
    (
        r"No space left on device|Errno 28|Disk quota exceeded",
        "the disk is full: {free_gb:.1f} GB are free at {repository}. Free some space (pip's "
        "cache: `pip cache purge`), or clone to another disk, and run the same command again; "
        "what is installed is kept.",
    ),
    (
        r"NewConnectionError|ConnectTimeout|ReadTimeout|NameResolutionError|ConnectionResetError"
        r"|Temporary failure in name resolution|Network is unreachable|ProxyError|SSLError"
        r"|Connection broken|IncompleteRead",
        "a package index could not be reached. Needed are PyPI and, for the CPU build of torch, "
        + PYTORCH_INDEX
        + " or a folder with that wheel (PIP_FIND_LINKS=folder). Check the network "
        "(and HTTPS_PROXY, PIP_INDEX_URL, PIP_CERT if you use them) and run the same command "
        "again; finished downloads are kept.",
    ),
    (
        r"No matching distribution found|not a supported wheel",
        "a package has no build for this system ({platform}, Python {python}). Agent-R1 runs "
        "natively on x86-64 Linux with Python 3.11 or 3.12; elsewhere use Docker: "
        "`docker compose -f docker-compose.yml -f deploy/compose.cpu.yml up --build -d`.",
    ),
    (r"Permission denied|Errno 13", "{repository} is not writable for this user."),
)


class InstallError(Exception):
    """pip failed; the text is its output."""


def read_lock() -> list[str]:
    """Return the requirement lines of the lock."""
    lines = (line.strip() for line in LOCK.read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def compute_stamp() -> str:
    """Return what a finished set-up depends on: lock, project file, interpreter and place."""
    digest = hashlib.sha256()
    for path in (LOCK, PARITY_LOCK, REPOSITORY / "pyproject.toml", *sorted(SCRIPTS)):
        digest.update(path.read_bytes())
    digest.update(f"{sys.version_info[:2]} {REPOSITORY}".encode())
    return digest.hexdigest()


def is_done(stamp: str) -> bool:
    """Tell whether `.venv` is what `stamp` says."""
    return PYTHON.exists() and STAMP.exists() and STAMP.read_text().strip() == stamp


def check_system() -> None:
    """Run the check of system, Python, memory and disk; it prints what it found."""
    check = subprocess.run([sys.executable, str(REPOSITORY / "deploy" / "preflight.py")])
    if check.returncode != 0:
        sys.exit(check.returncode)


def make_venv() -> None:
    """Create `.venv`, or keep the one that is there when its interpreter fits."""
    probe = "import sys; print('%d.%d' % sys.version_info[:2])"
    if PYTHON.exists():
        found = subprocess.run([str(PYTHON), "-c", probe], capture_output=True, text=True)
        wanted = f"{sys.version_info.major}.{sys.version_info.minor}"
        has_pip = subprocess.run([str(PYTHON), "-m", "pip", "--version"], capture_output=True)
        if found.stdout.strip() == wanted and has_pip.returncode == 0:
            return
    if VENV.exists():
        shutil.rmtree(VENV)
    # This program may itself run from the environment that is replaced.
    base = getattr(sys, "_base_executable", sys.executable)
    print(f"creating {VENV.name} with {base}")
    try:
        subprocess.run([base, "-m", "venv", str(VENV)], check=True)
    except subprocess.CalledProcessError as exc:
        raise InstallError(f"python -m venv ended with exit code {exc.returncode}") from exc


def remove_half_installed() -> None:
    """Forget packages whose installation was cut short, so that pip installs them again."""
    for info in VENV.glob("lib/python*/site-packages/*.dist-info"):
        # pip writes these two last.
        if not ((info / "RECORD").exists() and (info / "INSTALLER").exists()):
            shutil.rmtree(info)
    for leftover in VENV.glob("lib/python*/site-packages/~*"):
        shutil.rmtree(leftover)


def show_progress(output: bytes, elapsed_s: float) -> None:
    """Show how far pip is, by its output so far; on a terminal in one line that changes."""
    steps = [line for line in output.decode(errors="replace").splitlines() if STEP.match(line)]
    step = steps[-1].strip()[:50] if steps else ""
    count = len(list(VENV.glob("lib/python*/site-packages/*.dist-info")))
    text = f"{LINE_START}  {elapsed_s:4.0f} s  {count} packages installed  {step}"
    print(text, end="" if LINE_START else "\n", flush=True)


def run_pip(title: str, arguments: list[str]) -> None:
    """Run `pip install` into `.venv`.

    Raises:
        InstallError: pip failed.
    """
    # Versions come from the lock alone: a constraint of the user's or the machine's own, which may
    # stand in pip's configuration files, must not stop it. Empty would not override those.
    environment = os.environ | {
        "PIP_CONSTRAINT": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PYTHONNOUSERSITE": "1",
    }
    command = [str(PYTHON), "-m", "pip", "install", "--no-deps", "--progress-bar", "off"]
    every_s = 1.0 if LINE_START else QUIET_PROGRESS_S
    started = time.monotonic()
    print(f"{title} ...", flush=True)
    with subprocess.Popen(
        [*command, "--no-build-isolation", "--no-input", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        cwd=REPOSITORY,
    ) as process:
        output: bytes | None = None
        try:
            while output is None:
                try:
                    output, _ = process.communicate(timeout=every_s)
                except subprocess.TimeoutExpired as exc:
                    show_progress(exc.output or b"", time.monotonic() - started)
        finally:
            process.terminate()  # does nothing where it has ended
    with LOG.open("ab") as log:
        log.write(output)
    if process.returncode != 0:
        raise InstallError(output.decode(errors="replace"))
    print(f"{LINE_START}  done in {time.monotonic() - started:.0f} s", flush=True)


def is_installed(requirement: str) -> bool:
    """Tell whether exactly this "name==version" is in `.venv`."""
    name, version = requirement.split("==")
    program = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
    found = subprocess.run([str(PYTHON), "-c", program, name], capture_output=True, text=True)
    return found.stdout.strip() == version


def install_torch(requirement: str) -> None:
    """Install the CPU build of torch: from the configured indexes and folders, else PyTorch's.

    PyPI has no `+cpu` build. A folder or an index the user has configured is asked first, alone,
    so that a machine that cannot reach PyTorch's index does not wait for it.
    """
    if is_installed(requirement):
        return
    try:
        run_pip(f"installing {requirement} from the configured indexes", [requirement])
    except InstallError as exc:
        if "No matching distribution found" not in str(exc):
            raise
        print(f"  not there; asking {PYTORCH_INDEX}")
        run_pip(
            f"installing {requirement}",
            [*PYTORCH_OPTIONS, "--extra-index-url", PYTORCH_INDEX, requirement],
        )


def install_all() -> None:
    """Install the lock and this project into `.venv`."""
    make_venv()
    remove_half_installed()
    requirements = read_lock()
    torch = next(line for line in requirements if line.startswith("torch=="))
    tools = [line for line in requirements if line.split("==")[0] in BUILD_TOOLS]
    run_pip("installing build tools", tools)
    install_torch(torch)
    run_pip(f"installing {len(requirements)} packages", ["--requirement", str(LOCK)])
    run_pip("installing agent-r1", ["--editable", "."])
    run_pip(
        "installing what tests compare with",
        ["--upgrade", "--target", str(VENV / "parity"), "--requirement", str(PARITY_LOCK)],
    )
    ensure_libnuma(PYTHON, next(VENV.glob("lib/python*/site-packages")))
    ensure_bwrap(VENV / "bin")


def explain(output: str) -> str:
    """Return what a user can do about pip's failure, with pip's last lines."""
    tail = "\n".join(f"    {line}" for line in output.strip().splitlines()[-8:])
    remedy = "run the same command again; if it fails the same way, the log has the details."
    for pattern, text in FAILURES:
        if re.search(pattern, output):
            remedy = text.format(
                repository=REPOSITORY,
                free_gb=shutil.disk_usage(REPOSITORY).free / 1e9,
                platform=f"{sys.platform} {os.uname().machine}",
                python=f"{sys.version_info.major}.{sys.version_info.minor}",
            )
            break
    return f"\nset-up stopped: {remedy}\n  pip's last lines ({LOG}):\n{tail}"


def main() -> None:
    """Bring `.venv` to the state of the lock, or say why that is not possible."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--force", action="store_true", help="ignore the stamp")
    options = parser.parse_args()
    stamp = compute_stamp()
    if is_done(stamp) and not options.force:
        return
    check_system()
    started = time.monotonic()
    with (REPOSITORY / "pyproject.toml").open() as guard:
        # Two set-ups in one folder (two terminals) take turns; the second finds the work done.
        fcntl.flock(guard, fcntl.LOCK_EX)
        if is_done(stamp) and not options.force:
            return
        try:
            install_all()
        except InstallError as exc:
            sys.exit(explain(str(exc)))
        except MissingLibraryError as exc:
            sys.exit(f"\nset-up stopped: {exc}")
        except OSError as exc:
            sys.exit(explain(f"{type(exc).__name__}: {exc}"))
        except KeyboardInterrupt:
            sys.exit("\nset-up interrupted; the same command continues where it stopped")
        STAMP.write_text(stamp + "\n")
    print(f"set-up done in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
