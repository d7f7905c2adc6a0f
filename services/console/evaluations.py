"""Evaluations of the runs: scores with intervals, and paired differences of two.

Reads `evaluation_after.jsonl` of each run, which the learner writes, and result files of `agent-r1
evaluate` in the folder of the runs or in a run folder. services/evaluation computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from agent_r1.console.runs import DAMAGE, Runs
from agent_r1.evaluation.answer_file import Answer, meta_file, read_answers
from agent_r1.evaluation.comparison import BY_ANOTHER_NAME, Comparison, compare_answers
from agent_r1.evaluation.statistics import Estimate
from agent_r1.evaluation.summary import SetSummary, summarise_answers
from agent_r1.launch.local_view import read_json_lines
from agent_r1.runtime.files.run_folder import ANSWERS_FILE

META_SUFFIX = ".meta.json"
KEPT = 16
"""Summaries and comparisons that are kept: each takes up to seconds."""
LEFT_OUT = ("num_turns", "places", "searched")
"""Measures that a run's own evaluation does not have, and those of searches among branches."""


@dataclass(frozen=True)
class Scored:
    """One evaluation whose answers are on file."""

    key: str
    """Path below the folder of the runs."""
    file: Path
    written_at: float

    @property
    def stamp(self) -> tuple[Path, int, int]:
        """What changes when the file does."""
        status = self.file.stat()
        return self.file, status.st_mtime_ns, status.st_size


def list_evaluations(runs: Runs) -> list[Scored]:
    """Return the evaluations of the runs, the newest first."""
    names = runs.names()
    folders = [runs.root, *(runs.root / name for name in names)]
    files = [runs.root / name / ANSWERS_FILE for name in names]
    files += [file for folder in folders for file in _result_files(folder)]
    found = [
        Scored(str(file.relative_to(runs.root)), file, file.stat().st_mtime)
        for file in files
        if file.is_file()
    ]
    return sorted(found, key=lambda one: one.written_at, reverse=True)


def _result_files(folder: Path) -> Iterator[Path]:
    for meta in folder.glob(f"*{META_SUFFIX}"):
        file = meta.with_name(meta.name.removesuffix(META_SUFFIX))
        if meta_file(file) == meta:
            yield file


def find_evaluation(runs: Runs, key: str) -> Scored:
    """Return an evaluation by its key.

    Raises:
        ValueError: there is none.
    """
    for one in list_evaluations(runs):
        if one.key == key:
            return one
    raise ValueError(f"there is no evaluation {key!r} in {runs.root}")


def summarise(one: Scored) -> dict[str, dict[str, Estimate]]:
    """Return the scores of an evaluation with their intervals, by set and name.

    Raises:
        ValueError: its file is damaged.
    """
    return _summarised(one.stamp)


@lru_cache(KEPT)
def _summarised(stamp: tuple[Path, int, int]) -> dict[str, dict[str, Estimate]]:
    return {name: _shown(scores) for name, scores in summarise_answers(_answers(stamp[0])).items()}


def _shown(scores: SetSummary) -> dict[str, Estimate]:
    measured = {
        name: one
        for name, one in scores.measures.items()
        if one is not None and name not in LEFT_OUT
    }
    components = {n: one for n, one in scores.components.items() if n not in BY_ANOTHER_NAME}
    return measured | components | {f"calls/{tool}": one for tool, one in scores.calls.items()}


def compare(a: Scored, b: Scored) -> Comparison:
    """Compare two evaluations over the questions that both answered.

    Raises:
        ValueError: a file is damaged, or they have no question in common.
    """
    return _compared(a.stamp, b.stamp)


@lru_cache(KEPT)
def _compared(a: tuple[Path, int, int], b: tuple[Path, int, int]) -> Comparison:
    return compare_answers(a[0], b[0], _answers(a[0]), _answers(b[0]))


def _answers(file: Path) -> list[Answer]:
    return _own_answers(file) if file.name == ANSWERS_FILE else read_answers(file)


def _own_answers(file: Path) -> list[Answer]:
    """Return the lines of a run's last evaluation as answers without their texts."""
    answers: list[Answer] = []
    for record in read_json_lines(file):
        names = ("id", "type", "failed", "reward", "em", "f1")
        fields: dict[str, Any] = {name: record.get(name) for name in names}
        fields |= {"set": record.get("set") or "all", "components": record.get("components") or {}}
        fields |= {"method": "agent", "question": "", "prompt": []}
        try:
            fields["num_calls"] = sum((record.get("calls") or {}).values())
            answers.append(Answer.model_validate(fields))
        except DAMAGE as exc:
            raise ValueError(f"{file}: question {record.get('id')!r} is damaged: {exc}") from exc
    if not answers:
        raise ValueError(f"{file}: the file holds no answer; evaluate the run again")
    return answers
