"""Plan of `agent-r1 matrix`: matrix file --> one resolved configuration a cell.

matrix.py carries the plan out. What is needed and not there (data, a tool) makes a cell that says
so; a mistake in a file is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from pydantic import JsonValue

from agent_r1.cli.evaluation.asking import questioning
from agent_r1.cli.evaluation.decoding import read_setting, scorer_of, with_scorers
from agent_r1.cli.evaluation.experiment import Plan, places, read_experiment
from agent_r1.cli.evaluation.settings import asked_settings
from agent_r1.cli.policy import with_policy
from agent_r1.config.checks import use_plugins
from agent_r1.config.run import Config, load_config
from agent_r1.config.sources import ConfigError
from agent_r1.evaluation.answer_file import differences
from agent_r1.evaluation.config import QuestioningConfig
from agent_r1.evaluation.experiments import prompts
from agent_r1.evaluation.experiments.cell import MatrixCell, check_settings
from agent_r1.evaluation.experiments.config import (
    SET_NAMES,
    ComparisonEntry,
    DecodeEntry,
    MatrixFile,
    Method,
    ModelEntry,
    SetName,
)
from agent_r1.evaluation.experiments.data_sets import (
    CODE,
    DATA_SETS,
    OWN,
    Family,
    NoDataError,
    family_of,
    read_questions,
)
from agent_r1.evaluation.experiments.matrix_report import CellKey
from agent_r1.evaluation.experiments.questions import Question
from agent_r1.reward.config import measuring_advice
from agent_r1.runtime.files.published_data import write_lines
from agent_r1.runtime.files.task_source import DataSource
from agent_r1.tools.loading import describe_tool
from agent_r1_proto.tasks import Decoding
from agent_r1_proto.tools import ToolSpec

MATRIX_FOLDER = Path("runs") / "matrix"
AS_THEY_ARE = "as_they_are"
"""Method of a user's tasks."""
POOL = "pool"
"""Name of the answers of a pool among ways to decode."""


@dataclass(frozen=True)
class PlannedCell:
    """One evaluation."""

    place: CellKey
    config: Config
    """Configuration of the services, and of what is asked."""
    services: tuple[str, ...]
    """Cells in which this is the same run on one start of the services."""
    questioning: QuestioningConfig
    answers: Path
    """Result file, one line a question."""
    file: Path
    """File for its numbers."""
    settings: Mapping[str, JsonValue]
    """All that can change an answer or a score, without paths."""
    entry: DecodeEntry
    """Way to find answers."""
    pooled: bool
    """Whether an answer is chosen from those of the pool; else each is taken as it is."""
    scorer: str | None
    """Component that says which answer is the best; None takes the most frequent."""

    @property
    def costs_as(self) -> Path | None:
        """File of the cell whose cost is to be reached by what is chosen from."""
        named = self.entry.tokens_of or self.entry.calls_of
        if named is None:
            return None
        return self.file.with_name(f"{replace(self.place, decode=named).name}.json")

    @property
    def family(self) -> Family:
        """Return how its data set is asked and scored."""
        return family_of(self.place.set)

    def read(self) -> MatrixCell | None:
        """Return its numbers; None where it is not finished.

        Raises:
            ValueError: the file cannot be read, or was made with other settings.
        """
        cell = MatrixCell.read(self.file)
        if cell is not None:
            check_settings(self.file, differences(cell.settings, self.settings), "--overwrite")
        return cell


Planned = PlannedCell | MatrixCell | str
"""Cell that is to be run, the numbers of one whose model is not here, or the reason why nothing can
be run."""


@dataclass(frozen=True, kw_only=True)
class MatrixPlan(Plan[MatrixFile]):
    """Everything a matrix file asks for."""

    cells: Mapping[CellKey, Planned]
    """Cells in the order of the report."""
    absent: Mapping[str, ConfigError]
    """Models that are not here, by name, and why."""

    def runnable(self) -> list[PlannedCell]:
        """Return the cells that can be run."""
        return [cell for cell in self.cells.values() if isinstance(cell, PlannedCell)]


def read_plan(file: Path, options: list[str], out: Path | None = None) -> MatrixPlan:
    """Read a matrix file, write its tasks, and resolve every cell.

    Args:
        file: the matrix file.
        options: `KEY=VALUE` texts of `--set`.
        out: folder for results and answers; None takes the file's `results`, and `runs/matrix`.

    Raises:
        ConfigError: a key is unknown, a value not allowed, or a model not there of which a cell is
            not finished.
        SourceError: a record of a data set does not fit.
    """
    entries = {"models": ModelEntry, "decode": DecodeEntry, "comparisons": ComparisonEntry}
    matrix = read_experiment(MatrixFile, file, **entries)
    base_folder = file.resolve().parent
    base = load_config(base_folder / matrix.config, options).config
    use_plugins(base)
    cells_folder = matrix.results.with_name(f"{matrix.results.name}_cells")
    where_to = places(matrix, file, MATRIX_FOLDER, cells_folder, out)
    planner = _Planner(matrix, base_folder, base, where_to["cells_folder"], where_to["folder"])
    cells = dict(planner.cells())
    return MatrixPlan(asked=matrix, cells=cells, absent=planner.absent, **where_to)


