"""The configuration of a run: every table of `run.toml`, read, merged and checked.

`load_config` reads file < environment (`AGENT_R1__ROLLOUT__THREADS`) < `--set`, and
`cli/training/train.py` gives each service its tables. `write_config` writes `config.json` into the
run folder: the same values, resolved, without secrets; services and `--resume` read that.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import ValidationError, model_validator

from agent_r1.config import sources as config_sources
from agent_r1.config.placement import GPU, PlacementConfig, RayConfig
from agent_r1.config.sources import (
    REDACTED,
    ConfigError,
    Key,
    flat_leaves,
    is_secret,
    variable_of,
)
from agent_r1.config.versions import CONFIG_VERSION
from agent_r1.evaluation.config import DiagnoseConfig
from agent_r1.evaluation.score_names import ScoreNames
from agent_r1.gateway.config import AgentConfig
from agent_r1.learner.config import (
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    LearnerConfig,
    SftConfig,
    SupervisedConfig,
    TrainRewardConfig,
)
from agent_r1.learner.objective import PRESETS
from agent_r1.learner.prompt_lengths import PromptFormat, fitting_reader
from agent_r1.learner.prompts import PromptOrder
from agent_r1.reward.config import RewardConfig, measuring_advice
from agent_r1.rollout.config import EnvConfig, RolloutConfig
from agent_r1.runtime.config import ModelConfig, RedisConfig, RunConfig, StrictConfig
from agent_r1.runtime.files.file_formats import read_text
from agent_r1.runtime.files.writing import write_atomically
from agent_r1.runtime.http.token import RunToken, find_token, read_token
from agent_r1.tools.config import ToolConfig
from agent_r1.tools.kinds import AnyToolConfig
from agent_r1.tools.search.config import SearchConfig
from agent_r1_proto.agents import AGENTS

if TYPE_CHECKING:
    from agent_r1.text.reading import TurnReader

__all__ = ["Config", "ConfigError", "LoadedConfig", "load_config"]

OUTPUT_KEYS: frozenset[Key] = frozenset(
    {
        ("run", "dir"),
        ("learner", "weights_dir"),
        ("rollout", "weights_dir"),
        ("sft", "output"),
        ("sft", "work_dir"),
        ("train_reward", "output"),
        ("train_reward", "work_dir"),
    }
)
"""Paths that are written; relative ones mean the current folder, not the configuration file's."""

RESERVED_NAMES = {"redis", "rollout", "reward", "learner", "tool", "gateway", AGENTS}
"""Names of services, which name their logs and commands; no tool may have them."""

SUPERVISED: tuple[Literal["sft", "train_reward"], ...] = ("sft", "train_reward")
"""Commands that train on dialogues, and their tables: without rollout, tools, reward and Redis."""

_URL_SECRET = re.compile(r"^([a-z][a-z0-9+.-]*://)([^@\s]*)@", re.IGNORECASE)


class EpisodesConfig(StrictConfig):
    """`[episodes]`: two scripted interactions with known worth, for `agent-r1 try --policy none`.

    A file holds {"task": "id", "turns": ["what the model writes", ...]}.
    """

    passing: Path | None = None
    """JSON file of an interaction that solves its task."""
    failing: Path | None = None
    """JSON file of an interaction that does not; its reward must be lower."""


