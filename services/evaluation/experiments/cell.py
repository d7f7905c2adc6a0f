"""Cells: the numbers of one finished part of an experiment --> a small file, and back.

The file is made to be kept and committed: what has one is finished on every machine, and reports
are made of cells alone. A cell says with which settings it was made, and paths, which differ
between machines, are not among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, AliasChoices, Field, JsonValue, ValidationError

from agent_r1.evaluation.answer_file import Answer, Facts
from agent_r1.evaluation.experiments.config import EXACT_MATCH
from agent_r1.evaluation.experiments.data_sets import Family
from agent_r1.evaluation.statistics import bootstrap_mean
from agent_r1.runtime.files.writing import write_atomically
from agent_r1_proto.messages import StrictMessage

SEED_KEY = "run.seed"
# So that a report is the same from what was just measured and from the file.
Rounded = Annotated[float, AfterValidator(lambda value: round(value, 4))]
Interval = tuple[Rounded, Rounded, Rounded]
"""A mean over questions, and the ends of the interval around it."""


class Cell(StrictMessage):
    """Result of one part of an experiment, and how it was made."""

    indent: ClassVar[int | None] = None
    settings: dict[str, JsonValue]
    """All that can change an answer or a score."""

    def write(self, file: Path) -> None:
        """Write the file.

        Raises:
            ValueError: it cannot be written.
        """
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, self.model_dump_json(indent=self.indent) + "\n")
        except OSError as exc:
            raise ValueError(f"the cell {file} cannot be written: {exc.strerror}") from exc

    @classmethod
    def read(cls, file: Path | None) -> Self | None:
        """Return the cell of a file; None where there is none.

        Raises:
            ValueError: it cannot be read.
        """
        if file is None or not file.exists():
            return None
        try:
            return cls.model_validate_json(file.read_bytes())
        except (OSError, ValidationError) as exc:
            raise ValueError(f"the cell {file} cannot be read ({exc}); remove it") from exc


def check_settings(file: Path | None, found: Sequence[str], discard: str) -> None:
    """Refuse a cell that was made with other settings.

    Args:
        file: of the cell.
        found: in what its settings differ.
        discard: the options that discard it.

    Raises:
        ValueError: they do.
    """
    if found:
        raise ValueError(
            f"{file} was made with other settings: {'; '.join(found)}; restore the settings, or "
            f"discard the cell with {discard}"
        )


class TableCell(Cell):
    """Answers of one training run, or of one baseline, of a table.

    The settings of a baseline have nothing of training, and no seed: nothing in it is drawn.
    """

    in_domain: list[str] = []
    """Sets whose kind of question was trained on."""
    measure: str = EXACT_MATCH
    """The reward component that `scores` and `curve` are of."""
    # Cells of older versions call it `em`.
    scores: Annotated[
        dict[str, list[Rounded | None]], Field(validation_alias=AliasChoices("scores", "em"))
    ]
    """The measure of every question, by set, in the order of its file; None where it failed. Cells
    of older versions leave out what failed."""
    f1: dict[str, Rounded] = {}
    """Mean F1 of the same questions, by set; of none where it was not measured."""
    calls: dict[str, Rounded] = {}
    """Calls that a tool answered, mean over the same questions, by set."""
    failed: dict[str, int] = {}
    """Questions that failed and count in no mean, by set."""
    wall_s: float | None = None
    """Seconds the run took."""
    curve: list[Rounded] = []
    """Mean measure of the trajectories of each training step."""
    tokens: list[int] = []
    """Tokens sampled for each training step."""
    components: dict[str, list[Rounded]] = {}
    """Mean of every other reward component at each training step; of none in older cells."""

    @property
    def seed(self) -> int | None:
        """`run.seed`; None for a baseline."""
        seed = self.settings.get(SEED_KEY)
        assert seed is None or isinstance(seed, int)
        return seed


class MatrixCell(Cell):
    """Scores of one model on one data set, asked and decoded in one way."""

    indent: ClassVar[int | None] = 2
    n: int
    """Questions that were scored."""
    failed: int
    """Questions that were not, by an outage; they count in no mean."""
    score: Interval
    """Mean of the family's component over questions, and its interval, as are the others."""
    extra: Interval | None
    """The family's second component."""
    sampled_tokens: Interval
    """Tokens sampled for a question, those of branches that were not chosen included."""
    calls: Interval
    """Calls that tools answered for a question, to branches that were not chosen included."""
    seconds: Interval
    """Time from a question's first turn to its answer, beside the other questions in flight."""
    scorer_tokens: Interval | None = None
    """Tokens that the scorer's model read and wrote for a question; None where none was asked."""
    scored_share: Rounded | None = None
    """Share of questions about which the scorer was asked: a turn without a rival is not scored."""
    searched_share: Rounded | None = None
    """Share of questions for which a search had at least two different candidates in some state;
    None with other methods, and in cells of older versions."""
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
) -> MatrixCell:
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
    shares = [a.scores for a in scored if a.scores is not None]
    searched = [a.searched for a in scored if a.searched is not None]
    return MatrixCell(
        settings=dict(settings),
        n=len(scored),
        failed=len(ordered) - len(scored),
        score=_mean([a.components[family.component] for a in scored]),
        extra=None if extra is None else _mean(extra),
        sampled_tokens=_mean([a.sampled_tokens or 0 for a in scored]),
        calls=_mean([sum(a.calls.values()) + (a.discarded_calls or 0) for a in scored]),
        seconds=_mean([a.seconds or 0.0 for a in scored]),
        scorer_tokens=_mean(asked) if asked else None,
        scored_share=fmean(scores > 0 for scores in shares) if shares else None,
        searched_share=fmean(searched) if searched else None,
        candidates=candidates,
        scores={a.id: a.components[family.component] for a in scored},
    )


def _mean(values: Sequence[float]) -> Interval:
    found = bootstrap_mean(values)
    return found.mean, found.low, found.high
