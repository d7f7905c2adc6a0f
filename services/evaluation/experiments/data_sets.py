"""The data sets of the matrix: what they are, how they are scored, and where they come from.

A `DataSource` --records--> questions.py --> `Question`s; prompts.py makes tasks of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agent_r1.evaluation.experiments import questions
from agent_r1.evaluation.experiments.config import SetName
from agent_r1.evaluation.experiments.questions import Question
from agent_r1.runtime.files.columns import as_json
from agent_r1.runtime.files.published_data import SourceError, read_records
from agent_r1.runtime.files.rows import TaskFileError, rows_of
from agent_r1.runtime.files.task_source import DataSource
from agent_r1.runtime.imports import MissingPackageError


class NoDataError(Exception):
    """A data set that is not here; the text says what to do."""


@dataclass(frozen=True)
class Family:
    """Data sets that are asked and scored alike."""

    title: str
    component: str
    """Reward component that is the score: 1.0 for a right answer."""
    measure: str
    """Name of the score."""
    extra: str | None
    """A second component that is reported."""
    tool: str
    """Name of the tool that helps, as `[tools.<name>]` has it."""
    table: str
    """Table to write under it, for a remedy."""


MATHS = Family(
    "mathematics", "math_equal", "equal as mathematics", None, "python_exec", 'type = "python_exec"'
)
CODE = Family(
    "programs",
    "all_tests_passed",
    "all tests passed",
    "tests_passed",
    "code_tests",
    'type = "code_tests"',
)
MULTIHOP = Family(
    "questions", "exact_match", "exact match", "f1", "search", 'type = "search" and its corpus'
)
FAMILIES = (MULTIHOP, MATHS, CODE)
OWN = Family("tasks", "exact_match", "exact match", None, "", "")
"""Task files of the user's, which bring their tools along."""


@dataclass(frozen=True)
class DataSet:
    """One public data set."""

    title: str
    family: Family
    read: Callable[[str, dict[str, Any]], Question | None]
    """Makes a question of a record and its place; None leaves the record out."""
    hub: str
    """The set on the Hugging Face hub."""


DATA_SETS: Mapping[str, DataSet] = {
    "math500": DataSet("MATH-500", MATHS, questions.math500, "hf:HuggingFaceH4/MATH-500:test"),
    "gsm8k": DataSet("GSM8K", MATHS, questions.gsm8k, "hf:openai/gsm8k/main:test"),
    "humaneval": DataSet("HumanEval", CODE, questions.humaneval, "hf:openai/openai_humaneval:test"),
    "mbpp": DataSet("MBPP", CODE, questions.mbpp, "hf:google-research-datasets/mbpp/full:test"),
    "hotpotqa": DataSet(
        "HotpotQA", MULTIHOP, questions.multihop, "hf:hotpotqa/hotpot_qa/distractor:validation"
    ),
    "2wikimultihopqa": DataSet(
        "2WikiMultihopQA", MULTIHOP, questions.multihop, "hf:framolfese/2WikiMultihopQA:validation"
    ),
    "musique": DataSet("MuSiQue", MULTIHOP, questions.multihop, "hf:dgslibisey/MuSiQue:validation"),
}


def family_of(name: str) -> Family:
    """Return the family of a public data set, or of a user's task file."""
    return DATA_SETS[name].family if name in DATA_SETS else OWN


def title_of(name: str) -> str:
    """Return what a set is called in a report."""
    return DATA_SETS[name].title if name in DATA_SETS else name


def read_questions(name: SetName, source: DataSource | None) -> list[Question]:
    """Read a data set, in the order of its file.

    Args:
        name: which it is.
        source: its published file or its name on the hub; None where none is named.

    Raises:
        NoDataError: it is not here.
        SourceError: it is, and a record does not fit or comes twice.
    """
    data_set = DATA_SETS[name]
    remedy = f'set {name} = "FILE" (the published file), or "{data_set.hub}", under [sets]'
    if source is None:
        raise NoDataError(f"not named; {remedy}")
    found: dict[str, Question] = {}
    for place, values in _records(source, remedy):
        question = data_set.read(place, values)
        if question is None:
            continue
        if question.id in found:
            raise SourceError(f"{place}: id {question.id!r} comes twice; remove one of the two")
        found[question.id] = question
    if not found:
        raise SourceError(f"{source} has no question of {data_set.title}; {remedy}")
    return list(found.values())[: source.max_items]


def _records(source: DataSource, remedy: str) -> Iterable[tuple[str, dict[str, Any]]]:
    if not source.is_hub and not source.source.exists():
        raise NoDataError(f"{source} is missing; {remedy}")
    if not source.is_table:
        return read_records(source.source)
    try:
        return [(place, as_json(row)) for place, row in rows_of(source)]
    except (TaskFileError, MissingPackageError) as exc:
        raise NoDataError(str(exc)) from exc
