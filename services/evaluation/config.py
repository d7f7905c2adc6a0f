"""Configuration of evaluations outside of training: `agent-r1 evaluate`, `agent-r1 diagnose`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from agent_r1.runtime.config import StrictConfig
from agent_r1.runtime.user_code import CODE_PATTERN
from agent_r1_proto.tasks import Decoding, Temperature

SEARCH_TOOL = "search"
"""Name of the tool that `naive_rag` asks."""

Method = Literal["agent", "base_tool_call", "naive_rag"]
"""Method of answering: a policy with its tools; the same with the model that the configuration
names; one retrieval with the question, then one turn."""


class QuestioningConfig(StrictConfig):
    """Settings for asking questions; `config/run.py` fills it from `[evaluation]`, `[learner]`."""

    method: Method = "agent"
    """Method of answering."""
    temperature: Temperature = 0.0
    """Sampling temperature; 0.0 is greedy."""
    seed: int = 0
    """Seed from which each question's sampling seed derives, with the set's name and the task's
    id."""
    attempts: Annotated[int, Field(ge=1)] = 1
    """Answers sampled for each question."""
    greedy_first: bool = False
    """The first of several answers is greedy."""
    decoding: Decoding | None = None
    """Search for each answer among several branches; None samples one."""
    max_turns: Annotated[int, Field(ge=1)] | None = None
    """Overrides `env.max_turns`; None leaves it. `naive_rag` always has one turn."""
    max_questions: Annotated[int, Field(ge=1)] | None = None
    """Most questions asked of each set; None asks all of them."""
    max_in_flight: Annotated[int, Field(ge=1)] = 256
    """Most questions asked at one time."""
    max_attempts: Annotated[int, Field(ge=1)] = 3
    """Attempts at one question before its failure is final."""
    sample_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """A question without a result for this long is asked again, in seconds."""
    tool_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """Time one retrieval of `naive_rag` may take, in seconds."""
    timeout_s: Annotated[float, Field(gt=0)] = 7200.0
    """Longest the whole evaluation may take, in seconds."""

    def turns(self) -> int | None:
        """Return the most turns of a trajectory; None leaves `env.max_turns`."""
        return 1 if self.method == "naive_rag" else self.max_turns

    def facts(self) -> dict[str, JsonValue]:
        """Return what of it can change an answer, by dotted name; neither how many nor of whom."""
        decoding = {} if self.decoding is None else self.decoding.model_dump(mode="json")
        return {
            "seed": self.seed,
            "temperature": self.temperature,
            "max_turns": self.turns(),
            **({"attempts": self.attempts} if self.attempts > 1 else {}),
            **({"greedy_first": True} if self.greedy_first else {}),
            **{f"decoding.{name}": value for name, value in decoding.items()},
        }


class ScriptedPolicyConfig(StrictConfig):
    """A policy without a model: a class that takes the turns of one interaction."""

    type: Annotated[str, Field(pattern=CODE_PATTERN)]
    """`module:Name` of a class with a method `turn(observations)`, found through `run.plugins`. One
    instance is made per task, which is its first argument."""
    options: dict[str, JsonValue] = {}
    """Further keyword arguments of the class."""


class DiagnoseConfig(StrictConfig):
    """`[diagnose]`: what `agent-r1 diagnose` asks before methods are compared on a task."""

    sets: Annotated[list[str], Field(min_length=1)] | None = None
    """Names in `evaluation.sets` whose scores have bounds; None: all of them."""
    oracle: ScriptedPolicyConfig | None = None
    """Makes no mistake; None leaves its figures out."""
    degenerate: dict[str, ScriptedPolicyConfig] = {}
    """Policies that lack an ability, by name: none of them may do well."""
    attempts: Annotated[int, Field(ge=2)] = 8
    """Answers sampled for each question at temperature 1: k of pass@k, and the size of a group."""
    groups: Annotated[int, Field(ge=1)] = 64
    """Training questions that are asked for the mixed groups and the gradients."""
    turn_lam: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Lambda of the turn-level GAE whose gradient is compared with the configured algorithm's."""
    solved_above: float = 0.5
    """A sample is right where its outcome reward is above this."""
