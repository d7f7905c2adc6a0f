"""The policy as the loss needs it: token ids in, log-probabilities of chosen tokens out.

ranks.messages.MicroBatch --> PolicyModule (decoder, then head.py) --logprobs, entropy--> losses

Dimension key: B, L = rows and columns of a micro-batch, N = trained tokens, H = hidden size,
V = vocabulary size.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from agent_r1.learner.config import Layout
from agent_r1.learner.engine.attention import (
    LAYOUT_KEYS,
    ROW_ATTENTION,
    AttentionPlan,
    plan_attention,
)
from agent_r1.learner.engine.division import gathered_in_turn
from agent_r1.learner.engine.head import LogprobHead
from agent_r1.learner.engine.linear import use_fast_products
from agent_r1.runtime.config import ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CHECK_TOKENS = (0, 1, 2, 3)
TOLERANCE = 1e-3
CHECKED_ATTENTION = "sdpa"
"""Attention that a model is checked with on the CPU, where flash attention does not run."""


def parameter_names(model: nn.Module) -> dict[int, list[str]]:
    """Return the Hugging Face names of each parameter, by its id; more than one when tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def decode(
    decoder: nn.Module,
    token_ids: torch.Tensor,
    position_ids: torch.Tensor | None,
    plan: AttentionPlan | None = None,
) -> torch.Tensor:
    """Return [B, L, H] hidden states of padded, packed or shared tokens."""
    # Without a plan and a mask, transformers takes position ids that start again for packing.
    given = {"position_ids": position_ids, "plan": plan}
    layout = {name: value for name, value in given.items() if value is not None}
    return decoder(input_ids=token_ids, use_cache=False, **layout).last_hidden_state


