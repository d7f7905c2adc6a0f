"""Which GPUs or cores of this machine each process of a run gets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_r1.config.placement import Place, Placement, place
from agent_r1.config.run import Config, ConfigError, load_config
from tests.support.config_scene import write_scene

CORES = sorted(os.sched_getaffinity(0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_scene(tmp_path / "example").parent


def load(folder: Path, *options: str) -> Config:
    return load_config(folder / "run.toml", options, {}).config


def placed(folder: Path, gpus: int, *options: str, trains: bool = True) -> Placement:
    return place(load(folder, *options), num_gpus=gpus, trains=trains)


def gpus_of(found: Placement) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    return [one.gpus for one in found.rollout], found.learner.gpus


@pytest.mark.parametrize(
    ("gpus", "options", "rollout", "learner"),
    [
        # In order: the rollout servers, then the learner's ranks.
        (4, ["placement.rollout_replicas=2", "engine.ranks=2"], [(0,), (1,)], (2, 3)),
        (4, ["rollout.tensor_parallel_size=2", "engine.ranks=1"], [(0, 1)], (2,)),
        # Named ones leave the others to the rest.
        (4, ["placement.learner=[0, 1]", "engine.ranks=2"], [(2,)], (0, 1)),
        (4, ["placement.rollout=[[3], [1]]", "engine.ranks=2"], [(3,), (1,)], (0, 2)),
        # One GPU is everybody's.
        (
            1,
            ["placement.rollout_replicas=2", "rollout.gpu_memory_utilization=0.3"],
            [(0,)] * 2,
            (0,),
        ),
        (2, ["engine.device=cpu", "placement.rollout_replicas=2"], [(0,), (1,)], ()),
    ],
)
def test_gpus_are_given(
    folder: Path, gpus: int, options: list[str], rollout: list[tuple[int, ...]], learner: object
):
    found = placed(folder, gpus, *options)
    assert gpus_of(found) == (rollout, learner)
    assert found.shares_gpus == (gpus == 1)


def test_without_a_learner_its_gpus_are_free(folder: Path):
    options = ["placement.rollout_replicas=2", "engine.ranks=2"]
    assert gpus_of(placed(folder, 2, *options, trains=False)) == ([(0,), (1,)], ())


def test_learner_and_servers_share_gpus_that_both_name(folder: Path):
    options = ["placement.rollout=[[0], [1]]", "placement.learner=[0, 1]", "engine.ranks=2"]
    shares = ["rollout.gpu_memory_utilization=0.35", "engine.gpu_memory_share=0.6"]
    found = placed(folder, 2, *options, *shares)
    assert found.shares_gpus
    assert found.learner_share == 0.6
    # 0.4 + 0.6 leave nothing for two CUDA contexts.
    with pytest.raises(ValueError, match=r"GPU 0 is given 1\.00 times its memory.* most 0\.95"):
        placed(folder, 2, *options, "rollout.gpu_memory_utilization=0.4", shares[1])


@pytest.mark.parametrize(
    ("gpus", "options", "share"),
    [
        (1, ["rollout.gpu_memory_utilization=0.35"], 0.6),
        # Two servers: 0.95 - 2 x 0.3 = 0.35
        (1, ["rollout.gpu_memory_utilization=0.3", "placement.rollout_replicas=2"], 0.35),
        (1, [], 0.1),  # the default, 0.85, is enough for a small model
        (2, [], None),  # a GPU of its own
        (2, ["engine.gpu_memory_share=0.5"], 0.5),
        (1, ["engine.device=cpu"], None),
    ],
)
def test_a_learner_that_shares_a_gpu_takes_what_the_servers_leave(
    folder: Path, gpus: int, options: list[str], share: float | None
):
    assert placed(folder, gpus, *options).learner_share == share


@pytest.mark.parametrize(
    "options",
    [
        ["rollout.gpu_memory_utilization=0.5", "placement.rollout_replicas=2"],
        ["rollout.gpu_memory_utilization=0.92"],  # 0.05, the least a learner gets, is too much
    ],
)
def test_shares_that_leave_nothing_for_the_drivers_own_are_refused(
    folder: Path, options: list[str]
):
    with pytest.raises(ValueError, match=r"lower them to at most 0\.95 together"):
        placed(folder, 1, *options)


def test_a_server_alone_on_its_gpu_may_take_all_of_it(folder: Path):
    options = ["rollout.gpu_memory_utilization=1.0", "engine.ranks=1"]
    assert gpus_of(placed(folder, 2, *options)) == ([(0,)], (1,))


@pytest.mark.parametrize(
    ("gpus", "options", "expected"),
    [
        (2, ["placement.rollout_replicas=2", "engine.ranks=1"], "need 1 GPUs more than the 2 of"),
        (
            2,
            ["placement.rollout=[[2]]"],
            r"placement\.rollout names \[2\], and the GPUs .* \[0, 1\]",
        ),
        (4, ["placement.learner=[0, 1]"], r"must name engine\.ranks \(1\)"),
        (4, ["placement.rollout=[[0, 1]]"], r"gives a server the GPUs \[0, 1\], and .* is 1"),
        (0, ["placement.learner=[4096]"], r"placement\.learner names \[4096\], and the cores"),
    ],
)
def test_what_the_machine_lacks_is_said(folder: Path, gpus: int, options: list[str], expected: str):
    with pytest.raises(ValueError, match=expected):
        placed(folder, gpus, *options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["placement.learner=[1, 1]"], r"\(\[1, 1\]\) names a GPU or core twice"),
        (["placement.rollout=[[0], [1, 1]]"], r"\(\[1, 1\]\) names a GPU or core twice"),
        (["placement.rollout=[[0]]", "placement.rollout_replicas=2"], "leave rollout_replicas out"),
        (["placement.rollout=[[0], [0]]", "rollout.port=8001"], "2 rollout servers"),
    ],
)
def test_contradictions_are_refused(folder: Path, options: list[str], expected: str):
    with pytest.raises(ConfigError, match=expected):
        load(folder, *options)


def test_without_gpus_the_numbers_are_cores(folder: Path):
    found = placed(folder, 0, f"placement.rollout=[[{CORES[0]}], [{CORES[-1]}]]")
    assert found == Placement((Place(cores=(CORES[0],)), Place(cores=(CORES[-1],))))
    assert Place(cores=(0,)).environment({}) == {}


def test_numbers_count_the_gpus_that_are_visible():
    assert Place(gpus=(1, 0)).environment({}) == {"CUDA_VISIBLE_DEVICES": "1,0"}
    outer = {"CUDA_VISIBLE_DEVICES": "4,GPU-5f,6"}
    assert Place(gpus=(1, 2)).environment(outer) == {"CUDA_VISIBLE_DEVICES": "GPU-5f,6"}
