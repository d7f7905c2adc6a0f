"""examples/multihop_qa/configs: the paper's setting, complete, valid, and as its table makes it."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from agent_r1.cli.parser import build_parser
from agent_r1.config import checks as config_checks
from agent_r1.config.run import Config, load_config
from agent_r1.learner.prompts import PromptOrder
from agent_r1.learner.reporting.run_folder import RunFolder
from agent_r1.learner.run_spec import RunSpec
from agent_r1_proto.tasks import Task
from tests.support.config_scene import search_of, task_line

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "multihop_qa"
FILES = sorted((EXAMPLE / "configs").glob("*.toml"))

# Written down from the paper's scripts, apart from the table that makes the files: samples per
# prompt, where the KL goes and its estimator, and the critic's learning rate and warm-up.
PAPER = {
    "ppo": (1, "reward", "k1", (1e-5, 5)),
    "grpo": (5, "loss", "k3", None),
    "reinforce_pp": (1, "reward", "k1", None),
    "reinforce_pp_baseline": (5, "loss", "k3", None),
    "rloo": (5, "loss", "k3", None),
}
ADVANTAGES = {
    "ppo": "gae",
    "grpo": "grpo",
    "reinforce_pp": "reinforce_pp",
    "reinforce_pp_baseline": "reinforce_pp_baseline",
    "rloo": "rloo",
}
MODELS = {
    "0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "3b": "Qwen/Qwen2.5-3B-Instruct",
    "7b": "Qwen/Qwen2.5-7B-Instruct",
}


@pytest.fixture(scope="module")
def make_configs() -> Iterator[ModuleType]:
    """The example's script; its short name is gone afterwards."""
    sys.path.insert(0, str(EXAMPLE))
    yield importlib.import_module("make_configs")
    sys.path.remove(str(EXAMPLE))
    del sys.modules["make_configs"]


def name_of(file: Path) -> str:
    return file.stem


def parts_of(file: Path) -> tuple[str, str, int]:
    """Return method, model size and GPUs of a file's name."""
    found = re.fullmatch(r"([a-z_]+)_([\d.]+b)_(\d)gpu(?:_\d+gb)?", file.stem)
    assert found is not None, file.name
    return found[1], found[2], int(found[3])


def load(file: Path, *options: str) -> Config:
    return load_config(file, options, {}).config


each_file = pytest.mark.parametrize("file", FILES, ids=name_of)


def test_every_method_has_its_machines():
    wanted = {
        f"{method}_{machine}"
        for method in PAPER
        for machine in ("3b_4gpu", "3b_8gpu", "1.5b_4gpu", "7b_8gpu")
    }
    for method in ("ppo", "grpo"):
        wanted |= {f"{method}_0.5b_1gpu_24gb", f"{method}_1.5b_1gpu_80gb"}
    assert {file.stem for file in FILES} == wanted
    assert len(FILES) == 24  # 5 methods x 4 + 2 x 2


def test_the_committed_files_are_what_the_table_makes(make_configs: ModuleType):
    assert make_configs.stale_files(EXAMPLE / "configs") == []


