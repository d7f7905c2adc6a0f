"""Scoring against values worked out by hand from the published evaluation scripts' rules."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.reward.scoring import (
    exact_match,
    f1,
    format_score,
    normalize_answer,
    paper_reward,
    reasoning_share,
    substring_match,
    useful_share,
)
from tests.support.builders import read_turn


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("The Beatles", "beatles"),
        ("the  THE a an", "the the a an"),  # nothing would be left: the articles stay
        ("A", "a"),
        ("(A)", "a"),
        ("U.S.", "us"),  # punctuation is removed, not replaced by a blank
        ("well-known", "wellknown"),
        ("a-ha", "aha"),  # the article test comes after: "aha" holds no word "a"
        ("An apple, a day", "apple day"),
        ("theatre another", "theatre another"),  # only whole words are articles
        ("Crouching\tTiger\n ", "crouching tiger"),
        ("1,000", "1000"),
        ("Zürich — Straße", "zürich — straße"),  # only ASCII punctuation is dropped
        ("ÉCOLE", "école"),
        ("“quoted”", "“quoted”"),
        ("'quoted'", "quoted"),
        ("東京", "東京"),
        ("", ""),
        (" \n", ""),
        ("!?", "!?"),  # nothing would be left: the punctuation stays
        ("+ -", "+ -"),
    ],
)
def test_normalize_answer(text: str, normalized: str):
    assert normalize_answer(text) == normalized


@given(st.text())
def test_normalizing_twice_changes_nothing(text: str):
    assert normalize_answer(normalize_answer(text)) == normalize_answer(text)


@pytest.mark.parametrize(
    ("prediction", "answers", "score"),
    [
        ("the beatles.", ["Beatles"], 1.0),
        ("Beatles band", ["Beatles"], 0.0),
        ("beta", ["Alpha", "Beta"], 1.0),
        ("yes.", ["Yes"], 1.0),
        ("no", ["yes"], 0.0),
        (None, ["x"], 0.0),
        ("", ["x"], 0.0),
        ("", ["The"], 0.0),  # 1.0 in the official script: both normalize to nothing there
        ("the", ["A"], 0.0),
        (".", ["A"], 0.0),
        ("(a)", ["A"], 1.0),
        ("", ["?"], 0.0),
        ("-", ["+"], 0.0),
        ("+", ["+"], 1.0),
        ("", [""], 1.0),  # the data says that the answer is empty
        (" ", [""], 1.0),
        ("?", [""], 0.0),
        (None, ["The"], 0.0),  # no answer at all is never right
    ],
)
def test_exact_match(prediction: str | None, answers: list[str], score: float):
    assert exact_match(prediction, answers) == score


@pytest.mark.parametrize(
    ("prediction", "answers", "score"),
    [
        # 2 shared words; precision 2/3, recall 2/2: 2 * (2/3) / (5/3) = 0.8
        ("Barack Hussein Obama", ["Barack Obama"], 0.8),
        # words count with repetition: shared {b: 1}; precision 1/2, recall 1/1: 2/3
        ("b b", ["b"], 2 / 3),
        ("x y", ["z"], 0.0),
        # best over the answers
        ("big apple", ["new york city", "the big apple"], 1.0),
        # yes / no / noanswer: only equality counts, on either side
        ("yes it is", ["yes"], 0.0),
        ("yes", ["yes it is"], 0.0),
        ("Yes!", ["yes"], 1.0),
        ("no", ["yes"], 0.0),
        ("noanswer", ["some noanswer"], 0.0),
        # the rule looks at the whole normalized text, not at its words
        ("no country for old men", ["No Country for Old Men (film)"], 2 * 5 / (5 + 6)),
        ("", ["x"], 0.0),
        ("the", ["an"], 0.0),
        ("A", ["A"], 1.0),  # 0.0 in the official script: no words are left there
        ("", ["A"], 0.0),
        ("-", ["-"], 1.0),
        ("+", ["-"], 0.0),
        # shared {a: 1}; precision 1/2, recall 1/1: 2/3
        ("the a", ["a"], 2 / 3),
        (None, ["x"], 0.0),
    ],
)
def test_f1(prediction: str | None, answers: list[str], score: float):
    assert f1(prediction, answers) == pytest.approx(score)


@pytest.mark.parametrize(
    ("prediction", "answers", "score"),
    [
        ("It was Paris, France.", ["Paris"], 1.0),
        ("Par", ["Paris"], 0.0),
        ("comparison", ["Paris"], 1.0),  # "comparison" holds "paris": words do not matter
        ("the end", ["end"], 1.0),
        ("x", ["y", "x"], 1.0),
        ("anything", ["The"], 0.0),  # an empty answer is not inside everything
        ("", ["The"], 0.0),
        ("", ["+"], 0.0),
        ("the", ["A"], 0.0),
        ("(A)", ["A"], 1.0),
        (None, ["x"], 0.0),
    ],
)
def test_substring_match(prediction: str | None, answers: list[str], score: float):
    assert substring_match(prediction, answers) == score


@given(st.text(), st.lists(st.text(), min_size=1))
def test_exact_is_the_strictest(prediction: str, answers: list[str]):
    exact = exact_match(prediction, answers)
    assert substring_match(prediction, answers) >= exact
    assert 0.0 <= f1(prediction, answers) <= 1.0
    if exact and normalize_answer(prediction):
        assert f1(prediction, answers) == pytest.approx(1.0)


def test_no_accepted_answer_is_an_error():
    for score in (exact_match, f1, substring_match):
        with pytest.raises(ValueError, match="answers is empty"):
            score("x", [])


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>t</think><answer> Ada </answer><|im_end|>", "Ada"),
        ("<answer>first</answer> no, <answer>second</answer>", "second"),
        ("<answer>closed</answer><answer>open", "closed"),
        ("<answer><answer>inner</answer>", "inner"),
        ("<answer>two\nlines</answer>", "two\nlines"),
        ("<answer></answer>", ""),
        ("<answer>never closed", None),
        ("</answer>", None),
        ("<Answer>x</Answer>", None),
        ("", None),
    ],
)
def test_the_answer_of_a_turn_is_its_last_block(text: str, answer: str | None):
    assert read_turn(text).answer == answer


CALL = '<think>look</think>\n<tool_call>{"name": "search", "arguments": {}}</tool_call><|im_end|>'
ANSWER = "<think>done</think><answer>Ada</answer><|im_end|>"


@pytest.mark.parametrize(
    ("turns", "score"),
    [
        ([CALL, ANSWER], 1.0),
        ([CALL, CALL, ANSWER], 1.0),
        ([ANSWER], 1.0),  # no earlier turn: nothing that could be wrong
        ([CALL + "\n", ANSWER + " \n"], 1.0),
        (
            [
                "<think>\na\n</think>\n\n<tool_call>\n{}\n</tool_call>\n<tool_call>x</tool_call>",
                ANSWER,
            ],
            1.0,
        ),
        (["<think></think><tool_call></tool_call></s>", ANSWER], 1.0),
        # one of the two checks fails
        ([CALL, CALL], 0.5),
        ([ANSWER, ANSWER], 0.5),
        (["<tool_call>{}</tool_call>", ANSWER], 0.5),
        (["<think>a</think>text<tool_call>{}</tool_call>", ANSWER], 0.5),
        (["Sure! " + CALL, ANSWER], 0.5),
        ([CALL, "<answer>Ada</answer>"], 0.5),
        ([CALL, "<think>a</think><answer>Ada</answer> as I said"], 0.5),
        ([CALL, "<think>a</think><answer>Ada"], 0.5),
        ([CALL, "<think>a</think><answer>A</answer><answer>B</answer>"], 0.5),
        ([CALL, "<think>a <answer>A</answer></think><answer>B</answer>"], 0.5),
        ([CALL, ""], 0.5),
        # both fail
        ([ANSWER, CALL], 0.0),
        (["hello", "world"], 0.0),
        ([], 0.0),
    ],
)
def test_format_score(turns: list[str], score: float):
    assert format_score(list(map(read_turn, turns))) == score


def test_format_score_is_fast_on_hostile_text():
    # Linear: 200,000 characters of tags and blanks that never match take well under the timeout.
    hostile = "<think>" * 10_000 + " " * 100_000 + "<answer>" * 5_000
    turn = read_turn(hostile)
    assert format_score([turn, turn]) == 0.0
    assert turn.answer is None


@pytest.mark.parametrize(
    ("exact", "form", "reward"),
    [(1.0, 1.0, 1.0), (0.0, 1.0, 0.0), (1.0, 0.5, -0.5), (0.0, 0.5, -0.5), (1.0, 0.0, -1.0)],
)
def test_paper_reward(exact: float, form: float, reward: float):
    assert paper_reward(exact, form) == reward


def test_a_thought_is_a_block_with_text_at_the_start_of_the_turn():
    turns = ["<think>a</think>x", " <think> b\n</think>", "<think> </think>", "x<think>a</think>"]
    assert reasoning_share(list(map(read_turn, turns))) == 0.5
    assert reasoning_share([read_turn("<think>a<think>b</think>")]) == 0.0
    assert reasoning_share([]) == 0.0


def test_useful_calls_worked_and_repeat_none():
    calls: list[tuple[str, dict[str, Any], str]] = [
        ("search", {"query": "a", "k": 1}, "ok"),
        ("search", {"k": 1, "query": "a"}, "ok"),  # the same call again
        ("search", {"query": "b"}, "error"),
        ("search", {"query": "c"}, "ok"),
    ]
    assert useful_share(calls) == 0.5
    assert useful_share([]) == 1.0
