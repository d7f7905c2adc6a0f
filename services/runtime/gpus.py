"""The driver and the GPUs of this machine, as NVIDIA's management library (NVML) tells them.

The library comes with the driver, and is called without a package: tools and reward have none, and
`setup/preflight.py` asks before anything is installed (Python 3.7 can run this).
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import NamedTuple

LIBRARY = "libnvidia-ml.so.1"
TEXT_BYTES = 96
"""NVML's longest texts: driver version and name of a GPU."""


class _Memory(ctypes.Structure):
    """`nvmlMemory_t`."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]
    total: int
    used: int


class _Utilization(ctypes.Structure):
    """`nvmlUtilization_t`."""

    _fields_ = [(name, ctypes.c_uint) for name in ("gpu", "memory")]
    gpu: int


@dataclass(frozen=True)
class Gpu:
    """One GPU at one time."""

    index: int
    memory_bytes: int
    used_bytes: int
    busy: float
    """Share of the last moment in which it computed anything."""


@dataclass(frozen=True)
class Device:
    """Facts of one GPU."""

    index: int
    name: str
    capability: tuple[int, int]
    """Compute capability: (9, 0) is sm_90."""
    mig: bool
    """Whether it is divided into instances (MIG)."""


class Driver(NamedTuple):
    """NVML as it was found."""

    library: ctypes.CDLL | None
    """Library; None where it is not installed."""
    status: int
    """Status of its start: 0 is ready, 18 a library of another version than the kernel's module."""

    def version(self) -> str:
        """Return the version of the driver, such as 580.65.06; "" where it does not tell."""
        return _text(self.library, "nvmlSystemGetDriverVersion") if self.status == 0 else ""


@functools.lru_cache(maxsize=1)
def find_driver() -> Driver:
    """Load NVML and start it, once in a process."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return Driver(None, 0)
    return Driver(library, library.nvmlInit_v2())


def load_library() -> ctypes.CDLL | None:
    """Return NVML, ready; None on a machine without a driver."""
    driver = find_driver()
    return driver.library if driver.status == 0 else None


def read_devices() -> list[Device]:
    """Return what each GPU of this machine is; [] where there is none."""
    library = load_library()
    return [] if library is None else [_describe(library, index) for index in _indexes(library)]


def read_gpus() -> list[Gpu]:
    """Return every GPU of this machine; [] where there is none."""
    library = load_library()
    gpus = [] if library is None else [_read(library, index) for index in _indexes(library)]
    return [gpu for gpu in gpus if gpu is not None]


def _indexes(library: ctypes.CDLL) -> range:
    count = ctypes.c_uint(0)
    return range(count.value if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else 0)


def _handle(library: ctypes.CDLL, index: int) -> ctypes.c_void_p | None:
    handle = ctypes.c_void_p()
    status = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
    return handle if status == 0 else None


def _text(library: ctypes.CDLL | None, function: str, *arguments: object) -> str:
    buffer = ctypes.create_string_buffer(TEXT_BYTES)
    if library is None or getattr(library, function)(*arguments, buffer, TEXT_BYTES) != 0:
        return ""
    return buffer.value.decode(errors="replace")


def _describe(library: ctypes.CDLL, index: int) -> Device:
    handle = _handle(library, index)
    major, minor, mig, pending = (ctypes.c_int(0) for _ in range(4))
    library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    # Fails on GPUs that cannot be divided, and leaves 0.
    library.nvmlDeviceGetMigMode(handle, ctypes.byref(mig), ctypes.byref(pending))
    name = _text(library, "nvmlDeviceGetName", handle)
    return Device(index, name, (major.value, minor.value), mig.value == 1)


def _read(library: ctypes.CDLL, index: int) -> Gpu | None:
    handle, memory, load = _handle(library, index), _Memory(), _Utilization()
    if handle is None:
        return None
    if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
        return None
    # A GPU that is divided (MIG) does not tell its load.
    told = library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(load)) == 0
    return Gpu(index, memory.total, memory.used, load.gpu / 100 if told else 0.0)
