"""The model card of an exported policy: what it was trained on, with which settings and scores.

export.py writes it as `README.md`, where model hubs show it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agent_r1.config.checks import HUB_NAME
from agent_r1.config.run import Config
from agent_r1.evaluation.score_names import ScoreNames
from agent_r1.launch.local_view import read_json_lines
from agent_r1.runtime.files.run_folder import EVALUATIONS_FILE

SHOWN_TABLES = ("model", "data", "env", "tools", "reward", "learner", "engine", "evaluation")
"""Tables of the configuration that describe the model; the others are about machines."""


def model_card(run: Path, config: Config, step: int, agent: Mapping[str, Any]) -> str:
    """Return the card of the policy of one step.

    Args:
        run: run folder.
        config: of the run.
        step: learner step of the checkpoint.
        agent: what `agent.json` holds.
    """
    base = config.model.path
    on_hub = HUB_NAME.match(base) and not Path(base).exists()
    tools = ", ".join(f"`{tool['function']['name']}`" for tool in agent["tools"]) or "none"
    learner = config.learner
    batch = f"{learner.groups_per_batch} prompts of {learner.group_size} samples"
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [agent-r1, reinforcement-learning, tool-use]",
        *([f"base_model: {base}"] if on_hub else []),
        "---",
        "",
        f"# {config.run.id}, step {step}",
        "",
        "An agent trained by reinforcement learning with Agent-R1. The licence of the base model "
        "applies to this model too; name it here before you publish the model.",
        "",
        "| | |",
        "|---|---|",
        f"| base model | {base if on_hub else Path(base).name} |",
        f"| algorithm | {learner.algorithm} |",
        f"| learner steps | {step}, each of {batch} |",
        f"| learning rate | {config.engine.lr:g} |",
        f"| tools | {tools} |",
        f"| format of tool calls | {agent['tool_format']} |",
        "",
        "`agent.json` has the system prompt, the tools, the sampling and the limits that the "
        "model was trained and scored with. Other prompts or limits may score otherwise.",
        "",
        *_scores(run, config.score_names(), step),
        "## Configuration",
        "",
        "What differs from the defaults. Paths are shortened to their last part.",
        "",
        "```json",
        json.dumps(shown_config(config), indent=2, ensure_ascii=False),
        "```",
        "",
    ]
    return "\n".join(lines)


def shown_config(config: Config) -> dict[str, Any]:
    """Return the part of a configuration that a card shows, without paths of this machine."""
    values = config.model_dump(mode="json", exclude_defaults=True, include=set(SHOWN_TABLES))
    return _shortened(values)


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shortened(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_shortened(inner) for inner in value]
    is_path = isinstance(value, str) and Path(value).is_absolute() and "\n" not in value
    return Path(value).name if is_path else value


def _scores(run: Path, names: ScoreNames, step: int) -> Iterator[str]:
    """Yield a table of the policy's evaluation beside that of the base model."""
    evaluations = read_json_lines(run / EVALUATIONS_FILE)
    found = [one for one in evaluations if one["step"] == step]
    if not found:
        yield from ("This checkpoint was not evaluated.", "")
        return
    before = next((one["sets"] for one in evaluations if one["name"] == "before"), {})
    titles = {"reward": "reward", **names.titles()}
    yield from ("## Scores", "")
    yield from ("| set | questions | score | before | after |", "|---|---|---|---|---|")
    for name, scores in found[-1]["sets"].items():
        for key, title in titles.items():
            values = [_score(sets, key) for sets in (before.get(name), scores)]
            yield f"| {name} | {scores['n']} | {title} | {' | '.join(values)} |"
    yield ""


def _score(scores: Mapping[str, Any] | None, key: str) -> str:
    if scores is None:
        return "-"
    value = scores["reward"] if key == "reward" else scores["components"].get(key)
    return "-" if value is None else f"{value:.3f}"
