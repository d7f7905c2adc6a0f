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

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED_ANSWERS = {"yes", "no", "noanswer"}

# What the sampler's tokenizer writes at the end of a turn: <|im_end|>, <|eot_id|>, </s>. Backwards,
# since a search from the front would begin anew at each of many.
_ENDS_OF_TURN_REVERSED = re.compile(r"\s*(?:(?:>\|[^<>|\s]+\|<|>s/<)\s*)*")
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def _block(tag: str) -> str:
    """Pattern of one `<tag>…</tag>` whose content opens no tag of the format."""
    return rf"<{tag}>(?:(?!</?(?:think|tool_call|answer)>).)*</{tag}>"


_CALL_TURN = re.compile(rf"\s*{_block('think')}(?:\s*{_block('tool_call')})+\s*", re.DOTALL)
_THOUGHT = re.compile(r"\s*<think>(?!\s*</think>)(?:(?!</?think>).)+</think>", re.DOTALL)
_ANSWER_TURN = re.compile(rf"\s*{_block('think')}\s*{_block('answer')}\s*", re.DOTALL)


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


def extract_answer(text: str) -> str | None:
    """Return the content of the last closed `<answer>` of a turn, stripped; None without one."""
    found = _ANSWER.findall(text)
    return found[-1].strip() if found else None


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


def has_answers(payload: Mapping[str, Any]) -> bool:
    """Return whether a task's payload has what `accepted_answers` returns."""
    answers = payload.get("answers")
    return isinstance(answers, list) and bool(answers) and all(isinstance(a, str) for a in answers)


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


def format_score(turns: Sequence[str]) -> float:
    """Return the mean of two checks on the form of a dialogue: 0.0, 0.5 or 1.0.

    1. Every turn but the last is exactly `<think>…</think>` and one or more
       `<tool_call>…</tool_call>`; true when there is no such turn.
    2. The last turn is exactly `<think>…</think>` and one `<answer>…</answer>`.

    White space between and around the blocks and end-of-turn tokens are free; any other text
    outside the blocks, and any of these tags inside a block, fails the check.

    Source: Agent-R1, arXiv:2511.14460: the format reward is the mean of two binary checks.
    """
    if not turns:
        return 0.0
    *earlier, last = [_without_end_of_turn(turn) for turn in turns]
    calls_first = all(_CALL_TURN.fullmatch(turn) for turn in earlier)
    answers_last = _ANSWER_TURN.fullmatch(last) is not None
    return (float(calls_first) + float(answers_last)) / 2


def reasoning_share(turns: Sequence[str]) -> float:
    """Return the share of turns that open with a thought: `<think>…</think>` with text inside."""
    if not turns:
        return 0.0
    return sum(_THOUGHT.match(turn) is not None for turn in turns) / len(turns)


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


def _without_end_of_turn(text: str) -> str:
    ends = _ENDS_OF_TURN_REVERSED.match(text[::-1])
    return text[: len(text) - (ends.end() if ends else 0)]


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
