"""What `agent-r1 table` is to run: table file --> one resolved configuration a run.

table.py carries the plan out. Keys of the table file come over the configuration and its
variables, as `--set` does; `--set` on the command line comes over `[defaults]`, and a method's own
keys come last.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic import JsonValue, ValidationError

from agent_r1.cli.evaluation.evaluate import check_search
from agent_r1.config import checks as config_checks
from agent_r1.config.code import Findings
from agent_r1.config.files import VERSION_KEY, read_file
from agent_r1.config.run import OUTPUT_KEYS, Config, dump_config, load_config
from agent_r1.config.sources import (
    ConfigError,
    explain,
    field_annotation,
    flat_leaves,
    leaves,
    located,
    option_settings,
)
from agent_r1.config.versions import translate_dotted
from agent_r1.evaluation.answers import differences
from agent_r1.evaluation.table.config import (
    BASELINE_TITLES,
    EXACT_MATCH,
    Baseline,
    ContrastConfig,
    MethodConfig,
    Part,
    TableFile,
)
from agent_r1.reward.config import RewardConfig, measuring_advice
from agent_r1_proto.rewards import PAPER_MEASURES

CANARY = "learner.canary_"
"""How keys begin that say how closely pushes are watched."""
RULE = "reward.rule"
COMPONENTS = "reward.components."
ROW_KEYS = ("learner.", "engine.", "evaluation.", "run.seed", "run.dir", "model.path")
"""What may differ between runs: nothing that a service which stays up needs. Each learner pushes
the weights of its own model."""
SAME_KEYS = ("evaluation.sets", "evaluation.temperature", "evaluation.max_questions")
"""And these may not, or rows would answer different questions."""
SEED_KEY, DIR_KEY = "run.seed", "run.dir"
SEED = "{seed}"
"""Stands for the seed of the run in a value of a method."""
EVALUATED = {"evaluation.before": False, "evaluation.every": 0, "evaluation.after": True}
"""Of every run: the baseline is what came before, and only the last policy is a result."""
TABLES_FOLDER = Path("runs") / "table"


@dataclass(frozen=True)
class PlannedRun:
    """One training run."""

    method: str
    title: str
    seed: int
    folder: Path
    config: Config

    @property
    def label(self) -> str:
        """Name the run for people."""
        return f"{self.title} seed {self.seed}"


@dataclass(frozen=True)
class PlannedMethod:
    """One row of one of the tables."""

    name: str
    title: str
    table: Part
    settings: Mapping[str, JsonValue]
    runs: Sequence[PlannedRun]
    """One a seed; those of an earlier method where every setting is the same."""


@dataclass(frozen=True)
class TablePlan:
    """Everything a table file asks for."""

    file: Path
    name: str
    base: Config
    """Of the services and the baselines."""
    baselines: Sequence[Baseline]
    methods: Sequence[PlannedMethod]
    results: Path
    """Files to write, without suffix."""
    folder: Path
    """Folder of the runs, the baselines' answers and the services' logs."""
    chosen_on: str = ""
    """Which choices were made while looking at which questions."""
    remarks: str = ""
    """Sentences for the report that no number says."""
    contrasts: Sequence[ContrastConfig] = ()
    """Comparisons that are tested."""
    average: Sequence[str] = ()
    """Sets that the average is over; none: those whose kind of question was trained on."""
    threshold: float | None = None
    """Mean measure until which the sampled tokens of training are counted."""
    cells: Path | None = None
    """Folder with a small file for every finished run and baseline."""
    measure: str = EXACT_MATCH
    """The reward component that is compared."""

    def runs(
        self, only: Sequence[str] | None = None, seeds: Sequence[int] | None = None
    ) -> list[PlannedRun]:
        """Return every run once, seed by seed: what is finished early can be compared.

        Args:
            only: names of methods; None takes all of them.
            seeds: None takes all of them.
        """
        wanted = [m for m in self.methods if only is None or m.name in only]
        by_seed = zip_longest(*(method.runs for method in wanted))
        runs = {run.folder: run for of_seed in by_seed for run in of_seed if run is not None}
        return [run for run in runs.values() if seeds is None or run.seed in seeds]

    def baseline(self, name: Baseline) -> PlannedRun:
        """Return a baseline as a run that trains nothing; tables with one folder of cells may ask
        it different questions, so its own has the table's name."""
        folder = self.folder / "baselines" / f"{self.name}_{name}"
        return PlannedRun(name, BASELINE_TITLES[name], self.base.run.seed, folder, self.base)

    def answers(self, baseline: Baseline) -> Path:
        """Return the result file of a baseline."""
        return self.folder / "baselines" / f"{baseline}.jsonl"


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
    table = _read_table(file)
    base_folder = file.resolve().parent
    config_file = base_folder / table.config
    results = (base_folder / table.results).resolve()
    folder = (TABLES_FOLDER / results.name).resolve()
    cells = None if table.cells is None else (base_folder / table.cells).resolve()
    if out is not None:
        results, folder = out.resolve() / results.name, out.resolve()
        cells = cells and folder / cells.name
    common = [*_options(table.defaults, base_folder, f"{file}: [defaults]"), *options]
    fixed = [f"{key}={_toml(value)}" for key, value in EVALUATED.items()]

    def resolved(own: Sequence[str], run_dir: Path, seed: int | None = None) -> Config:
        numbers = [] if seed is None else [f"{SEED_KEY}={seed}"]
        place = f"{DIR_KEY}={json.dumps(str(run_dir))}"
        return load_config(config_file, [*common, *own, *fixed, *numbers, place]).config

    base = resolved([], folder)
    _check_base(base, table)
    _check_sets(file, table, base)
    methods: list[PlannedMethod] = []
    known: dict[str, PlannedRun] = {}
    for method in table.methods:
        where = _where(file, method.name)
        settings = dict(flat_leaves(method.set))
        title = method.title or method.name
        runs: list[PlannedRun] = []
        for seed in method.seeds or table.seeds:
            run_dir = folder / "runs" / f"{method.name}_seed{seed}"
            with _named(where):
                own = json.loads(json.dumps(method.set).replace(SEED, str(seed)))
                config = resolved(_options(own, base_folder, where), run_dir, seed)
                _check_run(config, base, settings)
            run = PlannedRun(method.name, title, seed, run_dir, config)
            runs.append(known.setdefault(json.dumps(flat_settings(config), sort_keys=True), run))
        methods.append(PlannedMethod(method.name, title, method.table, settings, runs))
    return TablePlan(
        file=file,
        name=results.name,
        base=base,
        baselines=table.baselines,
        methods=methods,
        results=results,
        folder=folder,
        chosen_on=table.chosen_on,
        remarks=table.remarks,
        contrasts=table.contrasts,
        average=table.average or (),
        threshold=table.threshold,
        cells=cells,
        measure=table.measure,
    )


