"""Weight snapshots: readable by safetensors, checked by manifest, complete or absent."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agent_r1.runtime.files.writing import (
    DiskFullError,
    replace_directory,
)
from agent_r1.weights import snapshot
from agent_r1.weights.snapshot import Weights, write_snapshot
from agent_r1_proto.weights import WeightManifest
from tests.support.snapshot_files import chunks_of


def make_weights() -> Weights:
    """Weights of several dtypes and shapes, one with a second name."""
    torch.manual_seed(0)
    tensors = {
        "embed.weight": torch.randn(6, 4),
        "norm.weight": torch.randn(4).to(torch.bfloat16),
        "scale": torch.tensor(2.0),
        "strided.weight": torch.randn(3, 5).T,
    }
    return Weights(tensors, {"lm_head.weight": "embed.weight"})


def test_safetensors_reads_back_what_was_written(tmp_path: Path):
    weights = make_weights()
    write_snapshot(tmp_path / "v3", "run", 3, weights)
    loaded = load_file(tmp_path / "v3" / "model.safetensors")
    assert set(loaded) == set(weights.tensors)
    for name, tensor in weights.tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


def test_the_manifest_describes_every_tensor_and_its_alias(tmp_path: Path):
    weights = make_weights()
    manifest = write_snapshot(tmp_path / "v3", "run", 3, weights)
    stored = WeightManifest.model_validate_json((tmp_path / "v3" / "manifest.json").read_text())
    assert stored == manifest
    assert (manifest.run_id, manifest.policy_version) == ("run", 3)
    file = Path(manifest.location)
    assert file == tmp_path / "v3" / "model.safetensors"
    assert manifest.size_bytes == file.stat().st_size
    entries = {entry.name: entry for entry in manifest.tensors}
    assert manifest.chunks == chunks_of(file.read_bytes())
    assert entries["embed.weight"].shape == [6, 4]
    assert entries["norm.weight"].dtype == "bfloat16"
    head = entries["lm_head.weight"]
    assert (head.alias_of, head.shape) == ("embed.weight", [6, 4])
    assert all(entries[name].alias_of is None for name in weights.tensors)


def test_a_snapshot_replaces_one_that_is_there_and_leaves_nothing_else(tmp_path: Path):
    write_snapshot(tmp_path / "v1", "run", 1, make_weights())
    other = Weights({"w": torch.ones(2)})
    write_snapshot(tmp_path / "v1", "run", 1, other)
    assert set(load_file(tmp_path / "v1" / "model.safetensors")) == {"w"}
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]


def test_an_unsupported_dtype_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"weight 'ids' has dtype torch\.int64"):
        write_snapshot(tmp_path / "v1", "run", 1, Weights({"ids": torch.arange(3)}))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_explained_and_nothing_is_left(tmp_path: Path, monkeypatch):
    def no_space(path: Path, parts: object) -> None:
        path.write_bytes(b"part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(snapshot, "write_chunks", no_space)
    with pytest.raises(
        DiskFullError,
        match=r"weight version 1 \(.*\) needs about .* MiB, and .* MiB are free; .*weights_dir",
    ):
        write_snapshot(tmp_path / "v1", "run", 1, make_weights())
    assert list(tmp_path.iterdir()) == []


def test_a_failed_replacement_keeps_the_old_directory(tmp_path: Path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "old").write_text("1")

    def replace_half() -> None:
        with replace_directory(tmp_path / "d") as staging:
            (staging / "new").write_text("2")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half"):
        replace_half()
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
