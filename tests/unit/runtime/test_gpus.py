"""What NVML says of GPUs; a class stands in for the driver's library."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from agent_r1.runtime import gpus
from agent_r1.runtime.gpus import Device, Gpu, find_driver, read_devices, read_gpus


class Nvml:
    """Two GPUs of 80 GB; the second is divided, and does not tell its load."""

    def __init__(self, *, fails: str = "") -> None:
        self._fails = fails

    def __getattr__(self, name: str) -> Any:
        return lambda *given: 999 if name == self._fails else getattr(Nvml, f"do_{name}")(*given)

    @staticmethod
    def do_nvmlInit_v2() -> int:  # noqa: N802 - NVML's name
        return 0

    @staticmethod
    def do_nvmlDeviceGetCount_v2(count: Any) -> int:  # noqa: N802
        count._obj.value = 2
        return 0

    @staticmethod
    def do_nvmlDeviceGetHandleByIndex_v2(index: Any, handle: Any) -> int:  # noqa: N802
        handle._obj.value = 100 + index.value
        return 0

    @staticmethod
    def do_nvmlDeviceGetMemoryInfo(handle: Any, memory: Any) -> int:  # noqa: N802
        memory._obj.total, memory._obj.used = 80_000_000_000, handle.value * 1_000_000
        return 0

    @staticmethod
    def do_nvmlSystemGetDriverVersion(text: Any, size: int) -> int:  # noqa: N802
        text.value = b"580.65.06"
        return 0

    @staticmethod
    def do_nvmlDeviceGetName(handle: Any, text: Any, size: int) -> int:  # noqa: N802
        text.value = b"NVIDIA H100 80GB HBM3"
        return 0

    @staticmethod
    def do_nvmlDeviceGetCudaComputeCapability(handle: Any, major: Any, minor: Any) -> int:  # noqa: N802
        major._obj.value, minor._obj.value = 9, 0
        return 0

    @staticmethod
    def do_nvmlDeviceGetMigMode(handle: Any, current: Any, pending: Any) -> int:  # noqa: N802
        current._obj.value = int(handle.value == 101)
        return 0

    @staticmethod
    def do_nvmlDeviceGetUtilizationRates(handle: Any, load: Any) -> int:  # noqa: N802
        load._obj.gpu = 25
        return 0 if handle.value == 100 else 3


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(library: object) -> None:
        def load(name: str) -> object:
            if library is None:
                raise OSError(name)
            return library

        monkeypatch.setattr(ctypes, "CDLL", load)
        gpus.find_driver.cache_clear()

    yield install
    gpus.find_driver.cache_clear()


def test_each_gpu_tells_memory_and_load(nvml: Any) -> None:
    nvml(Nvml())
    assert read_gpus() == [
        Gpu(0, 80_000_000_000, 100_000_000, 0.25),
        Gpu(1, 80_000_000_000, 101_000_000, 0.0),
    ]


@pytest.mark.parametrize(
    "fails",
    [
        "nvmlInit_v2",
        "nvmlDeviceGetCount_v2",
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetMemoryInfo",
    ],
)
def test_a_driver_that_does_not_answer_has_no_gpus(nvml: Any, fails: str) -> None:
    nvml(Nvml(fails=fails))
    assert read_gpus() == []


def test_a_machine_without_a_driver_has_none(nvml: Any) -> None:
    nvml(None)
    assert read_gpus() == []


def test_the_driver_tells_its_version_and_what_each_gpu_is(nvml: Any) -> None:
    nvml(Nvml())
    assert find_driver().version() == "580.65.06"
    name = "NVIDIA H100 80GB HBM3"
    assert read_devices() == [Device(0, name, (9, 0), False), Device(1, name, (9, 0), True)]


def test_a_gpu_that_cannot_be_divided_is_not_divided(nvml: Any) -> None:
    nvml(Nvml(fails="nvmlDeviceGetMigMode"))
    assert [device.mig for device in read_devices()] == [False, False]


def test_a_driver_that_does_not_start_says_with_which_error(nvml: Any) -> None:
    nvml(Nvml(fails="nvmlInit_v2"))
    assert find_driver().status == 999
    assert find_driver().version() == ""
    nvml(None)
    assert find_driver().library is None
