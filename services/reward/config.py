"""`[reward]`: what a finished trajectory is worth, and how the reward service runs.

Read by `main.py` of the reward service; `agent_r1.config.run` joins it with the other tables.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from agent_r1.reward.components import ASKING, BUILT_IN, COMPARES_ANSWER, TIMED
from agent_r1.runtime.config import ListenConfig, StrictConfig
from agent_r1.runtime.user_code import CODE_PATTERN
from agent_r1.text.verdicts import QUESTION
from agent_r1_proto.rewards import measured_components


class ModelServerConfig(StrictConfig):
    """A language model that a component asks over HTTP."""

    url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """URL of its server: with OpenAI's chat API, up to and including `/v1`; of a critic, vLLM's
    with what `agent-r1 export --critic` wrote, without `/v1`."""
    path: Path | None = None
    """Model folder to serve with vLLM if `url` is not given. Only commands that start all services
    on one machine without GPUs do this."""
    model: str
    """Name of the model at the server."""
    api_key: str | None = None
    """Key that is sent as a bearer token. Give it as AGENT_R1__REWARD__SERVERS__JUDGE__API_KEY,
    with REWARD_MODEL or CRITIC in the place of JUDGE for the other tables."""
    extra_body: dict[str, JsonValue] = {}
    """More keys of the request's body, such as `chat_template_kwargs`."""
    max_concurrent: Annotated[int, Field(ge=1)] = 8
    """Requests at once, of each reward worker."""
    requests_per_minute: Annotated[float, Field(gt=0)] | None = None
    """Most requests a minute, of each reward worker; None is no limit."""
    cache_size: Annotated[int, Field(ge=0)] = 10_000
    """Scores that are kept, so that equal interactions are asked about once."""

    @model_validator(mode="after")
    def _check_server(self) -> Self:
        if self.url is None and self.path is None:
            raise ValueError(
                "neither url nor path is given; name the server of the model, or its folder"
            )
        return self


