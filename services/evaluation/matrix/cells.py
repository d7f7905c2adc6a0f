"""One cell of the matrix: the answers of an evaluation --> its numbers, in a small file.

The file is made to be kept and committed: a cell that has one is finished on every machine. It says
with which settings it was made, and paths, which differ between machines, are not among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean

from pydantic import JsonValue, ValidationError

from agent_r1.evaluation.answers import Answer, Facts, differences, write_json
from agent_r1.evaluation.matrix.data_sets import Family
from agent_r1.evaluation.statistics import Estimate, bootstrap_mean
from agent_r1_proto.messages import StrictMessage


class Cell(StrictMessage):
    """What one model got on one data set, asked and decoded in one way."""

    settings: dict[str, JsonValue]
    """All that can change an answer or a score."""
    n: int
    """Questions that were scored."""
    failed: int
    """Questions that were not, by an outage; they count in no mean."""
    score: tuple[float, float, float]
    """Mean of the family's component over questions, and its interval, as are the others."""
    extra: tuple[float, float, float] | None
    """The family's second component."""
    sampled_tokens: tuple[float, float, float]
    """Tokens sampled for a question, those of branches that were not chosen included."""
    calls: tuple[float, float, float]
    """Calls that tools answered for a question, to branches that were not chosen included."""
    seconds: tuple[float, float, float]
    """From a question's first turn to its answer, beside the other questions in flight."""
    scorer_tokens: tuple[float, float, float] | None = None
    """Tokens that the scorer's model read and wrote for a question; None where none was asked."""
    scored_share: float | None = None
    """Share of questions about which the scorer was asked: a turn without a rival is not scored."""
    candidates: int | None = None
    """Answers of a pool that were chosen from."""
    scores: dict[str, float] = {}
    """Score of each question by its id, so that cells can be paired; empty in cells of older
    versions that were in no comparison."""


def measure(
    answers: Iterable[Answer],
    family: Family,
    settings: Facts,
    *,
    candidates: int | None = None,
) -> Cell:
    """Return the numbers of a cell.

    Args:
        answers: one a question, in any order.
        family: of the data set.
        settings: of the cell.
        candidates: answers of a pool that each was chosen from.

    Raises:
        ValueError: no question was scored.
    """
    # Sorted, so that resampling meets the questions in the same order however they came.
    ordered = sorted(answers, key=lambda answer: answer.key)
    scored = [answer for answer in ordered if not answer.failed]
    if not scored:
        raise ValueError(f"all {len(ordered)} questions failed; there is nothing to measure")
    extra = None if family.extra is None else [a.components[family.extra] for a in scored]
    asked = [a.scorer_tokens for a in scored if a.scorer_tokens is not None]
    return Cell(
        settings=dict(settings),
        n=len(scored),
        failed=len(ordered) - len(scored),
        score=_rounded([a.components[family.component] for a in scored]),
        extra=None if extra is None else _rounded(extra),
        sampled_tokens=_rounded([a.sampled_tokens or 0 for a in scored]),
        calls=_rounded([sum(a.calls.values()) + (a.discarded_calls or 0) for a in scored]),
        seconds=_rounded([a.seconds or 0.0 for a in scored]),
        scorer_tokens=_rounded(asked) if asked else None,
        scored_share=round(fmean(tokens > 0 for tokens in asked), 4) if asked else None,
        candidates=candidates,
        scores={a.id: a.components[family.component] for a in scored},
    )


def _rounded(values: list[float] | list[int]) -> tuple[float, float, float]:
    found: Estimate = bootstrap_mean(values)
    return round(found.mean, 4), round(found.low, 4), round(found.high, 4)


def write_cell(file: Path, cell: Cell) -> None:
    """Write a cell's file.

    Raises:
        ValueError: it cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, cell.model_dump(mode="json"))
    except OSError as exc:
        raise ValueError(f"the cell {file} cannot be written: {exc.strerror}") from exc


def load_cell(file: Path) -> Cell | None:
    """Return the cell of a file; None where there is none.

    Raises:
        ValueError: it cannot be read.
    """
    if not file.exists():
        return None
    try:
        return Cell.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as exc:
        raise ValueError(f"the cell {file} cannot be read ({exc}); remove it") from exc


def read_cell(file: Path, settings: Mapping[str, JsonValue]) -> Cell | None:
    """Return a finished cell; None where it has no file.

    Raises:
        ValueError: the file cannot be read, or was made with other settings.
    """
    cell = load_cell(file)
    found = [] if cell is None else differences(cell.settings, settings)
    if found:
        raise ValueError(
            f"{file} was made with other settings: {'; '.join(found)}; restore the settings, or "
            "discard the cell with --overwrite"
        )
    return cell
