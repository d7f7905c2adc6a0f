"""Gradients of one batch: their top direction, and estimators compared."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from agent_r1.learner.config import LearnerConfig
from agent_r1.learner.diagnosis import (
    StateMeans,
    gradient_figures,
    sum_of_gradients,
    top_share,
    trajectory_gradients,
)
from agent_r1.learner.engine.model import PolicyModule
from agent_r1.learner.groups import Group, Slot
from agent_r1.learner.train_samples import build_samples
from agent_r1.runtime.config import ModelConfig
from agent_r1_proto.rewards import ScoredTrajectory
from agent_r1_proto.trajectory import Turn
from tests.support.builders import rollout_task, scored


def test_orthogonal_gradients_share_their_energy_by_squared_length():
    # Squared lengths 9 and 16: the top direction has 16 of 25.
    assert top_share(torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]])) == pytest.approx(0.64)


def test_parallel_and_opposite_gradients_have_one_direction():
    assert top_share(torch.tensor([[1.0, 2.0], [-2.0, -4.0]])) == pytest.approx(1.0)


def test_a_batch_without_a_gradient_is_no_sign_of_variety():
    assert top_share(torch.zeros(2, 3)) == 1.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("model")
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def with_turns(group: int, sample: int, total: float, keys: list[str]) -> ScoredTrajectory:
    """A trajectory of two prompt tokens and one-token turns in the named states."""
    turns = [
        Turn(start=2 + k, end=3 + k, text="", finish_reason="stop", state_key=key)
        for k, key in enumerate(keys)
    ]
    tokens = np.array([1, 2, *(3 + (sample + k) % 12 for k in range(len(keys)))], np.int32)
    rollout = rollout_task(group_id=group, sample_index=sample)
    size = {"num_sampled": len(keys), "token_ids": tokens, "turns": turns}
    return scored(rollout, total=total, **size)


def a_group(index: int, *members: ScoredTrajectory) -> Group:
    slots = [Slot(0.0, final=True, result=member) for member in members]
    return Group(index, members[0].trajectory.rollout.task, 0, slots)


def test_a_state_is_worth_the_mean_reward_of_those_who_were_in_it():
    group = a_group(
        0,
        with_turns(0, 0, 1.0, ["", "seen", "end"]),
        with_turns(0, 1, 0.0, ["", "seen", ""]),
        with_turns(0, 2, 0.0, ["", "other", ""]),
    )
    samples = build_samples([group], LearnerConfig()).samples
    values = StateMeans([group]).token_values(samples)
    # Start: (1 + 0 + 0) / 3. "seen": (1 + 0) / 2. A state of one trajectory, or without a name,
    # is worth what the state before it was.
    assert values[0].tolist() == pytest.approx([0, 0, 1 / 3, 1 / 2, 1 / 2])
    assert values[1].tolist() == pytest.approx([0, 0, 1 / 3, 1 / 2, 1 / 2])
    assert values[2].tolist() == pytest.approx([0, 0, 1 / 3, 1 / 3, 1 / 3])


def test_gradients_of_trajectories_add_up_to_that_of_the_batch(model_dir):
    policy = PolicyModule(Qwen2ForCausalLM.from_pretrained(model_dir), 64)
    group = a_group(0, with_turns(0, 0, 1.0, ["", "a"]), with_turns(0, 1, 0.0, ["", "b"]))
    samples = build_samples([group], LearnerConfig()).samples
    rows = trajectory_gradients(policy, samples)
    assert rows.abs().max() > 0
    torch.testing.assert_close(rows.sum(0), sum_of_gradients(policy, samples))
    # Twice the advantage is twice the gradient.
    double = replace(samples[0], advantages=2 * samples[0].advantages)
    torch.testing.assert_close(2 * rows[0], sum_of_gradients(policy, [double]))


def cosines(model_dir: Any, keys: list[str], lam: float) -> list[float]:
    """Of two batches of two groups, each of four trajectories in pairs of the named states."""
    config = LearnerConfig(groups_per_batch=2, group_size=4, normalize_std=False)
    table = ModelConfig(path=str(model_dir), dtype="float32", max_context=32)
    groups = [
        a_group(
            i,
            *(
                with_turns(i, j, total, ["", key, ""])
                for j, total in enumerate((1.0, 1.0, 1.0, 0.0))
            ),
        )
        for i, key in enumerate(keys)
    ]
    return [figures.cosine for figures in gradient_figures(groups, config, table, lam, 1)]


def test_without_states_and_without_discount_turns_are_credited_like_trajectories(model_dir):
    assert cosines(model_dir, ["", "", "", ""], 1.0) == pytest.approx([1.0, 1.0], abs=1e-4)


def test_an_estimator_that_credits_other_turns_has_another_gradient(model_dir):
    # With lambda = 0 only the turn after the last known state is credited.
    assert max(cosines(model_dir, ["a", "a", "a", "a"], 0.0)) < 0.99


def test_gradients_that_do_not_fit_are_refused(model_dir):
    config = LearnerConfig(groups_per_batch=1_000_000, group_size=8)
    table = ModelConfig(path=str(model_dir), dtype="float32", max_context=32)
    with pytest.raises(ValueError, match=r"lower learner\.groups_per_batch"):
        gradient_figures([], config, table, 0.0, 1)
