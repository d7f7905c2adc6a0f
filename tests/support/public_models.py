"""The shapes of public models, as their config.json has them: sizes without a download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "tie_word_embeddings"),
)
SHAPES: dict[str, dict[str, Any]] = {
    name: kind | dict(zip(KEYS, shape, strict=True)) | {"max_position_embeddings": 32_768}
    for name, kind, shape in (
        ("Qwen/Qwen2.5-0.5B-Instruct", QWEN2, (896, 4864, 24, 14, 2, 151_936, True)),
        ("Qwen/Qwen2.5-1.5B-Instruct", QWEN2, (1536, 8960, 28, 12, 2, 151_936, True)),
        ("Qwen/Qwen2.5-3B-Instruct", QWEN2, (2048, 11_008, 36, 16, 2, 151_936, True)),
        ("Qwen/Qwen2.5-7B-Instruct", QWEN2, (3584, 18_944, 28, 28, 4, 152_064, False)),
        ("Qwen/Qwen2.5-32B-Instruct", QWEN2, (5120, 27_648, 64, 40, 8, 152_064, False)),
        ("Qwen/Qwen3-4B", QWEN3 | {"head_dim": 128}, (2560, 9728, 36, 32, 8, 151_936, True)),
    )
}
WEIGHTS = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen/Qwen3-4B": 4_022_468_096,
}
"""What their model cards and safetensors files say."""


def write_shape(name: str, folder: Path) -> Path:
    """Write the config.json of a public model into a folder, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    return folder
