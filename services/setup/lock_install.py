"""Installs a lock into a virtual environment: exactly its packages, nothing resolved.

`scripts/install.py` (`make setup`) and `agent-r1 setup` call `install_lock`. Standard library only,
since what it installs is not there yet. An interrupted run continues: pip keeps what it downloaded
and skips what is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .gpu_probe import probe
from .native_libraries import ensure_bwrap, ensure_libnuma

PYTORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# Short, because the index may be unreachable where PyPI is not; a slow download is no timeout.
PYTORCH_OPTIONS = ("--timeout", "10", "--retries", "1")
# What builds the packages that come as source (DeepSpeed) and this project itself.
BUILD_TOOLS = ("setuptools",)
CPU_BUILD = "+cpu"
CUDA = "13."
"""The releases of CUDA that the lock for GPUs is made for; its packages link libcudart.so.13."""
# On a terminal, a line of progress takes the place of the one before.
LINE_START, LINE_END = ("\r\x1b[2K", "") if sys.stdout.isatty() else ("", "\n")
# The lines of pip that say what takes time.
STEP = re.compile(r"\s*(Downloading|Building|Installing collected)")

# First match wins: (pattern in pip's output, what to tell the user).
FAILURES = (
    (
        r"No space left on device|Errno 28|Disk quota exceeded",
        "the disk is full: {free_mb:,.0f} MB are free at {place}. Free some space (pip's "
        "cache: `pip cache purge`), or use another disk, and run the same command again; "
        "what is installed is kept.",
    ),
    (
        r"NewConnectionError|ConnectTimeout|ReadTimeout|NameResolutionError|ConnectionResetError"
        r"|Temporary failure in name resolution|Network is unreachable|ProxyError|SSLError"
        r"|Connection broken|IncompleteRead",
        "a package index could not be reached. pip needs PyPI and, for the CPU build of torch, "
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
    (
        r"is no build for CUDA",
        "pip took another build of torch from a folder or an index of this machine. Run "
        "`make clean`, and then, without that place, "
        "`PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= make setup-gpu`.",
    ),
    (
        r"torch cannot be imported",
        "a package that torch needs is damaged, or the C library is too old. Run `make clean` and "
        "the same command again.",
    ),
    (r"Permission denied|Errno 13", "{place} is not writable for this user."),
)


class InstallError(Exception):
    """pip failed; the text is its output."""


@dataclass(frozen=True)
class Target:
    """A virtual environment, and the lock that it is to have."""

    prefix: Path
    """Folder of the environment."""
    lock: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.prefix / "bin" / "python"

    @property
    def log(self) -> Path:
        """File of what pip printed."""
        return self.prefix / "agent-r1-setup.log"

    def site_packages(self) -> Path:
        """Return the folder of its packages."""
        return next(self.prefix.glob("lib/python*/site-packages"))


def install_lock(target: Target) -> None:
    """Install every package of the lock, and the native libraries that wheels do not carry.

    Raises:
        InstallError: pip failed, or the lock of GPUs got a torch that cannot use them.
        MissingLibraryError: a library is not there and could not be fetched.
    """
    remove_half_installed(target)
    requirements = read_lock(target.lock)
    torch = next(line for line in requirements if line.startswith("torch=="))
    tools = [line for line in requirements if line.split("==")[0] in BUILD_TOOLS]
    run_pip(target, "installing build tools", tools)
    if CPU_BUILD in torch:
        install_torch(target, torch)
    else:
        install_torch_for_gpus(target, torch)
    title = f"installing {len(requirements)} packages"
    run_pip(target, title, ["--requirement", str(target.lock)])
    if CPU_BUILD in torch:  # vLLM's CPU build links to it
        ensure_libnuma(target.python, target.site_packages())
    ensure_bwrap(target.prefix / "bin")


def read_lock(lock: Path) -> list[str]:
    """Return the requirement lines of a lock."""
    lines = (line.strip() for line in lock.read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def remove_half_installed(target: Target) -> None:
    """Forget packages whose installation was cut short, so that pip installs them again."""
    for info in target.prefix.glob("lib/python*/site-packages/*.dist-info"):
        # pip writes these two last.
        if not ((info / "RECORD").exists() and (info / "INSTALLER").exists()):
            shutil.rmtree(info)
    for leftover in target.prefix.glob("lib/python*/site-packages/~*"):
        shutil.rmtree(leftover)


def run_pip(
    target: Target,
    title: str,
    arguments: Sequence[str],
    folder: Path | None = None,
    *,
    deps: bool = False,
) -> None:
    """Run `pip install` into the environment.

    Args:
        target: the environment.
        title: what is printed about it.
        arguments: of pip, after `install`.
        folder: in which it runs; None is the current one.
        deps: install what the packages need as well.

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
    # -P: modules of the folder the command runs in must not shadow installed ones.
    command = [
        str(target.python),
        "-P",
        "-m",
        "pip",
        "install",
        *(() if deps else ("--no-deps",)),
        "--progress-bar",
        "off",
    ]
    command += ["--no-build-isolation", "--no-input", *arguments]
    started = time.monotonic()
    print(f"{title} ...", flush=True)
    status, output = _run_logged(command, target.log, environment, folder)
    if status != 0:
        raise InstallError(output)
    print(f"{LINE_START}  done in {time.monotonic() - started:.0f} s", flush=True)


