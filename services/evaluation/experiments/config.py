"""Experiment files: the methods of a table, and the models and questions of a matrix.

`cli/evaluation/table_plan.py` and `matrix_plan.py` resolve every run and every cell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, JsonValue, model_validator

from agent_r1.evaluation.statistics import MAX_FLIPPED
from agent_r1.runtime.config import StrictConfig
from agent_r1.runtime.files.task_source import DataSource
from agent_r1_proto.tasks import TURN_BY_TURN, Decoding, DecodingMethod, PositiveTemperature

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,40}$")]


class ExperimentFile(StrictConfig):
    """Keys that a table file and a matrix file have in common."""

    config: Path
    """Configuration of every run and every cell."""
    results: Path
    """Files to write, without suffix: `results/small` makes `results/small.md` and others."""


def check_once(what: str, names: Sequence[object]) -> None:
    """Refuse names of which one comes twice.

    Raises:
        ValueError: one does.
    """
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"{what} has {twice!r} twice; remove one of the two")


# --- A table: methods over seeds ------------------------------------------------------------------

Baseline = Literal["naive_rag", "base_tool_call"]
Part = Literal["methods", "ablation"]
"""Table, of the two, that a method is a row of."""
BASELINE_TITLES: dict[Baseline, str] = {
    "naive_rag": "Naive RAG",
    "base_tool_call": "Base Tool Call",
}
EXACT_MATCH = "exact_match"
"""The measure of a table that names none."""


class MethodConfig(StrictConfig):
    """One entry of `[[methods]]`: a row of one of the tables."""

    name: Name
    """Names the run folders, `{name}_seed0`, and the row for `--only`."""
    title: str = ""
    """Name in the tables; empty is `name`."""
    table: Part = "methods"
    """Table that it is a row of."""
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


class TableFile(ExperimentFile):
    """A table file; every row starts from its configuration."""

    seeds: Annotated[list[int], Field(min_length=1)]
    """Values of `run.seed`; every method is trained once with each."""
    measure: str = EXACT_MATCH
    """The reward component that the table compares, which `reward.components` names."""
    defaults: dict[str, JsonValue] = {}
    """Keys of the run configuration that hold for every row; a method's own come after."""
    chosen_on: str = ""
    """Choices (learning rate, data, prompts) that were made while looking at questions, and at
    which, in sentences for the report. Empty is not known, and the report says so."""
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
        check_once("methods", names)
        check_once("seeds", self.seeds)
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


# --- A matrix: models, questions, ways to ask and to decode --------------------------------------

SetName = Literal["math500", "gsm8k", "humaneval", "mbpp", "hotpotqa", "2wikimultihopqa", "musique"]
Method = Literal["direct", "chain_of_thought", "react", "tools_single_turn", "tools_multi_turn"]
"""Way to ask a model. `direct`: for nothing but the answer. `chain_of_thought`: to think first.
`react`: to call tools in plain text. `tools_single_turn`, `tools_multi_turn`: to call them as its
chat template has it, in one turn or in up to `env.max_turns`."""
SET_NAMES: tuple[SetName, ...] = get_args(SetName)
METHODS: tuple[Method, ...] = get_args(Method)
BRANCHING: tuple[str, ...] = get_args(DecodingMethod)
POOLED: tuple[DecodingMethod, ...] = ("majority", "best_of_n")
"""Methods that can choose among stored answers."""
Scorer = Literal["reward_model", "critic"]


class ModelEntry(StrictConfig):
    """One entry of `[[models]]`."""

    name: Name
    """Names the model in the report and in the cells' files: `zero-shot`, `grpo`."""
    policy: str
    """Model folder, name on the hub, or run folder (its last checkpoint)."""
    scorers: dict[Scorer, str] = {}
    """Reward components that score branches of this model, and the model folder that each asks; the
    command serves it."""


