"""Cells of a table: a small file for every finished run and baseline, made to be committed.

table.py writes one when a run has finished and reads it where the run's folder is not there, so
that a table can be continued on another machine. A cell says with which settings it was made, of
all that decides what is learned and asked; of paths, which differ between machines, it has the last
part.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AliasChoices, Field, JsonValue, ValidationError

from agent_r1.cli.evaluation.table_plan import (
    SEED_KEY,
    PlannedRun,
    TablePlan,
    differences_since,
    flat_settings,
)
from agent_r1.config.run import ConfigError
from agent_r1.evaluation.answers import differences
from agent_r1.evaluation.table.config import BASELINE_TITLES, EXACT_MATCH
from agent_r1.evaluation.table.run import Scores, SeedScores
from agent_r1.runtime.files.writing import write_atomically
from agent_r1_proto.messages import StrictMessage

DECISIVE = (
    *("model.", "data.", "env.", "tools.", "learner.", "engine.", "evaluation."),
    *("reward.components", "reward.rule", "reward.ranges"),
)
"""How keys begin that a cell holds; the others say where and how fast a run is made."""
OF_TRAINING = ("learner.", "engine.", "data.", SEED_KEY)
"""And of these, a baseline's cell holds none."""
MODEL_KEY = re.compile(r"reward\.servers\.\w+\.(\w+)")
OF_A_SERVER = ("url", "api_key", "max_concurrent", "requests_per_minute", "cache_size")
"""Of the models that score, a cell holds every key but these."""


class TableCell(StrictMessage):
    """What one finished run answered, and how it was made."""

    settings: dict[str, JsonValue]
    """Every key that begins like one of `DECISIVE`, the models that score, and the seed; of a
    baseline none that begins like one of `OF_TRAINING`."""
    in_domain: list[str]
    """Sets whose kind of question was trained on."""
    measure: str = EXACT_MATCH
    """The reward component that `scores` and `curve` are of."""
    # Cells of older versions call it `em`.
    scores: Annotated[
        dict[str, list[float | None]], Field(validation_alias=AliasChoices("scores", "em"))
    ]
    """The measure of every question, by set, in the order of its file; None where it failed. Cells
    of older versions leave out what failed."""
    f1: dict[str, float]
    """Mean F1 of the same questions, by set; of none where it was not measured."""
    calls: dict[str, float]
    """Calls that a tool answered, mean over the same questions, by set."""
    failed: dict[str, int]
    """Questions that failed, by set."""
    wall_s: float | None
    curve: list[float]
    """Mean measure of the trajectories of each training step."""
    tokens: list[int]
    """Tokens sampled for each training step."""
    components: dict[str, list[float]] = {}
    """Mean of every other reward component at each training step; of none in older cells."""

    def seed_scores(self) -> SeedScores:
        """Return what the report is made of."""
        seed = self.settings.get(SEED_KEY)
        assert seed is None or isinstance(seed, int)
        return SeedScores(
            seed,
            self.scores,
            self.f1,
            self.calls,
            self.failed,
            self.wall_s,
            self.curve,
            self.tokens,
            self.components,
        )


def write_cell(
    plan: TablePlan, run: PlannedRun, found: SeedScores, in_domain: Sequence[str]
) -> SeedScores:
    """Write the cell of a finished run, if the table keeps cells.

    Returns:
        The scores as a cell has them, so that a report is the same with the run and without it.

    Raises:
        ConfigError: it cannot be written.
    """
    cell = TableCell(
        settings=_settings(run),
        in_domain=list(in_domain),
        measure=plan.measure,
        scores={name: _rounded(values) for name, values in found.scores.items()},
        f1={name: round(value, 4) for name, value in found.f1.items()},
        calls={name: round(value, 4) for name, value in found.calls.items()},
        failed=dict(found.failed),
        wall_s=found.wall_s,
        curve=[round(value, 4) for value in found.curve],
        tokens=list(found.tokens),
        components={
            name: [round(value, 4) for value in values] for name, values in found.components.items()
        },
    )
    file = _file(plan, run)
    if file is None:
        return cell.seed_scores()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, cell.model_dump_json() + "\n")
    except OSError as exc:
        raise ConfigError(f"the cell {file} cannot be written: {exc.strerror}") from exc
    return cell.seed_scores()


def read_cell(plan: TablePlan, run: PlannedRun) -> TableCell | None:
    """Return the cell of a run; None where it has none.

    Raises:
        ConfigError: the file cannot be read, or was made with other settings or for another
            measure.
    """
    file = _file(plan, run)
    if file is None or not file.exists():
        return None
    try:
        cell = TableCell.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as exc:
        raise ConfigError(f"the cell {file} cannot be read ({exc}); remove it") from exc
    found = differences({"measure": cell.measure}, {"measure": plan.measure})
    found += differences_since(cell.settings, _settings(run), run.config, plan.measure)
    if found:
        raise ConfigError(
            f"{file} was made with other settings: {'; '.join(found)}; restore the settings, or "
            f"discard it with --only {run.method} --overwrite"
        )
    return cell


def remove_cell(plan: TablePlan, run: PlannedRun) -> None:
    """Remove the cell of a run, if it has one."""
    file = _file(plan, run)
    if file is not None:
        file.unlink(missing_ok=True)


def _file(plan: TablePlan, run: PlannedRun) -> Path | None:
    return None if plan.cells is None else plan.cells / f"{run.folder.name}.json"


def _settings(run: PlannedRun) -> dict[str, JsonValue]:
    left_out = OF_TRAINING if run.method in BASELINE_TITLES else ()
    return {
        key: _portable(value)
        for key, value in flat_settings(run.config).items()
        if _is_decisive(key) and not key.startswith(left_out)
    }


def _is_decisive(key: str) -> bool:
    if of_model := MODEL_KEY.match(key):
        return of_model[1] not in OF_A_SERVER
    return key.startswith((*DECISIVE, SEED_KEY))


def _portable(value: JsonValue) -> JsonValue:
    if isinstance(value, list):
        return [_portable(item) for item in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _rounded(scores: Scores) -> list[float | None]:
    return [None if score is None else round(score, 4) for score in scores]
