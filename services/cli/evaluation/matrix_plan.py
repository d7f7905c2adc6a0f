"""What `agent-r1 matrix` is to run: matrix file --> one resolved configuration a cell.

matrix.py carries the plan out. What is needed and not there (data, a tool) makes a cell that says
so; a mistake in a file is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue, ValidationError

from agent_r1.cli.evaluation.decoding import scorer_of
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
    DecodeEntry,
    MatrixFile,
    Method,
    SetName,
)
from agent_r1.evaluation.matrix.data_sets import (
    CODE,
    DATA_SETS,
    Family,
    NoDataError,
    read_questions,
)
from agent_r1.evaluation.matrix.questions import Question
from agent_r1.evaluation.matrix.report import Place
from agent_r1.tools.loading import describe_tool
from agent_r1_proto.tools import ToolSpec
from agent_r1_service.files.data_source import DataSource
from agent_r1_service.files.source import write_lines
from agent_r1_service.files.tasks import source_digest

MATRIX_FOLDER = Path("runs") / "matrix"


@dataclass(frozen=True)
class PlannedCell:
    """One evaluation."""

    place: Place
    family: Family
    config: Config
    """Of the services, and of what is asked."""
    services: tuple[str, ...]
    """Cells in which this is the same run on one start of the services."""
    questioning: QuestioningConfig
    tasks: Path
    """Task file, written by the plan."""
    answers: Path
    """Result file, one line a question."""
    file: Path
    """Where its numbers go."""
    settings: Mapping[str, JsonValue]
    """All that can change an answer or a score, without paths."""


@dataclass(frozen=True)
class MatrixPlan:
    """Everything a matrix file asks for."""

    name: str
    results: Path
    """Files to write, without suffix."""
    models: Mapping[str, str]
    """What each model is, as the file names it."""
    cells: Mapping[Place, PlannedCell | str]
    """In the order of the report; a text is why a cell cannot be run."""

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
    return MatrixPlan(results.name, results, models, dict(planner.cells()))


class _Planner:
    def __init__(
        self, matrix: MatrixFile, base_folder: Path, base: Config, results: Path, folder: Path
    ) -> None:
        self._matrix = matrix
        self._base_folder = base_folder
        self._models = {
            entry.name: with_policy(base, _located(entry.policy, base_folder))
            for entry in matrix.models
        }
        self._base = base
        self._results = results
        self._folder = folder
        self._decodings = {
            decode.label: decode.decoding(lambda named: scorer_of(named, base))
            for decode in matrix.decode
        }

    def cells(self) -> Iterator[tuple[Place, PlannedCell | str]]:
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
                        place = Place(model, name, method, decode.label)
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
        if source is not None and not source.is_hub:
            located = (self._base_folder / source.source.expanduser()).resolve()
            source = source.model_copy(update={"source": located})
        return read_questions(name, source)[: self._base.evaluation.max_questions]

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

    def _cell(self, place: Place, method: Method, decode: DecodeEntry, tasks: Path) -> PlannedCell:
        family = DATA_SETS[place.set].family
        style = prompts.call_style(method, family)
        config = service_config(self._models[place.model], family, style)
        temperature = 0.0 if decode.method == "greedy" else decode.temperature
        evaluation = config.evaluation.model_copy(
            update={
                "sets": {place.set: DataSource(source=tasks)},
                "temperature": temperature,
            }
        )
        config = config.model_copy(update={"evaluation": evaluation})
        asked = questioning(config, "agent", 1, self._decodings[decode.label]).model_copy(
            update={"max_turns": prompts.max_turns(method, family)}
        )
        folder = self._results.with_name(f"{self._results.name}_cells")
        return PlannedCell(
            place=place,
            family=family,
            config=config,
            services=(place.model, family.title, style),
            questioning=asked,
            tasks=tasks,
            answers=self._folder / "answers" / f"{place.name}.jsonl",
            file=folder / f"{place.name}.json",
            settings=_settings(config, asked, tasks),
        )


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


def _settings(config: Config, asked: QuestioningConfig, tasks: Path) -> dict[str, JsonValue]:
    facts = {
        **evaluation_facts(config),
        "seed": asked.seed,
        "temperature": asked.temperature,
        "max_turns": asked.max_turns,
        "tasks": f"sha256:{source_digest(tasks)}",
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
