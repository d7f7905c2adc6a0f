"""Plan of `agent-r1 table`: table file --> one resolved configuration a run.

table.py carries the plan out. Keys of the table file come over the configuration and its
variables, as `--set` does; `--set` on the command line comes over `[defaults]`, and a method's own
keys come last.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from agent_r1.cli.evaluation.evaluate import check_search
from agent_r1.cli.evaluation.experiment import Plan, named, places, read_experiment
from agent_r1.cli.evaluation.settings import (
    DIR_KEY,
    differences_since,
    flat_settings,
    trained_settings,
)
from agent_r1.config import checks as config_checks
from agent_r1.config.findings import Check
from agent_r1.config.run import OUTPUT_KEYS, Config, load_config
from agent_r1.config.sources import (
    ConfigError,
    field_annotation,
    flat_leaves,
    located,
    option_settings,
)
from agent_r1.evaluation.answer_file import differences
from agent_r1.evaluation.experiments.cell import SEED_KEY, TableCell, check_settings
from agent_r1.evaluation.experiments.config import (
    BASELINE_TITLES,
    Baseline,
    ContrastConfig,
    MethodConfig,
    TableFile,
)
from agent_r1.evaluation.experiments.estimates import Row
from agent_r1.reward.config import measuring_advice

ROW_KEYS = ("learner.", "engine.", "evaluation.", "run.seed", "run.dir", "model.path")
"""Keys that may differ between runs: none that a service which stays up needs. Each learner pushes
the weights of its own model."""
SAME_KEYS = ("evaluation.sets", "evaluation.temperature", "evaluation.max_questions")
"""Keys that may not differ, or rows would answer different questions."""
SEED = "{seed}"
"""Stands for the seed of the run in a value of a method."""
EVALUATED = {"evaluation.before": False, "evaluation.every": 0, "evaluation.after": True}
"""Evaluations of every run: the baseline is what came before, and only the last policy is a
result."""
TABLES_FOLDER = Path("runs") / "table"


@dataclass(frozen=True)
class PlannedRun:
    """One training run, or a baseline, which trains nothing."""

    method: str
    title: str
    seed: int
    folder: Path
    config: Config

    @property
    def label(self) -> str:
        """Name the run for people."""
        return f"{self.title} seed {self.seed}"

    @cached_property
    def settings(self) -> dict[str, JsonValue]:
        """Every value of the configuration by dotted key, except the folder."""
        return flat_settings(self.config)

    def cell_settings(self) -> dict[str, JsonValue]:
        """Return the settings of its cell."""
        return trained_settings(self.settings, trains=self.method not in BASELINE_TITLES)


@dataclass(frozen=True, kw_only=True)
class TablePlan(Plan[TableFile]):
    """Everything a table file asks for."""

    base: Config
    """Configuration of the services and the baselines."""
    methods: Sequence[Row[PlannedRun]]
    """Methods with the same settings share their runs."""

    def runs(
        self, only: Sequence[str] | None = None, seeds: Sequence[str] | None = None
    ) -> list[PlannedRun]:
        """Return every run once, seed by seed: what is finished early can be compared.

        Args:
            only: names of methods; None takes all of them.
            seeds: None takes all of them.
        """
        wanted = [m for m in self.methods if only is None or m.name in only]
        by_seed = zip_longest(*(method.runs for method in wanted))
        runs = {run.folder: run for of_seed in by_seed for run in of_seed if run is not None}
        return [run for run in runs.values() if seeds is None or str(run.seed) in seeds]

    def baseline(self, name: Baseline) -> PlannedRun:
        """Return a baseline as a run that trains nothing; tables with one folder of cells may ask
        it different questions, so its own has the table's name."""
        folder = self.folder / "baselines" / f"{self.name}_{name}"
        return PlannedRun(name, BASELINE_TITLES[name], self.base.run.seed, folder, self.base)

    def answers(self, baseline: Baseline) -> Path:
        """Return the result file of a baseline."""
        return self.folder / "baselines" / f"{baseline}.jsonl"

    def cell_file(self, run: PlannedRun) -> Path | None:
        """Return the file of a run's cell; None where the table keeps none."""
        return self.cells_folder and self.cells_folder / f"{run.folder.name}.json"

    def read_cell(self, run: PlannedRun) -> TableCell | None:
        """Return the cell of a run; None where it has none.

        Raises:
            ValueError: the file cannot be read, or was made with other settings or for another
                measure.
        """
        file, measure = self.cell_file(run), self.asked.measure
        cell = TableCell.read(file)
        if cell is not None:
            found = differences({"measure": cell.measure}, {"measure": measure})
            found += differences_since(cell.settings, run.cell_settings(), run.config, measure)
            check_settings(file, found, f"--only {run.method} --overwrite")
        return cell


