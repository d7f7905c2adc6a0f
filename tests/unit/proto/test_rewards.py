"""Which tokens lead to the state that a critic is asked about."""

from __future__ import annotations

from agent_r1_proto.rewards import ScoreRequest, ScoreTurn, valued_tokens
from agent_r1_proto.trajectory import Turn


def turn(start: int, end: int) -> Turn:
    return Turn(start=start, end=end, text="", finish_reason="stop")


def test_an_interaction_that_goes_on_has_come_to_its_next_turn():
    # A prompt of 2, a turn of 3, and a reply of 2 that ends where the next turn begins.
    assert valued_tokens(range(7), [], [turn(2, 5)]) == [0, 1, 2, 3, 4, 5, 6]
    assert valued_tokens(range(2), [], []) == [0, 1]


def test_after_a_turn_that_nothing_follows_it_is_the_state_before_its_last_token():
    assert valued_tokens(range(5), [], [turn(2, 5)]) == [0, 1, 2, 3]
    assert valued_tokens(range(9), [], [turn(2, 5), turn(8, 9)]) == [0, 1, 2, 3, 4, 5, 6, 7]


def test_the_state_is_one_of_the_last_segment():
    assert valued_tokens(range(9), [5], [turn(2, 5)]) == [5, 6, 7, 8]
    assert valued_tokens(range(9), [3, 5], [turn(2, 3), turn(7, 9)]) == [5, 6, 7]


def test_requests_without_tokens_stay_as_they_were():
    request = ScoreRequest(payload={}, turns=[ScoreTurn(text="")])
    assert "token_ids" not in request.model_dump()
