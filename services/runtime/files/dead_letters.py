"""The dead letters of an ended run: the stream `dead_letters` --> `dead_letters.jsonl` --> readers.

The launcher and the learner write it when a run ends; `agent-r1 status` and `show` read it.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agent_r1.runtime.files.run_folder import DEAD_LETTERS_FILE
from agent_r1.runtime.files.state import parse_objects
from agent_r1.runtime.files.writing import write_atomically
from agent_r1_proto.dead_letters import MAX_LETTERS, DeadLetter

logger = logging.getLogger(__name__)


def save_letters(folder: Path, letters: Iterable[DeadLetter]) -> None:
    """Add dead letters to `dead_letters.jsonl`; one that is there already is not added again.

    Raises:
        DiskFullError: there is no room; the file is as it was.
    """
    known = {letter.letter_id: letter for letter in load_letters(folder)}
    known |= {letter.letter_id: letter for letter in letters}
    kept = sorted(known.values(), key=lambda letter: letter.failed_at)[-MAX_LETTERS:]
    if kept:
        write_atomically(folder / DEAD_LETTERS_FILE, "".join(map(_line, kept)))


def _line(letter: DeadLetter) -> str:
    values = dict(vars(letter))
    values["fields_base64"] = {
        name.decode(errors="replace"): base64.b64encode(value).decode()
        for name, value in values.pop("fields").items()
    }
    return json.dumps(values) + "\n"


def load_letters(folder: Path) -> list[DeadLetter]:
    """Read the dead letters that an ended run left in its folder, oldest first.

    Lines that are damaged are left out.
    """
    path = folder / DEAD_LETTERS_FILE
    if not path.is_file():
        return []
    letters: list[DeadLetter] = []
    for values in parse_objects(path.read_text(encoding="utf-8", errors="replace")):
        try:
            letters.append(_letter(values))
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            logger.warning("dead letter cannot be read path=%s error=%r", path, exc)
    return letters


def _letter(values: dict[str, Any]) -> DeadLetter:
    encoded: dict[str, str] = values.pop("fields_base64")
    fields = {name.encode(): base64.b64decode(value) for name, value in encoded.items()}
    return DeadLetter(**values, fields=fields)