def check_runs(plan: TablePlan, runs: Sequence[PlannedRun]) -> None:
    """Look at the data, models, code and machine that the services and these runs need.

    Of runs that differ by their seed alone, the first is looked at.

    Raises:
        ConfigError: something is missing or does not fit; the text names the method.
    """
    findings = config_checks.look(plan.base, "train", resume=True)  # it continues in its folder
    # What training names is all that evaluating loads.
    findings.add(Findings(problems=config_checks.problems(plan.base, "evaluate")))
    config_checks.refuse(findings)
    firsts: dict[tuple[str, str], PlannedRun] = {}
    for run in runs:
        firsts.setdefault((run.method, run.config.model.path), run)
    for run in firsts.values():
        with _named(_where(plan.file, run.method)):
            config_checks.check(run.config, "train", machine=False)


def chosen(plan: TablePlan, only: str | None) -> list[str] | None:
    """Return the names that `--only` lists; None without it.

    Raises:
        ConfigError: a name is no method of the table.
    """
    if only is None:
        return None
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = [*plan.baselines, *(method.name for method in plan.methods)]
    for name in names:
        if name not in known:
            raise ConfigError(f"--only names {name!r}; the table has {', '.join(known)}")
    if not names:
        raise ConfigError(f"--only is empty; name one of {', '.join(known)}")
    return names


def flat_settings(config: Config) -> dict[str, JsonValue]:
    """Return every value of a run's configuration by dotted key, without its folder and version.

    Those of other commands, which inherit from `[engine]`, are left out as well.
    """
    return flat_values(dump_config(config)[0])


def flat_values(values: Mapping[str, Any]) -> dict[str, JsonValue]:
    """Return the values of a `config.json` in the same form."""
    return {
        key: value
        for key, value in flat_leaves(values)
        if key not in (DIR_KEY, VERSION_KEY) and not key.startswith(("sft.", "train_reward."))
    }


