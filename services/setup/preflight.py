"""Checks this machine before anything is installed, and says what installing takes.

    python3 services/setup/preflight.py [gpu]

Run by scripts/setup; standard library only, and Python 3.7 can run it, since telling Pythons apart
is its work. Exit status 0: continue; 1: something is missing, and was reported.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import types
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
if __name__ == "__main__":  # nothing is installed yet, under whose name services/ would be found
    package = sys.modules["agent_r1"] = types.ModuleType("agent_r1")
    package.__path__ = [str(REPOSITORY / "services")]

from agent_r1.runtime.gpu_needs import Finding, check_gpu_needs  # noqa: E402 - through it
from agent_r1.runtime.memory import free_memory_bytes  # noqa: E402

PYTHONS = ((3, 11), (3, 12))
OLDEST_GLIBC = (2, 28)


class Sizes(NamedTuple):
    """Sizes of the packages of a variant, in GB."""

    download: float
    installed: float
    origin: str
    """Origin of the downloads."""


SIZES = {
    "cpu": Sizes(0.9, 3.6, "PyPI, and torch for CPUs from PyTorch's index"),
    "gpu": Sizes(4.3, 10.3, "PyPI"),
}
"""Measured: every wheel that pip downloads for the lock, and .venv after the installation."""
RUN_GB = 0.5
"""Room for the runs of the demo."""
MEMORY_GB = 4.0
"""Peak of the demo, all services together."""
GB = 1e9

DOCKER_WAY = (
    "use Docker instead, where everything runs on Linux: docker compose -f "
    "docker-compose.yml -f deploy/compose.cpu.yml up --build "
    "(Docker Desktop or any engine with compose v2)"
)


def check_system(system: str, machine: str) -> Finding:
    """Say whether there are wheels for this system."""
    text = "{} {}".format(system or "unknown", machine or "unknown")
    if system != "Linux":
        names = {"Darwin": "macOS"}
        why = f"vLLM and Redis have no wheels for {names.get(system, system)}; "
        return Finding("system", text, why + DOCKER_WAY)
    if machine not in ("x86_64", "AMD64"):
        why = "the wheel of Redis, and parts of the lock, are for x86-64 only; "
        return Finding("system", text, why + DOCKER_WAY)
    return Finding("system", text)


def check_libc(name: str, version: str) -> Finding:
    """Say whether the C library can load the wheels."""
    text = "{} {}".format(name or "not glibc", version).strip()
    parts = version.split(".")
    numbers = tuple(int(part) for part in parts[:2] if part.isdigit())
    if name != "glibc" or numbers < OLDEST_GLIBC:
        why = "the wheels need glibc {}.{} or newer (Debian 10, Ubuntu 18.10, RHEL 8); "
        return Finding("C library", text, why.format(*OLDEST_GLIBC) + DOCKER_WAY)
    return Finding("C library", text)


def check_python(version: tuple[int, int]) -> Finding:
    """Say whether this Python is one the lock was made for."""
    text = "{}.{}".format(*version)
    if version in PYTHONS:
        return Finding("Python", text)
    return Finding(
        "Python",
        text,
        "needs 3.11 or 3.12; install one (`apt-get install python3.11-venv`, or from python.org) "
        "and name it: PYTHON=/path/to/python3.11 make setup",
    )


def check_memory(available: int | None) -> Finding:
    """Say whether the demo fits into the bytes that are available; None is unknown."""
    if available is None:
        return Finding("memory", f"unknown; the demo needs {MEMORY_GB:.0f} GB")
    remedy = (
        f"the demo needs {MEMORY_GB:.0f} GB; close other programs, or give the virtual machine or "
        "container more"
    )
    text = f"{available / GB:.1f} GB available"
    return Finding("memory", text, remedy if available < MEMORY_GB * GB else "")


def check_disk(free: int, installed: bool, place: Path, variant: str = "cpu") -> Finding:
    """Say whether everything fits into the free bytes; `installed`: .venv is there already."""
    sizes = SIZES[variant]
    need_gb = RUN_GB if installed else sizes.download + sizes.installed + RUN_GB
    remedy = f"{need_gb:.1f} GB are needed; free some space, or clone to another disk"
    text = f"{free / GB:.2f} GB free at {place}"
    return Finding("disk", text, remedy if free < need_gb * GB else "")


def check_gpus() -> list[Finding]:
    """Look at what the variant for GPUs needs; it may be installed where there is none."""
    return check_gpu_needs() or [
        Finding("driver", "none: without a GPU here, nothing of it is checked")
    ]


def check_machine(installed: bool, place: Path = REPOSITORY, variant: str = "cpu") -> list[Finding]:
    """Look at everything.

    Args:
        installed: the packages are in `place` already.
        place: what the environment is in.
        variant: a key of SIZES.
    """
    findings = [check_system(platform.system(), platform.machine())]
    if findings[0].ok:
        findings.append(check_libc(*platform.libc_ver()))
    findings.append(check_python((sys.version_info[0], sys.version_info[1])))
    findings.append(check_memory(free_memory_bytes()))
    free = shutil.disk_usage(str(place)).free
    findings.append(check_disk(free, installed, place, variant))
    return findings + (check_gpus() if variant == "gpu" else [])


def report(findings: list[Finding], installed: bool, variant: str = "cpu") -> str:
    """Render the findings, and what set-up will take."""
    lines = []
    for finding in findings:
        mark = "ok     " if finding.ok else "MISSING"
        lines.append(f"{mark}  {finding.name:<10} {finding.text}")
        if not finding.ok:
            lines.append("         " + finding.remedy)
    if all(finding.ok for finding in findings) and not installed:
        sizes = SIZES[variant]
        lines.append(
            f"set-up downloads about {sizes.download:.1f} GB ({sizes.origin}), takes "
            f"{sizes.installed:.1f} GB in .venv and nothing outside this folder but "
            f"pip's cache; the demo uses up to {MEMORY_GB:.0f} GB of memory and {RUN_GB:.1f} GB in "
            "runs/"
        )
    return "\n".join(lines)


def main() -> int:
    """Print the findings; 0 when everything needed is there."""
    installed = (REPOSITORY / ".venv" / "bin" / "agent-r1").exists()
    variant = "gpu" if "gpu" in sys.argv[1:] else "cpu"
    findings = check_machine(installed, variant=variant)
    sys.stdout.write(report(findings, installed, variant) + os.linesep)
    return 0 if all(finding.ok for finding in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
