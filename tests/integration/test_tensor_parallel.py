"""Weights from the learner's memory to an engine whose model is cut over two processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_r1.weights.snapshot import Weights
from tests.support.live_engine import LiveEngine
from tests.support.sent_weights import sent
from tests.support.snapshot_files import (
    EMBEDDING,
    LM_HEAD,
    build_model,
    model_logprobs,
    own_tensors,
)

pytestmark = [pytest.mark.models, pytest.mark.vllm]

PARITY = 1e-4
PROMPT = [5, 9, 100, 33, 7]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LiveEngine]:
    found = LiveEngine(tmp_path, tensor_parallel_size=2)
    yield found
    found.close()


@pytest.mark.timeout(600)
def test_each_part_takes_its_share_of_what_is_sent(engine: LiveEngine, tmp_path: Path):
    async def send(version: int) -> None:
        weights = Weights(own_tensors(engine.models[version]), {LM_HEAD: EMBEDDING})
        async with sent(weights, version, tmp_path) as manifest:
            await engine.policy.load_weights(manifest)

    def distance(version: int) -> float:
        held = engine.run(engine.policy.score(PROMPT))
        expected = model_logprobs(engine.models[version], PROMPT)
        return max(abs(a - b) for a, b in zip(held, expected, strict=True))

    for version in (1, 2):
        engine.models[version] = build_model(seed=20 + version)
        engine.run(send(version))
        assert engine.policy.policy_version == version
        assert distance(version) <= PARITY
        assert distance(version - 1) > 100 * PARITY
