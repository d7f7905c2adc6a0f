"""Completions: a row for each of the first stored samples of a step --> tables of W&B and MLflow.

run_folder.py makes them while it stores the trajectories, which have everything; a table has what
fits into it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from agent_r1.runs.record import prompt_messages
from agent_r1.runtime.unicode import repair_text

COLUMNS = (
    *("step", "task_id", "group_id", "sample_index", "status", "prompt", "completion"),
    *("reward", "components", "advantage"),
)
MOST_ROWS = 16
"""Most completions of a step."""
MOST_CHARS = 4_000
"""Most characters of a prompt or a completion."""
Completion: TypeAlias = Sequence[str | int | float | None]
"""Values of COLUMNS."""


def completion_of(record: Mapping[str, Any]) -> Completion:
    """Return the row of a stored trajectory.

    The completion has what the policy wrote and, after each turn, what its calls returned;
    components are a JSON object, because runs have different ones.
    """
    prompt = [message.shown() for message in prompt_messages(record)]
    written = [one["text"] for turn in record["turns"] for one in (turn, *turn["calls"])]
    reward = record["reward"] or {}
    texts = {"prompt": prompt, "completion": written}
    values = {
        **record,
        **{name: repair_text("\n".join(parts))[:MOST_CHARS] for name, parts in texts.items()},
        "reward": reward.get("total"),
        "components": json.dumps(reward.get("components", {})),
    }
    return [values[name] for name in COLUMNS]
