"""Snapshots: what is refused before any sampler pauses for it, and what the refusal says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_r1.weights.layout import ModelLayout
from agent_r1.weights.manifest import WeightsRefusedError
from agent_r1.weights.snapshot import verify_snapshot
from agent_r1_proto.weights import WeightManifest
from tests.support.snapshot_files import (
    EMBEDDING,
    LM_HEAD,
    flip_byte,
    rewrite_header,
    write_snapshot,
)

NORM = "model.norm.weight"


def tensors() -> dict[str, np.ndarray]:
    return {
        EMBEDDING: np.arange(12, dtype=np.float32).reshape(4, 3),
        NORM: np.ones(3, dtype=np.float32),
    }


def layout() -> ModelLayout:
    return ModelLayout(
        files=(), shapes={EMBEDDING: (4, 3), NORM: (3,)}, aliases={LM_HEAD: EMBEDDING}
    )


def change_entry(manifest: WeightManifest, name: str, **changes: Any) -> WeightManifest:
    entries = [
        entry.model_copy(update=changes) if entry.name == name else entry
        for entry in manifest.tensors
    ]
    return manifest.model_copy(update={"tensors": entries})


def test_an_intact_snapshot_is_accepted_with_and_without_the_tied_alias(tmp_path: Path):
    with_alias = write_snapshot(tmp_path / "a", tensors(), 3)
    without = write_snapshot(tmp_path / "b", tensors(), 3, aliases={})
    for manifest in (with_alias, without):
        path = verify_snapshot(manifest, layout(), "float32")
        assert path == Path(manifest.location)


def test_a_flipped_byte_is_refused_by_its_checksum(tmp_path: Path):
    manifest = write_snapshot(tmp_path, tensors(), 3)
    flip_byte(Path(manifest.location))
    with pytest.raises(
        WeightsRefusedError, match=r"version 3: .* bytes from 0 have another sha256"
    ):
        verify_snapshot(manifest, layout(), "float32")


def test_data_of_older_weights_under_a_newer_manifest_is_refused(tmp_path: Path):
    older = write_snapshot(tmp_path / "v1", tensors(), 1)
    newer = write_snapshot(tmp_path / "v2", {**tensors(), NORM: np.zeros(3, np.float32)}, 2)
    stale = newer.model_copy(update={"location": older.location})
    with pytest.raises(WeightsRefusedError, match="another sha256"):
        verify_snapshot(stale, layout(), "float32")


@pytest.mark.parametrize("keep", [0, 7, 60, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int):
    manifest = write_snapshot(tmp_path, tensors(), 3)
    path = Path(manifest.location)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightsRefusedError, match=r"has \d+ bytes; its manifest says"):
        verify_snapshot(manifest, layout(), "float32")
    as_long = manifest.model_copy(update={"size_bytes": path.stat().st_size})
    with pytest.raises(WeightsRefusedError, match=r"is no complete safetensors file: Error"):
        verify_snapshot(as_long, layout(), "float32")


def test_a_missing_file_is_refused(tmp_path: Path):
    manifest = write_snapshot(tmp_path, tensors(), 3)
    Path(manifest.location).unlink()
    with pytest.raises(WeightsRefusedError, match="cannot be read \\(No such file"):
        verify_snapshot(manifest, layout(), "float32")


def test_a_damaged_header_is_refused(tmp_path: Path):
    manifest = write_snapshot(tmp_path, tensors(), 3)
    path = Path(manifest.location)
    data = bytearray(path.read_bytes())
    data[8] = ord("[")
    path.write_bytes(bytes(data))
    with pytest.raises(
        WeightsRefusedError, match=r"is no complete safetensors file: .*invalid JSON"
    ):
        verify_snapshot(manifest, layout(), "float32")


def test_tensors_that_overlap_in_the_file_are_refused(tmp_path: Path):
    manifest = write_snapshot(tmp_path, tensors(), 3)
    path = Path(manifest.location)

    def shorten(header: dict[str, Any]) -> dict[str, Any]:
        header[EMBEDDING]["data_offsets"][1] -= 4
        return header

    rewrite_header(path, shorten)
    manifest = manifest.model_copy(update={"size_bytes": path.stat().st_size})
    with pytest.raises(WeightsRefusedError, match=r"no complete safetensors file: .*offset"):
        verify_snapshot(manifest, layout(), "float32")


def test_a_tensor_the_manifest_does_not_name_is_refused(tmp_path: Path):
    manifest = write_snapshot(tmp_path, {**tensors(), "extra": np.ones(2, np.float32)}, 3)
    entries = [entry for entry in manifest.tensors if entry.name != "extra"]
    silent = manifest.model_copy(update={"tensors": entries})
    with pytest.raises(WeightsRefusedError, match="holds 'extra', which its manifest"):
        verify_snapshot(silent, layout(), "float32")
    with pytest.raises(WeightsRefusedError, match="the model has no tensor 'extra'"):
        verify_snapshot(manifest, layout(), "float32")


def test_a_tensor_the_file_lacks_is_refused(tmp_path: Path):
    whole = write_snapshot(tmp_path / "whole", tensors(), 3)
    partial = write_snapshot(tmp_path / "partial", {NORM: tensors()[NORM]}, 3, aliases={})
    mixed = whole.model_copy(
        update={"location": partial.location, "size_bytes": partial.size_bytes}
    )
    with pytest.raises(WeightsRefusedError, match=f"lacks the tensor '{EMBEDDING}'"):
        verify_snapshot(mixed, layout(), "float32")
    with pytest.raises(WeightsRefusedError, match=f"tensor '{EMBEDDING}' of the model is missing"):
        verify_snapshot(partial, layout(), "float32")


def test_a_shape_or_format_other_than_the_models_is_refused(tmp_path: Path):
    turned = {**tensors(), EMBEDDING: tensors()[EMBEDDING].T.copy()}
    manifest = write_snapshot(tmp_path / "turned", turned, 3)
    with pytest.raises(WeightsRefusedError, match=r"has shape \[3, 4\]; the model's is \[4, 3\]"):
        verify_snapshot(manifest, layout(), "float32")
    manifest = write_snapshot(tmp_path / "good", tensors(), 3)
    with pytest.raises(WeightsRefusedError, match=r"is float32; model.dtype is bfloat16"):
        verify_snapshot(manifest, layout(), "bfloat16")
    lying = change_entry(write_snapshot(tmp_path / "lying", turned, 3), EMBEDDING, shape=[4, 3])
    with pytest.raises(WeightsRefusedError, match=r"as F32 \[3, 4\]; its manifest says"):
        verify_snapshot(lying, layout(), "float32")


def test_an_alias_the_model_does_not_have_is_refused(tmp_path: Path):
    manifest = write_snapshot(tmp_path, tensors(), 3, aliases={LM_HEAD: NORM})
    with pytest.raises(WeightsRefusedError, match=f"'{LM_HEAD}' is an alias of '{NORM}'"):
        verify_snapshot(manifest, layout(), "float32")


def test_a_tensor_named_twice_is_refused(tmp_path: Path):
    manifest = write_snapshot(tmp_path, tensors(), 3)
    twice = manifest.model_copy(update={"tensors": [*manifest.tensors, manifest.tensors[0]]})
    with pytest.raises(WeightsRefusedError, match="names a tensor twice"):
        verify_snapshot(twice, layout(), "float32")


def test_a_snapshot_that_is_no_file_is_refused(tmp_path: Path):
    manifest = write_snapshot(tmp_path, tensors(), 3)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    piped = manifest.model_copy(update={"location": str(pipe), "size_bytes": 0})
    with pytest.raises(WeightsRefusedError, match="not a regular file"):
        verify_snapshot(piped, layout(), "float32")
