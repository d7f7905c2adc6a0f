"""Tiny random Qwen2 models and snapshots of them, as the learner publishes them.

A tied model of 70,000 parameters: 2 layers of 64, 300 tokens. Token `EOS` ends a turn;
`build_model` says how likely it is, so that a test chooses whether a generation stops by itself.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agent_r1.weights import chunks, snapshot
from agent_r1_proto.weights import FileChunks, TensorEntry, WeightManifest

if TYPE_CHECKING:
    import torch

    from agent_r1.learner.engine.interface import PolicyEngine

VOCAB_SIZE = 300
EOS = 299
EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


def build_model(seed: int, *, eos_weight: float = -20.0) -> Any:
    """Make a random tied model; a large positive `eos_weight` makes it end every turn at once.

    Feature 0 of every embedding is 1, and no layer writes to it; that of `EOS` is `eos_weight`, so
    its logit is far below (or above) all others.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        hidden_size=64,
        num_hidden_layers=2,
        vocab_size=VOCAB_SIZE,
        intermediate_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=EOS,
        initializer_range=0.1,
    )
    model: Any = Qwen2ForCausalLM(config).float().eval()
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding[:, 0] = 1.0
        embedding[EOS, 0] = eos_weight
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
    return model


def all_logprobs(model: Any, token_ids: list[int]) -> list[list[float]]:
    """Return [T][V] log-probabilities of every next token, by a transformers forward in fp32."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0].float()
    return logits.log_softmax(-1).tolist()


def batch_logprobs(
    model: Any, sequences: list[list[int]], temperature: float = 1.0
) -> list[list[float]]:
    """Return [B][T-1] log-probabilities of tokens 1..T-1, by a transformers forward in fp32."""
    import torch

    tokens = torch.tensor(sequences)
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits.float() / temperature
    return logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0].tolist()


def model_logprobs(model: Any, token_ids: list[int], temperature: float = 1.0) -> list[float]:
    """Return [T-1] log-probabilities of tokens 1..T-1, by a transformers forward in fp32."""
    return batch_logprobs(model, [token_ids], temperature)[0]


def own_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a tied model, without the lm_head that repeats the embedding."""
    return {name: value for name, value in model.state_dict().items() if name != LM_HEAD}


def write_snapshot(
    folder: Path,
    tensors: dict[str, Any],
    policy_version: int,
    aliases: dict[str, str] | None = None,
) -> WeightManifest:
    """Write `model.safetensors` and `manifest.json` for these tensors, numpy or torch."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: _raw(value) for name, value in tensors.items()}
    path = folder / "model.safetensors"
    _write_safetensors(path, stored)
    entries = {
        name: TensorEntry(name=name, shape=list(raw["shape"]), dtype=raw["dtype"])
        for name, raw in stored.items()
    }
    for alias, name in ({LM_HEAD: EMBEDDING} if aliases is None else aliases).items():
        entries[alias] = entries[name].model_copy(update={"name": alias, "alias_of": name})
    manifest = WeightManifest(
        run_id="test",
        policy_version=policy_version,
        location=str(path),
        size_bytes=path.stat().st_size,
        chunks=chunks_of(path.read_bytes(), chunks.CHUNK_BYTES),
        tensors=list(entries.values()),
    )
    (folder / "manifest.json").write_text(manifest.model_dump_json(), encoding="utf-8")
    return manifest


def write_version(
    engine: PolicyEngine, folder: Path, run_id: str, policy_version: int
) -> WeightManifest:
    """Write the weights of a learner's engine as the learner does."""
    weights = engine.weights()
    return snapshot.write_snapshot(folder, run_id, policy_version, weights, adapter=engine.adapter)


def chunks_of(content: bytes, size_bytes: int = 4 * 2**20) -> FileChunks:
    """Describe the chunks of a file."""
    starts = range(0, len(content), size_bytes)
    digests = [hashlib.sha256(content[start : start + size_bytes]).hexdigest() for start in starts]
    return FileChunks(size_bytes=size_bytes, sha256=digests)


def _write_safetensors(path: Path, stored: dict[str, dict[str, Any]]) -> None:
    header: dict[str, Any] = {}
    offset = 0
    for name, raw in stored.items():
        end = offset + len(raw["data"])
        code = {"float32": "F32", "bfloat16": "BF16"}[raw["dtype"]]
        header[name] = {"dtype": code, "shape": raw["shape"], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(raw["data"] for raw in stored.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _raw(value: Any) -> dict[str, Any]:
    """Describe a numpy array or torch tensor as safetensors stores it."""
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype == "bfloat16":  # numpy has no such format
        import torch

        value = value.view(torch.int16)
    array = np.ascontiguousarray(np.asarray(value))
    return {"dtype": dtype, "shape": array.shape, "data": array.tobytes()}


def flip_byte(path: Path, offset_from_end: int = 5) -> None:
    """Damage one byte of the data, leaving the size as it is."""
    data = bytearray(path.read_bytes())
    data[-offset_from_end] ^= 0xFF
    path.write_bytes(bytes(data))


def rewrite_header(path: Path, change: Any) -> None:
    """Replace a safetensors file's header by `change(header)`, leaving the data."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(change(json.loads(data[8 : 8 + length]))).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def random_prompts(lengths: list[int], seed: int) -> list[list[int]]:
    """Make prompts of these lengths, of which none begins as another does."""
    rng = np.random.default_rng(seed)
    return [
        [number + 2, *rng.integers(2, VOCAB_SIZE - 1, length - 1).tolist()]
        for number, length in enumerate(lengths)
    ]
