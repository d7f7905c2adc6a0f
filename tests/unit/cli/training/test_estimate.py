"""`agent-r1 check` and the sums of `agent-r1 train --dry-run`."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agent_r1.cli.main import main
from agent_r1.cli.parser import build_parser
from agent_r1.cli.training import estimate
from agent_r1.cli.training.dry_run import (
    Measured,
    Plan,
    disk,
    dry_run,
    hours,
    plan_of,
    prediction,
    shortened,
)
from agent_r1.cli.training.estimate import (
    LARGEST_ERROR,
    find_machine,
    sum_up,
    verdict,
    with_reserve,
)
from agent_r1.cli.training.remedies import changed, make_fit, tried_keys
from agent_r1.config import gpu_checks
from agent_r1.config.boxes import Machine
from agent_r1.config.estimate import ModelSize, learner_parts, total
from agent_r1.config.run import Config, load_config
from agent_r1.runtime.exit_status import EXIT_FAILED, EXIT_INTERRUPTED
from agent_r1.runtime.gpus import Device
from tests.support.config_scene import load_nothing, write_scene
from tests.support.public_models import write_shape

SIZE = ModelSize(
    weights=50_000_000,
    layers=8,
    hidden=512,
    intermediate=1408,
    heads=8,
    queries=512,
    keys=128,
    vocabulary=8000,
    tied=False,
)
FIGURES = Path(__file__).resolve().parents[4] / "docs" / "results"
LARGE = Machine(gpu_bytes=None, memory_bytes=1e12, disk_bytes=1e12)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    options = ["engine.max_tokens_per_microbatch=16384", "learner.groups_per_batch=64"]
    return load_config(write_scene(tmp_path / "example"), options, {}).config


def judge(words: list[str]) -> int:
    """Print what a run takes, as `agent-r1 check` does; return 1 if it does not fit."""
    arguments = build_parser().parse_args(words)
    config = load_config(arguments.config, arguments.options, {}).config
    box = {name: getattr(arguments, name) for name in ("gpus", "boxes", "memory_gb")}
    machine = find_machine(config, arguments.gpu_gb, **box)
    lines, problems = estimate.estimate(config, machine)
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if problems else 0


def test_a_run_that_fits_is_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = write_scene(tmp_path / "example")
    assert judge(["check", str(file), "--set", "engine.device=cpu"]) == 0
    printed = capsys.readouterr().out
    assert "model: 0.7M weights, " in printed
    for title in (
        "learner, 1 rank on the CPU",
        "rollout, 1 server on",
        "disk",
        "memory and disk: enough",
    ):
        assert title in printed


@pytest.mark.parametrize("option", ["--gpus", "--boxes"])
def test_gpus_that_are_counted_must_be_there(
    option: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(estimate, "usable_gpus", lambda: 0)
    file = write_scene(tmp_path / "example")
    assert main(["check", str(file), option, "4"]) == 2
    said = f"{option} (4) counts GPUs, and this machine has none"
    assert said in capsys.readouterr().err


def test_a_broken_configuration_of_the_model_is_said_in_one_line(tmp_path: Path):
    file = write_scene(tmp_path / "example")
    broken = file.parent / "model" / "config.json"
    broken.unlink()  # a link to the committed model's
    for text in ('{"model_type": ', "null", "[" * 5000):
        broken.write_text(text)
        with pytest.raises(ValueError, match=f"{broken} is no JSON") as caught:
            judge(["check", str(file)])
        assert len(str(caught.value).splitlines()) == 1


def test_figures_for_gpus_say_that_they_are_unverified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = write_scene(tmp_path / "example")
    assert judge(["check", str(file), "--gpu-gb", "80"]) == 0
    assert "figures for GPUs are unverified" in capsys.readouterr().out


def test_gpus_that_the_packages_leave_unused_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    file = write_scene(tmp_path / "example")
    h100 = Device(0, "H100", (9, 0), False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu_checks, "read_devices", lambda: [h100, h100])
    monkeypatch.setattr(gpu_checks, "installed_version", lambda name: "2.13.0+cpu")
    load_nothing(monkeypatch)
    said = "the packages are for CPUs and this machine has 2 GPUs: run `make setup-gpu`"
    main(["check", str(file)])
    assert said in capsys.readouterr().out
    main(["check", str(file), "--gpu-gb", "80"])  # of another machine
    assert said not in capsys.readouterr().out


def test_what_does_not_fit_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = write_scene(tmp_path / "example")
    assert judge(["check", str(file), "--gpu-gb", "1"]) == 1
    printed = capsys.readouterr().out
    assert "!! GPU 0: " in printed
    assert "are placed on 1.00 GB (rollout server (0.85 of it) 850.00 MB + learner rank" in printed
    assert "no key that is tried makes it fit with 20% to spare (tried: " in printed
    assert "--set" not in printed


def test_a_box_has_gpus_and_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = write_scene(tmp_path / "example")
    box = ["--gpu-gb", "24", "--gpus", "2", "--boxes", "2", "--memory-gb", "9"]
    assert judge(["check", str(file), *box]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition("  ")[0] for line in printed if line.startswith("memory of")] == [
        "memory of machine 0",
        "memory of machine 1",
    ]
    # The learner has the GPU after the server's; nothing else is said of GPUs 2 and 3.
    assert [line.partition("  ")[0] for line in printed if line.startswith("GPU")] == [
        "GPU 0",
        "GPU 1",
    ]
    # Two processes with a GPU take 4 GB each, the services 4, and Redis 0.5.
    (problem,) = [line for line in printed if line.startswith("!! ")]
    assert problem.startswith("!! memory of machine 0: 12.5")


def test_proposed_keys_leave_some_to_spare():
    gpu = Machine(gpu_bytes=80e9, memory_bytes=100e9, disk_bytes=None)
    spared = with_reserve(gpu)
    assert (spared.gpu_bytes, spared.memory_bytes) == pytest.approx((64e9, 80e9))
    assert with_reserve(LARGE).gpu_bytes is None


@pytest.fixture
def run_3b(tmp_path: Path) -> list[str]:
    """Words of `agent-r1 check` of a run with a model of 3B."""
    file = write_scene(tmp_path / "example")
    (tmp_path / "example" / "model" / "config.json").unlink()
    write_shape("Qwen/Qwen2.5-3B-Instruct", tmp_path / "example" / "model")
    options = ("model.dtype=bfloat16", "engine.activation_checkpointing=true")
    return ["check", str(file), *(word for one in options for word in ("--set", one))]


def test_proposed_keys_fit_a_machine_that_is_a_fifth_smaller(
    run_3b: list[str], capsys: pytest.CaptureFixture[str]
):
    # A rank allocates 71.9 GB. Beside a server with 0.5 of 180 GB it may take 0.45 x 180 = 81, but
    # of 144 GB only 64.8; beside one with 0.4, 0.55 x 144 = 79.2.
    assert judge([*run_3b, "--gpus", "1", "--gpu-gb", "180", "--memory-gb", "100"]) == 1
    printed = capsys.readouterr().out
    _, found, proposed = printed.partition("memory and disk are enough, with 20% to spare, with:\n")
    assert found
    keys = re.findall(r"^  --set (\S+)", proposed, re.M)
    assert keys == ["rollout.gpu_memory_utilization=0.4"]
    sets = [word for key in keys for word in ("--set", key)]
    smaller = ["--gpus", "1", "--gpu-gb", "144", "--memory-gb", "80"]
    assert judge([*run_3b, *sets, *smaller]) == 0


def test_keys_that_leave_less_are_proposed_where_no_others_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    # A rank allocates 24.72 GB, and takes 26.22 with CUDA. Of 40 GB, the engine needs 0.3, 12 GB,
    # for weights and a cache, and leaves 0.95 - 0.3 of them, 26. 12 + 26.22 are 38.22: 4.4 % are
    # left, and not 20.
    file = FIGURES.parents[1] / "examples/multihop_qa/configs/qwen2.5-3b_1x80gb.toml"
    model = write_shape("Qwen/Qwen2.5-3B-Instruct", tmp_path / "model")
    box = ["--gpus", "1", "--gpu-gb", "40", "--memory-gb", "110"]
    assert judge(["check", str(file), "--set", f"model.path={model}", *box]) == 1
    lines = capsys.readouterr().out.splitlines()
    (first,) = (n for n, line in enumerate(lines) if line.startswith("no key that is tried makes"))
    tried, _, by_hand = lines[first].partition("; by hand, change ")
    assert "rollout.gpu_memory_utilization, engine.gpu_memory_share, " in tried
    for key in ("engine.gpu_memory_share", "placement.rollout_replicas", "engine.ranks"):
        assert key in by_hand
    assert lines[first + 1 : first + 4] == [
        "they are enough with 4 % to spare; the sums have been up to 21 % too low, with:",
        "  --set rollout.gpu_memory_utilization=0.3",
        "  --set engine.gpu_memory_share=0.65",
    ]


@pytest.mark.parametrize(
    ("gpu_gb", "said"),
    [
        ("92", "memory and disk: enough"),
        ("80", "memory and disk: enough, with 8 % to spare; the sums have been up to 21 % too low"),
    ],
)
def test_little_to_spare_is_said(
    run_3b: list[str], capsys: pytest.CaptureFixture[str], gpu_gb: str, said: str
):
    # A rank takes 73.39 GB of its GPU: 1 - 73.39 / 92 = 0.202, 1 - 73.39 / 80 = 0.083.
    assert judge([*run_3b, "--gpus", "2", "--gpu-gb", gpu_gb, "--memory-gb", "500"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == said


@pytest.mark.parametrize(
    ("spare", "said"),
    [
        (0.5, "memory and disk: enough"),
        (0.2, "memory and disk: enough"),
        (
            0.19,
            "memory and disk: enough, with 19 % to spare; the sums have been up to 21 % too low",
        ),
        (
            0.055,
            "memory and disk: enough, with 5 % to spare; the sums have been up to 21 % too low",
        ),
        (0.0, "memory and disk: enough, with 0 % to spare; the sums have been up to 21 % too low"),
    ],
)
def test_a_verdict_has_what_is_left_where_that_is_little(spare: float, said: str):
    assert verdict(lambda reserve: reserve <= spare) == said


def test_the_largest_error_is_that_of_the_committed_figures():
    rows = json.loads((FIGURES / "benchmarks" / "estimate.json").read_text())["rows"]
    # deep: 1652.7 MB were measured, 1346.8 estimated, which is 18.5 % less. Measured again, it was
    # 1694.5 MB: 20.5 % less.
    assert max(1 - row["estimated_peak_mb"] / row["peak_mb"] for row in rows) <= LARGEST_ERROR


def test_a_rank_may_not_exceed_the_share_that_the_servers_leave(large: Config):
    # One GPU of 110 GB for both: 33 are the engine's, and the rank allocates 73.7 (60 for weights,
    # gradients and optimizer, 10.2 for activations and logits, 5 % of these in fragments), with
    # CUDA 75.2. That is 108.2 together; but the launcher gives the learner 0.95 - 0.3 = 0.65.
    box = Machine(gpu_bytes=110e9, memory_bytes=200e9, disk_bytes=None)
    (problem,) = sum_up(large, MODEL_3B, None, box).problems
    assert problem.startswith("learner: a rank allocates 73.7")
    assert "(0.65) allows 71.50 GB" in problem
    assert "rollout.gpu_memory_utilization" in problem
    # 0.65 x 114 = 74.1. With a GPU of its own it has no share.
    assert sum_up(large, MODEL_3B, None, replace(box, gpu_bytes=114e9)).problems == []
    assert sum_up(large, MODEL_3B, None, replace(box, gpus=2)).problems == []


def test_too_few_gpus_are_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = write_scene(tmp_path / "example")
    options = ["--set", "placement.rollout_replicas=2", "--set", "engine.ranks=3"]
    assert judge(["check", str(file), "--gpu-gb", "24", "--gpus", "4", *options]) == 1
    assert "!! 2 rollout servers of 1 GPUs" in capsys.readouterr().out


def test_the_key_that_makes_it_fit_is_named_alone(config: Config):
    assert sum_up(config, SIZE, None, LARGE).problems == []
    fewer = changed(config, [("engine", "max_tokens_per_microbatch", 4096)])

    def need(one: Config) -> float:
        found = sum_up(one, SIZE, None, replace(LARGE, memory_bytes=0))
        (problem,) = found.problems
        return float(problem.partition("memory: ")[2].partition(" GB")[0])

    machine = replace(LARGE, memory_bytes=(need(fewer) + 0.1) * 1e9)
    changes = make_fit(config, lambda c: not sum_up(c, SIZE, None, machine).problems, machine)
    assert changes == [("engine", "max_tokens_per_microbatch", 4096)]


MODEL_3B = ModelSize(
    weights=3_000_000_000,
    layers=36,
    hidden=2048,
    intermediate=11_008,
    heads=16,
    queries=2048,
    keys=256,
    vocabulary=151_936,
    tied=True,
)


@pytest.fixture
def large(tmp_path: Path) -> Config:
    """A run in bfloat16 with contexts of 16,384 tokens, whose micro-batches cannot be smaller."""
    options = [
        *("model.dtype=bfloat16", "model.max_context=16384", "learner.groups_per_batch=64"),
        *("engine.activation_checkpointing=true", "rollout.gpu_memory_utilization=0.3"),
    ]
    return load_config(write_scene(tmp_path / "large"), options, {}).config


def proposed(config: Config, machine: Machine) -> list[tuple[str, str, object]] | None:
    def fits(one: Config) -> bool:
        return not sum_up(one, MODEL_3B, None, machine).problems

    return make_fit(config, fits, machine)


def test_where_only_offload_fits_it_is_proposed_alone(large: Config):
    # 18 bytes for each of 3e9 weights are 54 GB, and 24 GB are the engine's: 78, and activations
    # do not go into the 2 GB that are left, whatever the chunk is.
    box = Machine(gpu_bytes=80e9, memory_bytes=200e9, disk_bytes=None)
    assert proposed(large, box) == [
        ("engine", "zero_stage", 2),
        ("engine", "offload", "optimizer"),
    ]


def test_offload_counts_in_the_memory_of_the_machine(large: Config):
    # The optimizer of 3e9 weights is 18 bytes each, 54 GB: it does not go into 50.
    box = Machine(gpu_bytes=80e9, memory_bytes=50e9, disk_bytes=None)
    assert proposed(large, box) is None
    offloaded = changed(large, [("engine", "zero_stage", 2), ("engine", "offload", "optimizer")])
    (problem,) = sum_up(offloaded, MODEL_3B, None, box).problems
    assert problem.startswith("memory of the machine: ")


def test_a_second_gpu_is_used_where_memory_is_short(large: Config):
    box = Machine(gpu_bytes=80e9, memory_bytes=50e9, disk_bytes=None, gpus=3)
    # The server takes GPU 0; one rank of 54 GB and activations fits GPU 1 alone.
    assert sum_up(large, MODEL_3B, None, box).problems == []
    small = replace(box, gpu_bytes=60e9)
    # 18 / 2 ranks are 27 GB each.
    assert proposed(large, small) == [("engine", "zero_stage", 3), ("engine", "ranks", 2)]


def test_an_engine_that_takes_too_much_takes_less(large: Config):
    greedy = changed(
        large,
        [
            ("engine", "zero_stage", 2),
            ("engine", "offload", "optimizer"),
            ("rollout", "gpu_memory_utilization", 0.85),
        ],
    )
    box = Machine(gpu_bytes=80e9, memory_bytes=200e9, disk_bytes=None)
    need = total(learner_parts(greedy, MODEL_3B, None, on_gpu=True)) / 80e9
    assert 0.4 < need < 0.5  # so that half is left, by learner_parts' own tests
    assert proposed(greedy, box) == [("rollout", "gpu_memory_utilization", 0.5)]


def test_a_learner_that_names_its_share_gets_what_the_engines_leave(large: Config):
    # As above, a rank allocates 73.7 GB, of 120 more than 0.6 and less than 0.95 - 0.3 = 0.65.
    box = Machine(gpu_bytes=120e9, memory_bytes=50e9, disk_bytes=None)
    share = ("engine", "gpu_memory_share", 0.65)
    named = changed(large, [("engine", "gpu_memory_share", 0.6)])
    assert proposed(named, box) == [share]
    engine = ("rollout", "gpu_memory_utilization", 0.3)
    named = changed(named, [("rollout", "gpu_memory_utilization", 0.35)])
    assert proposed(named, box) == [engine, share]
    assert {"rollout.gpu_memory_utilization", "engine.gpu_memory_share"} <= {
        *tried_keys(named, box)
    }
    # With GPUs of its own, nothing is left over by others.
    assert "engine.gpu_memory_share" not in tried_keys(named, replace(box, gpus=2))


def test_a_rank_may_not_exceed_its_share(large: Config):
    box = Machine(gpu_bytes=80e9, memory_bytes=200e9, disk_bytes=None, gpus=2)
    limited = changed(large, [("engine", "gpu_memory_share", 0.6)])
    # 54 GB and activations are more than 0.6 x 80 = 48.
    (problem,) = sum_up(limited, MODEL_3B, None, box).problems
    assert problem.startswith("learner: a rank allocates ")
    assert "engine.gpu_memory_share (0.6) allows 48.00 GB" in problem


def test_models_that_the_run_serves_for_rewards_are_counted(config: Config):
    alone = sum_up(config, SIZE, None, LARGE).memory[0].size
    scored = sum_up(config, SIZE, None, LARGE, [MODEL_3B]).memory[0].size
    # 3e9 weights of 4 bytes, and a KV cache of 1 GiB (rollout.kv_cache_gib).
    assert scored - alone == 12e9 + 2**30


def test_adapters_are_a_hint_where_all_weights_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "example"
    file = write_scene(folder)
    (folder / "model" / "config.json").unlink()
    write_shape("Qwen/Qwen2.5-3B-Instruct", folder / "model")
    options = [
        *("model.dtype=bfloat16", "rollout.gpu_memory_utilization=0.3"),
        "engine.activation_checkpointing=true",
    ]
    sets = [word for option in options for word in ("--set", option)]
    box = ["--gpu-gb", "40", "--gpus", "1", "--memory-gb", "30"]
    assert judge(["check", str(file), *sets, *box]) == 1
    assert "or with adapters alone (LoRA): --set model.lora.rank=32" in capsys.readouterr().out


def test_too_small_a_disk_keeps_fewer_checkpoints(config: Config):
    # 50M weights: a checkpoint is 0.8 GB, a version 0.2 GB. 4 and 3 of them are 3.8 GB, 2 and 3
    # are 2.2 GB.
    machine = replace(LARGE, disk_bytes=2.5e9)
    (problem,) = sum_up(config, SIZE, None, machine).problems
    assert problem == "disk: 3.80 GB are needed, and 2.50 GB are free"
    changes = make_fit(config, lambda c: not sum_up(c, SIZE, None, machine).problems, machine)
    assert changes == [("learner", "keep_best", 0), ("learner", "keep_last", 1)]


MEASURED = Measured(
    step_s=3.0, rollout_s=2.0, checkpoint_bytes=100, weights_bytes=50, trajectory_bytes=7
)
PLAN = Plan(steps=1000, evaluations=3, questions=40, samples_per_step=8, checkpoints=4)


def test_time_and_disk_are_those_of_the_steps():
    # 1000 x 3 s; 3 x 40 questions of 2 / 8 s each.
    assert hours(PLAN, MEASURED) == (3000.0, 30.0)
    # 4 x 100 + 50 + 1000 x 7
    assert disk(PLAN, MEASURED) == 7450
    # 4 x 100 + 50 + 5000
    assert disk(replace(PLAN, trajectories_bytes=5000.0), MEASURED) == 5450


def test_the_plan_is_the_whole_runs_and_the_dry_run_two_steps(config: Config, tmp_path: Path):
    assert plan_of(config).steps == 3
    short = shortened(config, tmp_path / "dry")
    assert (short.learner.steps, short.evaluation.before) == (2, False)
    assert short.run.folder() == tmp_path / "dry"
    lines = list(prediction(config, PLAN, MEASURED))
    assert lines[0] == "a step takes 3.00 s, a checkpoint 0.00 MB"
    assert "1000 steps will take about" in lines[1]


@pytest.mark.parametrize(("status", "stays"), [(EXIT_INTERRUPTED, False), (EXIT_FAILED, True)])
def test_a_dry_run_that_stops_keeps_its_folder_for_the_cause_alone(
    config: Config, monkeypatch: pytest.MonkeyPatch, status: int, stays: bool
):
    folders: list[Path] = []

    def run_training(config: Config, *, resume: bool, temporary: bool) -> int:
        assert temporary
        folders.append(config.run.folder())
        folders[0].mkdir()
        (folders[0] / "metrics.jsonl").write_text('{"step": 1}\n')
        return status

    monkeypatch.setattr("agent_r1.launch.local.run_training", run_training)
    assert dry_run(config) == status
    assert folders[0].exists() == stays
    shutil.rmtree(folders[0].parent, ignore_errors=True)


def test_a_dry_run_of_a_resumed_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = write_scene(tmp_path / "example")
    assert main(["train", str(file), "--dry-run", "--resume", str(tmp_path)]) == 2
    assert "--resume" in capsys.readouterr().err