class DecodeEntry(StrictConfig):
    """One entry of `[[decode]]`: how the answer to a question is found.

    The keys after `temperature` are the options of `agent-r1 evaluate --decode`.
    """

    method: Literal["greedy", "fitted"] | DecodingMethod
    """`greedy` is one answer at temperature 0, `fitted` what `--decode-fit` wrote into the run of
    the policy; the others choose among several branches."""
    name: Name | None = None
    """Names the entry in reports and files; None: the method, and the number of candidates."""
    temperature: PositiveTemperature = 1.0
    """Temperature at which branches are sampled."""
    candidates: Annotated[int, Field(ge=1)] = 4
    """Interactions, the greedy one among them, or turns sampled after every branch."""
    beta: Annotated[float, Field(ge=0)] = 1.0
    """Weight of a value beside a log-probability."""
    branch_below: Annotated[float, Field(gt=0, le=1)] | None = None
    """Candidates are sampled where the greedy turn is less probable than this; None: everywhere."""
    answer_bias: Annotated[float, Field(ge=-100, le=100)] | None = None
    """Added to the log-probability of turns that call nothing; None is 0."""
    keep: Annotated[int, Field(ge=2)] = 2
    """Branches that beam keeps."""
    lookahead: Annotated[int, Field(ge=0)] = 1
    """Turns whose calls are run before a candidate of value_guided or beam is scored."""
    max_calls: Annotated[int, Field(ge=0)] | str | None = None
    """Most tool calls of all branches together; None is no limit."""
    scorer: str | None = None
    """Component of `reward.components` that scores branches; None: the first that asks a model."""
    tokens_of: Name | None = None
    """`majority` and `best_of_n` of a pool: another entry. As many answers are chosen from as cost
    at least as many sampled tokens, and no fewer than `candidates`."""
    calls_of: Name | None = None
    """The same with the calls that tools answered."""

    @property
    def series(self) -> str:
        """Name what several entries have in common that differ in what they may cost."""
        parts = [self.method, *filter(None, [self.scorer])]
        if self.method in TURN_BY_TURN:
            parts.append(f"d = {self.lookahead}")
        equal = {"tokens": self.tokens_of, "calls": self.calls_of}
        return ", ".join([*parts, *(f"equal {name}" for name, of in equal.items() if of)])

    @property
    def label(self) -> str:
        """Name the entry in reports and files: `greedy`, `majority_4`."""
        if self.name is not None or self.method not in BRANCHING:
            return self.name or self.method
        return f"{self.method}_{self.candidates}"

    @model_validator(mode="after")
    def _check(self) -> Self:
        needed: dict[str, tuple[str, ...]] = {
            "temperature": BRANCHING,
            "candidates": BRANCHING,
            "keep": ("beam",),
            "lookahead": TURN_BY_TURN,
            "beta": TURN_BY_TURN,
            "branch_below": TURN_BY_TURN,
            "answer_bias": TURN_BY_TURN,
            "max_calls": BRANCHING,
            "scorer": tuple(name for name in BRANCHING if name != "majority"),
            "tokens_of": POOLED,
            "calls_of": POOLED,
        }
        for key in self.model_fields_set & needed.keys():
            if self.method not in needed[key]:
                raise ValueError(
                    f"decode {self.method!r} has {key} = {getattr(self, key)!r}, which belongs to "
                    f"{', '.join(needed[key])}; remove it"
                )
        if self.tokens_of is not None and self.calls_of is not None:
            raise ValueError(f"decode {self.label!r} has tokens_of and calls_of; keep one of them")
        self.decoding(lambda named: named or "")  # refuses what no rollout server can do
        return self

    def decoding(self, scorer_of: Callable[[str | None], str]) -> Decoding | None:
        """Return what the rollout server is asked for; None for greedy and fitted.

        Args:
            scorer_of: returns the component that scores branches, given the one that is named.
        """
        if self.method == "greedy" or self.method == "fitted":
            return None
        by_turn = self.method in TURN_BY_TURN
        scores = self.method != "majority" and not (by_turn and self.beta == 0.0)
        return Decoding(
            method=self.method,
            candidates=self.candidates,
            keep=self.keep if self.method == "beam" else 1,
            lookahead=self.lookahead if by_turn else None,
            beta=self.beta if by_turn else None,
            branch_below=self.branch_below,
            answer_bias=self.answer_bias,
            max_calls=self.max_calls,
            scorer=scorer_of(self.scorer) if scores else None,
        )