class Config(StrictConfig):
    """Every table of `run.toml`."""

    config_version: int = CONFIG_VERSION
    """Version of the keys and their meaning. A release refuses a file of a later one."""
    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig | None = None
    """Prompts; needed for training."""
    env: EnvConfig = EnvConfig()
    tools: dict[str, AnyToolConfig] = {}
    reward: RewardConfig = RewardConfig()
    redis: RedisConfig = RedisConfig()
    rollout: RolloutConfig = RolloutConfig()
    learner: LearnerConfig = LearnerConfig()
    engine: EngineConfig = EngineConfig()
    """The training engine; `[sft.engine]` and `[train_reward.engine]` hold what differs there."""
    placement: PlacementConfig = PlacementConfig()
    ray: RayConfig = RayConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    diagnose: DiagnoseConfig = DiagnoseConfig()
    sft: SftConfig | None = None
    """Warm start; needed for `agent-r1 sft`."""
    train_reward: TrainRewardConfig | None = None
    """Reward model to train; needed for `agent-r1 train-reward`."""
    episodes: EpisodesConfig = EpisodesConfig()
    agent: AgentConfig | None = None
    """An agent that is trained as it is, in place of the loop of `[env]`."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for name in sorted(RESERVED_NAMES & self.tools.keys()):
            raise ValueError(
                f"[tools.{name}] has the name of another service (taken are "
                f"{', '.join(sorted(RESERVED_NAMES))}); rename the tool"
            )
        for name in self.env.enable_tools or []:
            if name not in self.tools:
                raise ValueError(
                    f"env.enable_tools names {name!r}, and the configured tools are "
                    f"{sorted(self.tools)}; add a table [tools.{name}] or remove the name"
                )
        for name in self.diagnose.sets or []:
            if name not in self.evaluation.sets:
                raise ValueError(
                    f"diagnose.sets names {name!r}, and evaluation.sets has "
                    f"{sorted(self.evaluation.sets)}; add its file there or remove the name"
                )
        score, measured = self.evaluation.score, ["reward", *self.reward.measured()]
        if score not in measured:
            advice = measuring_advice(score, self.reward.components)
            raise ValueError(
                f"evaluation.score ({score!r}) is none of {measured}, which alone are measured; "
                f"name one of them, or {advice}"
            )
        return self

    @model_validator(mode="after")
    def _check_turns_fit(self) -> Self:
        if self.env.max_tokens_per_turn >= self.model.max_context:
            raise ValueError(
                f"env.max_tokens_per_turn ({self.env.max_tokens_per_turn}) must be smaller than "
                f"model.max_context ({self.model.max_context}), which holds the prompt as well; "
                "lower it or raise model.max_context"
            )
        return self

    @model_validator(mode="after")
    def _check_deterministic(self) -> Self:
        replicas = self.placement.num_rollout_servers
        if self.run.deterministic and (self.learner.max_staleness > 0 or replicas > 1):
            raise ValueError(
                f"run.deterministic needs learner.max_staleness = 0 (now "
                f"{self.learner.max_staleness}) and one rollout server (now "
                f"{replicas}): otherwise timing decides which weights sample what; "
                "change them or set deterministic = false"
            )
        return self

    @model_validator(mode="after")
    def _check_collective(self) -> Self:
        replicas = self.placement.num_rollout_servers
        sends = self.learner.transport == "collective"
        backend = self.learner.collective_backend if sends else "gloo"
        if backend != "gloo" and self.engine.device == "cpu":
            raise ValueError(
                f'learner.collective_backend ("{backend}") needs engine.device "cuda", not "cpu"; '
                "set gloo, which goes through host memory"
            )
        parts = self.rollout.tensor_parallel_size
        if backend == "ipc" and (parts > 1 or self.model.lora is not None):
            raise ValueError(
                'learner.collective_backend ("ipc") is for whole models of one GPU, and not for '
                f"[model.lora] or rollout.tensor_parallel_size ({parts}); set gloo"
            )
        if backend == "ipc" and replicas > 1:
            raise ValueError(
                'learner.collective_backend ("ipc") is for one rollout server, not '
                f"{replicas}: torch counts one receiver of a GPU's memory; set gloo or nccl, or "
                "lower placement.rollout_replicas"
            )
        return self

    @model_validator(mode="after")
    def _check_rollout_servers(self) -> Self:
        replicas = self.placement.num_rollout_servers
        if replicas > 1 and self.rollout.port != 0:
            raise ValueError(
                f"rollout.port ({self.rollout.port}) must be 0 with {replicas} rollout "
                "servers ([placement]): servers of one machine cannot share a port"
            )
        if replicas > 1 and self.rollout.server_id is not None:
            raise ValueError(
                f"rollout.server_id ({self.rollout.server_id!r}) must be unset with "
                f"{replicas} rollout servers ([placement]): every server needs its own"
            )
        gpus, parts = self.ray.rollout_resources.get(GPU, 0), self.rollout.tensor_parallel_size
        if gpus not in (0, parts):
            raise ValueError(
                f'ray.rollout_resources asks for {gpus:g} "GPU", and rollout.tensor_parallel_size '
                f"is {parts}; give a server as many GPUs as it uses"
            )
        return self

    @model_validator(mode="after")
    def _check_agent(self) -> Self:
        if self.agent and self.agent.timeout_s >= self.learner.sample_timeout_s:
            raise ValueError(
                f"agent.timeout_s ({self.agent.timeout_s:g}) must be below "
                f"learner.sample_timeout_s ({self.learner.sample_timeout_s:g}), after which the "
                "learner asks again; lower it or raise that"
            )
        return self

    def supervised(self, purpose: str) -> SupervisedConfig | None:
        """Return the table of a command that trains on dialogues; None of the other commands."""
        return getattr(self, purpose) if purpose in SUPERVISED else None

    @property
    def max_segments(self) -> int:
        """Most segments of one trajectory: every turn may follow a rewritten history."""
        if self.agent is not None:
            return math.ceil(self.agent.max_session_tokens / self.model.max_context)
        return self.env.max_turns if self.env.rewritten_history == "segments" else 1

    def turn_reader(self) -> TurnReader:
        """Return what reads turns of this run's model that nobody has read."""
        from agent_r1.text.reading import TurnReader  # which most commands do without

        return TurnReader.of(self.env.tool_format, self.env.answer_pattern)

    def tool_format(self) -> str | None:
        """Return how calls are written; None where no tool is offered."""
        offers_tools = bool(self.tools) and self.env.enable_tools != []
        return self.env.tool_format if offers_tools else None

    def started_tools(self) -> dict[str, AnyToolConfig]:
        """Return the tools that this run starts; the others run already."""
        return {name: tool for name, tool in self.tools.items() if tool.url is None}

    def served_tools(self) -> dict[str, ToolConfig]:
        """Return what is started as a tool: the tools, and the service that runs agents."""
        served: dict[str, ToolConfig] = dict(self.started_tools())
        if self.agent is not None and self.agent.url is None:
            listen = self.agent.service.model_dump()
            served[AGENTS] = ToolConfig(
                type="attached_agents" if self.agent.attached else AGENTS,
                settings=self.agent.service_settings(),
                session_expiry_s=self.agent.timeout_s,
                **listen,
            )
        return served

    def agents_token(self) -> RunToken | None:
        """Return the token of the service that runs agents: its own, or the run's.

        Raises:
            ValueError: what is given is no token.
        """
        if self.agent is not None and self.agent.token_file is not None:
            return read_token(self.agent.token_file, "agent.token_file")
        return find_token(self.run)

    @property
    def system_prompt(self) -> str | None:
        """System prompt of the loop of `[env]`; None where an agent brings its own."""
        return self.env.system_prompt if self.agent is None else None

    def prompt_order(self) -> PromptOrder:
        """Read the training data, as the learner does.

        Raises:
            ConfigError: there is none.
            TaskFileError: a source is missing, empty or malformed, or a prompt is too long.
            MissingPackageError: the package that reads a source is not installed.
        """
        if self.data is None:
            raise ConfigError("table [data] is missing; the learner needs data.train")
        env = self.env
        form = PromptFormat(
            self.model.path,
            env.system_prompt,
            env.chat_template_kwargs,
            self.tool_format(),
            env.max_tool_response_chars,
            env.max_tool_response_tokens,
        )
        return PromptOrder.of(self.data, self.run.seed, read=fitting_reader(self.data, form))

    def score_names(self) -> ScoreNames:
        """Return which scores are shown of this configuration's trajectories."""
        enabled = self.env.enable_tools
        tools = self.tools if enabled is None else enabled
        return ScoreNames(tuple(self.reward.measured()), tuple(tools))