def read_plan(file: Path, options: Sequence[str] = (), out: Path | None = None) -> TablePlan:
    """Read a table file and resolve every run.

    Args:
        file: the table file.
        options: `KEY=VALUE` texts of `--set`.
        out: folder for results, runs and cells; None takes the file's `results` and `cells`, and
            `runs/table`.

    Raises:
        ConfigError: a key is unknown, a value not allowed, or a run could not work beside the
            others; the text names the method. What a run needs is for `check_runs` to find.
    """
    table = read_experiment(TableFile, file, methods=MethodConfig, contrasts=ContrastConfig)
    base_folder = file.resolve().parent
    where_to = places(table, file, TABLES_FOLDER, table.cells, out)
    common = [*_options(table.defaults, base_folder, f"{file}: [defaults]"), *options]
    fixed = [f"{key}={_toml(value)}" for key, value in EVALUATED.items()]

    def resolved(own: Sequence[str], run_dir: Path, seed: int | None = None) -> Config:
        numbers = [] if seed is None else [f"{SEED_KEY}={seed}"]
        values = [*common, *own, *fixed, *numbers, f"{DIR_KEY}={json.dumps(str(run_dir))}"]
        return load_config(base_folder / table.config, values).config

    base = resolved([], where_to["folder"])
    _check_base(base, table)
    _check_sets(file, table, base)
    there = flat_settings(base)
    methods: list[Row[PlannedRun]] = []
    known: dict[str, PlannedRun] = {}
    for method in table.methods:
        where = _where(file, method.name)
        settings = dict(flat_leaves(method.set))
        title = method.title or method.name
        runs: list[PlannedRun] = []
        for seed in method.seeds or table.seeds:
            run_dir = where_to["folder"] / "runs" / f"{method.name}_seed{seed}"
            with named(where):
                own = json.loads(json.dumps(method.set).replace(SEED, str(seed)))
                config = resolved(_options(own, base_folder, where), run_dir, seed)
                run = PlannedRun(method.name, title, seed, run_dir, config)
                _check_run(run, there, settings)
            runs.append(known.setdefault(json.dumps(run.settings, sort_keys=True), run))
        methods.append(Row(method.name, title, method.table, runs, settings=settings))
    return TablePlan(asked=table, base=base, methods=methods, **where_to)


def check_runs(plan: TablePlan, runs: Sequence[PlannedRun]) -> None:
    """Look at the data, models, code and machine that the services and these runs need.

    Of runs that differ by their seed alone, the first is looked at.

    Raises:
        ConfigError: something is missing or does not fit; the text names the method.
    """
    findings = config_checks.find(plan.base, "train", resume=True)  # it continues in its folder
    # What training names is all that evaluating loads.
    asked = config_checks.problems(plan.base, "evaluate")
    findings.checks.append(Check("evaluation", "", asked, here=False))
    config_checks.refuse(findings)
    firsts: dict[tuple[str, str], PlannedRun] = {}
    for run in runs:
        firsts.setdefault((run.method, run.config.model.path), run)
    for run in firsts.values():
        with named(_where(plan.file, run.method)):
            config_checks.check(run.config, "train", machine=False)


