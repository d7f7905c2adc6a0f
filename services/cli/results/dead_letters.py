"""`agent-r1 dead-letters list|show|retry RUN`: messages that no service could process.

Reads the stream `dead_letters` of a live run's Redis, or `dead_letters.jsonl` of a run that has
ended; `retry` puts an entry back on the stream it came from.
"""

from __future__ import annotations

import argparse
import json
import shlex
from datetime import UTC, datetime
from pathlib import Path

from agent_r1.cli.live_run import ask, redis_of, run_config
from agent_r1.config.sources import ENV_PREFIX, ConfigError
from agent_r1.runtime.files.dead_letters import load_letters
from agent_r1_proto.dead_letters import DeadLetter
from agent_r1_proto.streams import Broker

ALL = "all"
URL_VARIABLE = f"{ENV_PREFIX}REDIS__URL"


def _letters(folder: Path) -> list[DeadLetter]:
    config = run_config(folder)
    url = redis_of(folder, config)
    letters = {letter.letter_id: letter for letter in load_letters(folder)}
    if url is not None:
        live = ask(url, config.run.id, Broker.dead_letters, URL_VARIABLE)
        letters |= {letter.letter_id: letter for letter in live}
    return list(letters.values())


def list_letters(arguments: argparse.Namespace) -> int:
    """Print one line per dead letter."""
    letters = _letters(arguments.run_folder)
    for letter in letters:
        when = datetime.fromtimestamp(letter.failed_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        key = letter.fields.get(b"key", b"-").decode(errors="replace")
        print(f"{letter.letter_id}  {when}  {letter.stream.rpartition(':')[2]}  {key}")
        print(f"    {letter.reason}")
    print(f"{len(letters)} dead letters")
    return 0


def _find(letters: list[DeadLetter], letter_id: str) -> DeadLetter:
    for letter in letters:
        if letter.letter_id == letter_id:
            return letter
    raise ConfigError(
        f"there is no dead letter {letter_id!r}; `agent-r1 dead-letters list RUN` lists all "
        f"{len(letters)}"
    )


def show_letters(arguments: argparse.Namespace) -> int:
    """Print one dead letter in full."""
    letter = _find(_letters(arguments.run_folder), arguments.id)
    print(f"id      {letter.letter_id}")
    print(f"stream  {letter.stream}, entry {letter.entry_id}")
    print(f"reason  {letter.reason}")
    if letter.cut:
        print(f"cut     the entry had {letter.size_bytes:,} bytes; the beginning was kept")
    for name, value in letter.fields.items():
        if name.startswith(b"array:"):
            print(f"{name.decode()}  {len(value)} bytes")
            continue
        text = value.decode(errors="replace")
        if name == b"meta":
            try:
                text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
            except json.JSONDecodeError:
                text = repr(text)
        print(f"{name.decode(errors='replace')}  {text}")
    return 0


def retry_letters(arguments: argparse.Namespace) -> int:
    """Put one dead letter, or all, back on its stream."""
    folder: Path = arguments.run_folder
    config = run_config(folder)
    url = redis_of(folder, config)
    if url is None:
        raise ConfigError(
            f"the run in {folder} is not running, and its Redis has stopped too. Nothing is lost: "
            f"`agent-r1 train --resume {shlex.quote(str(folder))}` requests every unfinished "
            "sample again"
        )

    async def retry(broker: Broker) -> int:
        letters = await broker.dead_letters()
        if arguments.id == ALL:
            chosen = [letter for letter in letters if not letter.cut]
        else:
            chosen = [_find(letters, arguments.id)]
        for letter in chosen:
            await broker.retry_dead_letter(letter)
        return len(chosen)

    count = ask(url, config.run.id, retry, URL_VARIABLE)
    print(f"{count} dead letters are back on their streams")
    return 0