def _run_logged(
    command: Sequence[str], log: Path, environment: Mapping[str, str], folder: Path | None
) -> tuple[int, str]:
    """Return status and output of pip, which is added to a log and printed step by step."""
    output = ""
    with (
        log.open("a", encoding="utf-8") as file,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
            encoding="utf-8",
            errors="replace",
        ) as process,
    ):
        for line in process.stdout or ():
            output += line
            file.write(line)
            if STEP.match(line):
                print(f"{LINE_START}  {line.strip()[:75]}", end=LINE_END, flush=True)
    return process.returncode, output


def is_installed(target: Target, requirement: str) -> bool:
    """Tell whether exactly this "name==version" is in the environment."""
    name, version = requirement.split("==")
    program = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
    found = subprocess.run(
        [str(target.python), "-P", "-c", program, name], capture_output=True, text=True
    )
    return found.stdout.strip() == version


def install_torch(target: Target, requirement: str) -> None:
    """Install the CPU build of torch: from the configured indexes and folders, else PyTorch's.

    PyPI has no `+cpu` build. A folder or an index the user has configured is asked first, alone,
    so that a machine that cannot reach PyTorch's index does not wait for it.
    """
    if is_installed(target, requirement):
        return
    try:
        title = f"installing {requirement} from the configured indexes"
        run_pip(target, title, [requirement])
    except InstallError as exc:
        if "No matching distribution found" not in str(exc):
            raise
        print(f"  not there; asking {PYTORCH_INDEX}")
        run_pip(
            target,
            f"installing {requirement}",
            [*PYTORCH_OPTIONS, "--extra-index-url", PYTORCH_INDEX, requirement],
        )


def install_torch_for_gpus(target: Target, requirement: str) -> None:
    """Install torch and what it links before anything else, and try it: most of the download.

    Raises:
        InstallError: pip failed, or this torch cannot be imported or is not for CUDA 13.
    """
    # Of equal versions pip prefers one with a local part, such as 2.13.0+cpu, for `==`.
    wanted = requirement.replace("==", "===")
    # With its dependencies, unlike the rest, so that it can be imported.
    constraint = ["--constraint", str(target.lock)]
    run_pip(target, f"installing {requirement} for CUDA", [*constraint, wanted], deps=True)
    found = probe(target.python, ["torch"])
    if found.error:
        raise InstallError(f"torch cannot be imported: {found.error}")
    torch = found.facts["torch"]
    if not str(torch["cuda"]).startswith(CUDA):
        raise InstallError(f"torch {torch['version']} is no build for CUDA {CUDA}x")
    print(f"  torch {torch['version']} can be imported, CUDA {torch['cuda']}")


def explain(target: Target, output: str) -> str:
    """Return what a user can do about pip's failure, with pip's last lines."""
    tail = "\n".join(f"    {line}" for line in output.strip().splitlines()[-8:])
    remedy = "run the same command again; if it fails the same way, the log has the details."
    for pattern, text in FAILURES:
        if re.search(pattern, output):
            remedy = text.format(
                place=target.prefix,
                free_mb=shutil.disk_usage(target.prefix.parent).free / 1e6,
                platform=f"{sys.platform} {os.uname().machine}",
                python=f"{sys.version_info.major}.{sys.version_info.minor}",
            )
            break
    return f"\nset-up stopped: {remedy}\n  pip's last lines ({target.log}):\n{tail}"
