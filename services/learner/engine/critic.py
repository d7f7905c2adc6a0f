"""The critic of PPO: token ids in, the value of each chosen state out.

ranks.messages.ValueBatch --> CriticModule (its own decoder, then one number a token) --> losses
a checkpoint's critic.safetensors --export_critic--> a model directory that vLLM serves

Source: PPO, arXiv:1707.06347, section 5, with a backbone of its own as in Agent-R1.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)

from agent_r1.learner.engine.attention import AttentionPlan
from agent_r1.learner.engine.model import DTYPES, decode
from agent_r1.learner.engine.model_files import WEIGHT
from agent_r1.runtime.config import ModelConfig
from agent_r1.weights.snapshot import Weights, write_safetensors
from agent_r1_proto.weights import SNAPSHOT_FILE


class CriticModule(nn.Module):
    """A model's decoder and a linear head that starts at 0, so that every first value is 0."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.decoder = model.get_decoder()
        hidden_size = cast(int, model.config.get_text_config().hidden_size)
        self.head = nn.Linear(hidden_size, 1, dtype=model.dtype)
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
            plan: who looks at whom among tokens that lie in one row.
        """
        hidden = decode(self.decoder, token_ids, position_ids, plan)
        chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, positions)
        return self.head(chosen).squeeze(-1).float()


def export_critic(directory: Path, model_config: ModelConfig, state: Path) -> None:
    """Write the critic of a checkpoint as a model with one label, whose logit is the value.

    transformers loads it as AutoModelForTokenClassification, with a value at every token. vLLM
    serves it for sequences, and gives the value at their last token.

    Args:
        directory: an empty folder.
        model_config: what the critic's backbone started from.
        state: what the engine wrote of the critic.

    Raises:
        ValueError: that model cannot be such a one, or is another than the critic's.
    """
    config = _value_config(model_config.path)
    with torch.device("meta"):
        model = AutoModelForTokenClassification.from_config(config, trust_remote_code=False)
    places = {"decoder": model.base_model_prefix, "head": "score"}
    tensors: dict[str, torch.Tensor] = {}
    with safe_open(state, "pt") as file:
        for key in file.keys():  # noqa: SIM118 - it is no mapping
            part, _, rest = key.partition(".")
            if rest.endswith(f".{WEIGHT}"):
                name = f"{places[part]}.{rest.removesuffix(f'.{WEIGHT}')}"
                tensors[name] = file.get_tensor(key).to(DTYPES[model_config.dtype])
    if strange := sorted(tensors.keys() ^ {name for name, _ in model.named_parameters()}):
        raise ValueError(
            f"{state} is no critic of {model_config.path} (different: {strange[0]}); name the run "
            "folder with the configuration that it was trained with"
        )
    config.dtype = DTYPES[model_config.dtype]
    config.save_pretrained(directory)
    AutoTokenizer.from_pretrained(model_config.path, trust_remote_code=False).save_pretrained(
        directory
    )
    write_safetensors(directory / SNAPSHOT_FILE, Weights(tensors))


def _value_config(path: str) -> PretrainedConfig:
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    causal = (config.architectures or [""])[0]
    kind = causal.removesuffix("ForCausalLM")
    if kind == causal:
        raise ValueError(
            f"the critic's model ({path}) is of the architecture {causal!r}, and only one that "
            "ends with ForCausalLM can be served as a critic"
        )
    config.architectures = [f"{kind}ForSequenceClassification"]
    config.num_labels = 1
    return config
