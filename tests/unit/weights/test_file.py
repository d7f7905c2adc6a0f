"""Manifests in a folder: of the version asked for, and nowhere else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from agent_r1.weights.file import FileFetcher
from agent_r1.weights.manifest import WeightsRefusedError, time_limit_s
from agent_r1_proto.weights import NewestVersion, WeightManifest
from tests.support.snapshot_files import EMBEDDING, write_snapshot


def tensors() -> dict[str, np.ndarray]:
    return {EMBEDDING: np.zeros((4, 3), np.float32)}


def read(location: Path, policy_version: int, weights_dir: Path | None = None) -> WeightManifest:
    fetcher = FileFetcher(weights_dir or location.parent, "test")
    newest = NewestVersion(policy_version=policy_version, manifest_location=str(location))
    return asyncio.run(fetcher.fetch(newest))


def test_a_manifest_is_read_only_as_the_version_asked_for(tmp_path: Path):
    manifest = write_snapshot(tmp_path, tensors(), 3)
    location = tmp_path / "manifest.json"
    assert read(location, 3) == manifest
    with pytest.raises(WeightsRefusedError, match="of another version than 4"):
        read(location, 4)
    with pytest.raises(WeightsRefusedError, match="cannot be read"):
        read(tmp_path / "none.json", 3)
    location.write_text("{}", encoding="utf-8")
    with pytest.raises(WeightsRefusedError, match="does not parse"):
        read(location, 3)


def test_a_snapshot_outside_the_weights_folder_is_refused(tmp_path: Path):
    weights = tmp_path / "weights"
    manifest = write_snapshot(weights, tensors(), 3)
    for location, reason in (
        ("/dev/zero", "does not lie in"),
        (str(weights / ".." / "elsewhere"), "does not lie in"),
    ):
        elsewhere = manifest.model_copy(update={"location": location})
        (weights / "manifest.json").write_text(elsewhere.model_dump_json())
        with pytest.raises(WeightsRefusedError, match=reason):
            read(weights / "manifest.json", 3)


def test_the_weights_folder_may_itself_be_reached_by_a_link(tmp_path: Path):
    manifest = write_snapshot(tmp_path / "disk", tensors(), 3)
    (tmp_path / "weights").symlink_to(tmp_path / "disk")
    found = read(tmp_path / "weights" / "manifest.json", 3, tmp_path / "weights")
    assert found == manifest


def test_a_manifest_for_pulls_is_refused_because_nobody_would_verify_its_bytes(tmp_path: Path):
    pulled = write_snapshot(tmp_path, tensors(), 3).model_copy(update={"transport": "http"})
    (tmp_path / "manifest.json").write_text(pulled.model_dump_json())
    with pytest.raises(WeightsRefusedError, match="is for pulls over HTTP"):
        read(tmp_path / "manifest.json", 3)


def test_limits_grow_with_the_bytes():
    # 6.2 GB at 50 MB/s
    assert time_limit_s(120.0, 6_200_000_000) == pytest.approx(120.0 + 124.0)
    assert time_limit_s(120.0, 0) == 120.0
