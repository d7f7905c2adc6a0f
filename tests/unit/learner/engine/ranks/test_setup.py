"""What a rank's setup makes of a configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agent_r1.learner.config import EngineConfig, Layout
from agent_r1.learner.engine.ranks.messages import EngineSetup
from agent_r1.runtime.config import ModelConfig


@pytest.mark.parametrize(
    ("keys", "attention", "gpus", "layout"),
    [
        ({"device": "cpu"}, "sdpa", True, "shared"),
        ({"device": "auto"}, "sdpa", False, "shared"),
        ({"device": "auto"}, "sdpa", True, "padded"),
        ({"device": "cuda"}, "sdpa", True, "padded"),
        ({"device": "cpu"}, "eager", False, "padded"),
        ({"device": "cpu", "packing": True}, "sdpa", False, "packed"),
        ({"device": "cpu", "share_prefixes": False}, "sdpa", False, "padded"),
        ({"device": "cuda", "share_prefixes": True}, "sdpa", True, "shared"),
    ],
)
def test_prefixes_are_shared_on_a_cpu_unless_a_key_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
    keys: dict[str, Any],
    attention: str,
    gpus: bool,
    layout: Layout,
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    model = ModelConfig.model_validate({"path": "model", "attention": attention})
    setup = EngineSetup.of(model, EngineConfig.model_validate(keys))
    assert setup.config.layout == layout
