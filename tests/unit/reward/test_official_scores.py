"""Exact match and F1 against the official evaluation scripts of HotpotQA and SQuAD.

The expected values are those of `hotpot_evaluate_v1.py` (hotpotqa/hotpot), worked out by hand from
its rules: lower case, drop ASCII punctuation, replace the words a, an, the by a blank, collapse
white space; F1 over words, 0 where one side is yes, no or noanswer and the other is not the same.
`evaluate-v1.1.py` and `evaluate-v2.0.py` of SQuAD normalize likewise; where they score otherwise,
the tests at the end say so. Where removing punctuation or articles would leave nothing, the scripts
call every such text equal, and this system does not (`NOTHING_LEFT`).
"""

from __future__ import annotations

import pytest

from agent_r1.reward.scoring import exact_match, f1, substring_match

BOTH = [
    # --- case, punctuation, white space ---
    ("Paris", "Paris", 1.0, 1.0),
    ("paris", "PARIS", 1.0, 1.0),
    ("Paris.", "Paris", 1.0, 1.0),
    ("  Paris\t\n", "Paris", 1.0, 1.0),
    ("New  York", "New York", 1.0, 1.0),
    ("U.S.", "US", 1.0, 1.0),  # punctuation goes without a blank in its place
    ("U.S.A.", "U S A", 0.0, 0.0),  # "usa"; and of "u s a" the "a" goes as well
    ("well-known", "well known", 0.0, 0.0),  # "wellknown"
    ("1,000", "1000", 1.0, 1.0),
    ("3.5", "35", 1.0, 1.0),
    ("$5", "5", 1.0, 1.0),
    ("rock 'n' roll", "Rock n Roll", 1.0, 1.0),
    ("`Help!'", "help", 1.0, 1.0),
    ("AC/DC", "ACDC", 1.0, 1.0),
    ("foo_bar", "foobar", 1.0, 1.0),  # the underscore is ASCII punctuation
    # --- articles ---
    ("The Beatles", "Beatles", 1.0, 1.0),
    ("an apple a day", "apple day", 1.0, 1.0),
    ("Los Angeles the city", "Los Angeles city", 1.0, 1.0),
    ("theatre", "atre", 0.0, 0.0),  # whole words only
    ("a-ha", "aha", 1.0, 1.0),  # punctuation goes first, so the a is no word of its own
    ("a.b", "ab", 1.0, 1.0),
    ("Malcolm X", "Malcolm X.", 1.0, 1.0),
    ("Vitamin A", "Vitamin", 1.0, 1.0),  # so does every A that means something
    # --- words shared, with repetition ---
    # shared 2; precision 2/3, recall 2/2: 2 * (2/3) / (5/3)
    ("Barack Hussein Obama", "Barack Obama", 0.0, 0.8),
    # shared 1; precision 1/1, recall 1/4: 2 * (1/4) / (5/4)
    ("1989", "9 November 1989 evening", 0.0, 0.4),
    # shared 1 of 2 and 1 of 1
    ("b b", "b", 0.0, 2 / 3),
    # shared 2 of 3 and 2 of 4: 2 * (1/3) / (7/6)
    ("x x y", "x x z z", 0.0, 4 / 7),
    ("York New", "New York", 0.0, 1.0),  # order does not matter
    ("Lyon", "Paris", 0.0, 0.0),
    # --- yes, no, noanswer ---
    ("yes", "yes", 1.0, 1.0),
    ("Yes.", "yes", 1.0, 1.0),
    ("no", "No!", 1.0, 1.0),
    ("noanswer", "noanswer", 1.0, 1.0),
    ("no answer", "noanswer", 0.0, 0.0),
    ("yes", "no", 0.0, 0.0),
    ("the yes", "yes", 1.0, 1.0),  # the rule looks at the normalized text
    # --- Unicode: no folding, no normalization, ASCII punctuation only ---
    ("Beyoncé", "Beyoncé", 1.0, 1.0),
    ("BEYONCÉ", "beyoncé", 1.0, 1.0),
    ("Beyonce", "Beyoncé", 0.0, 0.0),
    ("Beyonce\u0301", "Beyonc\u00e9", 0.0, 0.0),  # composed and decomposed stay two texts
    ("“Help”", "Help", 0.0, 0.0),  # typographic quotes stay
    ("1914\u20131918", "1914-1918", 0.0, 0.0),  # an en dash stays, a hyphen goes
    ("Straße", "strasse", 0.0, 0.0),  # lower() does not fold
    ("İ", "i̇", 1.0, 1.0),  # lower() writes the Turkish capital as two characters
    ("New\u00a0York", "New York", 1.0, 1.0),  # a no-break space is white space
    ("東京", "東京", 1.0, 1.0),
    ("東京 都", "東京都", 0.0, 0.0),
    ("the東京", "東京", 0.0, 0.0),  # a CJK character is a word character: no article
    # --- nothing on one side ---
    ("", "Paris", 0.0, 0.0),
    ("   ", "Paris", 0.0, 0.0),
    ("the", "Paris", 0.0, 0.0),
    ("?!", "Paris", 0.0, 0.0),
    ("Paris", "", 0.0, 0.0),
    ("Paris", "a", 0.0, 0.0),
]
"""(prediction, gold, exact match, F1) on which HotpotQA and SQuAD 1.1 agree."""

