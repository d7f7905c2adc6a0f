"""What is placed on each GPU and in the memory of each machine, and what is said of the figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent_r1.config.boxes import (
    PROCESS,
    SERVICES,
    Machine,
    gpu_loads,
    memory_loads,
    placed,
    verdict_on_gpus,
)
from agent_r1.config.estimate import ModelSize, Part
from agent_r1.config.run import Config

SIZE = ModelSize(
    weights=1000,
    layers=2,
    hidden=8,
    intermediate=16,
    heads=2,
    queries=8,
    keys=4,
    vocabulary=32,
    tied=True,
)
RANK = [Part("weights", 30.0), Part("activations", 10.0)]


def config(**tables: dict[str, Any]) -> Config:
    model = {"path": "none", "dtype": "bfloat16", "max_context": 512}
    return Config.model_validate({"model": model, "env": {"max_tokens_per_turn": 64}, **tables})


def box(gpus: int, boxes: int = 1) -> Machine:
    return Machine(gpu_bytes=100.0, memory_bytes=None, disk_bytes=None, gpus=gpus, boxes=boxes)


def loads(run: Config, machine: Machine) -> dict[str, float]:
    found = gpu_loads(run, placed(run, machine), RANK, 100.0)
    return {load.name: load.size for load in found}


def test_one_gpu_has_everything():
    run = config(rollout={"gpu_memory_utilization": 0.3})
    assert loads(run, box(1)) == {"GPU 0": 30 + 40}


def test_gpus_with_the_same_are_one_line():
    run = config(
        rollout={"gpu_memory_utilization": 0.3},
        placement={"rollout_replicas": 2},
        engine={"ranks": 3},
    )
    assert loads(run, box(8)) == {"GPUs 0-1": 30, "GPUs 2-4": 40}


def test_processes_are_where_placement_puts_them():
    run = config(
        rollout={"gpu_memory_utilization": 0.25},
        placement={"rollout": [[0], [0], [2]], "learner": [0, 1]},
        engine={"ranks": 2},
    )
    # Two servers and a rank; a rank; a server.
    assert loads(run, box(3)) == {"GPU 0": 25 + 25 + 40, "GPU 1": 40, "GPU 2": 25}
    run = config(
        rollout={"gpu_memory_utilization": 0.25}, placement={"rollout": [[0], [2]], "learner": [1]}
    )
    assert loads(run, box(3)) == {"GPUs 0, 2": 25, "GPU 1": 40}


def test_a_server_on_two_machines_is_refused():
    run = config(
        rollout={"tensor_parallel_size": 2},
        placement={"rollout": [[1, 2]], "learner": [0]},
    )
    with pytest.raises(ValueError, match=r"\[1, 2\], of two machines"):
        placed(run, box(2, boxes=2))


def test_every_machine_has_the_memory_of_its_processes():
    run = config(
        rollout={"tensor_parallel_size": 2, "gpu_memory_utilization": 0.3},
        placement={"rollout": [[0, 1]], "learner": [2, 3]},
        engine={"ranks": 2, "zero_stage": 2, "offload": "optimizer"},
        redis={"maxmemory_mb": 100},
    )
    machine = box(2, boxes=2)
    first, second = memory_loads(run, placed(run, machine), machine, SIZE, None)
    # A server of two processes, the services and 100 MiB of Redis.
    assert first.size == 2 * PROCESS + SERVICES + 100 * 2**20
    # Two ranks, each with 8 + 4 + 4 + 2 bytes for 500 weights, the blocks of 2000, 2000 and 1000
    # rounded up by 48, 48 and 24, and the 2000 of a model; and two versions of 2000 to push.
    offloaded = 2 * (500 * 18 + 48 + 48 + 24)
    assert second.size == offloaded + 2 * 2000 + 2 * 2000 + 2 * PROCESS
    assert (first.name, second.name) == ("memory of machine 0", "memory of machine 1")


def write_report(path: Path, errors: dict[str, float], outcome: str = "passed") -> Path:
    memory = [{"what": what, "error": error} for what, error in errors.items()]
    report = {"outcome": outcome, "machine": {"device": "NVIDIA X"}, "memory": memory}
    path.write_text(json.dumps(report))
    return path


def test_a_report_within_a_fifth_names_the_gpu_and_the_largest_error(tmp_path: Path):
    report = write_report(tmp_path / "report.json", {"learner": -0.19, "rollout": 0.02})
    said = verdict_on_gpus(report)
    assert "unverified" not in said
    assert "learner, -19% of what NVIDIA X took" in said


@pytest.mark.parametrize("error", [0.21, -0.21])
def test_a_report_that_is_further_off_verifies_nothing(tmp_path: Path, error: float):
    said = verdict_on_gpus(write_report(tmp_path / "report.json", {"learner": error}))
    assert "unverified: one is off by more than 20%" in said


@pytest.mark.parametrize(("errors", "outcome"), [({}, "passed"), ({"learner": 0.1}, "failed")])
def test_a_run_that_measured_nothing_verifies_nothing(
    tmp_path: Path, errors: dict[str, float], outcome: str
):
    said = verdict_on_gpus(write_report(tmp_path / "report.json", errors, outcome))
    assert "unverified: no report compares them" in said


def test_without_a_report_figures_are_unverified(tmp_path: Path):
    assert "unverified" in verdict_on_gpus(tmp_path / "none.json")
