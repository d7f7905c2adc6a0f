"""What examples/deep_world compares reinforcement learning with."""

from types import SimpleNamespace

import numpy as np

from agent_r1.learner.algorithms.advantages import AdvantageBatch, AdvantageOptions


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
    found = deep_world.rejection_sampling.accepted_advantages(batch, AdvantageOptions())
    nothing = [0.0] * 4
    assert [list(tokens) for tokens in found.advantages] == [
        nothing,
        [0.0, 1.0, 0.0, 1.0],
        nothing,
        nothing,
    ]
