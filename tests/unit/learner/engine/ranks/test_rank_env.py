"""What a process reads about its place among the ranks."""

from __future__ import annotations

import pytest

from agent_r1.learner.engine.ranks.rank_env import RankPlace, read_place

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
}


def test_without_a_launcher_a_process_leads_its_own_machine():
    place = read_place({"LOCAL_RANK": "1", "RANK": "1"}, 2, "engine")
    assert place == RankPlace(rank=0, size=2, local_rank=0, address="127.0.0.1", port=0)


def test_the_variables_of_a_launcher_give_the_place():
    place = read_place(TORCHRUN, 4, "engine")
    assert place == RankPlace(3, 4, 1, "node-0", 29500, attempt=None)
    assert place.environment() == TORCHRUN
    restarted = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert read_place(TORCHRUN | restarted, 4, "engine").attempt == "2"


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({}, 1, r"engine\.ranks \(1\) must equal WORLD_SIZE \(4\)"),
        ({"RANK": "4"}, 4, r"RANK \(4\) must be below it"),
        ({"MASTER_PORT": "http"}, 4, "MASTER_PORT: invalid literal"),
    ],
)
def test_a_contradiction_is_refused(changes: dict[str, str], ranks: int, message: str):
    with pytest.raises(ValueError, match=message):
        read_place(TORCHRUN | changes, ranks, "engine")


def test_missing_variables_are_named():
    with pytest.raises(ValueError, match=r"LOCAL_RANK, MASTER_PORT is not; a rank needs RANK"):
        read_place(
            {k: v for k, v in TORCHRUN.items() if k not in {"LOCAL_RANK", "MASTER_PORT"}},
            4,
            "engine",
        )