class JudgeConfig(ModelServerConfig):
    """`[reward.servers.judge]`: the model that the component `judge` asks, and how."""

    prompt: str | None = None
    """Prompt of the model. `$question`, `$transcript`, `$answer`, `$answers` (of the payload),
    `$payload` (as JSON) and `$status` are filled in; `$$` is a dollar sign."""
    prompt_file: Path | None = None
    """File with the prompt, on the host of the reward service."""
    pattern: str = r"score:\s*(-?\d+(?:\.\d+)?)"
    """Regular expression, without regard to case, whose one group is the score; the last match
    counts."""
    scale: tuple[float, float] = (0.0, 10.0)
    """Lowest and highest score, which become 0.0 and 1.0; a score outside is an error."""
    max_tokens: Annotated[int, Field(ge=1)] = 512
    """Most tokens of an answer."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.prompt is None) == (self.prompt_file is None):
            raise ValueError(
                "[reward.servers.judge] needs either prompt or prompt_file; give one of them"
            )
        try:
            groups = re.compile(self.pattern).groups
        except re.error as exc:
            raise ValueError(
                f"reward.servers.judge.pattern ({self.pattern!r}) is no regular expression: {exc}"
            ) from exc
        if groups != 1:
            raise ValueError(
                f"reward.servers.judge.pattern ({self.pattern!r}) has {groups} groups; it needs "
                "one, around the score; write the others as (?:...)"
            )
        if not self.scale[0] < self.scale[1]:
            raise ValueError(
                f"reward.servers.judge.scale is {list(self.scale)}; the first number must be "
                "smaller"
            )
        return self


class RewardModelConfig(ModelServerConfig):
    """`[reward.servers.reward_model]`: the model that the component `reward_model` asks."""

    question: str = QUESTION
    """Question that it was trained with: `train_reward.question`."""
    thoughts: bool = True
    """Whether it was trained to read what the agent thinks: `train_reward.thoughts`."""


class CriticConfig(ModelServerConfig):
    """`[reward.servers.critic]`: the critic of a PPO run that the component `critic` asks."""

    max_concurrent: Annotated[int, Field(ge=1)] = 64
    """Requests at once, of each reward worker; the server computes them together."""


class RewardServers(StrictConfig):
    """`[reward.servers]`: the language models that components ask, a table for each."""

    critic: CriticConfig | None = None
    """Critic; needed by the component `critic`."""
    judge: JudgeConfig | None = None
    """Judge; needed by the component `judge`."""
    reward_model: RewardModelConfig | None = None
    """Reward model; needed by the component `reward_model`."""

    def named(self) -> dict[str, ModelServerConfig]:
        """Return the tables that are given, by component."""
        tables = {name: getattr(self, name) for name in ASKING}
        return {name: table for name, table in tables.items() if table is not None}


DEFAULT_COMPONENTS = {"exact_match": 1.0}


def measuring_advice(component: str, components: Mapping[str, float]) -> str:
    """Return how to let a component be measured without counting it, beside others."""
    # All of them on one line: a table that is given replaces the default.
    table = ", ".join(
        f"{name if name.isidentifier() else json.dumps(name, ensure_ascii=False)} = {weight}"
        for name, weight in {**components, component: 0.0}.items()
    )
    return (
        f"set reward.components = {{ {table} }} (with --set, or in a file above its first table; "
        "below [reward] its name is components)"
    )


class RewardConfig(ListenConfig):
    """`[reward]`: the rule, the components and their weights."""

    rule: Literal["weighted", "paper"] = "weighted"
    """`weighted`: sum of weight x component. `paper`: exact match if format is 1, else format - 1
    (Agent-R1, arXiv:2511.14460)."""
    components: dict[str, float] = DEFAULT_COMPONENTS
    """Weight of each component: built-in names, or `module:Name` of your own found through
    `run.plugins`. Weight 0.0 reports a component without counting it. Nothing else is measured,
    except exact_match and format, which `rule = "paper"` needs."""
    ranges: dict[str, tuple[float, float]] = {}
    """Lowest and highest value of components of yours; a value outside is an error."""
    servers: RewardServers = RewardServers()
    """The language models that components ask, a table for each such component."""
    component_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Time one of your own components may take per trajectory, in seconds; then it has failed."""
    max_concurrent: Annotated[int, Field(ge=1)] = 32
    """Trajectories scored at once."""

    def without_asking(self) -> Self:
        """Return the table without the components that ask a language model."""
        kept = {name: weight for name, weight in self.components.items() if name not in ASKING}
        return self.model_copy(update={"components": kept, "servers": RewardServers()})

    def to_serve(self) -> dict[str, ModelServerConfig]:
        """Return the tables of models, by name, that have a folder and no server."""
        return {name: table for name, table in self.servers.named().items() if table.url is None}

    def measured(self) -> dict[str, float]:
        """Return the weights of all components that are measured: the named and the rule's own."""
        return measured_components(self.rule, self.components)

    def branch_scorers(self) -> list[str]:
        """Return the named components that can score a branch: they need not know the answer."""
        return [name for name in self.components if name not in COMPARES_ANSWER]

    @model_validator(mode="after")
    def _check_components(self) -> Self:
        built_in = (*BUILT_IN, *TIMED, *ASKING)
        for name in ASKING:
            if (name in self.components) != (name in self.servers.named()):
                raise ValueError(
                    f"the component {name} of reward.components and the table "
                    f"[reward.servers.{name}] need each other; add the one that is missing, or "
                    "remove the other"
                )
        for name in self.components:
            if name in built_in or re.match(CODE_PATTERN, name):
                continue
            near = difflib.get_close_matches(name, built_in, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"reward.components has {name!r}, which is neither a built-in component nor a "
                f"module:Name; {hint}the built-in ones are {', '.join(built_in)}"
            )
        for name, (low, high) in self.ranges.items():
            if name not in self.components or name in built_in:
                raise ValueError(
                    f"reward.ranges names {name!r}, which is not one of your own components in "
                    "reward.components; correct the name or remove it"
                )
            if low > high:
                raise ValueError(
                    f"reward.ranges of {name!r} is [{low:g}, {high:g}]; the first number must not "
                    "be the larger one"
                )
        if self.rule == "paper":
            weighted = sorted(name for name, weight in self.components.items() if weight != 0.0)
            if weighted not in ([], ["exact_match"]):
                raise ValueError(
                    f'reward.rule = "paper" has no weights, but components gives some to '
                    f"{', '.join(weighted)}; set those to 0.0 to report them only, or use "
                    'rule = "weighted"'
                )
        elif not any(self.components.values()):
            raise ValueError(
                f"reward.components ({self.components}) gives every trajectory reward 0; give one "
                "component a weight, such as exact_match = 1.0"
            )
        return self