class _Planner:
    def __init__(
        self, matrix: MatrixFile, base_folder: Path, base: Config, cells: Path, folder: Path
    ) -> None:
        self._matrix = matrix
        self._base_folder = base_folder
        self._models: dict[str, Config] = {}
        self.absent: dict[str, ConfigError] = {}
        """Models that are not here: a finished cell of theirs is taken as it is."""
        for entry in matrix.models:
            try:
                self._models[entry.name] = with_scorers(
                    with_policy(base, _located(entry.policy, base_folder)),
                    {name: _located(folder, base_folder) for name, folder in entry.scorers.items()},
                    "models.scorers.{}",
                )
            except ConfigError as exc:
                self.absent[entry.name] = exc
        self._base = base
        self._cells = cells
        self._folder = folder
        self._decodings = {
            entry.label: entry.decoding(self._scorer_of) for entry in matrix.decode if self._models
        }

    def _scorer_of(self, named: str | None) -> str:
        """Return the component that scores branches of every model."""
        (scorer, *others) = {scorer_of(named, config) for config in self._models.values()}
        if others:
            raise ConfigError(
                f"the models have different scorers ({', '.join(sorted([scorer, *others]))}); name "
                "one as scorer under [[decode]]"
            )
        return scorer

    def cells(self) -> Iterator[tuple[CellKey, Planned]]:
        yield from self._published() if self._matrix.sets else ()
        for (name, source), model, decode in product(
            self._matrix.tasks.items(), self._matrix.models, self._matrix.decode
        ):
            place = CellKey(model.name, name, AS_THEY_ARE, decode.label)
            yield place, self._kept(place) or self._own_cell(place, decode, source)

    def _kept(self, place: CellKey) -> MatrixCell | None:
        """Return the finished cell of a model that is not here; None where the model is.

        Raises:
            ConfigError: it is not finished.
        """
        if place.model not in self.absent:
            return None
        found = MatrixCell.read(self._cells / f"{place.name}.json")
        if found is None:
            raise self.absent[place.model]
        return found

    def _own_cell(self, place: CellKey, decode: DecodeEntry, source: DataSource) -> PlannedCell:
        config = self._models[place.model]
        if OWN.component not in config.reward.measured():
            raise ConfigError(
                f"[tasks] are scored by {OWN.component}, which the configuration does not measure; "
                f"{measuring_advice(OWN.component, config.reward.components)}"
            )
        services = (place.model, OWN.title, AS_THEY_ARE)
        cell = self._planned(place, decode, config, self._source(source), services)
        settings = {**cell.settings, "max_questions": cell.questioning.max_questions}
        return replace(cell, settings=settings)

    def _published(self) -> Iterator[tuple[CellKey, Planned]]:
        for name in SET_NAMES:
            family = DATA_SETS[name].family
            try:
                questions, missing = self._questions(name), ""
            except NoDataError as exc:
                questions, missing = [], f"no data: {exc}"
            specs = self._specs(family)
            for method in self._matrix.methods:
                gap = missing or self._gap(method, family, specs)
                tasks = Path() if gap else self._write_tasks(name, method, questions, specs)
                for model, decode in product(self._matrix.models, self._matrix.decode):
                    place = CellKey(model.name, name, method, decode.label)
                    if not gap and decode.method == "majority" and family is CODE:
                        yield place, "no majority: programs are not equal as texts"
                    else:
                        kept = gap or self._kept(place)
                        yield place, kept or self._cell(place, method, decode, tasks)

    def _questions(self, name: SetName) -> list[Question]:
        source = self._matrix.sets.get(name)
        located = None if source is None else self._source(source)
        return read_questions(name, located)[: self._base.evaluation.max_questions]

    def _source(self, source: DataSource) -> DataSource:
        """Return a source whose relative path means the matrix file's folder."""
        if source.is_hub:
            return source
        located = (self._base_folder / source.source.expanduser()).resolve()
        return source.model_copy(update={"source": located})

    def _specs(self, family: Family) -> dict[str, ToolSpec]:
        """Return what react tells of the family's tool; nothing where that runs elsewhere."""
        table = self._base.tools.get(family.tool)
        if "react" not in self._matrix.methods or table is None or table.url is not None:
            return {}
        return {family.tool: describe_tool(family.tool, table)}

    def _gap(self, method: Method, family: Family, specs: Mapping[str, ToolSpec]) -> str:
        """Say what a method lacks; "" where it lacks nothing."""
        if prompts.needs_tool(method, family) and family.tool not in self._base.tools:
            return f"no tool: add [tools.{family.tool}] with {family.table} to the configuration"
        if method == "react" and not specs:
            return (
                f"no description: [tools.{family.tool}] runs elsewhere, and react tells the model "
                "about its tool before it is reached; let the matrix start the tool"
            )
        return ""

    def _write_tasks(
        self, name: SetName, method: Method, questions: list[Question], specs: dict[str, ToolSpec]
    ) -> Path:
        family = DATA_SETS[name].family
        file = self._folder / "tasks" / f"{name}-{method}.jsonl"
        spec = specs.get(family.tool)
        write_lines(file, (prompts.make_task(q, name, method, family, spec) for q in questions))
        return file

    def _cell(
        self, place: CellKey, method: Method, decode: DecodeEntry, tasks: Path
    ) -> PlannedCell:
        family = family_of(place.set)
        style = prompts.call_style(method, family)
        config = service_config(self._models[place.model], family, style)
        services = (place.model, family.title, style)
        turns = prompts.max_turns(method, family)
        source = DataSource(source=tasks)
        return self._planned(place, decode, config, source, services, turns)

    def _planned(
        self,
        place: CellKey,
        decode: DecodeEntry,
        config: Config,
        source: DataSource,
        services: tuple[str, ...],
        max_turns: int | None = None,
    ) -> PlannedCell:
        decoding, temperature = self._decodings[decode.label], decode.temperature
        if decode.method == "greedy":
            temperature = 0.0
        elif decode.method == "fitted":
            decoding, temperature = self._fitted(place.model)
        changes = {"sets": {place.set: source}, "temperature": temperature}
        evaluation = config.evaluation.model_copy(update=changes)
        # The sets of the configuration are gone, and so is what names them.
        diagnose = config.diagnose.model_copy(update={"sets": None})
        config = config.model_copy(update={"evaluation": evaluation, "diagnose": diagnose})
        pooled = self._matrix.pools(decode)
        scorer = decoding and decoding.scorer
        answers, attempts, pool = place.name, 1, dict[str, JsonValue]()
        if pooled:
            answers = replace(place, decode=f"{POOL}_{temperature:g}").name
            pool, decoding, attempts = (
                _pool_settings(place, decode, scorer),
                None,
                self._matrix.pool,
            )
        asked = questioning(config, "agent", attempts or 1, decoding)
        asked = asked.model_copy(update={"max_turns": max_turns, "greedy_first": pooled})
        return PlannedCell(
            place=place,
            config=config,
            services=services,
            questioning=asked,
            answers=self._folder / "answers" / f"{answers}.jsonl",
            file=self._cells / f"{place.name}.json",
            settings=asked_settings(config, asked, source) | pool,
            entry=decode,
            pooled=pooled,
            scorer=scorer,
        )

    def _fitted(self, model: str) -> tuple[Decoding | None, float]:
        """Return what was fitted for a model's run; its scorer must be one of the matrix."""
        (policy,) = (entry.policy for entry in self._matrix.models if entry.name == model)
        fitted = read_setting(_located(policy, self._base_folder))
        if fitted is None:
            raise ConfigError(
                f"nothing was fitted for {policy}; fit it with `agent-r1 evaluate CONFIG --policy "
                f"{policy} --decode value_guided --decode-fit` (docs/decoding.md)"
            )
        scorer = None if fitted.decoding is None else fitted.decoding.scorer
        if scorer is not None and scorer not in self._models[model].reward.components:
            raise ConfigError(
                f"the setting fitted for {policy} asks {scorer}, and the model {model} has "
                f"no such scorer; add it to its scorers: {scorer} = {fitted.model!r}"
            )
        return fitted.decoding, fitted.temperature


