"""What vLLM hands back is read whole, or refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agent_r1.rollout.vllm.engine_answers import to_prompt_logprobs
from agent_r1.text.tokens import PolicyError

T = 100
"""Tokens of the prompt."""


def request(count: int) -> Any:
    """Return a finished request with the values 1, 2, ... of two tokens a position.

    Position 0 has no value, as vLLM has it; the actual token's comes first at every other one.
    """
    values = [value for number in range(1, count + 1) for value in (float(number), -1.0)]
    starts = [0, *range(0, 2 * count, 2)]
    return SimpleNamespace(prompt_logprobs=SimpleNamespace(logprobs=values, start_indices=starts))


@pytest.mark.parametrize(
    ("count", "cached", "first"),
    [
        (99, 0, 1.0),  # T - 1, of both model runners
        (99, 96, 97.0),  # V1: T - 1, of which 96 are void
        (3, 96, 1.0),  # V2: T - 1 - 96
    ],
)
def test_values_after_the_cached_prefix_are_taken(count: int, cached: int, first: float):
    taken = to_prompt_logprobs(request(count), T, cached)
    assert taken == [first + number for number in range(T - 1 - cached)]


@pytest.mark.parametrize("count", [0, 99])
def test_nothing_is_left_where_all_but_the_last_token_were_cached(count: int):
    assert to_prompt_logprobs(request(count), T, 99) == []


@pytest.mark.parametrize("cached", [0, 96])
@pytest.mark.parametrize("count", [4, 96, 100])
def test_another_number_of_values_is_refused(count: int, cached: int):
    # Expected are 99 - 0 = 99, or 99 - 96 = 3 and 99.
    with pytest.raises(PolicyError) as refused:
        to_prompt_logprobs(request(count), T, cached)
    assert str(refused.value) == (
        f"the engine returned {count} log-probabilities for a prompt of 100 tokens, {cached} of "
        f"them cached, and {99 - cached} or 99 were expected; try the other of "
        'rollout.model_runner = "v1" and "v2"'
    )
