"""Ranks meet at a store: each says what it is, and all begin or none."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from agent_r1.learner.config import EngineConfig
from agent_r1.learner.engine.interface import EngineError
from agent_r1.learner.engine.ranks.messages import CriticSetup, EngineSetup
from agent_r1.learner.engine.ranks.rank_env import RankPlace
from agent_r1.learner.engine.ranks.rendezvous import meet_others, meet_rank_0, refuse
from agent_r1.runtime.config import ModelConfig

JOIN_TIMEOUT_S = 60.0


def setup(path: str = "/models/a", timeout_s: float = JOIN_TIMEOUT_S, **table: Any) -> EngineSetup:
    model = ModelConfig(path=path, max_context=64)
    config = EngineConfig(ranks=2, rank_join_timeout_s=timeout_s, **table)
    return EngineSetup(model, config, critic=CriticSetup(model, 1e-3))


def meet(first: EngineSetup, second: Callable[[RankPlace, Any], object]) -> list[str]:
    """Let rank 0 and rank 1 meet; return what each of them raises, or ""."""
    store = dist.__dict__["HashStore"]()
    places = [RankPlace(rank, 2, 0, "node-0", 29500) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        futures = [
            threads.submit(meet_others, places[0], store, first, lambda: None),
            threads.submit(second, places[1], store),
        ]
        errors = [future.exception(timeout=JOIN_TIMEOUT_S) for future in futures]
    assert all(error is None or isinstance(error, EngineError) for error in errors)
    return [str(error or "") for error in errors]


def test_ranks_whose_own_settings_differ_begin():
    other = setup("/elsewhere", torch_threads=8, rank_interface="eth1")
    assert meet(setup(), lambda place, store: meet_rank_0(place, store, other)) == ["", ""]


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (setup(lr=2e-5), "engine.lr is 2e-05, not 1e-06"),
        (setup(lr=2e-5, zero_stage=3), "engine.lr is 2e-05, not 1e-06, engine.zero_stage is 3, "),
    ],
)
def test_a_rank_with_another_configuration_ends_both_with_the_keys(
    other: EngineSetup, difference: str
):
    errors = meet(setup(), lambda place, store: meet_rank_0(place, store, other))
    assert errors[0] == errors[1]
    assert f"rank 1 is configured differently from rank 0: {difference}" in errors[0]


def test_a_rank_that_cannot_take_part_says_why():
    errors = meet(setup(), lambda place, store: refuse(place, store, "too few GPUs"))
    assert errors == ["rank 1: too few GPUs", ""]


def test_a_rank_that_does_not_come_is_named():
    errors = meet(setup(timeout_s=0.2), lambda place, store: None)
    assert "rank 1 of 2 did not come to node-0:29500 within 0.2 s" in errors[0]
