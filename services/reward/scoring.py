"""Scores of an answer and of a dialogue's form, as pure functions.

`components.py` calls these on finished trajectories; evaluation reports the same numbers. Strict
exact match, F1 and substring match are three different measures and never go by one name.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from agent_r1_proto.rewards import ScoreTurn

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED_ANSWERS = {"yes", "no", "noanswer"}


def normalize_answer(text: str) -> str:
    """Lower the case; drop ASCII punctuation, then the words a, an, the; collapse white space.

    Source: the SQuAD evaluation, arXiv:1606.05250, which HotpotQA, 2WikiMultihopQA and MuSiQue
    took over. Punctuation is removed, not replaced: "U.S." is "us" and "well-known" "wellknown".
    Unlike there, a step that would leave nothing is left out: the choice "A" is "a" and not the
    same as no answer, and "+" is not the same as "-".
    """
    lower = text.lower()
    bare = _unless_blank(lower.translate(_PUNCTUATION), lower)
    return " ".join(_unless_blank(_ARTICLES.sub(" ", bare), bare).split())


def _unless_blank(text: str, otherwise: str) -> str:
    return text if text.strip() else otherwise


def accepted_answers(payload: Mapping[str, Any]) -> list[str]:
    """Return the `answers` in a task's payload.

    Raises:
        ValueError: there are none, or they are not texts.
    """
    answers = payload.get("answers")
    if not isinstance(answers, list) or not answers:
        raise ValueError(
            f'payload has answers = {answers!r}; this component needs "answers": [text, …] in the '
            "payload of every task; add it, or let reward.components name others only"
        )
    if not all(isinstance(answer, str) for answer in answers):
        raise ValueError(
            f"payload has answers = {answers!r}; every answer must be a text; write numbers as "
            "texts, or let reward.components name components that do not compare answers"
        )
    return answers


def exact_match(prediction: str | None, answers: Sequence[str]) -> float:
    """Return 1.0 when the prediction equals one of the answers after normalization, else 0.0.

    An empty prediction equals only an answer that is empty in the data itself.
    """
    _check_answers(answers)
    if prediction is None:
        return 0.0
    predicted = normalize_answer(prediction)
    return float(any(predicted == normalize_answer(answer) for answer in answers))


def f1(prediction: str | None, answers: Sequence[str]) -> float:
    """Return the best token F1 of the prediction over the answers, 0.0 to 1.0.

    Tokens are the normalized words, counted with repetition. Where prediction or answer is yes, no
    or noanswer, only equality counts: such an answer is no bag of words.

    Source: the HotpotQA evaluation, arXiv:1809.09600.
    """
    _check_answers(answers)
    if prediction is None:
        return 0.0
    predicted = normalize_answer(prediction)
    words = Counter(predicted.split())
    return max(_token_f1(predicted, words, normalize_answer(answer)) for answer in answers)


def substring_match(prediction: str | None, answers: Sequence[str]) -> float:
    """Return 1.0 when the normalized prediction contains one of the normalized answers, else 0.0.

    Looser than exact match: a prediction that lists every candidate passes. An empty answer
    matches only an empty prediction.
    """
    _check_answers(answers)
    if prediction is None:
        return 0.0
    predicted = normalize_answer(prediction)
    golds = [normalize_answer(answer) for answer in answers]
    return float(any(gold in predicted if gold else not predicted for gold in golds))


def format_score(turns: Sequence[ScoreTurn]) -> float:
    """Return the mean of two checks on the form of a dialogue: 0.0, 0.5 or 1.0.

    1. Every turn but the last is exactly a thought and one or more calls; true when there is no
       such turn.
    2. The last turn is exactly a thought and one answer.

    White space between and around them and end-of-turn tokens are free; any other text outside
    them, and any tag of another one inside of one, fails the check.

    Source: Agent-R1, arXiv:2511.14460: the format reward is the mean of two binary checks.
    """
    if not turns:
        return 0.0
    *earlier, last = turns
    calls_first = all(turn.well_formed and turn.num_calls for turn in earlier)
    answers_last = last.well_formed and not last.num_calls
    return (float(calls_first) + float(bool(answers_last))) / 2


def reasoning_share(turns: Sequence[ScoreTurn]) -> float:
    """Return the share of turns with a thought that says something."""
    if not turns:
        return 0.0
    return sum(bool(turn.thought) for turn in turns) / len(turns)


def useful_share(calls: Sequence[tuple[str, Mapping[str, Any], str]]) -> float:
    """Return the share of tool calls that worked and are no repetition.

    Args:
        calls: name, arguments and status of each call, in order.

    Returns:
        Calls of status "ok" with a name and arguments that no earlier call has, over all calls;
        1.0 when there is no call, since none was wasted.
    """
    if not calls:
        return 1.0
    seen: set[str] = set()
    useful = 0
    for name, arguments, status in calls:
        key = json.dumps([name, arguments], sort_keys=True)
        useful += status == "ok" and key not in seen
        seen.add(key)
    return useful / len(calls)


def paper_reward(exact: float, form: float) -> float:
    """Return exact match when the format is right (1.0), else format - 1: -1.0 or -0.5.

    Source: Agent-R1, arXiv:2511.14460.
    """
    return exact if form == 1.0 else form - 1.0


def _check_answers(answers: Sequence[str]) -> None:
    if not answers:
        raise ValueError("answers is empty; a question needs at least one accepted answer")


def _token_f1(predicted: str, predicted_words: Counter[str], gold: str) -> float:
    if predicted != gold and (predicted in _CLOSED_ANSWERS or gold in _CLOSED_ANSWERS):
        return 0.0
    gold_words = Counter(gold.split())
    same = (gold_words & predicted_words).total()
    if same == 0:
        return 0.0
    precision, recall = same / predicted_words.total(), same / gold_words.total()
    return 2 * precision * recall / (precision + recall)
