"""Dead letters in `agent-r1 status`, `show` and `dead-letters retry`, with a real Redis."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from agent_r1.cli import main as cli
from agent_r1.config.run import load_config, write_config
from agent_r1.runtime.files.dead_letters import load_letters, save_letters
from agent_r1_proto.messages import encode_entry
from agent_r1_proto.rewards import ScoredTrajectory
from agent_r1_proto.streams import Broker
from tests.support.builders import scored
from tests.support.config_scene import write_scene

pytestmark = pytest.mark.redis

T = TypeVar("T")


class Run:
    """A run folder whose run has this Redis."""

    def __init__(self, folder: Path, url: str, run_id: str) -> None:
        self.folder = folder / "run"
        self.url = url
        self.run_id = run_id
        self.folder.mkdir()
        file = write_scene(folder / "example")
        config = load_config(file, [f"redis.url={url}", f"run.id={run_id}"], {}).config
        write_config(config, self.folder / "config.json")

    def ask(self, question: Callable[[Broker], Awaitable[T]]) -> T:
        async def connected() -> T:
            async with await Broker.connect(self.url, self.run_id) as broker:
                return await question(broker)

        return asyncio.run(connected())

    def leave(self, reason: str) -> str:
        """Dead-letter a scored trajectory; return the letter's id."""

        async def add(broker: Broker) -> str:
            original = {b"field:" + k: v for k, v in encode_entry(scored()).items()}
            letter: Any = {
                b"stream": broker.keys.scored.encode(),
                b"entry_id": b"1-0",
                b"reason": reason.encode(),
                b"failed_at": b"0.0",
                **original,
            }
            return (await broker.redis.xadd(broker.keys.dead_letters, letter)).decode()

        return self.ask(add)

    def show(self, letter: str) -> int:
        return cli.main(["show", str(self.folder), "--dead-letter", letter])

    def retry(self, letter: str) -> int:
        return cli.main(["dead-letters", "retry", str(self.folder), letter])


@pytest.fixture
def run(tmp_path: Path, redis_url: str, run_id: str) -> Run:
    return Run(tmp_path, redis_url, run_id)


def test_letters_are_listed_with_stream_key_and_reason(
    run: Run, capsys: pytest.CaptureFixture[str]
):
    letter_id = run.leave("failed 3 times: no answers in the payload")
    assert cli.main(["status", str(run.folder)]) == 0
    text = capsys.readouterr().out
    first, second, last = text.splitlines()[-3:]
    assert first == (
        f"{letter_id}  1970-01-01 00:00:00 UTC  scored_trajectories  {scored().stream_key()}"
    )
    assert second.strip() == "failed 3 times: no answers in the payload"
    assert last.startswith("1 dead letter; ")


def test_a_letter_is_shown_in_full_with_its_arrays_as_sizes(
    run: Run, capsys: pytest.CaptureFixture[str]
):
    letter_id = run.leave("broken")
    assert run.show(letter_id) == 0
    text = capsys.readouterr().out
    assert "reason  broken" in text
    num_tokens = len(scored().trajectory.token_ids)
    assert f"array:trajectory.token_ids  {num_tokens} bytes" in text
    assert '"status": "COMPLETED"' in text


def test_retry_puts_letters_back_on_their_stream(run: Run, capsys: pytest.CaptureFixture[str]):
    first, _ = run.leave("one"), run.leave("two")
    assert run.retry(first) == 0
    assert "1 dead letter is back on its stream\n" in capsys.readouterr().out

    async def look(broker: Broker) -> tuple[int, int, str]:
        consumer = broker.consumer(
            broker.keys.scored, ScoredTrajectory, group="learner", consumer="test"
        )
        async with consumer:
            entries = await consumer.read(8, 0.0)
        letters = await broker.dead_letters()
        return len(entries), len(letters), entries[0].message.stream_key()

    assert run.ask(look) == (1, 1, scored().stream_key())
    assert run.retry("all") == 0
    assert run.ask(lambda broker: broker.dead_letters()) == []


def test_an_unknown_letter_is_refused(run: Run, capsys: pytest.CaptureFixture[str]):
    assert run.show("9-9") == 2
    assert "there is no dead letter '9-9': the run has none" in capsys.readouterr().err
    run.leave("one")
    assert run.retry("9-9") == 2
    lists = f"`agent-r1 status {run.folder}` lists the newest (1 in all)"
    assert f"there is no dead letter '9-9'; {lists}" in capsys.readouterr().err


def test_that_there_are_none_is_said(run: Run, capsys: pytest.CaptureFixture[str]):
    assert run.show("all") == 0
    assert run.retry("all") == 0
    assert capsys.readouterr().out == "no dead letters\nno dead letters\n"


@pytest.mark.parametrize("answers", [True, False])
def test_letters_of_earlier_starts_are_listed_with_those_of_now(
    answers: bool, run: Run, capsys: pytest.CaptureFixture[str]
):
    """Those stored in the folder of a run that was killed, or goes on."""
    earlier = run.leave("before it was killed")
    save_letters(run.folder, run.ask(lambda broker: broker.dead_letters()))
    run.ask(lambda broker: broker.forget_run())
    expected = [earlier]
    if answers:
        expected.append(run.leave("now"))
    else:  # a Redis of the run's own, which has stopped with it
        file = run.folder / "config.json"
        values = json.loads(file.read_text())
        del values["redis"]["url"]
        file.write_text(json.dumps(values))
    assert cli.main(["status", str(run.folder)]) == 0
    text = capsys.readouterr().out
    listed = [line.split()[0] for line in text.splitlines() if "1970-01-01" in line]
    assert listed == expected
    assert run.show("all") == 0
    text = capsys.readouterr().out
    assert [line.split()[1] for line in text.splitlines() if line.startswith("id ")] == expected


def test_letters_of_an_ended_run_are_kept_as_they_were(run: Run):
    run.leave("broken")
    letters = run.ask(lambda broker: broker.dead_letters())
    save_letters(run.folder, letters)
    assert load_letters(run.folder) == letters


def test_a_redis_that_does_not_answer_is_named(run: Run, capsys: pytest.CaptureFixture[str]):
    file = run.folder / "config.json"
    file.write_text(file.read_text().replace(run.url, "redis://127.0.0.1:1/0"))
    assert run.show("all") == 2
    assert "(redis://127.0.0.1:1/0) does not answer" in capsys.readouterr().err


def test_options_for_trajectories_are_refused_with_a_letter(
    run: Run, capsys: pytest.CaptureFixture[str]
):
    options = ["--step", "1", "--failed", "--dead-letter", "all"]
    assert cli.main(["show", str(run.folder), *options]) == 2
    expected = "--step and --failed do nothing with --dead-letter; leave them out"
    assert expected in capsys.readouterr().err