def test_a_changed_a_missing_and_a_foreign_file_are_stale(
    make_configs: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert make_configs.main(["--out", str(tmp_path)]) == 0
    assert make_configs.main(["--out", str(tmp_path), "--check"]) == 0
    changed = tmp_path / "grpo_3b_4gpu.toml"
    changed.write_text(changed.read_text() + "# mine\n")
    (tmp_path / "ppo_3b_4gpu.toml").unlink()
    (tmp_path / "own.toml").write_text("# not from the table\n")
    capsys.readouterr()
    assert make_configs.main(["--out", str(tmp_path), "--check"]) == 1
    told = capsys.readouterr().err
    assert re.findall(r"(\w+)\.toml is stale", told) == ["grpo_3b_4gpu", "own", "ppo_3b_4gpu"]
    assert make_configs.main(["--out", str(tmp_path)]) == 0
    assert make_configs.stale_files(tmp_path) == ["own.toml"]  # a user's file is not deleted


@each_file
def test_the_hyperparameters_are_the_papers(file: Path):
    method, size, _ = parts_of(file)
    config = load(file)
    learner, env, evaluation = config.learner, config.env, config.evaluation
    group_size, kl, estimator, critic = PAPER[method]
    assert (learner.algorithm, learner.advantage) == (method, ADVANTAGES[method])
    assert (learner.group_size, learner.groups_per_batch) == (group_size, 128)
    # Mini-batches of 64 prompts: 128 / 64 = 2.
    assert learner.optimizer_steps_per_batch == 2
    assert learner.lr == 1e-6
    assert (learner.kl, learner.kl_coef, learner.kl_estimator) == (kl, 1e-3, estimator)
    assert learner.has_critic == (critic is not None)
    if critic is not None:
        assert (learner.critic_lr, learner.critic_warmup_steps) == critic
    assert (learner.gamma, learner.lam) == (1.0, 1.0)
    assert (learner.clip_low, learner.clip_high, learner.dual_clip) == (0.2, 0.2, 3.0)
    assert (learner.policy_loss, learner.aggregation) == ("ppo", "token_mean")
    assert (learner.loss_mask, learner.advantage_mask) == (True, True)
    assert (learner.temperature, learner.max_staleness) == (1.0, 0)
    assert (learner.epochs, learner.steps) == (1, None)
    assert (env.max_turns, env.max_tokens_per_turn, env.max_tool_response_chars) == (5, 1024, 2048)
    assert (config.reward.rule, search_of(config).top_k) == ("paper", 5)
    assert (evaluation.every, evaluation.temperature) == (10, 0.0)
    assert set(evaluation.sets) == {"hotpotqa", "2wikimultihopqa", "musique"}
    assert (config.model.path, config.model.dtype) == (MODELS[size], "bfloat16")
    # 8192 + 8192; the smallest machine has half.
    assert config.model.max_context == (8192 if size == "0.5b" else 16_384)


@each_file
def test_the_gpus_add_up(file: Path):
    method, _, gpus = parts_of(file)
    config = load(file)
    replicas, ranks = config.placement.num_rollout_servers, config.learner.ranks
    assert config.rollout.tensor_parallel_size == 1
    if gpus == 1:
        assert (replicas, ranks) == (1, 1)
        assert config.rollout.gpu_memory_utilization <= 0.35  # the learner is on the same GPU
        assert config.learner.offload == ("optimizer" if method == "ppo" else "none")
    else:
        # Half of the GPUs sample with 5 trajectories a prompt, a quarter with 1.
        assert replicas == gpus // (2 if PAPER[method][0] == 5 else 4)
        assert replicas + ranks == gpus
        assert config.learner.zero_stage == 3


@each_file
def test_each_file_passes_the_check_of_config_check(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "configs").mkdir()
    copy = Path(shutil.copy(file, tmp_path / "configs"))
    for name in ("hotpotqa", "2wikimultihopqa", "musique"):
        (data / f"{name}_train.jsonl").write_text(task_line(f"{name}-train"))
        (data / f"{name}_eval.jsonl").write_text(task_line(f"{name}-eval"))
    passage = {"id": "1", "title": "There", "text": "It is there."}
    (data / "corpus.jsonl").write_text(json.dumps(passage) + "\n")
    config = load(copy)
    assert config_checks.problems(config, "train") == []
    (data / "corpus.jsonl").unlink()
    (problem,) = config_checks.problems(config, "train")
    assert str(data / "corpus.jsonl") in problem


@each_file
def test_the_comments_tell_what_a_reader_must_know(file: Path):
    _, size, _ = parts_of(file)
    text = file.read_text()
    assert "not run on GPUs" in text
    assert ("research use only" in text) == (size == "3b")
    assert ("(Apache-2.0)" in text) == (size != "3b")
    # What the memory comments add up to fits on the GPU: "N GB of M." or ": N GB of M."
    total, limit = re.findall(r"(\d+\.\d) GB of (\d+)\.$", text, re.MULTILINE)[-1]
    assert float(total) < 0.95 * float(limit)


@pytest.mark.parametrize(
    ("method", "trajectories"),
    [
        # 51,200 prompts of one epoch x samples per prompt, by hand.
        ("ppo", 51_200),
        ("grpo", 256_000),
        ("reinforce_pp", 51_200),
        ("reinforce_pp_baseline", 256_000),
        ("rloo", 256_000),
    ],
)
def test_one_epoch_is_400_steps(method: str, trajectories: int, tmp_path: Path):
    config = load(EXAMPLE / "configs" / f"{method}_3b_4gpu.toml")
    tasks = [Task(id=str(number), prompt="?") for number in range(2 * 25_600)]
    spec = RunSpec(
        run=config.run,
        model=config.model,
        resolved_config={},
        redis=config.redis,
        learner=config.learner,
        evaluation=config.evaluation,
        prompts=PromptOrder(tasks, config.run.seed),
        eval_sets={},
        folder=RunFolder(tmp_path),
        resume=False,
    )
    assert spec.total_steps == 400  # 51,200 / 128
    assert spec.total_steps * spec.samples_per_batch == trajectories


@pytest.mark.parametrize(
    ("method", "masks"),
    [("ppo", (True, False)), ("ppo", (False, False)), ("grpo", (False, False))],
)
def test_the_ablations_of_the_masks_are_two_switches(method: str, masks: tuple[bool, bool]):
    loss_mask, advantage_mask = masks
    environ = {
        "AGENT_R1__LEARNER__LOSS_MASK": str(loss_mask).lower(),
        "AGENT_R1__LEARNER__ADVANTAGE_MASK": str(advantage_mask).lower(),
    }
    file = EXAMPLE / "configs" / f"{method}_3b_4gpu.toml"
    learner = load_config(file, (), environ).config.learner
    assert (learner.loss_mask, learner.advantage_mask) == masks


def test_the_paper_on_paper_names_every_kind_of_file():
    text = (EXAMPLE.parents[1] / "docs" / "paper-setting.md").read_text()
    for file in FILES:
        found = re.fullmatch(r"([a-z_]+)_([\d.]+b_.*)", file.stem)
        assert found is not None
        method, machine = found.groups()
        assert f"`{method}`" in text
        assert f"`{machine}`" in text
    for name in re.findall(r"\b(\w+_\d\.?\d?b_\w+\.toml)", text):
        assert (EXAMPLE / "configs" / name).is_file(), name


def test_the_commands_of_the_page_parse_and_name_files_that_exist():
    repository = EXAMPLE.parents[1]
    text = (repository / "docs" / "paper-setting.md").read_text()
    commands: list[list[str]] = []
    variables: dict[str, str] = {}
    for line in "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).splitlines():
        for name, value in variables.items():
            line = line.replace(f"${name}", value)
        if assigned := re.fullmatch(r"([A-Z])=\"?(.*?)\"?", line):
            variables[assigned[1]] = assigned[2]
        elif found := re.search(r"\bagent-r1 ([^&]*)", line):
            commands.append(shlex.split(found[1]))
    # config check, five services, three evaluations and a comparison
    assert len(commands) == 1 + 5 + 3 + 1
    for command in commands:
        arguments = build_parser().parse_args(command)
        if hasattr(arguments, "config"):
            load_config(repository / arguments.config, arguments.options, {})
