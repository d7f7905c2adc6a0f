"""Questions of public data sets: published files, or the same on the hub, record by record.

data_sets.py reads the records, and prompts.py makes tasks of the questions. Fields that are not
needed here, such as the paragraphs of HotpotQA, are left out.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any

from pydantic import AliasChoices, BaseModel, Field, JsonValue

from agent_r1.runtime.files.published_data import SourceError, parse_record

_FINAL = re.compile(r"####\s*(-?\$?[\d,]+(?:\.\d+)?)\s*$")
MBPP_TEST_IDS = range(11, 511)
"""The evaluation part of MBPP, as its paper has it (arXiv:2108.07732)."""


@dataclass(frozen=True)
class Question:
    """One question of a data set, before it is put in words for a method."""

    id: str
    text: str
    payload: dict[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    tool_context: JsonValue = None
    type: str | None = None


class GsmRecord(BaseModel):
    """A record of GSM8K."""

    question: str
    answer: str
    """Worked out; the last line is `#### number`."""


class MathRecord(BaseModel):
    """A record of MATH-500."""

    problem: str
    answer: str = Field(min_length=1)
    subject: str | None = None
    unique_id: str | None = None


class HumanEvalRecord(BaseModel):
    """A record of HumanEval."""

    task_id: str
    prompt: str
    """Imports, the function's head and its docstring."""
    entry_point: str
    test: str
    """Defines `check(candidate)`."""


class MbppRecord(BaseModel):
    """A record of MBPP."""

    text: str
    task_id: int
    test_setup_code: str = ""
    test_list: list[str] = Field(min_length=1)


class MultihopRecord(BaseModel):
    """A record of HotpotQA, 2WikiMultihopQA or MuSiQue, published or repacked."""

    id: str = Field(validation_alias=AliasChoices("_id", "id"))
    question: str
    answer: str | None = None
    answers: list[str] = []
    """Answers of repacked files."""
    answer_aliases: list[str] = []
    answerable: bool = True
    """False: a question of MuSiQue-Full that has no answer, which is left out."""
    type: str | None = None


def gsm8k(place: str, values: dict[str, Any]) -> Question:
    """Return a record of GSM8K as a question.

    Raises:
        SourceError: the record does not fit, or has no number after `####`.
    """
    record = parse_record(GsmRecord, place, values)
    final = _FINAL.search(record.answer)
    if final is None:
        raise SourceError(
            f"{place}: answer ends with {record.answer[-40:]!r}; it must end with `#### number`"
        )
    answer = final[1].replace(",", "").replace("$", "")
    payload: dict[str, JsonValue] = {"answers": [answer], "answer_type": "number"}
    return Question(_digest(record.question), record.question, payload)


def math500(place: str, values: dict[str, Any]) -> Question:
    """Return a record of MATH-500 as a question.

    Raises:
        SourceError: the record does not fit.
    """
    record = parse_record(MathRecord, place, values)
    name = record.unique_id or _digest(record.problem)
    return Question(name, record.problem, {"answers": [record.answer]}, type=record.subject)


def humaneval(place: str, values: dict[str, Any]) -> Question:
    """Return a record of HumanEval as a question.

    Raises:
        SourceError: the record does not fit, or its test does not define `check`.
    """
    record = parse_record(HumanEvalRecord, place, values)
    if "def check(" not in record.test:
        raise SourceError(f"{place}: test must define check(candidate); it does not")
    prompt = _unix(record.prompt)
    text = f"Complete this program:\n\n```python\n{prompt.strip()}\n```"
    tests: dict[str, JsonValue] = {
        "prompt": prompt,
        "entry_point": record.entry_point,
        "check": _unix(record.test),
    }
    return Question(record.task_id, text, tool_context=tests)


def mbpp(place: str, values: dict[str, Any]) -> Question | None:
    """Return a record of MBPP's evaluation part as a question; it shows the first test.

    Raises:
        SourceError: the record does not fit.
    """
    record = parse_record(MbppRecord, place, values)
    if record.task_id not in MBPP_TEST_IDS:
        return None
    tests: list[JsonValue] = [_unix(test).strip() for test in record.test_list]
    text = f"{_unix(record.text).strip()}\n\nThis must hold:\n\n```python\n{tests[0]}\n```"
    context: dict[str, JsonValue] = {"tests": tests, "setup": _unix(record.test_setup_code)}
    return Question(f"MBPP/{record.task_id}", text, tool_context=context)


def multihop(place: str, values: dict[str, Any]) -> Question | None:
    """Return a record of HotpotQA, 2WikiMultihopQA or MuSiQue as a question.

    Raises:
        SourceError: the record does not fit, or has no answer.
    """
    record = parse_record(MultihopRecord, place, values)
    if not record.answerable:
        return None
    given = [*record.answers, *filter(None, [record.answer]), *record.answer_aliases]
    answers: list[JsonValue] = [*dict.fromkeys(given)]
    if not answers:
        raise SourceError(f"{place}: the question has no answer; take a split that has answers")
    return Question(record.id, record.question, {"answers": answers}, type=record.type)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _unix(text: str) -> str:
    """Return a text with \\n at its line ends: MBPP's has \\r\\n."""
    return text.replace("\r\n", "\n").replace("\r", "\n")
