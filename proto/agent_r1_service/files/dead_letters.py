"""The dead letters of an ended run: the stream `dead_letters` --> `dead_letters.jsonl` --> readers.

The launcher and the learner write it when a run ends; `agent-r1 dead-letters` reads it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from pathlib import Path

from agent_r1_proto.dead_letters import MAX_LETTERS, DeadLetter
from agent_r1_service.files.json_lines import split_lines
from agent_r1_service.files.run_folder import DEAD_LETTERS_FILE
from agent_r1_service.files.writing import write_atomically


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
    """Read the dead letters that an ended run left in its folder, oldest first."""
    path = folder / DEAD_LETTERS_FILE
    if not path.is_file():
        return []
    letters: list[DeadLetter] = []
    for line in split_lines(path.read_text()):
        values = json.loads(line)
        fields = values.pop("fields_base64")
        letters.append(
            DeadLetter(
                **values,
                fields={name.encode(): base64.b64decode(value) for name, value in fields.items()},
            )
        )
    return letters