NOTHING_LEFT = [
    # In the scripts: exact match 1, F1 0, for all of these.
    ("A", "A", 1.0, 1.0),  # a choice
    ("A.", "a", 1.0, 1.0),
    ("A.", "the", 0.0, 0.0),
    ("", "A", 0.0, 0.0),
    # shared 1; precision 1/3, recall 1/1: 2 * (1/3) / (4/3)
    ("the the The", "the", 0.0, 0.5),
    ("+", "-", 0.0, 0.0),
    ("?", "?", 1.0, 1.0),
    ("", "?", 0.0, 0.0),
    ("...", "", 0.0, 0.0),
    (" a an ", "", 0.0, 0.0),
]
"""(prediction, gold, exact match, F1) where the scripts' normalization leaves nothing."""

CLOSED = [
    # precision 1/3, recall 1: SQuAD 2 * (1/3) / (4/3)
    ("yes it is", "yes", 0.0, 0.5),
    ("yes", "yes it is", 0.0, 0.5),
    # precision 1/2, recall 1
    ("no idea", "no", 0.0, 2 / 3),
    ("noanswer here", "noanswer", 0.0, 2 / 3),
    ("yes and no", "no", 0.0, 0.5),
]
"""(prediction, gold, F1 of HotpotQA, F1 of SQuAD), where HotpotQA's rule on yes and no applies."""


@pytest.mark.parametrize(("prediction", "gold", "em", "expected_f1"), BOTH)
def test_scores_are_those_of_the_official_scripts(
    prediction: str, gold: str, em: float, expected_f1: float
):
    assert exact_match(prediction, [gold]) == em
    assert f1(prediction, [gold]) == pytest.approx(expected_f1)
    # Both scripts compare two texts, so that they may change places.
    assert exact_match(gold, [prediction]) == em
    assert f1(gold, [prediction]) == pytest.approx(expected_f1)


@pytest.mark.parametrize(("prediction", "gold", "hotpot", "squad"), CLOSED)
def test_a_closed_answer_is_no_bag_of_words_as_hotpotqa_has_it(
    prediction: str, gold: str, hotpot: float, squad: float
):
    assert hotpot != squad
    assert exact_match(prediction, [gold]) == 0.0
    assert f1(prediction, [gold]) == hotpot


@pytest.mark.parametrize(("prediction", "gold", "em", "expected_f1"), NOTHING_LEFT)
def test_a_text_of_articles_or_punctuation_alone_stays_as_it_is(
    prediction: str, gold: str, em: float, expected_f1: float
):
    for one, other in ((prediction, gold), (gold, prediction)):
        assert exact_match(one, [other]) == em
        assert f1(one, [other]) == pytest.approx(expected_f1)
        assert substring_match(one, [other]) >= em


def test_an_empty_answer_is_equal_to_an_empty_gold_answer_and_shares_no_word():
    # HotpotQA and SQuAD 1.1: exact match 1, F1 0. SQuAD 2.0, which has questions without an answer,
    # gives F1 1 here; `f1` follows HotpotQA.
    assert exact_match("", [""]) == 1.0
    assert f1("", [""]) == 0.0


def test_the_best_of_several_gold_answers_counts():
    # SQuAD takes the maximum of each score on its own; HotpotQA has one gold answer.
    golds = ["Obama", "Barack Obama", "the 44th president"]
    assert exact_match("Barack Obama", golds) == 1.0
    assert f1("Barack Hussein Obama", golds) == pytest.approx(0.8)
    # HotpotQA's rule is applied to each gold answer alone: "no" against "no one" is 0.
    assert f1("no", ["no one", "nobody"]) == 0.0
    assert f1("no one", ["no", "no one else"]) == pytest.approx(0.8)


def test_a_missing_prediction_counts_as_wrong():
    # The scripts print "missing answer" and divide by all questions.
    assert exact_match(None, ["Paris"]) == f1(None, ["Paris"]) == 0.0


@pytest.mark.parametrize(("prediction", "gold", "em", "expected_f1"), BOTH)
def test_an_exact_match_is_a_substring_match(
    prediction: str, gold: str, em: float, expected_f1: float
):
    del expected_f1
    assert substring_match(prediction, [gold]) >= em
