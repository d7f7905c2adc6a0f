"""The report of `make test-gpu`: what of a run it keeps."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agent_r1.rollout.parsing import parse_turn

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("gpu_loop")


@pytest.fixture
def gpu(loop: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Bytes used on a GPU, and what each process takes of the host, as a test sets them."""
    used = {"gpu": 5.0, "learner": 0.0}
    monkeypatch.setattr(loop, "gpu_used", lambda: used["gpu"])
    monkeypatch.setattr(
        loop,
        "memory_of",
        lambda root: {"rollout": 1.0, **({"learner": used["learner"]} if used["learner"] else {})},
    )
    return used


def test_gpu_memory_is_divided_where_the_learner_starts(loop: ModuleType, gpu: dict[str, float]):
    process: Any = None
    watch = loop.Watch(gpu_before=5.0)
    for used, learner in ((25.0, 0.0), (25.0, 1.0), (65.0, 3.0), (45.0, 2.0)):
        gpu.update(gpu=used, learner=learner)
        watch.look(process)
    # Before: 5. With the servers: 25 - 5. The peak: 65 - 5, of which 40 came with the learner.
    assert (watch.gpu_rollout, watch.gpu_learner) == (20.0, 40.0)
    assert watch.host_gb == {"rollout": 1.0, "learner": 3.0}


def test_the_first_step_warms_up_and_no_difference_is_forgotten(loop: ModuleType):
    steps = [
        {"time/step_s": 9.0, "canary/dlogp_max": 0.5},
        {"time/step_s": 2.0, "canary/dlogp_max": 0.1},
        {"time/step_s": 4.0, "canary/dlogp_max": 0.2},
    ]
    found = loop.figures(steps)
    # The median of 2 and 4; the largest of all three.
    assert (found["time/step_s"], found["canary/dlogp_max"]) == (3.0, 0.5)
    assert found["learn/tokens_per_s"] is None
    assert loop.figures([])["time/step_s"] is None


def test_every_turn_of_a_random_model_is_a_call(loop: ModuleType):
    tool_format = importlib.import_module("gpu_loop_format").EveryTurnSearches()
    random = parse_turn("abc" * 100, tool_format=tool_format)
    assert [(call.name, len(str(call.arguments["query"]))) for call in random.calls] == [
        ("search", 40)
    ]
    written = '<tool_call>{"name": "other", "arguments": {}}</tool_call> more'
    assert [call.name for call in parse_turn(written, tool_format=tool_format).calls] == ["other"]
