"""examples/multihop_qa/configs: the paper's setting, complete, valid, and fitting its boxes."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from agent_r1.cli.parser import build_parser
from agent_r1.cli.training.estimate import (
    LARGEST_ERROR,
    RESERVE,
    find_machine,
    sum_up,
    with_reserve,
)
from agent_r1.config import checks as config_checks
from agent_r1.config.estimate import ModelSize, read_model_size
from agent_r1.config.run import Config, load_config
from agent_r1.learner.prompts import PromptOrder
from agent_r1.learner.run_spec import RunSpec
from agent_r1.runtime.config import LoraConfig
from agent_r1_proto.tasks import Task
from tests.support.config_scene import search_of, task_line
from tests.support.public_models import SHAPES, WEIGHTS, write_shape

REPOSITORY = Path(__file__).resolve().parents[3]
EXAMPLE = REPOSITORY / "examples" / "multihop_qa"
PAPER_FILE = EXAMPLE / "configs" / "paper.toml"
BOXES = sorted(set((EXAMPLE / "configs").glob("*.toml")) - {PAPER_FILE})
PAGE = (REPOSITORY / "docs" / "paper-setting.md").read_text()

# Written down from the paper's scripts, apart from the files: samples per prompt, where the KL
# goes and its estimator, and the critic's learning rate and warm-up.
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
NAMES = {
    "GRPO": "grpo",
    "RLOO": "rloo",
    "REINFORCE++Baseline": "reinforce_pp_baseline",
    "REINFORCE++": "reinforce_pp",
    "PPO": "ppo",
}


def settings(text: str) -> list[str]:
    """Return what the `--set` options of a text set."""
    return re.findall(r"--set ([\w.]+=[\w.-]+)", text)


def methods() -> dict[str, list[str]]:
    """Return the options of each method, as the head of paper.toml has them."""
    head = PAPER_FILE.read_text().partition("\n[")[0]
    found = re.split(r"^#   (\S+)(?= {2,})", head, flags=re.MULTILINE)[1:]
    return {NAMES[name]: settings(text) for name, text in zip(found[::2], found[1::2], strict=True)}


METHODS = methods()


def options(file: Path, method: str) -> list[str]:
    """Return the options of a method on a box, with those that the file says PPO needs."""
    more = re.search(r"PPO needs as well: (.*)", file.read_text())
    return METHODS[method] + (settings(more[1]) if more and method == "ppo" else [])


def load(file: Path, options: Sequence[str] = ()) -> Config:
    return load_config(file, options, {}).config


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], ModelSize]:
    """Sizes of public models, by name and whether adapters alone are trained."""
    folder, lora = tmp_path_factory.mktemp("models"), LoraConfig(rank=32)
    return {
        (name, adapted): read_model_size(
            write_shape(name, folder / name), lora if adapted else None
        )
        for name in SHAPES
        for adapted in (False, True)
    }


def problems(
    file: Path,
    options: Sequence[str],
    sizes: dict[tuple[str, bool], ModelSize],
    reserve: float = 0.0,
) -> list[str]:
    """Return what does not fit the box that the head of a file names, less a share of it."""
    text = file.read_text().partition("\nextends")[0].replace("\n#", " ")
    command = re.search(r"agent-r1 (check .*?GB|check [^A-Z]*)(?= [A-Z])", text)
    assert command is not None, file
    arguments = build_parser().parse_args(shlex.split(command[1]))
    assert REPOSITORY / arguments.config == file
    config = load(file, options)
    policy = sizes[config.model.path, config.model.lora is not None]
    critic = sizes[config.model.path, False] if config.learner.has_critic else None
    machine = find_machine(
        config,
        arguments.gpu_gb,
        gpus=arguments.gpus,
        boxes=arguments.boxes,
        memory_gb=arguments.memory_gb,
    )
    assert machine.memory_bytes is not None
    return sum_up(config, policy, critic, with_reserve(machine, reserve)).problems


each_box = pytest.mark.parametrize("file", BOXES, ids=lambda file: file.stem)
each_method = pytest.mark.parametrize("method", PAPER)


def test_the_shapes_of_public_models_give_their_weights(
    sizes: dict[tuple[str, bool], ModelSize],
):
    assert {name: sizes[name, False].weights for name in SHAPES} == WEIGHTS


def test_there_is_a_file_for_each_model_and_box():
    assert [file.stem for file in BOXES] == [
        "qwen2.5-0.5b_1x24gb",
        "qwen2.5-1.5b_1x80gb",
        "qwen2.5-32b_16x80gb",
        "qwen2.5-3b_1x80gb",
        "qwen2.5-3b_4x40gb",
        "qwen2.5-3b_4x80gb",
        "qwen2.5-7b_8x80gb",
        "qwen3-4b_1x80gb",
    ]


@each_box
@each_method
def test_every_method_fits_its_box(
    file: Path, method: str, sizes: dict[tuple[str, bool], ModelSize]
):
    assert problems(file, options(file, method), sizes) == []


@each_box
def test_the_head_and_the_page_say_how_much_is_left(
    file: Path, sizes: dict[tuple[str, bool], ModelSize]
):
    head = file.read_text().partition("\nextends")[0].replace("\n#", "")
    ppo = options(file, "ppo")
    for method in set(PAPER) - {"ppo"}:
        assert problems(file, options(file, method), sizes, RESERVE) == []
    if not problems(file, ppo, sizes, RESERVE):
        assert "fits and leaves 20 % or more" in head
        return
    (left,) = re.findall(r"PPO leaves (\d+) %", head)
    assert problems(file, ppo, sizes, int(left) / 100) == []
    (first, *_) = problems(file, ppo, sizes, (int(left) + 1) / 100)
    assert first.startswith("memory of the machine") == ("of the machine's memory" in head)
    assert f"the sums have been up to {100 * LARGEST_ERROR:.0f} % too low" in head
    assert re.search(rf"`{file.stem}`(?: leaves)?\s{left} %", PAGE)
    (remedy,) = re.findall(r"If memory runs out, first: (.*?)(?:  |$| All| Learner| Roll)", head)
    if keys := settings(remedy):
        assert problems(file, [*ppo, *keys], sizes, (int(left) + 1) / 100) == []
    else:
        assert remedy == "a method without a critic"


@each_box
def test_without_what_makes_it_fit_it_does_not(
    file: Path, sizes: dict[tuple[str, bool], ModelSize]
):
    # PPO without offload, or with the GPUs of the other methods, is said to be too large.
    smaller = [*METHODS["ppo"], "engine.offload=none"]
    assert any("GPU" in problem for problem in problems(file, smaller, sizes))


@each_box
def test_what_a_head_says_of_methods_is_so(file: Path, sizes: dict[tuple[str, bool], ModelSize]):
    head = file.read_text().partition("\nextends")[0].replace("\n#", "")
    claims = re.findall(CLAIM, head)
    # Nothing fits, and no keys are named, but by one of the sentences that are looked at.
    assert len(re.findall(r"\bfits?\b", head)) == 1 + len(claims)
    known = [keys for _, _, _, keys in claims] + re.findall(
        r"PPO needs as well: (.*?) +Every", head
    )
    known += re.findall(r"If memory runs out, first: ((?:--set \S+ ?)*)", head)
    assert head.count("--set") == sum(keys.count("--set") for keys in known)
    assert re.search(r"Every method (then )?fits", head)
    for without, left, warning, keys in claims:
        for method in PAPER:
            chosen = [*options(file, method), *settings(keys)]
            assert (problems(file, chosen, sizes) == []) == (without == "" or method != "ppo")
            if method == "ppo" and without:
                continue
            assert problems(file, chosen, sizes, int(left) / 100) == []
            if warning:
                assert problems(file, chosen, sizes, (int(left) + 1) / 100) != []
        assert bool(warning) == (int(left) < 100 * RESERVE)
        assert "engine.offload=none" in keys
        if warning:
            assert re.search(rf"`{file.stem}`\s+leaves\s+{left} %", PAGE)


CLAIM = re.compile(
    r"(?:Every method|All (but PPO)) fits? [^.:]*too[^.:]*\. They leave (\d+) %(?: or more)? then"
    rf"(, and the sums have been up to {100 * LARGEST_ERROR:.0f} % too low)?:"
    r"\s+((?:--set \S+ ?)+)"
)
"""Who fits with other keys too, what they leave, whether that is little, and the keys."""


@each_box
def test_the_name_the_head_and_the_run_say_one_box(file: Path):
    model, count, size = re.fullmatch(r"(.+)_(\d+)x(\d+)gb", file.stem).groups()  # pyright: ignore[reportOptionalMemberAccess]
    text, config = file.read_text(), load(file)
    boxes, gpus = (int(n) for n in re.findall(r"--(?:boxes|gpus) (\d+)", "--boxes 1 " + text)[-2:])
    assert boxes * gpus == int(count)
    assert f"--gpu-gb {size} " in text
    assert model in config.model.path.lower()
    assert config.run.id == f"multihop-{file.stem.replace('_', '-')}"
    assert "Not run on GPUs" in text
    assert ("research use only" in text) == ("2.5-3b" in model)


@each_box
@each_method
def test_the_hyperparameters_are_the_papers(file: Path, method: str):
    config = load(file, options(file, method))
    learner, env, evaluation = config.learner, config.env, config.evaluation
    group_size, kl, estimator, critic = PAPER[method]
    assert (learner.algorithm, learner.advantage) == (method, ADVANTAGES[method])
    assert (learner.group_size, learner.groups_per_batch) == (group_size, 128)
    # Mini-batches of 64 prompts: 128 / 64 = 2.
    assert learner.optimizer_steps_per_batch == 2
    assert config.engine.lr == 1e-6
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
    assert config.model.dtype == "bfloat16"
    # 8192 + 8192; the smallest box has half.
    assert config.model.max_context == (8192 if "0.5B" in config.model.path else 16_384)


@each_box
def test_each_file_passes_the_check_of_config_check(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "configs").mkdir()
    shutil.copy(PAPER_FILE, tmp_path / "configs")
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
def test_one_epoch_is_400_steps(method: str, trajectories: int):
    config = load(PAPER_FILE, METHODS[method])
    tasks = [Task(id=str(number), prompt="?") for number in range(2 * 25_600)]
    spec = RunSpec(
        run=config.run,
        model=config.model,
        resolved_config={},
        redis=config.redis,
        learner=config.learner,
        engine=config.engine,
        evaluation=config.evaluation,
        prompts=PromptOrder(tasks, config.run.seed),
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
    learner = load_config(PAPER_FILE, METHODS[method], environ).config.learner
    assert (learner.loss_mask, learner.advantage_mask) == masks


def test_compose_starts_with_a_file_whose_gpu_is_shared(
    sizes: dict[tuple[str, bool], ModelSize],
):
    compose = (REPOSITORY / "docker-compose.yml").read_text()
    (default,) = re.findall(r"\$\{CONFIG:-(.*)\}", compose)
    assert f"#CONFIG={default}\n" in (REPOSITORY / ".env.example").read_text()
    # Learner and rollout server have GPU 0 by default.
    assert 'ROLLOUT_GPUS: "${ROLLOUT_GPUS:-0}"' in compose
    assert 'CUDA_VISIBLE_DEVICES: "${LEARNER_GPUS:-0}"' in compose
    file = REPOSITORY / default
    assert file in BOXES
    config = load(file, options(file, "ppo"))
    assert (config.placement.num_rollout_servers, config.engine.ranks) == (1, 1)
    assert problems(file, options(file, "ppo"), sizes) == []
    for told in (compose, (REPOSITORY / ".env.example").read_text()):
        (box,) = re.findall(
            r"one GPU of (\d+) GB or more.*, and (\d+) GB of memory", told, re.DOTALL
        )
        assert f"--gpu-gb {box[0]} --memory-gb {box[1]}" in file.read_text()


def test_the_page_has_the_memory_of_every_box(sizes: dict[tuple[str, bool], ModelSize]):
    rows = dict(re.findall(r"^\| `([\w.-]+x\d+gb)` \| (.*) \|$", PAGE, re.MULTILINE))
    assert list(rows) == sorted(rows, key=list(rows).index)
    assert set(rows) == {file.stem for file in BOXES}
    for file in BOXES:
        assert rows[file.stem].split(" | ")[1:] == [
            *row_of(file, "grpo", sizes),
            *row_of(file, "ppo", sizes),
        ]


def row_of(file: Path, method: str, sizes: dict[tuple[str, bool], ModelSize]) -> list[str]:
    """Return two cells of the page: what is on the GPUs, and in the memory of a machine."""
    config = load(file, options(file, method))
    gpus, gpu_gb = (int(n) for n in re.findall(r"--gpus (\d+) --gpu-gb (\d+)", file.read_text())[0])
    boxes = 2 if "--boxes 2" in file.read_text() else 1
    policy = sizes[config.model.path, False]
    critic = policy if config.learner.has_critic else None
    machine = find_machine(config, gpu_gb, gpus=gpus, boxes=boxes)
    found = sum_up(config, policy, critic, machine)
    loads = [f"{one.name}: {one.size / 1e9:.0f} GB" for one in found.gpus]
    return [", ".join(loads), f"{max(one.size for one in found.memory) / 1e9:,.0f} GB"]


def test_the_commands_of_the_page_parse_and_name_files_that_exist():
    commands: list[list[str]] = []
    variables: dict[str, str] = {}
    for line in "\n".join(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)).splitlines():
        for name, value in variables.items():
            line = line.replace(f"${name}", value)
        if assigned := re.fullmatch(r"([A-Z])=\"?(.*?)\"?", line):
            variables[assigned[1]] = assigned[2]
        elif found := re.search(r"\bagent-r1 ([^&]*)", line):
            commands.append(shlex.split(found[1]))
    # two checks, five services, three evaluations and a comparison
    assert len(commands) == 2 + 5 + 3 + 1
    for command in commands:
        arguments = build_parser().parse_args(command)
        if hasattr(arguments, "config"):
            load_config(REPOSITORY / arguments.config, arguments.options, {})


def test_the_methods_of_the_page_are_those_of_the_file():
    rows = re.findall(
        r"^\| ([A-Z+a-z ]+) \| (?:\.\d+ \| ){4}`(--set.*?|as it stands)` \|$", PAGE, re.M
    )
    names = NAMES | {"REINFORCE++ with a baseline": "reinforce_pp_baseline"}
    assert {names[name]: settings(text) for name, text in rows} == METHODS
