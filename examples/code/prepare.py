"""Turn HumanEval and MBPP files into task files.

    python examples/code/prepare.py humaneval --source FILE --out FILE
    python examples/code/prepare.py mbpp --source FILE --out FILE [--ids 11-510]

Reads the published JSON lines, plain or gzip-compressed. Writes one task a line: the tests go into
`tool_context`, which the tool `code_tests` reads and the model never sees. The reference solution
is kept in `payload.solution` for checks of the data; no service shows it to the model. A record
that does not fit is an error, named by file and line.

MBPP's ids 11 to 510 are its evaluation set; 601 to 974 its training set, 2 to 4 its prompt.
"""

import argparse
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
    "Write the Python program that is asked for and test it with the tool code_tests. Mend it "
    "until all tests pass; then answer in a sentence."
)


class HumanEvalRecord(BaseModel):
    """A line of HumanEval."""

    model_config = ConfigDict(extra="forbid", strict=True)

    task_id: str
    prompt: str
    """Imports, the function's head and its docstring."""
    entry_point: str
    canonical_solution: str
    test: str
    """Defines `check(candidate)`."""


class MbppRecord(BaseModel):
    """A line of MBPP."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str
    code: str
    task_id: int
    test_setup_code: str
    """Runs after the code and before the tests; set in two problems."""
    test_list: list[str]
    challenge_test_list: list[str] = []


def humaneval_task(place: str, values: dict[str, Any]) -> Task:
    """Return a line of HumanEval as a task.

    Raises:
        SourceError: the line does not fit, or its test does not define `check`.
    """
    record = parse_record(HumanEvalRecord, place, values)
    if "def check(" not in record.test:
        raise SourceError(f"{place}: test must define check(candidate); it does not")
    prompt = _unix(record.prompt)
    return Task(
        id=record.task_id,
        prompt=f"{INSTRUCTION}\n\nComplete this program:\n\n```python\n{prompt.strip()}\n```",
        payload={"solution": _unix(record.canonical_solution)},
        tools=["code_tests"],
        tool_context={
            "prompt": prompt,
            "entry_point": record.entry_point,
            "check": _unix(record.test),
        },
        metadata={"set": "humaneval", "type": "function"},
    )


def mbpp_task(place: str, values: dict[str, Any]) -> Task:
    """Return a line of MBPP as a task; it shows the first test, which gives the function's name.

    Raises:
        SourceError: the line does not fit, or has no tests.
    """
    record = parse_record(MbppRecord, place, values)
    if not record.test_list:
        raise SourceError(f"{place}: test_list is empty; every problem needs a test")
    tests = [_unix(test).strip() for test in record.test_list]
    return Task(
        id=f"MBPP/{record.task_id}",
        prompt=(
            f"{INSTRUCTION}\n\n{_unix(record.text).strip()}\n\n"
            f"This must hold:\n\n```python\n{tests[0]}\n```"
        ),
        payload={"solution": _unix(record.code)},
        tools=["code_tests"],
        tool_context={"tests": [*tests], "setup": _unix(record.test_setup_code)},
        metadata={"set": "mbpp", "type": "function"},
    )


def _unix(text: str) -> str:
    """Return a text with \\n at its line ends: MBPP's has \\r\\n."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


MAKERS = {"humaneval": humaneval_task, "mbpp": mbpp_task}


def read_tasks(kind: str, path: Path, ids: tuple[int, int] | None = None) -> list[Task]:
    """Read every task of a file, in order.

    Args:
        kind: the data set.
        path: its file.
        ids: MBPP: lowest and highest id taken; None takes all.

    Raises:
        SourceError: a line does not fit, an id comes twice, or no task is left.
    """
    tasks: list[Task] = []
    place_of: dict[str, str] = {}
    for place, values in read_records(path):
        task = MAKERS[kind](place, values)
        if task.id in place_of:
            raise SourceError(f"{place}: id {task.id!r} was used at {place_of[task.id]}")
        place_of[task.id] = place
        number = int(task.id.rpartition("/")[2])
        if ids is None or ids[0] <= number <= ids[1]:
            tasks.append(task)
    if not tasks:
        raise SourceError(f"{path} has no task with an id from {ids}; correct --ids")
    return tasks


def _id_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    return int(low), int(high)


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("kind", choices=sorted(MAKERS))
    parser.add_argument("--source", type=Path, required=True, help="published file")
    parser.add_argument("--out", type=Path, required=True, help="task file to write")
    parser.add_argument("--ids", type=_id_range, metavar="FIRST-LAST", help="only these ids")
    arguments = parser.parse_args(argv)
    try:
        tasks = read_tasks(arguments.kind, arguments.source, arguments.ids)
        print(f"{arguments.out}: {write_lines(arguments.out, tasks)} tasks")
    except SourceError as exc:
        print(f"prepare.py: error: {exc}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
