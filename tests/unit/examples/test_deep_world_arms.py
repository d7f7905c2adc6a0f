"""What examples/deep_world compares reinforcement learning with."""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agent_r1.config.run import load_config
from agent_r1.learner.algorithms.advantages import AdvantageBatch
from agent_r1.runtime.files.tasks import read_task_file
from agent_r1_proto.tasks import Task


def answer_of(task: Task) -> str:
    payload: Any = task.payload
    return payload["answers"][0]


def test_rejection_sampling_trains_on_right_trajectories_only_and_on_no_tool_text(
    deep_world: SimpleNamespace,
):
    # Two groups of two: of the first one trajectory is right, of the second none.
    sampled = np.array([False, True, False, True])
    right, wrong = np.array([0.0, 0.0, 0.0, 1.0]), np.zeros(4)
    batch = AdvantageBatch(
        group_ids=[0, 0, 1, 1],
        token_rewards=[wrong, right, wrong, wrong],
        credit_masks=[sampled] * 4,
    )
    found = deep_world.rejection_sampling.AcceptedAdvantages()(batch)
    nothing = [0.0] * 4
    assert [list(tokens) for tokens in found.advantages] == [
        nothing,
        [0.0, 1.0, 0.0, 1.0],
        nothing,
        nothing,
    ]


def test_right_runs_answer_every_training_question(
    deep_world: SimpleNamespace, deep_world_files: Path
):
    tasks = read_task_file(deep_world_files / "train.jsonl")[:40]
    look_up = deep_world.generate.catalogue(deep_world_files)
    runs = deep_world.right_runs.right_runs(tasks, look_up, seed=0)
    answers = {str(task.prompt): answer_of(task) for task in tasks}
    assert {run[0]["content"] for run in runs} == set(answers)
    for question, *turns in runs:
        assert turns[-1]["content"].endswith(f"<answer> {answers[question['content']]}</answer>")
        assert {turn["role"] for turn in turns} == {"assistant", "tool"}
    replies = [turn["content"] for run in runs for turn in run if turn["role"] == "tool"]
    # About 15 % of some hundred calls; a run goes on after them.
    assert 0 < replies.count(deep_world.scripted.UNAVAILABLE) < len(replies) / 3
    assert runs == deep_world.right_runs.right_runs(tasks, look_up, seed=0)
    assert runs != deep_world.right_runs.right_runs(tasks, look_up, seed=1)


def test_the_gain_by_a_learned_reward_is_a_share_of_that_by_labels(
    deep_world: SimpleNamespace, tmp_path: Path
):
    sets = ("in_domain", "longer", "compositions", "wording")

    def write(name: str, rights: Sequence[int]) -> None:
        scores = {
            one: [1.0] * right + [0.0] * (4 - right)
            for one, right in zip(sets, rights, strict=True)
        }
        (tmp_path / f"{name}.json").write_text(json.dumps({"scores": scores}))

    write("methods_base_tool_call", (1, 1, 1, 1))
    for seed in range(5):
        write(f"true_labels_seed{seed}", (3, 3, 3, 3))
        write(f"learned_reward_kl_seed{seed}", (3, 3, 3, 1 if seed == 2 else 3))
    shares = deep_world.unlabelled.gain_shares(tmp_path)
    assert shares == pytest.approx({0: 1.0, 1: 1.0, 2: 0.75, 3: 1.0, 4: 1.0})


def test_the_share_of_the_gain_is_as_uncertain_as_the_questions_that_all_runs_share(
    deep_world: SimpleNamespace, tmp_path: Path
):
    def write(name: str, rights: int) -> None:
        scores = [1.0] * rights + [0.0] * (100 - rights)
        cell = {"scores": dict.fromkeys(deep_world.unlabelled.SETS, scores)}
        (tmp_path / f"{name}.json").write_text(json.dumps(cell))

    write("methods_base_tool_call", 0)
    for seed in range(5):
        write(f"true_labels_seed{seed}", 100)
        write(f"learned_reward_kl_seed{seed}", 50)
    # Equal seeds leave the questions: 4 sets of 100, so 1/2 -+ 1.96 * sqrt(1/4 / 400) = 0.049.
    found = deep_world.unlabelled.share_of_the_gain(tmp_path)
    assert found.mean == pytest.approx(0.5)
    assert (found.low, found.high) == pytest.approx((0.451, 0.549), abs=0.004)


def test_learned_and_true_reward_of_a_long_run_are_means_of_the_last_ten_steps(
    deep_world: SimpleNamespace, tmp_path: Path
):
    rewards = [0.0, *[1.0] * 10]
    cell = {"curve": rewards, "components": {"reward_model": [1 - value for value in rewards]}}
    (tmp_path / "learned_reward_long_seed0.json").write_text(json.dumps(cell))
    found = deep_world.unlabelled.curves_of_long_run(tmp_path, "free")
    mean = [0.0, *(1 - 1 / n for n in range(2, 11)), 1.0]
    assert found["true reward, free"] == pytest.approx(mean)
    assert found["learned reward, free"] == pytest.approx([1 - value for value in mean])


def test_runs_that_teach_a_scorer_look_at_no_reported_set():
    folder = Path(__file__).resolve().parents[3] / "examples" / "deep_world"
    text = (folder / "unlabelled.sh").read_text(encoding="utf-8").replace("\\\n", " ")
    (command,) = re.findall(r'agent-r1 train "\$example/run.toml".*', text)
    words = shlex.split(command.replace("$example", str(folder)).replace("$seed", "0"))
    options = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    assert list(load_config(folder / "run.toml", options).config.evaluation.sets) == ["development"]
