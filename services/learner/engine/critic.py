"""The critic of PPO: token ids in, the value of each chosen state out.

ranks.messages.ValueBatch --> CriticModule (its own decoder, then one number a token) --> losses

Source: PPO, arXiv:1707.06347, section 5, with a backbone of its own as in Agent-R1.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from agent_r1.learner.config import EngineConfig
from agent_r1.learner.engine.attention import AttentionPlan
from agent_r1.learner.engine.model import (
    checkpoint_activations,
    decode,
    load_causal_model,
    prepare_layout,
)
from agent_r1_service.config import ModelConfig


class CriticModule(nn.Module):
    """A decoder and a linear head that starts at 0, so that every first value is 0."""

    def __init__(self, decoder: nn.Module, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.decoder = decoder
        self.head = nn.Linear(hidden_size, 1, dtype=dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        plan: AttentionPlan | None = None,
    ) -> torch.Tensor:
        """Return [N] values, float32, in reward units.

        Args:
            token_ids: [B, L] as for the policy.
            positions: [N] index into [B * L] of the state before each chosen token.
            position_ids: [B, L] of packed or shared tokens.
            plan: of shared tokens.
        """
        hidden = decode(self.decoder, token_ids, position_ids, plan)
        chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, positions)
        return self.head(chosen).squeeze(-1).float()


def load_critic(model_config: ModelConfig, config: EngineConfig) -> nn.Module:
    """Load the backbone of a critic and put a fresh head on it.

    Raises:
        ValueError: the model cannot be loaded.
    """
    model = load_causal_model(model_config)
    prepare_layout(model, config.layout)
    if config.activation_checkpointing:
        checkpoint_activations(model, config.zero_stage)
    hidden_size = cast(int, model.config.get_text_config().hidden_size)
    critic = CriticModule(model.get_decoder(), hidden_size, model.dtype)
    return critic.train()
