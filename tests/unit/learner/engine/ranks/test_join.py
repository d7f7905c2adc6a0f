"""What a machine lacks for its ranks is said before they meet."""

from __future__ import annotations

import pytest

from agent_r1.learner.config import EngineConfig
from agent_r1.learner.engine.ranks.join import check_machine
from tests.support.disk import free


def test_several_ranks_with_gpus_need_more_shared_memory_than_a_container_has(
    monkeypatch: pytest.MonkeyPatch,
):
    free(64 * 2**20, monkeypatch)  # Docker's default
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ValueError, match="2 learner ranks need"):
        check_machine(EngineConfig(ranks=2, device="cuda"), range(2))
    check_machine(EngineConfig(ranks=1, device="cuda"), range(1))
    check_machine(EngineConfig(ranks=2, device="cpu"), range(2))
