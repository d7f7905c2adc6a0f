"""Answers with valid defaults, so that a test shows only what it is about."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agent_r1.evaluation.answer_file import Answer
from agent_r1_proto.tasks import ChatMessage


def answer(task_id: str = "q", em: float | None = 1.0, **changes: Any) -> Answer:
    """Return a scored answer; `em` None is one without gold answers."""
    components = {} if em is None else {"exact_match": em}
    fields: dict[str, Any] = {
        "method": "agent",
        "set": "s",
        "id": task_id,
        "question": "who?",
        "prompt": [ChatMessage(role="user", content="who?")],
        "failed": False,
        "status": "COMPLETED",
        "em": em,
        "f1": em,
        "substring_match": em,
        "reward": 0.0 if em is None else em,
        "components": components,
        "num_turns": 1,
    }
    return Answer(**(fields | changes))


def write(path: Path, answers: Iterable[Answer]) -> Path:
    """Write a result file."""
    path.write_text("".join(line.model_dump_json() + "\n" for line in answers))
    return path
