"""What a table file says: methods over seeds, and where results go.

`cli/evaluation/table_plan.py` reads the file and resolves every method to a run configuration.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from agent_r1.evaluation.statistics import MAX_FLIPPED
from agent_r1.runtime.config import StrictConfig

Baseline = Literal["naive_rag", "base_tool_call"]
Part = Literal["methods", "ablation"]
"""Which of the two tables a method is a row of."""
BASELINE_TITLES: dict[Baseline, str] = {
    "naive_rag": "Naive RAG",
    "base_tool_call": "Base Tool Call",
}
EXACT_MATCH = "exact_match"
"""The measure of a table that names none."""


def measure_title(measure: str) -> str:
    """Return a measure in words: `trials:all_tests_passed` is `all tests passed`."""
    return measure.rpartition(":")[2].replace("_", " ")


class MethodConfig(StrictConfig):
    """One entry of `[[methods]]`: a row of one of the tables."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,40}$")]
    """Names the run folders, `{name}_seed0`, and the row for `--only`."""
    title: str = ""
    """What the tables call it; empty is `name`."""
    table: Part = "methods"
    """Which table it is a row of."""
    set: dict[str, JsonValue] = {}
    """Keys of the run configuration, as `--set` takes them: `learner.*`, `evaluation.*`, and
    `model.path` for another model of the same shape; "{seed}" stands for the seed of the run."""
    seeds: Annotated[list[int], Field(min_length=1)] | None = None
    """Values of `run.seed` for this method; None: the table's."""


class ContrastConfig(StrictConfig):
    """One entry of `[[contrasts]]`: two methods that are compared, fixed before the first run."""

    first: str
    """Name of a method."""
    second: str
    """Name of the method it is compared with; the difference is second minus first."""
    set: str | None = None
    """The evaluation set whose scores are compared; None: the average of the table."""


class TableFile(StrictConfig):
    """A table file."""

    config: Path
    """Configuration that every row starts from."""
    results: Path
    """Files to write, without suffix: `results/small` makes `results/small.md` and others."""
    seeds: Annotated[list[int], Field(min_length=1)]
    """Values of `run.seed`; every method is trained once with each."""
    measure: str = EXACT_MATCH
    """The reward component that the table compares, which `reward.components` names."""
    defaults: dict[str, JsonValue] = {}
    """Keys of the run configuration that hold for every row; a method's own come after."""
    chosen_on: str = ""
    """Which choices (learning rate, data, prompts) were made while looking at which questions, in
    sentences for the report. Empty is not known, and the report says so."""
    remarks: str = ""
    """Sentences for the report that no number says, such as which methods are the same by their
    formulas."""
    baselines: list[Baseline] = []
    """Untrained methods, evaluated first."""
    methods: Annotated[list[MethodConfig], Field(min_length=1)]
    """Trained methods, in the order of the tables."""
    average: Annotated[list[str], Field(min_length=1)] | None = None
    """Names in `evaluation.sets` that the average is over; None: those whose kind of question was
    trained on."""
    threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    """Mean measure of the training rollouts for which the sampled tokens are counted until a run
    reaches it; fixed before the first run. None counts none."""
    contrasts: list[ContrastConfig] = []
    """Comparisons that are tested, over the seeds that both methods have: exact sign-flip tests
    whose p-values are adjusted for their number by Holm's procedure."""
    cells: Path | None = None
    """Folder with a small file for every finished run and baseline, made to be committed: what has
    one is finished wherever the table is continued. None keeps results in the run folders only."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [*self.baselines, *(method.name for method in self.methods)]
        for what, counts in (("methods", Counter(names)), ("seeds", Counter(self.seeds))):
            twice = next((value for value, count in counts.items() if count > 1), None)
            if twice is not None:
                raise ValueError(f"{what} has {twice!r} twice; remove one of the two")
        trained = {method.name for method in self.methods}
        for contrast in self.contrasts:
            for name in (contrast.first, contrast.second):
                if name not in trained:
                    raise ValueError(
                        f"contrasts names {name!r}, and the trained methods are {sorted(trained)}; "
                        "name one of them"
                    )
        return self

    @model_validator(mode="after")
    def _check_contrasts(self) -> Self:
        seeds = {method.name: {*(method.seeds or self.seeds)} for method in self.methods}
        for contrast in self.contrasts:
            shared = len(seeds[contrast.first] & seeds[contrast.second])
            if shared > MAX_FLIPPED:
                raise ValueError(
                    f"contrasts compares {contrast.first!r} and {contrast.second!r} over {shared} "
                    f"seeds, and the exact sign-flip test takes at most {MAX_FLIPPED}; give one of "
                    "them fewer seeds"
                )
        return self
