"""Tokens drawn from log-probabilities, with numbers that seeds and positions give."""

import numpy as np
import pytest
import torch

from agent_r1.rollout.vllm.cpu.token_sampling import pick, uniforms

POSITIONS = np.arange(500)


def numbers(seed: int) -> np.ndarray:
    return uniforms(np.full(POSITIONS.shape, seed, np.uint64), POSITIONS)


@pytest.mark.parametrize("size", [1, 16, 50, 848])
def test_every_token_is_drawn_as_often_as_its_probability_says(size: int):
    torch.manual_seed(0)
    logprobs = (3 * torch.randn(size)).log_softmax(-1)
    count = 10_000
    # Evenly spread numbers: of them, an interval of length p holds count * p, give or take one.
    spread = (torch.arange(count, dtype=torch.float64) + 0.5) / count

    drawn = pick(logprobs.expand(count, -1), spread).bincount(minlength=size)

    assert drawn.double() == pytest.approx(count * logprobs.double().exp(), abs=1.01 + count * 1e-6)


def test_a_token_without_probability_is_never_drawn():
    logprobs = torch.tensor([[-np.inf, 0.5, -np.inf, 0.5, -np.inf]]).log_softmax(-1)
    largest = np.nextafter(1.0, 0.0)
    # The cumulative probabilities are 0, 1/2, 1/2, 1, 1.
    draws = torch.tensor([0.0, 0.4999, 0.5, 0.75, largest], dtype=torch.float64)

    assert pick(logprobs.expand(5, -1), draws).tolist() == [1, 1, 3, 3, 3]


def test_the_largest_number_draws_a_token_that_has_probability():
    torch.manual_seed(0)
    logits = torch.randn(200, 100)
    logits[:, 70:] = -np.inf  # in the middle of a block, and all of the last one
    largest = torch.full((200,), np.nextafter(1.0, 0.0), dtype=torch.float64)

    assert pick(logits.log_softmax(-1), largest).tolist() == [69] * 200


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_numbers_of_one_seed_are_uniform_over_positions(seed: int):
    # 500 numbers in 5 intervals: 100 each, standard deviation sqrt(500 * 0.2 * 0.8) = 8.9.
    counts = np.histogram(numbers(seed), bins=5, range=(0, 1))[0]

    assert counts == pytest.approx(100, abs=5 * 8.9)
    assert 0.0 <= numbers(seed).min() <= numbers(seed).max() < 1.0


def test_numbers_of_neighbouring_seeds_and_positions_are_independent():
    first, second = numbers(7), numbers(8)
    # The correlation of 500 independent pairs has the standard deviation 1 / sqrt(500) = 0.045.
    assert np.corrcoef(first, second)[0, 1] == pytest.approx(0.0, abs=5 * 0.045)
    assert np.corrcoef(first[1:], first[:-1])[0, 1] == pytest.approx(0.0, abs=5 * 0.045)
    assert np.corrcoef(first[1:], second[:-1])[0, 1] == pytest.approx(0.0, abs=5 * 0.045)


def test_a_number_depends_on_its_own_seed_and_position_alone():
    seeds, positions = np.array([5, 6, 7], np.uint64), np.array([9, 0, 3])
    together = uniforms(seeds, positions)
    alone = [uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(3)]

    assert together.tolist() == alone


def split_mix(state: int) -> int:
    """Return SplitMix64's output for a state, in Python's own integers."""
    word = 2**64 - 1
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & word
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & word
    return state ^ (state >> 31)


def test_a_number_is_the_hash_of_seed_and_position():
    golden = 0x9E3779B97F4A7C15
    # The first output that the authors of SplitMix64 give for the seed 0.
    assert split_mix(golden) == 0xE220A8397B1DCDAF
    for seed, position in ((0, 0), (12345, 6), (2**64 - 1, 1000)):
        key = split_mix((seed + golden) % 2**64)
        bits = split_mix((key + (position + 1) * golden) % 2**64)

        found = uniforms(np.array([seed], np.uint64), np.array([position]))

        assert found.tolist() == [(bits >> 11) / 2**53]
