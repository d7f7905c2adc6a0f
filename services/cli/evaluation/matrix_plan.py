"""What `agent-r1 matrix` is to run: matrix file --> one resolved configuration a cell.

matrix.py carries the plan out. What is needed and not there (data, a tool) makes a cell that says
so; a mistake in a file is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import JsonValue, ValidationError

from agent_r1.cli.evaluation.decoding import read_setting, scorer_of, with_scorers
from agent_r1.cli.evaluation.evaluate import evaluation_facts, questioning
from agent_r1.cli.policy import with_policy
from agent_r1.config.checks import use_plugins
from agent_r1.config.files import read_file
from agent_r1.config.run import Config, load_config
from agent_r1.config.sources import ConfigError, explain
from agent_r1.evaluation.config import QuestioningConfig
from agent_r1.evaluation.matrix import prompts
from agent_r1.evaluation.matrix.config import (
    SET_NAMES,
    ComparisonEntry,
    DecodeEntry,
    MatrixFile,
    Method,
    SetName,
)
from agent_r1.evaluation.matrix.data_sets import (
    CODE,
    DATA_SETS,
    OWN,
    Family,
    NoDataError,
    family_of,
    read_questions,
)
from agent_r1.evaluation.matrix.questions import Question
from agent_r1.evaluation.matrix.report import CellKey
from agent_r1.reward.config import measuring_advice
from agent_r1.runtime.files.data_source import DataSource
from agent_r1.runtime.files.source import write_lines
from agent_r1.runtime.files.tasks import source_digest
from agent_r1.tools.loading import describe_tool
from agent_r1_proto.tasks import Decoding
from agent_r1_proto.tools import ToolSpec

MATRIX_FOLDER = Path("runs") / "matrix"
AS_THEY_ARE = "as_they_are"
"""Method of a user's tasks."""
POOL = "pool"
"""What the answers of a pool are called among ways to decode."""


@dataclass(frozen=True)
class PlannedCell:
    """One evaluation."""

    place: CellKey
    family: Family
    config: Config
    """Of the services, and of what is asked."""
    services: tuple[str, ...]
    """Cells in which this is the same run on one start of the services."""
    questioning: QuestioningConfig
    source: DataSource
    """Task file: of a public data set, written by the plan."""
    answers: Path
    """Result file, one line a question."""
    file: Path
    """Where its numbers go."""
    settings: Mapping[str, JsonValue]
    """All that can change an answer or a score, without paths."""
    choice: Choice | None = None
    """How answers of the pool are chosen; None: each answer is taken as it is."""


@dataclass(frozen=True)
class Choice:
    """How one answer is chosen from the pool's answers to a question."""

    candidates: int
    """Answers that are chosen from, at least."""
    scorer: str | None
    """Component that says which is the best; None takes the most frequent."""
    costs_as: Path | None
    """File of the cell whose cost is to be reached; None: exactly `candidates`."""
    counts: Literal["tokens", "calls"] = "tokens"
    """What is counted."""


