"""Settings that can change an answer or a score, by which runs, cells and answers are compared.

A run and a cell are kept where nothing of this differs from what is asked for now. Addresses,
threads and time limits are not among it, and of paths, which differ between machines, only the last
part.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from agent_r1.config.run import Config, dump_config
from agent_r1.config.sources import VERSION_KEY, flat_leaves
from agent_r1.config.versions import translate_dotted
from agent_r1.evaluation.answer_file import differences
from agent_r1.evaluation.config import SEARCH_TOOL, QuestioningConfig
from agent_r1.evaluation.experiments.cell import SEED_KEY
from agent_r1.reward.config import RewardConfig
from agent_r1.runtime.files.task_source import DataSource
from agent_r1.runtime.files.tasks import source_digest
from agent_r1.tools.search.config import SearchConfig
from agent_r1_proto.rewards import PAPER_MEASURES

DIR_KEY = "run.dir"
RULE = "reward.rule"
COMPONENTS = "reward.components."
CANARY = "learner.canary_"
"""Beginning of the keys that say how closely pushes are watched."""
DECISIVE = (
    *("model.", "data.", "env.", "tools.", "learner.", "engine.", "evaluation."),
    *("reward.components", "reward.rule", "reward.ranges", SEED_KEY),
)
"""Beginnings of the keys that decide what is learned and asked; the others say where and how
fast."""
OF_TRAINING = ("learner.", "engine.", "data.", SEED_KEY)
"""Beginnings of those that a baseline has none of."""
MODEL_KEY = re.compile(r"reward\.servers\.\w+\.(\w+)")
OF_A_SERVER = ("url", "api_key", "max_concurrent", "requests_per_minute", "cache_size")
"""Keys of the models that score which decide nothing."""
ENV_FACTS = (
    *("type", "options", "max_turns", "max_calls_per_turn", "max_tokens_per_turn"),
    *("max_tool_response_tokens", "max_tool_response_chars", "system_prompt", "enable_tools"),
    *("answer_pattern", "chat_template_kwargs"),
)
TOOL_FACTS = (
    *("type", "settings", "backend", "corpus", "index", "description", "top_k"),
    *("passage_template", "separator", "empty_text", "max_chars", "max_query_chars"),
)


def evaluation_facts(config: Config) -> dict[str, JsonValue]:
    """Return what of a configuration can change an answer or a score, by dotted name.

    `top_k` is that of the search tool: None without one, and of one that runs elsewhere.
    """
    values = dump_config(config)[0]
    search = config.tools.get(SEARCH_TOOL)
    facts: dict[str, JsonValue] = {
        "policy": config.model.policy,
        "top_k": search.top_k if isinstance(search, SearchConfig) and search.url is None else None,
        "model.dtype": config.model.dtype,
        "model.max_context": config.model.max_context,
        "reward.rule": config.reward.rule,
        "reward.components": dict(config.reward.components),
    }
    facts |= {f"env.{key}": values["env"][key] for key in ENV_FACTS}
    return facts | dict(_tool_facts(values["tools"]))


def _tool_facts(tools: dict[str, dict[str, JsonValue]]) -> Iterator[tuple[str, JsonValue]]:
    for name, table in tools.items():
        for key in TOOL_FACTS:
            # Of a tool that runs elsewhere the table says nothing but its address.
            if key in table and table.get("url") is None:
                yield f"tools.{name}.{key}", table[key]


def asked_settings(
    config: Config, asked: QuestioningConfig, source: DataSource
) -> dict[str, JsonValue]:
    """Return the settings of a cell of a matrix."""
    facts = {
        **evaluation_facts(config),
        **asked.facts(),
        "tasks": f"sha256:{source_digest(source)}",
        **{
            # As version 1 of the configuration called the tables, so that older cells count.
            f"reward.{name.removeprefix('reward_')}.model": table.model
            for name, table in config.reward.servers.named().items()
        },
    }
    return {key: value for key, value in facts.items() if not _is_place(value)}


def _is_place(value: JsonValue) -> bool:
    return isinstance(value, str) and Path(value).is_absolute()


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


def trained_settings(settings: Mapping[str, JsonValue], *, trains: bool) -> dict[str, JsonValue]:
    """Return the settings of a cell of a table.

    Args:
        settings: of the run, as `flat_settings` gives them.
        trains: False for a baseline, to which nothing of training matters.
    """
    left_out = () if trains else OF_TRAINING
    return {
        key: _portable(value)
        for key, value in settings.items()
        if _is_decisive(key) and not key.startswith(left_out)
    }


def _is_decisive(key: str) -> bool:
    if of_model := MODEL_KEY.match(key):
        return of_model[1] not in OF_A_SERVER
    return key.startswith(DECISIVE)


def _portable(value: JsonValue) -> JsonValue:
    if isinstance(value, list):
        return [_portable(item) for item in value]
    return Path(str(value)).name if _is_place(value) else value


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
