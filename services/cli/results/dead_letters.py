"""Messages that no service could process: `agent-r1 dead-letters retry RUN`, and their text.

Reads `dead_letters.jsonl` of the run folder and the stream `dead_letters` of a live run's Redis,
for `agent-r1 show` and `status`; `retry` puts an entry back on the stream it came from.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from agent_r1.cli.declare import add_run_folder
from agent_r1.cli.live_run import ask
from agent_r1.config.live_run import redis_of, run_config
from agent_r1.config.sources import ENV_PREFIX, ConfigError
from agent_r1.runtime.files.dead_letters import load_letters
from agent_r1_proto.dead_letters import DeadLetter
from agent_r1_proto.streams import Broker

ALL = "all"
MOST_LISTED = 20
URL_VARIABLE = f"{ENV_PREFIX}REDIS__URL"


def read_letters(folder: Path, wanted: str) -> list[DeadLetter]:
    """Return the dead letter of an id, or all of a run, oldest first.

    Raises:
        ConfigError: there is none of this id, or the run's Redis does not answer.
    """
    config = run_config(folder)
    url = redis_of(folder, config)
    live = [] if url is None else ask(url, config.run.id, Broker.dead_letters, URL_VARIABLE)
    return _chosen(with_stored(folder, live), wanted, folder)


def with_stored(folder: Path, live: Iterable[DeadLetter] = ()) -> list[DeadLetter]:
    """Return the dead letters of a run, oldest first: those stored in its folder, then live ones.

    Args:
        folder: of the run.
        live: those in its Redis, where it has one now.
    """
    letters = {letter.letter_id: letter for letter in (*load_letters(folder), *live)}
    return sorted(letters.values(), key=lambda letter: letter.failed_at)


def _chosen(letters: Sequence[DeadLetter], wanted: str, folder: Path) -> list[DeadLetter]:
    chosen = [letter for letter in letters if wanted in (ALL, letter.letter_id)]
    if chosen or wanted == ALL:
        return chosen
    missing = f"there is no dead letter {wanted!r}"
    if not letters:
        raise ConfigError(f"{missing}: the run has none")
    raise ConfigError(
        f"{missing}; `agent-r1 status {shlex.quote(str(folder))}` lists the newest "
        f"({len(letters)} in all)"
    )


def counted(number: int) -> str:
    """Return how many dead letters there are, in words: `no dead letters`, `1 dead letter`."""
    return f"{number or 'no'} dead letter{'' if number == 1 else 's'}"


def print_summary(letters: Sequence[DeadLetter]) -> None:
    """Print two lines for each of the newest dead letters: where and when, and why."""
    for letter in letters[-MOST_LISTED:]:
        when = datetime.fromtimestamp(letter.failed_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        key = letter.fields.get(b"key", b"-").decode(errors="replace")
        print(f"{letter.letter_id}  {when}  {letter.stream.rpartition(':')[2]}  {key}")
        print(f"    {letter.reason}")
    if letters:
        print(f"{counted(len(letters))}; `agent-r1 show RUN --dead-letter ID` prints one")


def letter_lines(letter: DeadLetter) -> Iterator[str]:
    """Yield a dead letter in full, its arrays as sizes."""
    yield f"id      {letter.letter_id}"
    yield f"stream  {letter.stream}, entry {letter.entry_id}"
    yield f"reason  {letter.reason}"
    if letter.cut:
        yield f"cut     the entry had {letter.size_bytes:,} bytes; the beginning was kept"
    for name, value in letter.fields.items():
        if name.startswith(b"array:"):
            yield f"{name.decode()}  {len(value)} bytes"
            continue
        text = value.decode(errors="replace")
        if name == b"meta":
            try:
                text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
            except json.JSONDecodeError:
                text = repr(text)
        yield f"{name.decode(errors='replace')}  {text}"


def retry_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dead-letters retry`."""
    add_run_folder(parser)
    parser.add_argument("id", metavar="ID", help="its id, as `agent-r1 status` prints it, or `all`")


def retry(arguments: argparse.Namespace) -> int:
    """Put one dead letter, or all, back on the stream it came from."""
    folder: Path = arguments.run_folder
    config = run_config(folder)
    url = redis_of(folder, config)
    if url is None:
        raise ConfigError(
            f"the run in {folder} is not running, and its Redis has stopped too. Nothing is lost: "
            f"`agent-r1 train --resume {shlex.quote(str(folder))}` requests every unfinished "
            "sample again"
        )

    async def put_back(broker: Broker) -> int:
        chosen = _chosen(await broker.dead_letters(), arguments.id, folder)
        if arguments.id == ALL:
            chosen = [letter for letter in chosen if not letter.cut]
        for letter in chosen:
            await broker.retry_dead_letter(letter)
        return len(chosen)

    count = ask(url, config.run.id, put_back, URL_VARIABLE)
    back = {0: "", 1: " is back on its stream"}.get(count, " are back on their streams")
    print(f"{counted(count)}{back}")
    return 0
