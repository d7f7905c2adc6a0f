"""Layouts of model directories: which tensors they hold, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from agent_r1.weights.layout import read_model_layout
from tests.support.snapshot_files import EMBEDDING, LM_HEAD, write_snapshot

NORM = "model.norm.weight"
TENSORS = {
    EMBEDDING: np.arange(12, dtype=np.float32).reshape(4, 3),
    NORM: np.ones(3, dtype=np.float32),
}


def test_the_layout_of_a_model_directory_leaves_tied_tensors_out(tmp_path: Path):
    stored = {**TENSORS, LM_HEAD: TENSORS[EMBEDDING]}
    write_snapshot(tmp_path, stored, 0, aliases={})
    tied = read_model_layout(tmp_path, tied=True)
    assert tied.shapes == {EMBEDDING: (4, 3), NORM: (3,)}
    assert tied.aliases == {LM_HEAD: EMBEDDING}
    untied = read_model_layout(tmp_path, tied=False)
    assert untied.shapes == {EMBEDDING: (4, 3), NORM: (3,), LM_HEAD: (4, 3)}
    assert untied.aliases == {}


def test_the_layout_of_a_sharded_model_reads_the_files_its_index_names(tmp_path: Path):
    for number, (name, value) in enumerate(TENSORS.items()):
        write_snapshot(tmp_path / "part", {name: value}, 0, aliases={})
        (tmp_path / "part" / "model.safetensors").rename(tmp_path / f"m-{number}.safetensors")
    (tmp_path / "left_over.safetensors").write_bytes(b"not a part of the model")
    index = {"weight_map": {EMBEDDING: "m-0.safetensors", NORM: "m-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    found = read_model_layout(tmp_path, tied=False)
    assert found.shapes == {EMBEDDING: (4, 3), NORM: (3,)}
    assert [file.name for file in found.files] == ["m-0.safetensors", "m-1.safetensors"]


def test_a_model_directory_without_weights_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"holds no \*.safetensors file"):
        read_model_layout(tmp_path, tied=False)
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs")
    with pytest.raises(ValueError, match="copy the model again"):
        read_model_layout(tmp_path, tied=False)
