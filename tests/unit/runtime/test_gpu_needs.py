"""What GPUs need below the packages, and the remedy for each thing that is missing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from agent_r1.runtime import gpu_needs
from agent_r1.runtime.gpu_needs import check_compiler, check_devices, check_driver
from agent_r1.runtime.gpus import Device, Driver

H100 = Device(0, "NVIDIA H100", (9, 0), False)


class Library:
    """Stands in for NVML: a driver of one version."""

    def __init__(self, version: str) -> None:
        self._version = version

    def nvmlSystemGetDriverVersion(self, text: Any, size: int) -> int:  # noqa: N802 - NVML's name
        text.value = self._version.encode()
        return 0


def driver(version: str, status: int = 0) -> Driver:
    library: Any = Library(version)
    return Driver(library, status)


@pytest.mark.parametrize("version", ["580.65.06", "610.1"])
def test_a_driver_for_cuda_13_is_taken(version: str) -> None:
    assert check_driver(driver(version)) == ("driver", version, "")


def test_an_older_driver_is_refused_with_what_to_install() -> None:
    finding = check_driver(driver("535.288.01"))
    assert finding.text == "535.288.01 is older than 580, which CUDA 13 needs"
    assert "apt-get install nvidia-driver-580" in finding.remedy


@pytest.mark.parametrize(
    ("found", "remedy"),
    [
        (driver("580.65.06", status=18), "restart the machine"),
        (Driver(None, 0), "NVIDIA_DRIVER_CAPABILITIES"),
        (driver("?"), "install NVIDIA's driver 580"),
    ],
)
def test_a_driver_that_does_not_answer_is_a_problem(found: Driver, remedy: str) -> None:
    assert remedy in check_driver(found).remedy


def test_gpus_are_listed_with_what_mig_means() -> None:
    a100 = Device(1, "NVIDIA A100", (8, 0), True)
    assert check_devices([H100, a100]).ok
    assert check_devices([H100, a100]).text == (
        "0: NVIDIA H100 (sm_90), 1: NVIDIA A100 (sm_80), MIG: a process sees one instance"
    )


def test_gpus_without_kernels_and_none_at_all_are_refused() -> None:
    turing, volta = Device(0, "Tesla T4", (7, 5), False), Device(1, "Tesla V100", (7, 0), False)
    assert check_devices([turing, volta]).ok  # CUDA_VISIBLE_DEVICES may hide the second
    assert check_devices([volta]).remedy.startswith("none is of sm_75 (Turing) or newer")
    assert not check_devices([]).ok


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc and Python.h, as Triton does")
def test_a_module_is_compiled_and_loaded() -> None:
    assert check_compiler() == ("C compiler", shutil.which("gcc"), "")


def test_a_machine_without_a_compiler_is_told_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    finding = check_compiler()
    assert finding.text == "none"
    assert "apt-get install gcc" in finding.remedy


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a script in the place of the compiler."""

    def install(script: str) -> None:
        path = tmp_path / "cc"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CC", str(path))

    return install


def test_missing_headers_are_named_with_their_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc, whose message is read")
    monkeypatch.setattr(gpu_needs, "_include_folder", lambda: str(tmp_path))
    finding = check_compiler()
    assert finding.text == f"Python.h is missing in {tmp_path}"
    assert "apt-get install python3.1" in finding.remedy
    assert "-dev" in finding.remedy


def test_a_compiler_that_fails_says_why(compiler: Any) -> None:
    compiler("echo starting; echo 'cc1: error: unknown target' >&2; exit 1")
    assert check_compiler().text.endswith("compiles nothing: cc1: error: unknown target")


def test_a_module_that_cannot_be_loaded_names_the_folder(compiler: Any) -> None:
    # What it writes is no shared object.
    compiler('for last; do :; done; echo no > "$last"')
    finding = check_compiler()
    assert finding.text.startswith("a compiled module cannot be loaded from ")
    assert "noexec" in finding.remedy


def test_containers_have_too_little_shared_memory_by_default() -> None:
    assert not gpu_needs.check_shared_memory(64 * 2**20).ok
    assert gpu_needs.check_shared_memory(2**30).ok


def all_needs(monkeypatch: pytest.MonkeyPatch, found: Driver, devices: list[Device]) -> list[str]:
    monkeypatch.setattr(gpu_needs, "find_driver", lambda: found)
    monkeypatch.setattr(gpu_needs, "read_devices", lambda: devices)
    return [finding.name for finding in gpu_needs.check_gpu_needs()]


def test_everything_is_looked_at_where_there_is_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    one = ["driver", "GPU models", "C compiler"]
    assert all_needs(monkeypatch, driver("580.1"), [H100]) == one
    assert all_needs(monkeypatch, driver("580.1"), [H100, H100]) == [*one, "shared memory"]
    assert all_needs(monkeypatch, driver("580.1", status=18), []) == ["driver", "C compiler"]


def test_a_machine_without_a_driver_needs_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_needs, "KERNEL_MODULE", tmp_path / "missing")
    assert all_needs(monkeypatch, Driver(None, 0), []) == []
    (tmp_path / "missing").touch()  # a container that was not given the libraries
    assert all_needs(monkeypatch, Driver(None, 0), []) == ["driver", "C compiler"]
