"""What a check says of the GPUs of a machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agent_r1.config import gpu_checks
from agent_r1.config.gpu_checks import check_gpus, describe, dtype_problem, unused_gpus
from agent_r1.runtime.gpu_needs import Finding
from agent_r1.runtime.gpus import Device
from agent_r1.setup.gpu_probe import Probe

TORCH = {"version": "2.13.0+cu130", "cuda": "13.0"}
WORKS = Probe({"torch": TORCH, "cuda": {"gpus": 1}, "triton": {"version": "3.7.1"}})
DRIVER = Finding("driver", "580.65.06")
H100 = Device(0, "NVIDIA H100", (9, 0), False)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Say what a machine has, and which torch is installed on it."""

    def set_up(
        *needs: Finding, torch: str = "2.13.0", vllm: str = "0.32.0", found: Probe = WORKS
    ) -> list[str]:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        versions = {"torch": torch, "vllm": vllm}
        monkeypatch.setattr(gpu_checks, "installed_version", versions.__getitem__)
        monkeypatch.setattr(gpu_checks, "check_gpu_needs", lambda: list(needs))
        monkeypatch.setattr(gpu_checks, "_probe_here", lambda: found)
        return [look.name for look in check_gpus()]

    return set_up


def test_cuda_and_triton_are_tried_where_the_driver_is_right(machine: Any) -> None:
    assert machine(DRIVER, Finding("GPU models", "0: H100")) == ["driver", "GPU models", "CUDA"]
    old = Finding("driver", "535.1 is older than 580, which CUDA 13 needs", "install it")
    assert machine(old) == ["driver"]
    (look,) = check_gpus()
    assert look.problems == ["535.1 is older than 580, which CUDA 13 needs; install it"]


def test_what_will_not_use_a_gpu_is_not_held_up_by_one(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine(DRIVER, torch="2.13.0+cpu") == []
    assert machine(vllm="") == []
    machine(DRIVER)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert list(check_gpus()) == []


@pytest.mark.parametrize(("count", "said"), [(1, "1 GPU:"), (2, "2 GPUs:")])
def test_packages_for_cpus_are_noted_where_there_are_gpus(
    machine: Any, monkeypatch: pytest.MonkeyPatch, count: int, said: str
) -> None:
    monkeypatch.setattr(gpu_checks, "read_devices", lambda: [H100] * count)
    assert machine(DRIVER, torch="2.13.0+cpu", vllm="") == ["packages"]
    (look,) = check_gpus()
    (note,) = look.notes
    expected = f"the packages are for CPUs and this machine has {said} run `make setup-gpu`"
    assert (note.startswith(expected), look.problems) == (True, ())
    assert machine(DRIVER) == ["driver", "CUDA"]
    assert unused_gpus() is None
    machine(DRIVER, torch="2.13.0+cpu", vllm="")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert (list(check_gpus()), unused_gpus()) == ([], None)


def test_packages_for_gpus_need_a_driver(machine: Any) -> None:
    assert machine() == ["driver"]
    (look,) = check_gpus()
    assert look.problems[0].startswith("the packages are those for GPUs, and no driver is there; ")


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, "torch cannot be imported: OSError; run `make setup-gpu`"),
        ({"torch": TORCH}, "CUDA does not start: OSError; see `nvidia-smi`"),
        ({"torch": TORCH, "cuda": {}}, "a kernel of Triton does not run: OSError; see the lines"),
    ],
)
def test_each_stage_that_fails_has_its_remedy(facts: dict[str, Any], expected: str) -> None:
    (problem,) = describe(Probe(facts, "OSError")).problems
    assert problem.startswith(expected)


def test_what_works_is_said_in_one_line() -> None:
    look = describe(WORKS)
    assert look.problems == ()
    assert look.found == "torch 2.13.0+cu130, CUDA 13.0, Triton 3.7.1"


def test_bfloat16_needs_gpus_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    turing = Device(0, "Tesla T4", (7, 5), False)
    monkeypatch.setattr(gpu_checks, "read_devices", lambda: [turing])
    problem = dtype_problem("bfloat16")
    assert problem is not None
    assert problem.endswith('(Tesla T4) are older; set model.dtype = "float32"')
    assert dtype_problem("float32") is None
    monkeypatch.setattr(gpu_checks, "read_devices", lambda: [replace(turing, capability=(8, 0))])
    assert dtype_problem("bfloat16") is None
