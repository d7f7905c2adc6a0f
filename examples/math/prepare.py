"""Turn GSM8K and MATH files into task files.

    python examples/math/prepare.py gsm8k --source FILE --out FILE
    python examples/math/prepare.py math --source FILE --out FILE

Reads the published JSON lines, plain or gzip-compressed: GSM8K's `train.jsonl` and `test.jsonl`
(`question`, `answer` with the number after `####`), and MATH or MATH-500 (`problem`, `answer`,
optionally `solution`, `subject`, `level`, `unique_id`). Writes one task a line: `payload.answers`
for the reward `math_equal`, and for GSM8K `payload.answer_type`, which lets the last number of a
text count. A record that does not fit is an error, named by file and line.
"""

import argparse
import hashlib
import re
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from agent_r1.runtime.files.published_data import (
    SourceError,
    parse_record,
    read_records,
    write_lines,
)
from agent_r1_proto.tasks import Task

INSTRUCTION = (
    "Solve the problem. You may run Python with the tool. Give the final answer in \\boxed{}."
)
_FINAL = re.compile(r"####\s*(-?\$?[\d,]+(?:\.\d+)?)\s*$")


class GsmRecord(BaseModel):
    """A line of GSM8K."""

    model_config = ConfigDict(extra="forbid", strict=True)

    question: str
    answer: str
    """Worked out; the last line is `#### number`."""


class MathRecord(BaseModel):
    """A line of MATH-500, or of MATH with its answer taken out of the solution."""

    model_config = ConfigDict(extra="forbid", strict=True)

    problem: str
    answer: str
    solution: str = ""
    subject: str = "unknown"
    level: int | None = None
    unique_id: str | None = None


def gsm8k_task(place: str, values: dict[str, Any], name: str) -> Task:
    """Return a line of GSM8K as a task.

    Raises:
        SourceError: the line does not fit, or has no number after `####`.
    """
    record = parse_record(GsmRecord, place, values)
    final = _FINAL.search(record.answer)
    if final is None:
        raise SourceError(
            f"{place}: answer ends with {record.answer[-40:]!r}; it must end with `#### number`"
        )
    answer = final[1].replace(",", "").replace("$", "")
    return Task(
        id=f"{name}-{_digest(record.question)}",
        prompt=f"{INSTRUCTION}\n\n{record.question}",
        payload={"answers": [answer], "answer_type": "number"},
        metadata={"set": name, "type": "word_problem"},
    )


def math_task(place: str, values: dict[str, Any], name: str) -> Task:
    """Return a line of MATH as a task.

    Raises:
        SourceError: the line does not fit, or its answer is empty.
    """
    record = parse_record(MathRecord, place, values)
    if not record.answer.strip():
        raise SourceError(f"{place}: answer is empty; every problem needs one")
    metadata: dict[str, str | int] = {"set": name, "type": record.subject}
    if record.level is not None:
        metadata["level"] = record.level
    return Task(
        id=f"{name}-{record.unique_id or _digest(record.problem)}",
        prompt=f"{INSTRUCTION}\n\n{record.problem}",
        payload={"answers": [record.answer]},
        metadata={**metadata},
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


MAKERS = {"gsm8k": gsm8k_task, "math": math_task}


def read_tasks(kind: str, path: Path, name: str) -> list[Task]:
    """Read every task of a file, in order.

    Raises:
        SourceError: a line does not fit, or comes twice.
    """
    tasks: dict[str, Task] = {}
    place_of: dict[str, str] = {}
    for place, values in read_records(path):
        task = MAKERS[kind](place, values, name)
        if task.id in tasks:
            raise SourceError(f"{place}: the same problem as at {place_of[task.id]}; remove one")
        tasks[task.id], place_of[task.id] = task, place
    return list(tasks.values())


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("kind", choices=sorted(MAKERS))
    parser.add_argument("--source", type=Path, required=True, help="published file")
    parser.add_argument("--out", type=Path, required=True, help="task file to write")
    parser.add_argument("--set", dest="name", help="name of the set in reports (the kind)")
    arguments = parser.parse_args(argv)
    try:
        tasks = read_tasks(arguments.kind, arguments.source, arguments.name or arguments.kind)
        print(f"{arguments.out}: {write_lines(arguments.out, tasks)} tasks")
    except SourceError as exc:
        print(f"prepare.py: error: {exc}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
