"""What a matrix file says: real models on public data sets, asked and decoded in several ways.

`cli/evaluation/matrix_plan.py` reads the file and resolves every cell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from agent_r1_proto.tasks import TURN_BY_TURN, Decoding, DecodingMethod
from agent_r1_service.config import StrictConfig
from agent_r1_service.files.data_source import DataSource

SetName = Literal["math500", "gsm8k", "humaneval", "mbpp", "hotpotqa", "2wikimultihopqa", "musique"]
Method = Literal["direct", "chain_of_thought", "react", "tools_single_turn", "tools_multi_turn"]
"""How a model is asked. `direct`: for nothing but the answer. `chain_of_thought`: to think first.
`react`: to call tools in plain text. `tools_single_turn`, `tools_multi_turn`: to call them as its
chat template has it, in one turn or in up to `env.max_turns`."""
SET_NAMES: tuple[SetName, ...] = get_args(SetName)
METHODS: tuple[Method, ...] = get_args(Method)
BRANCHING: tuple[str, ...] = get_args(DecodingMethod)
NAME_PATTERN = r"^[a-z0-9][a-z0-9_.-]{0,40}$"


class ModelEntry(StrictConfig):
    """One entry of `[[models]]`."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    """Names the model in the report and in the cells' files: `zero-shot`, `grpo`."""
    policy: str
    """Model folder, name on the hub, or run folder (its last checkpoint)."""


class DecodeEntry(StrictConfig):
    """One entry of `[[decode]]`: how the answer to a question is found.

    The keys after `temperature` are the options of `agent-r1 evaluate --decode`.
    """

    method: Literal["greedy"] | DecodingMethod
    """`greedy` is one answer at temperature 0; the others choose among several branches."""
    name: Annotated[str, Field(pattern=NAME_PATTERN)] | None = None
    """Names the entry in reports and files; None: the method, and the number of candidates."""
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """At which branches are sampled."""
    candidates: Annotated[int, Field(ge=2)] = 4
    """Interactions sampled, or turns sampled after every branch."""
    keep: Annotated[int, Field(ge=2)] = 2
    """Branches that beam keeps."""
    lookahead: Annotated[int, Field(ge=0)] = 1
    """Turns whose calls are run before a candidate of value_guided or beam is scored."""
    max_calls: Annotated[int, Field(ge=0)] | str | None = None
    """Most tool calls of all branches together; None is no limit."""
    scorer: str | None = None
    """Component of `reward.components` that scores branches; None: reward_model, critic or judge."""

    @property
    def label(self) -> str:
        """Name the entry in reports and files: `greedy`, `majority_4`."""
        if self.name is not None or self.method == "greedy":
            return self.name or self.method
        return f"{self.method}_{self.candidates}"

    @model_validator(mode="after")
    def _check(self) -> Self:
        needed: dict[str, tuple[str, ...]] = {
            "temperature": BRANCHING,
            "candidates": BRANCHING,
            "keep": ("beam",),
            "lookahead": TURN_BY_TURN,
            "max_calls": BRANCHING,
            "scorer": tuple(name for name in BRANCHING if name != "majority"),
        }
        for key in self.model_fields_set & needed.keys():
            if self.method not in needed[key]:
                raise ValueError(
                    f"decode {self.method!r} has {key} = {getattr(self, key)!r}, which belongs to "
                    f"{', '.join(needed[key])}; remove it"
                )
        return self

    def decoding(self, scorer_of: Callable[[str | None], str]) -> Decoding | None:
        """Return what the rollout server is asked for; None for greedy.

        Args:
            scorer_of: returns the component that scores branches, given the one that is named.
        """
        if self.method == "greedy":
            return None
        return Decoding(
            method=self.method,
            candidates=self.candidates,
            keep=self.keep if self.method == "beam" else 1,
            lookahead=self.lookahead if self.method in TURN_BY_TURN else None,
            max_calls=self.max_calls,
            scorer=None if self.method == "majority" else scorer_of(self.scorer),
        )


class MatrixFile(StrictConfig):
    """A matrix file."""

    config: Path
    """Configuration that every cell starts from: tools, `[env]` limits, `[rollout]`, run.seed."""
    results: Path
    """Files to write, without suffix: `results/small` makes `results/small.md` and others."""
    sets: dict[SetName, DataSource]
    """Published file, or `hf:owner/name:split`, of each data set; those that are not named stand
    in the report without data."""
    methods: Annotated[list[Method], Field(min_length=1)] = list(METHODS)
    """How models are asked; all ways by default."""
    models: Annotated[list[ModelEntry], Field(min_length=1)]
    """Models, zero-shot or trained."""
    decode: Annotated[list[DecodeEntry], Field(min_length=1)] = [DecodeEntry(method="greedy")]
    """How answers are found."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        _check_once("methods", self.methods)
        _check_once("models", [model.name for model in self.models])
        _check_once("decode", [decode.label for decode in self.decode])
        return self


def _check_once(what: str, names: Sequence[str]) -> None:
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"{what} has {twice!r} twice; remove one of the two")
