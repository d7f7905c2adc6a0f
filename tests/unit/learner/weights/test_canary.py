"""The canary: which tokens it compares, and its bounds on the mean."""

from __future__ import annotations

import numpy as np
import pytest

from agent_r1.learner.engine.interface import Predictions, TrainSample
from agent_r1.learner.weights.canary import (
    MEAN_DLOGP,
    CanaryBounds,
    CanaryError,
    CanaryPrompt,
    CanaryReading,
    canary_request,
    canary_samples,
    choose_tokens,
    compare,
    judge,
)
from agent_r1_proto.trajectory import Trajectory
from agent_r1_proto.weights import CanaryRequest
from tests.support.builders import trajectory, two_segments


def sample_of_3() -> TrainSample:
    """Return two tokens of a prompt and three that were sampled."""
    return canary_samples([trajectory(prompt_length=2, num_sampled=3)], 1, 64)[0]


def predictions(entropies: list[float], logprob: float = -1.0) -> Predictions:
    return Predictions(
        np.full(len(entropies), logprob, np.float32), np.array(entropies, np.float32)
    )


def prompt(logprobs: list[float], chosen: list[int], num_tokens: int) -> CanaryPrompt:
    return CanaryPrompt(
        list(range(num_tokens)), np.array(chosen, np.int64), np.array(logprobs, np.float32)
    )


def bounds(dtype: str) -> CanaryBounds:
    return CanaryBounds(
        dtype=dtype,  # pyright: ignore[reportArgumentType]
        mean_dlogp=MEAN_DLOGP[dtype],  # pyright: ignore[reportArgumentType]
        fail_factor=3.0,
        warn_factor=2.0,
    )


def test_a_reading_is_mean_and_max_over_the_chosen_tokens_of_all_prompts():
    # |-1.5 + 1| and |-2 + 2| of the first prompt, |-3.25 + 3| of the second: 0.75 / 3.
    prompts = [prompt([-1.0, -2.0], [1, 3], 4), prompt([-3.0], [1], 2)]
    reading = compare(prompts, [-1.5, -2.0, -3.25])
    assert reading == CanaryReading(mean=0.25, max=0.5)


def with_logprobs(number: int, *logprobs: float) -> Trajectory:
    return trajectory(
        num_sampled=len(logprobs),
        token_ids=np.array([10, number, *range(len(logprobs))], np.int32),
        rollout_logprobs=np.array([0, 0, *logprobs], np.float32),
    )


def test_the_trajectories_whose_tokens_were_least_expected_are_looked_at():
    # Means of the sampled tokens: -0.1, -0.6, -(0.1 + 0.1 + 2.8) / 3 = -1, -(0.7 + 0.9) / 2 = -0.8.
    batch = [
        with_logprobs(0, -0.1, -0.1),
        with_logprobs(1, -0.6),
        with_logprobs(2, -0.1, -0.1, -2.8),
        with_logprobs(3, -0.7, -0.9),
    ]
    assert [sample.token_ids[1] for sample in canary_samples(batch, 2, 64)] == [2, 3]
    assert [sample.token_ids[1] for sample in canary_samples(batch, 9, 64)] == [2, 3, 1, 0]


def test_the_tokens_lie_in_one_segment_and_are_scored_at_temperature_1():
    # The first segment has 5 of the 10 tokens.
    given = trajectory(temperature=0.7, **two_segments())
    (chosen,) = canary_samples([given], 4, 64)
    assert chosen.token_ids.tolist() == given.token_ids[:5].tolist()
    assert chosen.loss_mask.tolist() == [False, False, True, True, True]
    assert chosen.temperature == 1.0


def test_a_trajectory_that_fills_the_context_leaves_the_server_room():
    # A server needs one token of the context's 16 for itself.
    given = trajectory(prompt_length=2, num_sampled=14)
    (chosen,) = canary_samples([given], 4, 16)
    assert chosen.num_tokens == 15


def test_the_first_token_is_not_compared_where_it_was_sampled():
    (chosen,) = canary_samples([trajectory(prompt_length=0, num_sampled=3)], 4, 16)
    assert chosen.loss_mask.tolist() == [False, True, True]


def test_a_prompt_that_fills_the_context_leaves_nothing_to_compare():
    assert canary_samples([trajectory(prompt_length=15, num_sampled=1)], 4, 16) == []


