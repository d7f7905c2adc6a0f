"""When the learner's job starts its ranks again; the ranks are a script of what becomes of them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

import pytest

from agent_r1.config.run import Config, ConfigError, load_config
from agent_r1_deploy.ray import learner
from agent_r1_deploy.ray.ranks import Ended, Node

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "tiny_world" / "run.toml"
LOST: list[Ended | None] = [None, Ended(1)]
FINISHED: list[Ended | None] = [Ended(0, "finished"), Ended(0)]
Script = Sequence[tuple[str, list[Ended | None]]]
"""For each start: the node of rank 0, and how the ranks end."""


def load(*options: str) -> Config:
    own = ['redis.url="redis://redis:6379/0"', 'run.dir="/runs/tiny"', "placement.max_restarts=2"]
    return load_config(EXAMPLE, [*own, *options], environ={}).config


class ScriptedRanks:
    """Stands for `PlacedRanks`."""

    def __init__(self, script: Script) -> None:
        self._script = list(script)
        self.near: list[str | None] = []
        self.arguments: list[Sequence[str]] = []

    def __call__(self, config: Config, stop_asked: Callable[[], bool]) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def order(self, near: Node | None) -> Node:
        self.near.append(None if near is None else near.node_id)
        return Node(self._script[0][0], "10.0.0.1", 29500)

    def run(self, arguments: Sequence[str]) -> list[Ended | None]:
        self.arguments.append(arguments)
        return self._script.pop(0)[1]


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(learner.ray, "init", lambda **_: None)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[[Script], ScriptedRanks]:
    def set_script(script: Script) -> ScriptedRanks:
        ranks = ScriptedRanks(script)
        monkeypatch.setattr(learner, "PlacedRanks", ranks)
        return ranks

    return set_script


def test_lost_ranks_start_again_near_the_run_folder(play: Callable[[Script], ScriptedRanks]):
    ranks = play([("a", LOST), ("a", FINISHED)])
    assert learner.train(load(), "run.toml", []) == 0
    assert ranks.near == [None, "a"]
    assert all(arguments[-1] == "--resume-if-begun" for arguments in ranks.arguments)


def test_a_run_without_a_store_ends_with_the_node_of_its_folder(
    play: Callable[[Script], ScriptedRanks],
):
    play([("a", LOST), ("b", FINISHED)])
    with pytest.raises(ConfigError, match=r"learner\.checkpoint_url"):
        learner.train(load(), "run.toml", [])


def test_a_run_with_a_store_goes_on_on_another_node(play: Callable[[Script], ScriptedRanks]):
    play([("a", LOST), ("b", FINISHED)])
    assert learner.train(load('learner.checkpoint_url="s3://b/c"'), "run.toml", []) == 0


def test_ranks_that_are_lost_too_often_end_the_job(play: Callable[[Script], ScriptedRanks]):
    ranks = play([("a", LOST)] * 5)
    assert learner.train(load(), "run.toml", []) == 1
    assert len(ranks.arguments) == 3  # placement.max_restarts is 2


def test_a_mistake_is_not_tried_again(
    play: Callable[[Script], ScriptedRanks], capsys: pytest.CaptureFixture[str]
):
    ranks = play([("a", [Ended(2), Ended(1)])])
    assert learner.train(load(), "run.toml", []) == 2
    assert len(ranks.arguments) == 1
    assert "status 2" in capsys.readouterr().out


def test_a_relative_run_folder_is_refused():
    with pytest.raises(ConfigError, match="absolute"):
        learner.train(load_config(EXAMPLE, ['redis.url="redis://r:1/0"']).config, "run.toml", [])