@dataclass(frozen=True)
class LoadedConfig:
    """A validated configuration and where its values came from."""

    config: Config
    origins: Mapping[Key, str]

    def origin(self, key: Key) -> str:
        """Say where the value at `key` came from."""
        for size in range(len(key), 0, -1):
            if key[:size] in self.origins:
                return self.origins[key[:size]]
        inner = [source for other, source in self.origins.items() if other[: len(key)] == key]
        if inner:
            return inner[-1]
        algorithm = self.config.learner.algorithm
        if key[0] == "learner" and key[-1] in PRESETS[algorithm]:
            return f"preset learner.algorithm = {algorithm}"
        return "default"


def load_config(
    file: Path | None,
    options: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    *,
    values: Mapping[str, Any] | None = None,
) -> LoadedConfig:
    """Read a configuration: defaults < file it extends < file < environment < options.

    Args:
        file: `.toml` file, or the `config.json` of a run folder.
        options: `KEY=VALUE` texts, as given to `--set`.
        environ: environment variables; None takes this process's.
        values: tables from Python in the place of a file; paths are relative to the current folder.

    Raises:
        ConfigError: a source is unreadable, a key unknown or a value not allowed.
    """
    loaded = _load(file, options, os.environ if environ is None else environ, values or {})
    _refuse_redacted(loaded.config.model_dump(mode="json"))
    return loaded


