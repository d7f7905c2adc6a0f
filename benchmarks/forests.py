"""The learner on forests: the shared layout against separate rows.

    make bench CASE=forests ARGS="--kinds tree rewritten sub_agents --model 10m --group 1 --rounds 3"

Trains policy and critic on sessions of agents (tests/support/forests.py), with PPO's loss, which is
about tokens, or GSPO's, which is about whole trajectories. "ours" computes what sequences begin
with alike once; "other" computes each sequence by itself, padded or packed, whichever is faster.
Before anything is measured, the gradients of policy and critic are compared. Figures are tokens of
the sessions a CPU second, with those of which nothing is trained.

Beside the ratio stands the most that it could be: of the tokens of trained sequences to those that
are computed. `stream` is what the group takes in Redis, in bytes a sampled token.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from agent_r1.learner.config import EngineConfig
from agent_r1.learner.engine.interface import LossSpec, TrainSample
from agent_r1.learner.engine.model_files import CRITIC_FILE, POLICY_FILE
from agent_r1.learner.engine.policy_engine import DeepSpeedPolicyEngine
from agent_r1.learner.engine.ranks.messages import CriticSetup, EngineSetup
from agent_r1.runtime.config import ModelConfig
from agent_r1_proto.messages import encode_entry
from benchmarks.harness import Row, alternate, compare, read_options, write_report
from benchmarks.models import BASE, random_model
from benchmarks.samples import as_sampled
from tests.support.forests import Sizes, grow, samples_of

SIZES = {
    "tree": Sizes(prompt=1000),
    "rewritten": Sizes(prompt=1000, turns=16),
    "sub_agents": Sizes(turns=4),
}
GOAL = "≥ 4"
LR = 1e-6
LAYOUTS: dict[str, dict[str, bool]] = {
    "shared": {"share_prefixes": True},
    "packed": {"packing": True},
    "padded": {"share_prefixes": False},
}
LOSSES = {
    "ppo": LossSpec(),
    "gspo": LossSpec(policy_loss="gspo", aggregation="sequence_mean"),
}
MOST_DISTANCE = 1e-5
"""Between gradients, relative to their norm."""
SHOWS_GRADIENT = {"max_grad_norm": 1e9, "adam_eps": 1e6, "lr": 1e12}
"""AdamW's first step is lr * g / (|g| + eps): with these, 1e6 times the gradient."""