class ComparisonEntry(StrictConfig):
    """One entry of `[[comparisons]]`: two ways to decode, and what is expected beforehand."""

    name: Name
    """Names the comparison in the report."""
    first: str
    """Name of an entry of `[[decode]]`."""
    second: str
    """Name of another one; differences are second - first."""
    sets: Annotated[list[str], Field(min_length=1)]
    """Names under `[tasks]`; each is compared by itself."""
    goal: Literal["better", "not_worse"]
    """`better`: the difference is at least the margin, and its interval is above 0. `not_worse`: it
    is not below the negative margin, and its interval is not wholly below 0."""
    margin: Annotated[float, Field(ge=0, le=1)]
    """Margin of the score."""
    greedy_between: tuple[float, float] | None = None
    """Range that greedy's score should be in, so that there is something to gain and to lose; a
    model outside is compared all the same, and the report says so."""


class MatrixFile(ExperimentFile):
    """A matrix file; every cell starts from its configuration: tools, `[env]`, `[rollout]`."""

    sets: dict[SetName, DataSource] = {}
    """Published file, or `hf:owner/name:split`, of each data set; those that are not named stand
    in the report without data."""
    tasks: dict[Name, DataSource] = {}
    """Task files of your own, which are asked as they are, with the environment, the tools and the
    reward of the configuration."""
    pool: Annotated[int, Field(ge=2)] | None = None
    """Answers to each question that are stored, at each temperature, for `majority` and `best_of_n`
    to choose from: the greedy one, and sampled ones. None lets each entry sample its own."""
    methods: Annotated[list[Method], Field(min_length=1)] = list(METHODS)
    """Ways to ask the models; all by default."""
    models: Annotated[list[ModelEntry], Field(min_length=1)]
    """Models, zero-shot or trained."""
    decode: Annotated[list[DecodeEntry], Field(min_length=1)] = [DecodeEntry(method="greedy")]
    """Ways to find an answer."""
    comparisons: list[ComparisonEntry] = []
    """Pairs of ways to find answers to `tasks`, compared question by question."""
    remarks: str = ""
    """Sentences for the report about the comparisons, such as which of them came later."""

    def pools(self, entry: DecodeEntry) -> bool:
        """Say whether an entry chooses from the pool."""
        return self.pool is not None and entry.method in POOLED

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        check_once("methods", self.methods)
        check_once("models", [model.name for model in self.models])
        check_once("decode", [decode.label for decode in self.decode])
        check_once("comparisons", [comparison.name for comparison in self.comparisons])
        if not self.sets and not self.tasks:
            raise ValueError("neither [sets] nor [tasks] names a file; there is nothing to ask")
        if both := self.tasks.keys() & set(SET_NAMES):
            raise ValueError(
                f"tasks has {min(both)!r}, which is the name of a public data set; choose another "
                "name, or name its published file under [sets]"
            )
        return self

    @model_validator(mode="after")
    def _check_pool(self) -> Self:
        pooled = [entry for entry in self.decode if self.pools(entry)]
        for entry in pooled:
            if entry.candidates > (self.pool or 0):
                raise ValueError(
                    f"decode {entry.label!r} chooses from {entry.candidates} answers, and the pool "
                    f"has {self.pool}; raise pool or lower candidates"
                )
            if entry.max_calls is not None:
                raise ValueError(
                    f"decode {entry.label!r} has max_calls, and the answers of a pool are sampled "
                    "one by one; remove it, or the pool"
                )
        sampled = {entry.label for entry in self.decode if not self.pools(entry)}
        for entry in self.decode:
            key = "tokens_of" if entry.tokens_of is not None else "calls_of"
            named = entry.tokens_of or entry.calls_of
            if named is not None and (not self.pools(entry) or named not in sampled):
                raise ValueError(
                    f"decode {entry.label!r} has {key} = {named!r}; it needs pool, and names an "
                    f"entry that samples its own answers: {', '.join(sorted(sampled))}"
                )
        return self

    @model_validator(mode="after")
    def _check_comparisons(self) -> Self:
        labels = [entry.label for entry in self.decode]
        for comparison in self.comparisons:
            for named, known in (
                ([comparison.first, comparison.second], labels),
                (comparison.sets, list(self.tasks)),
            ):
                if unknown := [name for name in named if name not in known]:
                    raise ValueError(
                        f"the comparison {comparison.name!r} names {unknown[0]!r}, which is none "
                        f"of {', '.join(known)}; correct it"
                    )
            if comparison.greedy_between is not None and "greedy" not in labels:
                raise ValueError(
                    f"the comparison {comparison.name!r} has greedy_between, and no entry of "
                    "decode is greedy; add it"
                )
        return self