def test_the_sampled_tokens_of_highest_entropy_are_chosen_over_all_trajectories():
    samples = [sample_of_3(), sample_of_3(), sample_of_3()]
    # Positions 0 and 1 are no sampled tokens. The three highest are 0.9, 0.8 and 0.6.
    found = choose_tokens(
        samples,
        [
            predictions([0, 5.0, 0.1, 0.8, 0.0], -1.0),
            predictions([0, 0, 0.5, 0.4, 0.3], -2.0),
            predictions([0, 0, 0.9, 0.2, 0.6], -3.0),
        ],
        3,
    )
    assert [list(prompt.chosen) for prompt in found] == [[3], [2, 4]]
    assert [prompt.token_ids for prompt in found] == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert [prompt.logprobs.tolist() for prompt in found] == [[-1.0], [-3.0, -3.0]]


def test_the_least_likely_token_is_not_chosen_where_the_policy_is_sure():
    sure = Predictions(
        np.array([0, 0, -20.0, -0.7, -0.01], np.float32),
        np.array([0, 0, 0, 0.69, 0.05], np.float32),
    )
    (found,) = choose_tokens([sample_of_3()], [sure], 2)
    assert list(found.chosen) == [3, 4]


def test_few_tokens_are_all_compared():
    (found,) = choose_tokens([sample_of_3()], [predictions([0, 0, 0.5, 0.0, 0.5])], 64)
    assert list(found.chosen) == [2, 3, 4]


def test_one_request_asks_for_the_chosen_tokens_of_all_prompts():
    # The second prompt begins at 4, so its tokens 1 and 2 are 5 and 6.
    request = canary_request([prompt([-1.0], [3], 4), prompt([-1.0, -1.0], [1, 2], 3)])
    assert request == CanaryRequest(
        token_ids=[0, 1, 2, 3, 0, 1, 2], prompt_starts=[4], wanted=[3, 5, 6]
    )


def test_answers_of_another_length_are_refused():
    with pytest.raises(CanaryError, match="gave 1 log-probabilities, and the learner 2"):
        compare([prompt([0.0], [1], 2), prompt([0.0], [1], 2)], [0.0])


def test_a_value_that_is_not_finite_is_refused():
    with pytest.raises(CanaryError, match="not finite"):
        compare([prompt([0.0], [1], 2)], [float("-inf")])


@pytest.mark.parametrize(("mean", "verdict"), [(2e-5, "ok"), (2.1e-5, "fail")])
@pytest.mark.parametrize("floor", [None, 0.01])
def test_float32_is_bounded_by_the_mean_alone(mean: float, verdict: str, floor: float | None):
    reading = CanaryReading(mean, 5.0)  # the max is only reported
    assert judge(reading, bounds("float32"), floor)[0] == verdict


def test_one_token_of_forty_may_be_off_by_float32_noise_and_not_by_other_weights():
    learner = prompt([-1.0] * 40, list(range(1, 41)), 41)
    noise = compare([learner], [-1.0] * 39 + [-1.0 - 1.36e-4])
    other = compare([learner], [-1.0] * 39 + [-1.0 - 3.1e-3])
    assert judge(noise, bounds("float32"), None)[0] == "ok"
    assert judge(other, bounds("float32"), None)[0] == "fail"


@pytest.mark.parametrize(
    ("mean", "floor", "verdict"),
    [
        (9.9, None, "ok"),  # version 0: this is the floor
        (0.019, 0.01, "ok"),
        (0.021, 0.01, "warn"),  # above 2 x floor, below max(3 x floor, 0.05)
        (0.05, 0.01, "warn"),
        (0.051, 0.01, "fail"),
        (0.089, 0.03, "warn"),  # 3 x floor is the larger bound
        (0.091, 0.03, "fail"),
    ],
)
def test_bfloat16_is_bounded_by_the_mean(mean: float, floor: float | None, verdict: str):
    reading = CanaryReading(mean, 5.0)  # the max is only reported
    assert judge(reading, bounds("bfloat16"), floor)[0] == verdict


def test_a_missed_push_of_a_nearly_deterministic_policy_is_seen():
    # The policy is sure of all but one token of 40 in the last of four trajectories. A step moves
    # that one from -0.7 to -0.71: the mean over 32 tokens is 0.01 / 32 = 3.1e-4.
    batch = [with_logprobs(number, *[0.0] * 40) for number in range(3)]
    batch.append(with_logprobs(3, *[0.0] * 20, -0.7, *[0.0] * 19))
    samples = canary_samples(batch, 2, 64)
    found = [predictions([0.0] * 42, 0.0) for _ in samples]
    found[0].logprobs[22], found[0].entropies[22] = -0.71, 0.69
    prompts = choose_tokens(samples, found, 32)
    request = canary_request(prompts)
    assert len(request.wanted) == 32
    missed = [-0.7 if token == 20 else 0.0 for token in np.array(request.token_ids)[request.wanted]]
    assert judge(compare(prompts, missed), bounds("float32"), None)[0] == "fail"