def chosen_seeds(plan: TablePlan, seeds: str | None) -> list[int] | None:
    """Return the seeds that `--seeds` lists; None without it.

    Raises:
        ConfigError: one is no seed of the table.
    """
    if seeds is None:
        return None
    known = sorted({run.seed for run in plan.runs()})
    names = [name.strip() for name in seeds.split(",")]
    for name in names:
        if name not in map(str, known):
            raise ConfigError(f"--seeds names {name!r}; the table has {known}")
    return [int(name) for name in names]


def differences_since(
    there: Mapping[str, JsonValue], here: Mapping[str, JsonValue], config: Config, measure: str
) -> list[str]:
    """Say in what the settings of an earlier run differ from those of a planned one.

    A key that is newer than the earlier run was at its default then. What watches a run and changes
    none may differ: keys of the canary, and components that are measured only.

    Args:
        there: settings of the earlier run by dotted key, also those of an older version.
        here: those of the planned one, in the same form.
        config: of the planned one.
        measure: the component that the table compares, which both must measure.
    """
    there = translate_dotted(there)
    changed = dict(flat_leaves(config.model_dump(mode="json", exclude_defaults=True)))
    kept = {key: value for key, value in here.items() if key in there or key in changed}
    return differences(_without_watching(there, measure), _without_watching(kept, measure))


def component_differences(
    there: Mapping[str, float], reward: RewardConfig, measure: str
) -> list[str]:
    """Say in what components of an earlier evaluation differ, but for those measured only."""
    rule: dict[str, JsonValue] = {RULE: reward.rule}
    both = (
        rule | {f"{COMPONENTS}{name}": weight for name, weight in components.items()}
        for components in (there, reward.measured())
    )
    return differences(*(_without_watching(one, measure) for one in both))


def _without_watching(settings: Mapping[str, JsonValue], measure: str) -> dict[str, JsonValue]:
    paper = settings.get(RULE) == "paper"  # which weighs nothing, and measures its own two always
    compared = set[str]() if paper and measure in PAPER_MEASURES else {f"{COMPONENTS}{measure}"}

    def watches(key: str, value: JsonValue) -> bool:
        measured = key.startswith(COMPONENTS) and (paper or value == 0.0)
        measured |= f"{key}." == COMPONENTS and value == {}
        return key.startswith(CANARY) or (measured and key not in compared)

    return {key: value for key, value in settings.items() if not watches(key, value)}


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Say in a configuration's errors where it came from."""
    try:
        yield
    except ConfigError as exc:
        raise ConfigError(f"{where}: {exc}") from exc


def _where(file: Path, method: str) -> str:
    return f"{file}: method {method!r}"


def _read_table(file: Path) -> TableFile:
    values = read_file(file)
    for _ in leaves(TableFile, values, f"file {file}"):
        pass
    for name, kind in (("methods", MethodConfig), ("contrasts", ContrastConfig)):
        for entry in values.get(name, []):
            if isinstance(entry, Mapping):
                for _ in leaves(kind, entry, f"[[{name}]] of file {file}"):
                    pass
    try:
        return TableFile.model_validate(values)
    except ValidationError as exc:
        raise ConfigError(f"{file}: {explain(exc, {})}") from exc


def _options(values: Mapping[str, Any], folder: Path, where: str) -> list[str]:
    """Return values as `--set` texts; relative paths mean the table file's folder."""
    options: list[str] = []
    for name, value in flat_leaves(values):
        key = tuple(name.split("."))
        if name in (SEED_KEY, DIR_KEY, *EVALUATED):
            raise ConfigError(f"{where}: {name} is set by the table itself; remove it")
        with _named(where):
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
        with _named(f"baseline {BASELINE_TITLES['naive_rag']}"):
            check_search(base)


def _check_run(config: Config, base: Config, settings: Mapping[str, JsonValue]) -> None:
    """Refuse a run that needs other services than the others, or answers other questions."""
    if config.learner.checkpoint_url is not None:
        raise ConfigError(
            f"learner.checkpoint_url ({config.learner.checkpoint_url!r}) holds one run, and the "
            "runs of a table share their run.id; remove it"
        )
    here, there = flat_settings(config), flat_settings(base)
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
                f"{key} ({settings.get(key, here.get(key))!r}) differs from that of the other rows "
                f"({there.get(key)!r}), so the rows would answer different questions; "
                "move it to [defaults]"
            )