class PolicyModule(nn.Module):
    """A causal language model without its logits: decoder and LogprobHead, sharing its weights."""

    def __init__(self, model: PreTrainedModel, chunk_tokens: int) -> None:
        super().__init__()
        self.decoder = model.get_decoder()
        self.head = LogprobHead(cast(nn.Linear, model.get_output_embeddings()), chunk_tokens)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        plan: AttentionPlan | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [N] log-probabilities and [N] entropies of the predictions.

        Args:
            token_ids: [B, L] as layout.py laid them out.
            positions: [N] index into [B * L] of the hidden state that predicts each target.
            targets: [N] token ids.
            temperatures: [N] each > 0.
            position_ids: [B, L] of packed or shared tokens.
            plan: who looks at whom among tokens that lie in one row.
        """
        hidden = decode(self.decoder, token_ids, position_ids, plan)
        chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, positions)
        return self.head(chosen, targets, temperatures)


def load_causal_model(
    config: ModelConfig, loading: AbstractContextManager[None] | None = None
) -> PreTrainedModel:
    """Load the configured model, without dropout, in its dtype, on the CPU.

    Args:
        config: which.
        loading: entered while weights are read; `divided_loading` leaves this rank a part of each.

    Raises:
        ValueError: there is no such model, weights of it are missing, or its logits are not a plain
            projection of the decoder's output.
    """
    transformers_logging.disable_progress_bar()
    path = Path(config.path)
    if path.exists() and not (path / "config.json").is_file():
        raise ValueError(
            f"model.path ({config.path}) holds no config.json; give a Hugging Face model directory"
        )
    try:
        loaded = AutoConfig.from_pretrained(config.path, trust_remote_code=False)
        for name in list(vars(loaded)):
            if name.endswith(("dropout", "_pdrop")) and isinstance(getattr(loaded, name), float):
                setattr(loaded, name, 0.0)
        with loading or nullcontext():
            read: Any = AutoModelForCausalLM.from_pretrained(
                config.path,
                config=loaded,
                trust_remote_code=False,
                dtype=DTYPES[config.dtype],
                attn_implementation=CHECKED_ATTENTION,
                output_loading_info=True,
            )
    except OSError as exc:
        raise ValueError(
            f"model.path ({config.path}) could not be loaded: {exc}; give a Hugging Face model "
            "directory, or a model name where a hub can be reached"
        ) from exc
    model: PreTrainedModel = read[0]
    if missing := sorted(read[1]["missing_keys"]):
        raise ValueError(
            f"model.path ({config.path}) has no weights for {missing[0]} ({len(missing)} are "
            "missing), which would be random; copy the model again"
        )
    limit = getattr(loaded, "max_position_embeddings", None)
    if limit is not None and config.max_context > limit:
        raise ValueError(
            f"model.max_context ({config.max_context}) exceeds the model's {limit} positions "
            f"(max_position_embeddings of {config.path}); lower it to at most {limit}"
        )
    _check_head(model)
    use_fast_products(model)
    try:
        model.set_attn_implementation(config.attention)
    except (ImportError, ValueError) as exc:
        raise ValueError(
            f'model.attention ("{config.attention}") cannot be used here: {exc}; install what it '
            f'names, or set model.attention = "{CHECKED_ATTENTION}"'
        ) from exc
    return model


def checkpoint_activations(model: PreTrainedModel, zero_stage: int) -> None:
    """Compute activations again in the backward pass instead of keeping them.

    ZeRO-3 frees weights between forward and recomputation; only the reentrant kind of checkpointing
    runs the hooks that bring them back.
    """
    reentrant = zero_stage == 3
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
        # It tells so of every pass that scores tokens, which wants none.
        no_gradient = "None of the inputs have requires_grad=True"
        warnings.filterwarnings("ignore", no_gradient, UserWarning)


def _check_head(model: PreTrainedModel) -> None:
    """Refuse a model that caps or scales its logits: LogprobHead would score it wrongly."""
    head = model.get_output_embeddings()
    problem = f"model of type {model.config.model_type!r} cannot be trained: "
    if not isinstance(head, nn.Linear):
        raise ValueError(f"{problem}its output embedding is {type(head).__name__}, not a Linear")
    token_ids = torch.tensor([CHECK_TOKENS]) % head.out_features
    with torch.no_grad(), gathered_in_turn(model):
        expected = model(input_ids=token_ids, use_cache=False).logits.float()
        hidden = model.get_decoder()(input_ids=token_ids, use_cache=False).last_hidden_state
        found = head(hidden).float()
    if not torch.allclose(expected, found, rtol=TOLERANCE, atol=TOLERANCE):
        raise ValueError(
            f"{problem}its logits are not its decoder's output times the output embedding (they "
            "are capped or scaled); choose a model of the Qwen2, Qwen3 or Llama kind"
        )


def prepare_layout(model: PreTrainedModel, layout: Layout) -> None:
    """Let a model take micro-batches of a layout.

    Raises:
        ValueError: it would compute something else than for each trajectory alone.
    """
    if layout == "padded":
        return
    attention = cast(str, model.config._attn_implementation)
    if layout == "shared" and attention != CHECKED_ATTENTION:
        raise ValueError(
            "engine.share_prefixes = true has an attention of its own, in place of "
            f'model.attention = "{attention}"; set engine.share_prefixes = false, engine.packing '
            f'= true for "flash_attention_2", or model.attention = "{CHECKED_ATTENTION}"'
        )
    plans = attention == CHECKED_ATTENTION
    first, *_, last = CHECK_TOKENS
    with torch.no_grad(), gathered_in_turn(model):
        model.set_attn_implementation(CHECKED_ATTENTION)
        alone = decode(model.get_decoder(), torch.tensor([[first, last]]), None)
        model.set_attn_implementation(ROW_ATTENTION if plans else CHECKED_ATTENTION)
        try:
            found = decode(model.get_decoder(), *_two_in_a_row(layout, plans))
            why = "its attention does not stop where a trajectory begins"
            equal = torch.allclose(found[:, -1], alone[:, -1], rtol=TOLERANCE, atol=TOLERANCE)
        except (TypeError, ValueError) as exc:
            equal, why = False, str(exc)
    if not equal:
        key = LAYOUT_KEYS[layout]
        raise ValueError(
            f"a model of type {model.config.model_type!r} cannot be trained with engine.{key} = "
            f"true: {why}; set engine.{key} = false"
        )
    if not plans:
        model.set_attn_implementation(attention)


def _two_in_a_row(
    layout: Layout, plans: bool
) -> tuple[torch.Tensor, torch.Tensor, AttentionPlan | None]:
    """Return two trajectories as `decode` takes them; the second is the first and last token."""
    first, second, _, last = CHECK_TOKENS
    if layout == "packed":
        token_ids, positions = [first, second, first, last], [0, 1, 0, 1]
        paths, spans = np.arange(4), np.array([[0, 2], [0, 2]])
    else:
        token_ids, positions = [*CHECK_TOKENS], [0, 1, 2, 1]
        paths, spans = np.array([0, 1, 2, 0, 3]), np.array([[0, 3], [1, 2]])
    plan = plan_attention(paths, spans, torch.device("cpu")) if plans else None
    return torch.tensor([token_ids]), torch.tensor([positions]), plan
