"""Tiny random models with a tokenizer and chat template, for tests of the learner."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AddedToken,
    GenerationConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

from agent_r1.learner.engine.interface import TrainSample

VOCABULARY = 320
CHAT_TEMPLATE = r"""
{%- for m in messages -%}
  {%- if m.role == "tool" -%}
    {{- "<|im_start|>user\n<tool_response>\n" + m.content + "\n</tool_response><|im_end|>\n" -}}
  {%- else -%}
    {{- "<|im_start|>" + m.role + "\n" + m.content + "<|im_end|>\n" -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\n" -}}{%- endif -%}
"""


def build_tokenizer() -> Qwen2Tokenizer:
    """Build a byte-level tokenizer with the Hermes markup as added tokens."""
    from tokenizers import pre_tokenizers

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Qwen2Tokenizer(
        vocab={entry: i for i, entry in enumerate([*special, *alphabet])},
        merges=[],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
    )
    for text in special:
        tokenizer.add_tokens(AddedToken(text, special=True), special_tokens=True)
    for text in ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "user"):
        tokenizer.add_tokens(AddedToken(text, normalized=False))
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(
    *, seed: int = 0, tied: bool = False, layers: int = 2, hidden: int = 32
) -> Qwen2ForCausalLM:
    """Build a random Qwen2 whose weights are large enough for log-probabilities to differ."""
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=tied,
            initializer_range=0.2,
        )
    )
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    return model


def save_model(directory: Path, **shape: Any) -> Path:
    """Write a random model with tokenizer; return its directory."""
    build_model(**shape).save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    return directory


def make_samples(count: int, *, seed: int = 0, longest: int = 60) -> list[TrainSample]:
    """Make random trajectories of different lengths, each with some trained tokens."""
    rng = np.random.default_rng(seed)
    samples: list[TrainSample] = []
    for _ in range(count):
        length = int(rng.integers(8, longest))
        mask = rng.random(length) < 0.4
        mask[:3] = False
        mask[-1] = True
        samples.append(
            TrainSample(
                token_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
                loss_mask=mask,
                rollout_logprobs=np.where(mask, rng.normal(-5.0, 1.0, length), 0).astype(
                    np.float32
                ),
                advantages=np.where(mask, rng.normal(), 0.0).astype(np.float32),
                temperature=0.8,
            )
        )
    return samples


def with_values(samples: list[TrainSample], *, seed: int = 0) -> list[TrainSample]:
    """Give samples random returns to learn and old values near 0, on their trained tokens."""
    rng = np.random.default_rng(seed)

    def drawn(sample: TrainSample, spread: float) -> np.ndarray:
        values = rng.normal(0.0, spread, sample.num_tokens)
        return np.where(sample.loss_mask, values, 0).astype(np.float32)

    return [
        dataclasses.replace(
            sample,
            value_mask=sample.loss_mask,
            returns=drawn(sample, 1.0),
            old_values=drawn(sample, 0.1),
        )
        for sample in samples
    ]
