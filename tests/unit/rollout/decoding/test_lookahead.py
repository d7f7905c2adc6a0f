"""Tasks that punish the turn that looks best at the moment: what looking ahead is worth there."""

from __future__ import annotations

from agent_r1.text.chat_format import ChatFormat
from tests.support.lookahead import greedy, looking_ahead, make_residents, oracle, play, sampled

RESIDENTS = make_residents(seed=1, count=20)


async def test_taking_what_looks_best_is_mostly_wrong_and_knowing_better_is_right(
    chat: ChatFormat, end_id: int
):
    likeliest = await play(chat, end_id, RESIDENTS, greedy)
    best = await play(chat, end_id, RESIDENTS, oracle)
    assert likeliest.right <= 0.2
    assert best.right >= 0.95
    assert likeliest.calls == 1.0
    assert best.calls == 1.5  # half of the tasks need a second one


async def test_each_turn_of_lookahead_solves_what_lies_a_turn_deeper(chat: ChatFormat, end_id: int):
    reached = [
        await play(chat, end_id, RESIDENTS, sampled, looking_ahead(turns)) for turns in (0, 1, 2)
    ]
    written, after_calls, after_a_turn = (outcome.right for outcome in reached)
    # The scorer cannot tell calls apart that have not been run: what is drawn first is kept, which
    # is right for 0.2 + 0.8 / 7 = 0.31 of the tasks.
    assert written < 0.5
    # It sees what the register says, which solves the half without a page: 0.5 + 0.5 x 0.31.
    assert written + 0.15 < after_calls < 0.85
    # And what the page says: 16 draws miss the register in 0.8^16 = 3 % of the tasks.
    assert after_a_turn > 0.85
    assert reached[0].calls < reached[1].calls < reached[2].calls
