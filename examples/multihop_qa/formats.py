"""The formats of HotpotQA, 2WikiMultihopQA and MuSiQue files, published and repacked.

`convert.py` reads records and parses them here into `Question` and `CorpusRecord`. A field that a
format does not have is an error.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from agent_r1_proto.messages import StrictMessage


def _parse_text(value: object) -> object:
    """Parse a column that the parquet export of 2WikiMultihopQA keeps as JSON text."""
    return json.loads(value) if isinstance(value, str) else value


Title = Annotated[str, Field(min_length=1)]
Paragraphs = Annotated[list[tuple[Title, list[str]]], BeforeValidator(_parse_text)]
JsonList = Annotated[list[Any], BeforeValidator(_parse_text)]
Text = Annotated[str, Field(min_length=1)]


class HotpotRecord(StrictMessage):
    """One question of a published HotpotQA file."""

    id: Text = Field(alias="_id")
    question: Text
    answer: Text
    type: Literal["bridge", "comparison"]
    level: Literal["easy", "medium", "hard"]
    supporting_facts: list[tuple[str, int]]
    context: Paragraphs


class WikiRecord(StrictMessage):
    """One question of a published 2WikiMultihopQA file."""

    id: Text = Field(alias="_id")
    question: Text
    answer: Text
    type: Literal["compositional", "comparison", "bridge_comparison", "inference"]
    supporting_facts: JsonList
    context: Paragraphs
    evidences: JsonList
    evidences_id: JsonList = []
    answer_id: str | None = None
    entity_ids: str | None = None


class MusiqueParagraph(StrictMessage):
    """One paragraph of a MuSiQue question."""

    idx: int
    title: Title
    paragraph_text: str
    is_supporting: bool


class MusiqueRecord(StrictMessage):
    """One question of a published MuSiQue-Ans file."""

    id: Annotated[str, Field(pattern=r"^[234]hop\d?__")]
    question: Text
    answer: Text
    answer_aliases: list[str]
    answerable: Literal[True]
    paragraphs: list[MusiqueParagraph]
    question_decomposition: list[dict[str, Any]]


class RepackedRecord(StrictMessage):
    """One question of a repacked file of any of the three sets."""

    id: Text
    question: Text
    answers: Annotated[list[Text], Field(min_length=1)]
    supporting_titles: list[str]
    supporting_ids: list[str]
    context_ids: list[str]
    type: str | None
    level: str | None = None
    hops: int | None = None
    evidences: list[Any] = []
    decomposition: list[dict[str, Any]] = []
    answer_in_support: bool | None
    source: str


class CorpusRecord(StrictMessage):
    """One passage of a repacked corpus file, and of every corpus this script writes."""

    id: Text
    title: str
    text: str


@dataclass(frozen=True)
class Question:
    """A question of any set, and the passages its file brings along."""

    id: str
    text: str
    answers: list[str]
    type: str | None
    level: str | None = None
    hops: int | None = None
    passages: tuple[tuple[str, str], ...] = ()
    """(title, text) of its paragraphs; () for repacked files, which have a corpus of their own."""


def _joined(paragraphs: list[tuple[str, list[str]]]) -> tuple[tuple[str, str], ...]:
    return tuple((title, _one_line(" ".join(sentences))) for title, sentences in paragraphs)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _from_hotpot(values: dict[str, Any]) -> Question:
    r = HotpotRecord.model_validate(values)
    return Question(r.id, r.question, [r.answer], r.type, r.level, None, _joined(r.context))


def _from_wiki(values: dict[str, Any]) -> Question:
    r = WikiRecord.model_validate(values)
    return Question(r.id, r.question, [r.answer], r.type, None, None, _joined(r.context))


def _from_musique(values: dict[str, Any]) -> Question:
    r = MusiqueRecord.model_validate(values)
    answers = list(dict.fromkeys([r.answer, *r.answer_aliases]))
    passages = tuple((p.title, _one_line(p.paragraph_text)) for p in r.paragraphs)
    kind = r.id.partition("__")[0]  # "2hop", "3hop1", …
    return Question(r.id, r.question, answers, kind, None, int(kind[0]), passages)


def _from_repacked(values: dict[str, Any]) -> Question:
    r = RepackedRecord.model_validate(values)
    return Question(r.id, r.question, r.answers, r.type, r.level, r.hops)


PUBLISHED: dict[str, Callable[[dict[str, Any]], Question]] = {
    "hotpotqa": _from_hotpot,
    "2wikimultihopqa": _from_wiki,
    "musique": _from_musique,
}


def parse_question(name: str, values: dict[str, Any]) -> Question:
    """Parse one question of the set `name`.

    Raises:
        ValidationError: the record fits neither the published nor the repacked format.
    """
    return _from_repacked(values) if "answers" in values else PUBLISHED[name](values)