@dataclass(frozen=True)
class MatrixPlan:
    """Everything a matrix file asks for."""

    name: str
    results: Path
    """Files to write, without suffix."""
    models: Mapping[str, str]
    """What each model is, as the file names it."""
    cells: Mapping[CellKey, PlannedCell | str]
    """In the order of the report; a text is why a cell cannot be run."""
    series: Mapping[str, str]
    """By the name of a way to decode: what it has in common with others that cost more or less."""
    comparisons: Sequence[ComparisonEntry]

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
        ConfigError: a key is unknown, a value not allowed, or a model not there.
        SourceError: a record of a data set does not fit.
    """
    matrix = _read_file(file)
    base_folder = file.resolve().parent
    base = load_config(base_folder / matrix.config, options).config
    use_plugins(base)
    results = (base_folder / matrix.results).resolve()
    folder = (MATRIX_FOLDER / results.name).resolve()
    if out is not None:
        results, folder = out.resolve() / results.name, out.resolve()
    planner = _Planner(matrix, base_folder, base, results, folder)
    models = {entry.name: entry.policy for entry in matrix.models}
    series = {decode.label: decode.series for decode in matrix.decode}
    cells = dict(planner.cells())
    return MatrixPlan(results.name, results, models, cells, series, matrix.comparisons)


class _Planner:
    def __init__(
        self, matrix: MatrixFile, base_folder: Path, base: Config, results: Path, folder: Path
    ) -> None:
        self._matrix = matrix
        self._base_folder = base_folder
        self._models = {
            entry.name: with_scorers(
                with_policy(base, _located(entry.policy, base_folder)),
                {name: _located(folder, base_folder) for name, folder in entry.scorers.items()},
            )
            for entry in matrix.models
        }
        self._base = base
        self._results = results
        self._folder = folder
        self._decodings = {
            decode.label: decode.decoding(lambda named: self._scorer_of(named))
            for decode in matrix.decode
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

    def cells(self) -> Iterator[tuple[CellKey, PlannedCell | str]]:
        yield from self._published() if self._matrix.sets else ()
        for name, source in self._matrix.tasks.items():
            for model in self._models:
                for decode in self._matrix.decode:
                    place = CellKey(model, name, AS_THEY_ARE, decode.label)
                    yield place, self._own_cell(place, decode, source)

    def _own_cell(self, place: CellKey, decode: DecodeEntry, source: DataSource) -> PlannedCell:
        config = self._models[place.model]
        if OWN.component not in config.reward.measured():
            raise ConfigError(
                f"[tasks] are scored by {OWN.component}, which the configuration does not measure; "
                f"{measuring_advice(OWN.component, config.reward.components)}"
            )
        services = (place.model, OWN.title, AS_THEY_ARE)
        cell = self._planned(place, decode, config, self._source(source), services, OWN)
        settings = {**cell.settings, "max_questions": cell.questioning.max_questions}
        return replace(cell, settings=settings)

    def _published(self) -> Iterator[tuple[CellKey, PlannedCell | str]]:
        for name in SET_NAMES:
            try:
                questions, missing = self._questions(name), ""
            except NoDataError as exc:
                questions, missing = [], f"no data: {exc}"
            specs = self._specs(DATA_SETS[name].family)
            for method in self._matrix.methods:
                gap = missing or self._gap(method, DATA_SETS[name].family, specs)
                tasks = "" if gap else self._write_tasks(name, method, questions, specs)
                for model in self._models:
                    for decode in self._matrix.decode:
                        place = CellKey(model, name, method, decode.label)
                        if (
                            not gap
                            and decode.method == "majority"
                            and DATA_SETS[name].family is CODE
                        ):
                            yield place, "no majority: programs are not equal as texts"
                        else:
                            yield place, gap or self._cell(place, method, decode, Path(tasks))

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
    ) -> str:
        family = DATA_SETS[name].family
        file = self._folder / "tasks" / f"{name}-{method}.jsonl"
        spec = specs.get(family.tool)
        write_lines(file, (prompts.make_task(q, name, method, family, spec) for q in questions))
        return str(file)

    def _cell(
        self, place: CellKey, method: Method, decode: DecodeEntry, tasks: Path
    ) -> PlannedCell:
        family = family_of(place.set)
        style = prompts.call_style(method, family)
        config = service_config(self._models[place.model], family, style)
        services = (place.model, family.title, style)
        turns = prompts.max_turns(method, family)
        source = DataSource(source=tasks)
        return self._planned(place, decode, config, source, services, family, turns)

    def _planned(
        self,
        place: CellKey,
        decode: DecodeEntry,
        config: Config,
        source: DataSource,
        services: tuple[str, ...],
        family: Family,
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
        choice, answers = None, place.name
        if self._matrix.pools(decode):
            assert decoding is not None  # of every method but greedy and fitted
            choice, decoding = self._choice(place, decode, decoding), None
            answers = replace(place, decode=f"{POOL}_{temperature:g}").name
        attempts = 1 if choice is None else self._matrix.pool or 1
        asked = questioning(config, "agent", attempts, decoding)
        changes = {"max_turns": max_turns, "greedy_first": choice is not None}
        asked = asked.model_copy(update=changes)
        return PlannedCell(
            place=place,
            family=family,
            config=config,
            services=services,
            questioning=asked,
            source=source,
            answers=self._folder / "answers" / f"{answers}.jsonl",
            file=self._file(place),
            settings=_settings(config, asked, source) | _choice_settings(choice),
            choice=choice,
        )

    def _choice(self, place: CellKey, decode: DecodeEntry, decoding: Decoding) -> Choice:
        costing = decode.tokens_of or decode.calls_of
        return Choice(
            candidates=decode.candidates,
            scorer=decoding.scorer,
            costs_as=None if costing is None else self._file(replace(place, decode=costing)),
            counts="tokens" if decode.calls_of is None else "calls",
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

    def _file(self, place: CellKey) -> Path:
        folder = self._results.with_name(f"{self._results.name}_cells")
        return folder / f"{place.name}.json"


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


def _choice_settings(choice: Choice | None) -> dict[str, JsonValue]:
    if choice is None:
        return {}
    costing = None if choice.costs_as is None else choice.costs_as.stem
    return {
        "pool.candidates": choice.candidates,
        "pool.scorer": choice.scorer,
        f"pool.{choice.counts}_of": costing,
    }


def _settings(config: Config, asked: QuestioningConfig, source: DataSource) -> dict[str, JsonValue]:
    facts = {
        **evaluation_facts(config),
        "seed": asked.seed,
        "temperature": asked.temperature,
        "max_turns": asked.max_turns,
        "tasks": f"sha256:{source_digest(source)}",
        **({} if asked.attempts == 1 else {"attempts": asked.attempts}),
        **({"greedy_first": True} if asked.greedy_first else {}),
        **{
            # As version 1 of the configuration called the tables, so that older cells count.
            f"reward.{name.removeprefix('reward_')}.model": table.model
            for name, table in config.reward.servers.named().items()
        },
    }
    if asked.decoding is not None:
        facts |= {f"decoding.{k}": v for k, v in asked.decoding.model_dump(mode="json").items()}
    return {key: value for key, value in facts.items() if not _is_place(value)}


def _is_place(value: JsonValue) -> bool:
    return isinstance(value, str) and Path(value).is_absolute()


def _located(policy: str, base_folder: Path) -> str:
    """Return a policy whose relative folder means the matrix file's, as all paths in it do."""
    beside = base_folder / Path(policy).expanduser()
    return str(beside.resolve()) if beside.is_dir() else policy


def _read_file(file: Path) -> MatrixFile:
    try:
        return MatrixFile.model_validate(read_file(file))
    except ValidationError as exc:
        raise ConfigError(f"{file}: {explain(exc, {})}") from exc
