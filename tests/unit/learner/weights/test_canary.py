"""The canary's bounds on the mean: float32 as it is, bfloat16 against the noise floor."""

from __future__ import annotations

import numpy as np
import pytest

from agent_r1.learner.weights.canary import (
    MEAN_DLOGP,
    CanaryBounds,
    CanaryError,
    CanaryReading,
    CanaryTokens,
    compare,
    judge,
)
from tests.support.builders import trajectory, two_segments

ALL = np.array([True, True, True])


def bounds(dtype: str) -> CanaryBounds:
    return CanaryBounds(
        dtype=dtype,  # pyright: ignore[reportArgumentType]
        mean_dlogp=MEAN_DLOGP[dtype],  # pyright: ignore[reportArgumentType]
        fail_factor=3.0,
        warn_factor=2.0,
    )


def test_a_reading_is_mean_and_max_of_the_differences():
    reading = compare(np.array([-1.0, -2.0, -3.0], np.float32), [-1.0, -2.5, -3.25], ALL)
    assert reading.mean == 0.25
    assert reading.max == 0.5


def test_only_sampled_tokens_count():
    sampled = np.array([True, False, True])
    reading = compare(np.array([-1.0, -26.0, -3.0], np.float32), [-1.0, -26.4, -3.5], sampled)
    assert reading == CanaryReading(mean=0.25, max=0.5)


def test_canary_tokens_are_the_first_sampled_ones_after_their_whole_prefix():
    tokens = CanaryTokens.of(trajectory(prompt_length=4, num_sampled=3), 2)
    assert tokens is not None
    assert tokens.token_ids == [0, 1, 2, 3, 4, 5]
    assert tokens.sampled.tolist() == [False] * 4 + [True, True]


def test_a_short_trajectory_is_compared_to_its_end():
    tokens = CanaryTokens.of(trajectory(prompt_length=4, num_sampled=3), 64)
    assert tokens is not None
    assert len(tokens.token_ids) == 7


def test_the_tokens_lie_in_one_segment():
    # The first segment has 5 of the 10 tokens.
    given = trajectory(**two_segments())
    tokens = CanaryTokens.of(given, 8)
    assert tokens is not None
    assert tokens.token_ids == given.token_ids[:5].tolist()


def test_no_tokens_make_no_canary():
    assert CanaryTokens.of(trajectory(), 0) is None


def test_answers_of_another_length_are_refused():
    with pytest.raises(CanaryError, match="gave 1 log-probabilities, and the learner 2"):
        compare(np.zeros(2, np.float32), [0.0], ALL[:2])


def test_a_value_that_is_not_finite_is_refused():
    with pytest.raises(CanaryError, match="not finite"):
        compare(np.zeros(1, np.float32), [float("-inf")], ALL[:1])


@pytest.mark.parametrize(("mean", "verdict"), [(2e-5, "ok"), (2.1e-5, "fail")])
@pytest.mark.parametrize("floor", [None, 0.01])
def test_float32_is_bounded_by_the_mean_alone(mean: float, verdict: str, floor: float | None):
    reading = CanaryReading(mean, 5.0)  # the max is only reported
    assert judge(reading, bounds("float32"), floor)[0] == verdict


def test_one_token_of_forty_may_be_off_by_float32_noise_and_not_by_other_weights():
    learner = np.full(40, -1.0, np.float32)
    sampled = np.ones(40, bool)
    noise = compare(learner, [-1.0] * 39 + [-1.0 - 1.36e-4], sampled)
    other = compare(learner, [-1.0] * 39 + [-1.0 - 3.1e-3], sampled)
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
