"""Turn HotpotQA, 2WikiMultihopQA and MuSiQue files into task files and a search corpus.

    python examples/multihop_qa/convert.py tasks --set hotpotqa --source FILE --out FILE
    python examples/multihop_qa/convert.py corpus --set hotpotqa --source FILE ... --out FILE
    python examples/multihop_qa/convert.py repacked --data FOLDER --out FOLDER

Reads the published files (`hotpot_train_v1.1.json`, `hotpot_dev_distractor_v1.json`,
`hotpot_dev_fullwiki_v1.json`; 2WikiMultihopQA's `train.json` and `dev.json`, or its parquet files
exported as JSON; `musique_ans_v1.0_*.jsonl`) and repacked ones (`*_dev.jsonl.gz`,
`*_train.jsonl.gz`, `*_corpus.jsonl.gz`), plain or gzip-compressed. Writes task lines
(`payload.answers`; `metadata` with set, type, hops, level) and corpus lines {id, title, text}. A
field that the format does not have is an error, named by file, line and record.
"""

import argparse
import hashlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from formats import CorpusRecord, Question, parse_question
from pydantic import ValidationError

from agent_r1.runtime.files.published_data import (
    SourceError,
    misfit,
    parse_record,
    read_records,
    write_lines,
)
from agent_r1_proto.tasks import Task

SETS = ("hotpotqa", "2wikimultihopqa", "musique")


def read_questions(name: str, path: Path) -> list[Question]:
    """Read the questions of one file, published or repacked, in order.

    Raises:
        SourceError: a record does not fit its format, or an id occurs twice.
    """
    questions: list[Question] = []
    place_of: dict[str, str] = {}
    for place, values in read_records(path):
        question = _question(name, place, values)
        if question.id in place_of:
            raise SourceError(
                f"{place}: id {question.id!r} was used at {place_of[question.id]}; ids must be "
                "unique within a file"
            )
        place_of[question.id] = place
        questions.append(question)
    return questions


def _question(name: str, place: str, values: dict[str, Any]) -> Question:
    try:
        return parse_question(name, values)
    except ValidationError as exc:
        raise misfit(place, exc) from exc


def choose(questions: list[Question], size: int | None, seed: int) -> list[Question]:
    """Choose `size` questions, in file order: those whose id and seed hash lowest.

    The choice depends on ids and seed alone, so it is the same for any order of the file.

    Raises:
        SourceError: there are fewer.
    """
    if size is None:
        return questions
    if size > len(questions):
        raise SourceError(f"--size ({size}) must be at most {len(questions)}, the questions read")

    def rank(question: Question) -> bytes:
        return hashlib.sha256(f"{seed}/{question.id}".encode()).digest()

    chosen = {question.id for question in sorted(questions, key=rank)[:size]}
    return [question for question in questions if question.id in chosen]


def as_task(name: str, question: Question) -> Task:
    """Return a question as a task; the model sees its text only."""
    metadata: dict[str, Any] = {"set": name, "type": question.type or "unknown"}
    if question.hops is not None:
        metadata["hops"] = question.hops
    if question.level is not None:
        metadata["level"] = question.level
    return Task(
        id=f"{name}-{question.id}",
        prompt=question.text,
        payload={"answers": list(question.answers)},
        metadata=metadata,
    )


def read_passages(name: str, paths: Iterable[Path]) -> list[CorpusRecord]:
    """Read the passages of question files or repacked corpora; equal ones come once.

    Raises:
        SourceError: a record fits no format, or one id names two different passages.
    """
    found: dict[str, CorpusRecord] = {}
    for path in paths:
        for place, values in read_records(path):
            for passage in _passages_of(name, place, values):
                known = found.setdefault(passage.id, passage)
                if known != passage:
                    raise SourceError(f"{place}: id {passage.id!r} names another passage already")
    if not found:
        raise SourceError("the files bring no passages; name published files or *_corpus files")
    return list(found.values())


def _passages_of(name: str, place: str, values: dict[str, Any]) -> Iterator[CorpusRecord]:
    if "text" in values:
        yield parse_record(CorpusRecord, place, values)
        return
    for title, text in _question(name, place, values).passages:
        if text:
            digest = hashlib.sha256(f"{title}\n{text}".encode()).hexdigest()
            yield CorpusRecord(id=f"{name}-{digest[:16]}", title=title, text=text)


def _write(path: Path, messages: Iterable[Task] | Iterable[CorpusRecord]) -> None:
    print(f"{path}: {write_lines(path, messages)} lines")


def convert_repacked(
    data: Path, out: Path, *, train_size: int | None, eval_size: int | None, seed: int
) -> None:
    """Convert every repacked file of a folder.

    Writes `{set}_train.jsonl`, `{set}_eval.jsonl` and `{set}_corpus.jsonl` per set, and
    `corpus.jsonl`, all passages together. The sizes hold per set.
    """
    everything: list[CorpusRecord] = []
    for name in SETS:
        for split, source, size in (("train", "train", train_size), ("eval", "dev", eval_size)):
            questions = read_questions(name, data / f"{name}_{source}.jsonl.gz")
            if size is not None:
                questions = choose(questions, min(size, len(questions)), seed)
            tasks = (as_task(name, question) for question in questions)
            _write(out / f"{name}_{split}.jsonl", tasks)
        passages = read_passages(name, [data / f"{name}_corpus.jsonl.gz"])
        _write(out / f"{name}_corpus.jsonl", passages)
        everything += passages
    _write(out / "corpus.jsonl", everything)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    tasks = commands.add_parser("tasks", help="questions of one file to a task file")
    corpus = commands.add_parser("corpus", help="passages of one or more files to a corpus")
    repacked = commands.add_parser("repacked", help="a folder of repacked files to everything")
    for command in (tasks, corpus):
        command.add_argument("--set", choices=SETS, required=True, dest="name")
        command.add_argument("--out", type=Path, required=True, help="file to write")
    tasks.add_argument("--source", type=Path, required=True)
    tasks.add_argument("--size", type=int, help="choose this many questions; default all")
    tasks.add_argument("--seed", type=int, default=0, help="seed of the choice")
    corpus.add_argument("--source", type=Path, required=True, nargs="+")
    repacked.add_argument("--data", type=Path, required=True, help="folder of the .jsonl.gz files")
    repacked.add_argument("--out", type=Path, required=True, help="folder to write")
    repacked.add_argument("--train-size", type=int, help="training questions per set at most")
    repacked.add_argument("--eval-size", type=int, help="evaluation questions per set at most")
    repacked.add_argument("--seed", type=int, default=0, help="seed of the choice")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit status."""
    a = _arguments(argv)
    try:
        if a.command == "tasks":
            questions = choose(read_questions(a.name, a.source), a.size, a.seed)
            _write(a.out, (as_task(a.name, question) for question in questions))
        elif a.command == "corpus":
            _write(a.out, read_passages(a.name, a.source))
        else:
            convert_repacked(
                a.data, a.out, train_size=a.train_size, eval_size=a.eval_size, seed=a.seed
            )
    except SourceError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