def service_config(config: Config, family: Family, style: str) -> Config:
    """Return the configuration of the services that answer one family in one style of calls.

    Limits, sampling servers and the system message stay; environment, tools and reward are the
    family's, so that every model is asked and scored in the same way.
    """
    env: dict[str, object] = {"type": "tool", "options": {}, "enable_tools": None}
    env["answer_pattern"] = None
    if style in prompts.TEXT_FORMATS:
        env |= {"type": prompts.TEXT_ENV, "tool_format": prompts.TEXT_FORMATS[style]}
    scorers = [name for name in config.reward.branch_scorers() if name != family.component]
    extra = [] if family.extra is None else [family.extra]
    components = {family.component: 1.0, **dict.fromkeys([*extra, *scorers], 0.0)}
    reward = {"rule": "weighted", "components": components}
    reward["ranges"] = {k: v for k, v in config.reward.ranges.items() if k in components}
    tools = {name: table for name, table in config.tools.items() if name == family.tool}
    return config.model_copy(
        update={
            "env": config.env.model_copy(update=env),
            "reward": config.reward.model_copy(update=reward),
            "tools": tools,
        }
    )


def _pool_settings(place: CellKey, entry: DecodeEntry, scorer: str | None) -> dict[str, JsonValue]:
    costing = entry.tokens_of or entry.calls_of
    return {
        "pool.candidates": entry.candidates,
        "pool.scorer": scorer,
        f"pool.{'calls' if entry.calls_of else 'tokens'}_of": costing
        and replace(place, decode=costing).name,
    }


def _located(policy: str, base_folder: Path) -> str:
    """Return a policy whose relative folder means the matrix file's, as all paths in it do."""
    beside = base_folder / Path(policy).expanduser()
    return str(beside.resolve()) if beside.is_dir() else policy
