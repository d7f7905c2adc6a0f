"""Checks of what GPUs need below the packages: driver, GPUs, C compiler, Python.h, /dev/shm.

setup/preflight.py asks before anything is installed, config/gpu_checks.py before a run, for
`agent-r1 check` and for `make test-gpu`. Standard library only, and Python 3.7 can run it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import NamedTuple

from agent_r1.runtime.files.disk_space import (
    SHARED_MEMORY,
    SHARED_MEMORY_BYTES,
    free_bytes,
    readable_size,
)
from agent_r1.runtime.gpus import LIBRARY, Device, Driver, find_driver, read_devices

LEAST_DRIVER = 580
"""The first driver for CUDA 13: torch and vLLM of the lock for GPUs link libcudart.so.13."""
LEAST_CAPABILITY = (7, 5)
"""The oldest GPUs that torch's build for CUDA 13 has kernels for."""
KERNEL_MODULE = Path("/proc/driver/nvidia/version")
COMPILE_TIMEOUT_S = 60.0
MODULE = "agent_r1_compiled"
SOURCE = f"""
#include <Python.h>
static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "{MODULE}", NULL, -1, NULL}};
PyMODINIT_FUNC PyInit_{MODULE}(void) {{ return PyModule_Create(&module); }}
"""
INSTALL_DRIVER = (
    f"install NVIDIA's driver {LEAST_DRIVER} or newer (Ubuntu: `apt-get install "
    f"nvidia-driver-{LEAST_DRIVER}-server-open`, else nvidia.com/drivers), on the host where this "
    "is a container"
)


class Finding(NamedTuple):
    """One thing that was looked at."""

    name: str
    text: str
    remedy: str = ""
    """Remedy where something is missing; empty where nothing is."""

    @property
    def ok(self) -> bool:
        """Return whether nothing is missing."""
        return not self.remedy


def check_gpu_needs() -> list[Finding]:
    """Look at all of it; [] on a machine without NVIDIA's driver."""
    driver = find_driver()
    if driver.library is None and not KERNEL_MODULE.exists():
        return []
    findings = [check_driver(driver)]
    devices = read_devices()
    if findings[0].ok:
        findings.append(check_devices(devices))
    findings.append(check_compiler())
    if len(devices) > 1:
        findings.append(check_shared_memory(free_bytes(SHARED_MEMORY)))
    return findings


def check_driver(driver: Driver) -> Finding:
    """Say whether NVML answers, of a driver that is new enough for CUDA 13."""
    if driver.library is None:
        return Finding(
            "driver",
            f"{LIBRARY} is missing, and the kernel has NVIDIA's module",
            "install the driver's libraries, or let the container have them: with the NVIDIA "
            "Container Toolkit, NVIDIA_DRIVER_CAPABILITIES must have `compute,utility`",
        )
    if driver.status != 0:
        return Finding(
            "driver",
            f"NVML does not start (error {driver.status})",
            "see what `nvidia-smi` says; after an update of the driver (error 18), restart the "
            "machine",
        )
    version = driver.version()
    major = version.split(".")[0]
    if not major.isdigit():
        return Finding("driver", "NVML does not tell its version", INSTALL_DRIVER)
    if int(major) < LEAST_DRIVER:
        text = f"{version} is older than {LEAST_DRIVER}, which CUDA 13 needs"
        return Finding("driver", text, INSTALL_DRIVER)
    return Finding("driver", version)


def check_devices(devices: list[Device]) -> Finding:
    """Say which GPUs there are, and whether torch has kernels for any of them."""
    text = ", ".join(_describe(device) for device in devices)
    if not devices:
        remedy = "see `nvidia-smi` and `lspci`, or give the container some"
        return Finding("GPU models", "the driver has none", remedy)
    # Which are used is said by CUDA_VISIBLE_DEVICES, which NVML does not read.
    if all(device.capability < LEAST_CAPABILITY for device in devices):
        return Finding(
            "GPU models",
            text,
            f"none is of sm_{_digits(LEAST_CAPABILITY)} (Turing) or newer, for which torch's build "
            "for CUDA 13 has kernels; use another machine",
        )
    return Finding("GPU models", text)


def _digits(capability: tuple[int, int]) -> str:
    return "".join(map(str, capability))


def _describe(device: Device) -> str:
    text = f"{device.index}: {device.name} (sm_{_digits(device.capability)})"
    # Where MIG is on, CUDA shows one instance to a process, whatever CUDA_VISIBLE_DEVICES lists.
    return f"{text}, MIG: a process sees one instance" if device.mig else text


def check_compiler() -> Finding:
    """Compile a module against Python.h and load it, as Triton does with each kernel's launcher."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return Finding("C compiler", "none", "Triton needs one; `apt-get install gcc`, or set CC")
    with tempfile.TemporaryDirectory() as folder:
        problem, remedy = _compile(compiler, Path(folder))
    return Finding("C compiler", problem or compiler, remedy)


def _compile(compiler: str, folder: Path) -> tuple[str, str]:
    """Return what went wrong and its remedy; two empty texts where nothing did."""
    source, module = folder / "module.c", folder / f"{MODULE}.so"
    source.write_text(SOURCE)
    include = _include_folder()
    command = [compiler, str(source), "-shared", "-fPIC", f"-I{include}", "-o", str(module)]
    status, said = _run(command)
    if status != 0 and "Python.h" in said:
        python = "python{}.{}".format(*sys.version_info[:2])
        return (
            f"Python.h is missing in {include}",
            f"Triton needs it; `apt-get install {python}-dev` (Fedora: `dnf install "
            f"{python}-devel`)",
        )
    if status != 0:
        return f"{compiler} compiles nothing: {said}", "reinstall it, or set CC to another"
    load = f"import sys; sys.path.insert(0, {str(folder)!r}); import {MODULE}"
    status, said = _run([sys.executable, "-I", "-S", "-c", load])
    if status != 0:
        return (
            f"a compiled module cannot be loaded from {folder.parent}: {said}",
            "set TMPDIR and TRITON_CACHE_DIR to folders that are not mounted with noexec",
        )
    return "", ""


def _include_folder() -> str:
    scheme = sysconfig.get_default_scheme() if sys.version_info >= (3, 10) else "posix_prefix"
    # Debian's own scheme names a folder that its packages do not use.
    return sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]


def _run(command: list[str]) -> tuple[int, str]:
    """Run a command; return its status, and the line in which it says why it failed."""
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMPILE_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        return 1, str(exc)
    lines = done.stdout.strip().splitlines() or ["it printed nothing"]
    errors = [line for line in lines if "rror" in line]
    return done.returncode, (errors or lines)[0]


def check_shared_memory(free: int) -> Finding:
    """Say whether NCCL has shared memory enough, which several GPUs of one machine need."""
    text = f"{readable_size(free)} of {SHARED_MEMORY} free"
    if free >= SHARED_MEMORY_BYTES:
        return Finding("shared memory", text)
    return Finding(
        "shared memory",
        text,
        "several GPUs exchange data through it; give the container 1 GB or more (docker: "
        "--shm-size=8g, Kubernetes: an emptyDir with medium: Memory)",
    )
