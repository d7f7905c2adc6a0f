"""Tiny random models of the supported architectures, with the chat templates that are published.

The templates are read from installed packages, and from the wheel of TRL that `make test-models`
downloads into build/templates; none of them is part of this repository. The tokenizers are small
ones over bytes, with the control tokens of the family.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "build" / "templates"
ARGUMENTS = {"query": 'Ada "L."'}
RESULT = 'born in "London"\nin 1815'
CALL_ID = "abcdefghi"

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|python_tag|>"),
)
MISTRAL = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[ARGS]", "[CALL_ID]", "[TOOL_CONTENT]"),
)
GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
}


@dataclass(frozen=True)
class Architecture:
    """A family of models."""

    config: str
    """Class of transformers."""
    template: Callable[[], str]
    """Reads the chat template."""
    special: Sequence[str]
    """Control tokens; the first one begins a text."""
    end: str
    """Ends a turn."""
    more: dict[str, Any] = field(default_factory=dict)
    """Of the model's configuration."""
    call: str | None = None
    """A call as the template writes it; None: it has no tools."""
    tool_format: str = "hermes"
    in_prompt: str = ""
    """What the template itself adds to a prompt."""


def _trl(name: str) -> str:
    wheels = sorted(WHEELS.glob("trl-*.whl"))
    if not wheels:
        pytest.skip("the templates of TRL are not here; `make test-models` downloads them")
    with zipfile.ZipFile(wheels[-1]) as wheel:
        return wheel.read(f"trl/chat_templates/{name}.jinja").decode()


def _mistral(version: str) -> str:
    from mistral_common.integrations.chat_templates import template_generator
    from mistral_common.tokens.tokenizers.base import TokenizerVersion

    config = template_generator.TemplateConfig(version=TokenizerVersion(version))
    return template_generator.build_chat_template(config)


def _vllm_chatml() -> str:
    # Without importing vllm, which takes seconds.
    import importlib.util

    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "transformers_utils" / "chat_templates"
    return (folder / "template_chatml.jinja").read_text()


def _hermes_call() -> str:
    call = json.dumps({"name": "search", "arguments": ARGUMENTS})
    return f"<tool_call>\n{call}\n</tool_call>"


_LLAMA_CALL = f'{{"name": "search", "parameters": {json.dumps(ARGUMENTS)}}}'
_MISTRAL_ARGUMENTS = json.dumps(ARGUMENTS)
ARCHITECTURES = {
    "qwen2.5": Architecture(
        "Qwen2Config",
        lambda: _trl("qwen2_5"),
        CHATML,
        "<|im_end|>",
        {"tie_word_embeddings": True},
        _hermes_call(),
        in_prompt="You are Qwen, created by Alibaba Cloud.",
    ),
    "qwen3": Architecture(
        "Qwen3Config",
        lambda: _trl("qwen3"),
        CHATML,
        "<|im_end|>",
        {"head_dim": 32, "tie_word_embeddings": True},
        _hermes_call(),
    ),
    "llama3.1": Architecture(
        "LlamaConfig",
        lambda: _trl("llama3_1"),
        LLAMA,
        "<|eot_id|>",
        {"tie_word_embeddings": False},
        _LLAMA_CALL,
        "llama3_json",
        in_prompt="Cutting Knowledge Date: December 2023",
    ),
    "llama3.2": Architecture(
        "LlamaConfig",
        lambda: _trl("llama3_2"),
        LLAMA,
        "<|eot_id|>",
        {"tie_word_embeddings": True},
        _LLAMA_CALL,
        "llama3_json",
    ),
    "mistral-v3": Architecture(
        "MistralConfig",
        lambda: _mistral("v3"),
        MISTRAL,
        "</s>",
        {"sliding_window": None},
        f'[TOOL_CALLS][{{"name": "search", "arguments": {_MISTRAL_ARGUMENTS}, "id": "{CALL_ID}"}}]',
        "mistral",
    ),
    "mistral-v11": Architecture(
        "MistralConfig",
        lambda: _mistral("v11"),
        MISTRAL,
        "</s>",
        {"sliding_window": None},
        f"[TOOL_CALLS]search[CALL_ID]{CALL_ID}[ARGS]{_MISTRAL_ARGUMENTS}",
        "mistral",
    ),
    "smollm2": Architecture(
        "LlamaConfig", _vllm_chatml, CHATML, "<|im_end|>", {"tie_word_embeddings": True}
    ),
    "smollm3": Architecture(
        "SmolLM3Config", _vllm_chatml, CHATML, "<|im_end|>", {"no_rope_layers": [1, 0]}
    ),
    "gemma": Architecture(
        "GemmaConfig", lambda: _trl("gemma"), GEMMA, "<end_of_turn>", {"head_dim": 32}
    ),
    "gemma3": Architecture(
        "Gemma3TextConfig",
        lambda: _trl("gemma3"),
        GEMMA,
        "<end_of_turn>",
        {
            "head_dim": 32,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


def save(architecture: Architecture, folder: Path) -> Path:
    """Write a random model of an architecture, with tokenizer and chat template."""
    import torch
    import transformers

    tokenizer = _tokenizer(architecture)
    kind: Any = getattr(transformers, architecture.config)
    end = tokenizer.convert_tokens_to_ids(architecture.end)
    config = kind(
        **SIZES,
        **architecture.more,
        vocab_size=len(tokenizer),
        bos_token_id=0,
        eos_token_id=end,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    model.generation_config = transformers.GenerationConfig(eos_token_id=end, pad_token_id=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer(architecture: Architecture) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # The control tokens come first: their ids are what `bos_token_id` and so on name.
    special = list(architecture.special)
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=special[0],
        eos_token=architecture.end,
        pad_token=special[0],
        clean_up_tokenization_spaces=False,
    )
    tokens: Any = [AddedToken(text, special=True, normalized=False) for text in special]
    tokenizer.add_tokens(tokens, special_tokens=True)
    tags: Any = [AddedToken(t, normalized=False) for t in ("<tool_call>", "</tool_call>")]
    if architecture.tool_format == "hermes":
        tokenizer.add_tokens(tags)
    tokenizer.chat_template = architecture.template()
    return tokenizer
