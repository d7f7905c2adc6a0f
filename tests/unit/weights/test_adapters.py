"""LoRA adapters on a disk: which tensors they have, and which folders hold a usable one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent_r1.runtime.config import LoraConfig
from agent_r1.weights.adapters import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    adapter_shapes,
    check_start,
    is_adapter,
    read_adapter,
    write_adapter_config,
)

SHAPES = {
    "model.embed_tokens.weight": (320, 32),
    "model.layers.0.self_attn.q_proj.weight": (32, 24),
    "model.layers.0.self_attn.q_proj.bias": (32,),
    "model.layers.0.self_attn.k_proj.weight": (8, 24),
    "model.layers.0.input_layernorm.weight": (24,),
    "lm_head.weight": (320, 32),
}
BLOCK = "base_model.model.model.layers.0.self_attn"


def write_adapter(folder: Path, lora: LoraConfig, **changes: Any) -> Path:
    folder.mkdir()
    write_adapter_config(folder, lora, "base")
    path = folder / ADAPTER_CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    (folder / ADAPTER_FILE).write_bytes(b"")
    return folder


def test_each_target_has_two_matrices_of_the_rank():
    assert adapter_shapes(SHAPES, LoraConfig(rank=4, targets=["q_proj"])) == {
        f"{BLOCK}.q_proj.lora_A.weight": (4, 24),
        f"{BLOCK}.q_proj.lora_B.weight": (32, 4),
    }


def test_a_rank_above_the_smaller_side_of_a_target_is_refused():
    lora = LoraConfig(rank=9, targets=["q_proj", "k_proj"])
    with pytest.raises(
        ValueError, match=r"rank \(9\) must be <= 8, .*k_proj \[8, 24\].* leave k_p"
    ):
        adapter_shapes(SHAPES, lora)
    assert len(adapter_shapes(SHAPES, lora.model_copy(update={"rank": 8}))) == 4


@pytest.mark.parametrize("target", ["query", "lm_head", "embed_tokens"])
def test_a_target_that_is_no_layer_of_a_block_is_refused_with_those_there_are(target: str):
    with pytest.raises(ValueError, match=rf"names '{target}'.* choose among k_proj, q_proj"):
        adapter_shapes(SHAPES, LoraConfig(rank=4, targets=["q_proj", target]))


def test_a_written_adapter_is_read_again(tmp_path: Path):
    lora = LoraConfig(rank=4, alpha=8, targets=["k_proj", "q_proj"])
    folder = write_adapter(tmp_path / "one", lora)
    assert is_adapter(folder)
    assert not is_adapter(tmp_path)
    found = read_adapter(folder)
    assert found.base == "base"
    assert found.lora == lora.model_copy(update={"path": folder})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"target_modules": "all-linear"}, "all-linear"),
        ({"r": 0}, "rank"),
    ],
)
def test_an_adapter_that_is_not_plain_lora_is_refused(
    tmp_path: Path, changes: dict[str, Any], named: str
):
    folder = write_adapter(tmp_path / "one", LoraConfig(rank=4), **changes)
    with pytest.raises(ValueError, match=named):
        read_adapter(folder)


def test_a_folder_without_the_tensors_is_refused(tmp_path: Path):
    folder = write_adapter(tmp_path / "one", LoraConfig(rank=4))
    (folder / ADAPTER_FILE).unlink()
    with pytest.raises(ValueError, match=ADAPTER_FILE):
        read_adapter(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 8}, r"rank \(8\) differs from 4"),
        ({"alpha": 1.0}, r"alpha \(1.0\) differs from 32"),
        ({"targets": ["q_proj"]}, r"targets \(q_proj\) differ .*: k_proj, q_proj;"),
    ],
)
def test_a_run_starts_only_from_an_adapter_of_its_own_form(
    tmp_path: Path, changes: dict[str, Any], message: str
):
    lora = LoraConfig(rank=4, targets=["q_proj", "k_proj"])
    start = lora.model_copy(update={"path": write_adapter(tmp_path / "one", lora)})
    check_start(start)
    with pytest.raises(ValueError, match=message):
        check_start(start.model_copy(update=changes))