def chosen(option: str, names: str | None, known: Iterable[object]) -> list[str] | None:
    """Return the names that an option lists; None without it.

    Raises:
        ConfigError: a name is not known.
    """
    if names is None:
        return None
    has = ", ".join(map(str, known))
    found = [name.strip() for name in names.split(",") if name.strip()]
    for name in found:
        if name not in has.split(", "):
            raise ConfigError(f"{option} names {name!r}; the table has {has}")
    if not found:
        raise ConfigError(f"{option} is empty; name one of {has}")
    return found


def _where(file: Path, method: str) -> str:
    return f"{file}: method {method!r}"


def _options(values: Mapping[str, Any], folder: Path, where: str) -> list[str]:
    """Return values as `--set` texts; relative paths mean the table file's folder."""
    options: list[str] = []
    for name, value in flat_leaves(values):
        key = tuple(name.split("."))
        if name in (SEED_KEY, DIR_KEY, *EVALUATED):
            raise ConfigError(f"{where}: {name} is set by the table itself; remove it")
        with named(where):
            list(option_settings(Config, [f"{name}={_toml(value)}"]))
        if key not in OUTPUT_KEYS:
            value = located(value, field_annotation(Config, key), folder)
        options.append(f"{name}={_toml(value)}")
    return options


def _toml(value: JsonValue) -> str:
    """Render a value as TOML does: JSON is TOML for all that a key of a configuration holds."""
    return "none" if value is None else json.dumps(value)


def _check_sets(file: Path, table: TableFile, base: Config) -> None:
    """Refuse a set that is compared or averaged, but not evaluated."""
    named = [("contrasts", c.set) for c in table.contrasts if c.set is not None]
    for key, name in [*named, *(("average", name) for name in table.average or ())]:
        if name not in base.evaluation.sets:
            raise ConfigError(
                f"{file}: {key} names the set {name!r}, and evaluation.sets has "
                f"{sorted(base.evaluation.sets)}; name one of them, or leave it out"
            )


def _check_base(base: Config, table: TableFile) -> None:
    measured = base.reward.measured()
    if table.measure not in measured:
        advice = measuring_advice(table.measure, base.reward.components)
        raise ConfigError(
            f"the table compares its measure {table.measure!r}, and the configuration measures "
            f"{', '.join(measured)} only; give the table another measure, or {advice}"
        )
    if "naive_rag" in table.baselines:
        with named(f"baseline {BASELINE_TITLES['naive_rag']}"):
            check_search(base)


def _check_run(
    run: PlannedRun, there: Mapping[str, JsonValue], own: Mapping[str, JsonValue]
) -> None:
    """Refuse a run that needs other services than the others, or answers other questions.

    Args:
        run: of a method.
        there: settings of the services and the other rows.
        own: what the file says of the method.
    """
    config, here = run.config, run.settings
    if config.learner.checkpoint_url is not None:
        raise ConfigError(
            f"learner.checkpoint_url ({config.learner.checkpoint_url!r}) holds one run, and the "
            "runs of a table share their run.id; remove it"
        )
    for key in sorted(here.keys() | there.keys()):
        if here.get(key) == there.get(key):
            continue
        if not key.startswith(ROW_KEYS):
            raise ConfigError(
                f"{key} ({here.get(key)!r}) differs from that of the other rows "
                f"({there.get(key)!r}): the services keep running between runs, so a method "
                "may set only learner.*, engine.*, evaluation.* and model.path; move it to "
                "[defaults]"
            )
        if any(key == name or key.startswith(f"{name}.") for name in SAME_KEYS):
            raise ConfigError(
                f"{key} ({own.get(key, here.get(key))!r}) differs from that of the other rows "
                f"({there.get(key)!r}), so the rows would answer different questions; "
                "move it to [defaults]"
            )