def load_given(config: str | Path | Mapping[str, Any], options: Sequence[str] = ()) -> LoadedConfig:
    """Read a configuration file, or tables from Python, as `load_config` does."""
    if isinstance(config, Mapping):
        return load_config(None, options, values=config)
    return load_config(Path(config), options)


def read_written_config(file: Path) -> Config:
    """Read the `config.json` of a run as it was written: without the secrets that it leaves out.

    Raises:
        ConfigError: it is unreadable, or of a release with other keys.
    """
    return _load(file, (), {}, {}).config


def _load(
    file: Path | None,
    options: Sequence[str],
    environ: Mapping[str, str],
    given: Mapping[str, Any],
) -> LoadedConfig:
    values, origins = config_sources.collect(
        Config, file=file, given=given, environ=environ, options=options, outputs=OUTPUT_KEYS
    )
    _inherit_engine(values, origins)
    _read_system_prompt(values, origins)
    try:
        config = Config.model_validate(values)
    except ValidationError as exc:
        raise ConfigError(config_sources.explain(exc, origins)) from exc
    return LoadedConfig(config=config, origins=origins)


def _inherit_engine(values: dict[str, Any], origins: dict[Key, str]) -> None:
    """Give `[sft.engine]` and `[train_reward.engine]` what `[engine]` sets and they do not."""
    for table in SUPERVISED:
        if isinstance(own := values.get(table), dict):
            own["engine"] = (values.get("engine") or {}) | (own.get("engine") or {})
            for name in values.get("engine") or {}:
                origins.setdefault((table, "engine", name), origins[("engine", name)])


def _read_system_prompt(values: dict[str, Any], origins: dict[Key, str]) -> None:
    """Put the text of `env.system_prompt_file` into `env.system_prompt`."""
    env = values.get("env") or {}
    file, named = env.get("system_prompt_file"), ("env", "system_prompt_file")
    if not isinstance(file, str) or env.get("system_prompt") is not None:
        return
    try:
        text = read_text(Path(file)).strip()
    except (OSError, ValueError) as exc:
        why = getattr(exc, "strerror", None) or exc
        raise ConfigError(
            f"env.system_prompt_file ({file}) cannot be read: {why}; name a text file "
            f"[{origins[named]}]"
        ) from exc
    env |= {"system_prompt": text, "system_prompt_file": None}
    origins[("env", "system_prompt")] = f"{file}, named in {origins[named]}"


def _refuse_redacted(values: Mapping[str, Any]) -> None:
    """Complain about a secret that `config.json` leaves out and nothing has filled in."""
    for name, value in flat_leaves(values):
        if isinstance(value, str) and (value == REDACTED or f":{REDACTED}@" in value):
            raise ConfigError(
                f"{name} is a secret, which config.json does not hold; set the environment "
                f"variable {variable_of(name.split('.'))}"
            )


def _redact(value: Any, key: Key, secrets: dict[str, str]) -> Any:
    """Return `value` without secrets, and collect them by variable name."""
    if isinstance(value, dict):
        return {name: _redact(inner, (*key, name), secrets) for name, inner in value.items()}
    if not isinstance(value, str):
        return value
    variable = variable_of(key)
    if is_secret(key):
        secrets[variable] = value
        return REDACTED
    match = _URL_SECRET.match(value)
    if match is None or ":" not in match[2]:
        return value
    secrets[variable] = value
    user = match[2].partition(":")[0]
    return f"{match[1]}{user}:{REDACTED}@{value[match.end() :]}"


def dump_config(config: Config) -> tuple[dict[str, Any], dict[str, str]]:
    """Turn a configuration into JSON values without secrets.

    Returns:
        The values, which `load_config` reads back, and the secrets by environment variable.
    """
    values = config.model_dump(mode="json")
    for name, tool in config.tools.items():
        if not isinstance(tool, SearchConfig):  # as every version has written it
            values["tools"][name] = tool.model_dump(mode="json", exclude_unset=True)
    run_dir = config.run.folder()
    values["run"]["dir"] = str(run_dir.resolve())
    secrets: dict[str, str] = {}
    return _redact(values, (), secrets), secrets


def write_config(config: Config, path: Path) -> dict[str, str]:
    """Write `config.json`.

    Returns:
        The secrets it leaves out, as environment variables for the services.
    """
    values, secrets = dump_config(config)
    write_atomically(path, json.dumps(values, indent=2) + "\n")
    return secrets
