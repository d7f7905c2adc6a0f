"""FlexAttention on a CPU: torch's class and its eager arithmetic, forward and backward."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from agent_r1.learner.engine import attention, flex


def use_flex_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the attention of rows be FlexAttention, without its kernel.

    torch refuses the backward pass on CPUs, where it has no kernel for it, but computes it.
    """
    monkeypatch.setattr(attention, "uses_flex", lambda _device, rows: rows > flex.BLOCK_ROWS)
    monkeypatch.setattr(flex, "_kernel", lambda: torch_flex.flex_attention)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_tensors: None)
    monkeypatch.setattr(torch_flex, "_WARNINGS_SHOWN", {"flex_attention_performance"})
    # torch's compiler looks, and would hide the warning if it were none of the test's errors.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    torch.compiler.reset()
