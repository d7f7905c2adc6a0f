"""Memory and load of this machine's GPUs, as NVIDIA's management library (NVML) tells them.

The library comes with the driver, and is called without a package: tools and reward have none.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

LIBRARY = "libnvidia-ml.so.1"


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


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """Return NVML, ready; None on a machine without a driver."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def read_gpus() -> list[Gpu]:
    """Return every GPU of this machine; [] where there is none."""
    library = load_library()
    count = ctypes.c_uint(0)
    if library is None or library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return []
    return [gpu for index in range(count.value) if (gpu := _read(library, index)) is not None]


def _read(library: ctypes.CDLL, index: int) -> Gpu | None:
    handle, memory, load = ctypes.c_void_p(), _Memory(), _Utilization()
    if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
        return None
    if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
        return None
    # A GPU that is divided (MIG) does not tell its load.
    told = library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(load)) == 0
    return Gpu(index, memory.total, memory.used, load.gpu / 100 if told else 0.0)
