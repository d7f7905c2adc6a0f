"""Filling a model whose lm_head is its embedding, as engines on GPUs have it.

vLLM is imported where it is used: every process of the suite collects this file, and few need it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch.multiprocessing import reductions

from agent_r1.weights import collective, ipc
from agent_r1.weights.layout import ModelLayout
from agent_r1.weights.snapshot import Weights, verify_snapshot
from agent_r1_proto.weights import SHARED_FILE
from tests.support.sent_weights import sent

pytestmark = pytest.mark.vllm
ALIASES = {"lm_head.weight": "embed.weight"}


class Model(torch.nn.Module):
    """An embedding, a layer, and a head, which vLLM ties after it has made both."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(4, 2)
        self.layer = torch.nn.Linear(2, 2, bias=False)
        self.lm_head = torch.nn.Linear(2, 4, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        record_metadata_for_reloading(self)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        from vllm.model_executor.models.utils import AutoWeightsLoader

        return AutoWeightsLoader(self).load_weights(weights)


class Headless(Model):
    """A model that uses its embedding as a head, without another name for it."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        del self.lm_head


def update(model: Model, folder: Path, files: dict[str, torch.Tensor]) -> None:
    save_file(files, folder / "weights.safetensors")
    fill(model, folder / "weights.safetensors")


def fill(model: Model, path: Path) -> None:
    from agent_r1.rollout.vllm.weight_transfer import FileInitInfo, FileWeightTransferEngine

    vllm_config: Any = SimpleNamespace(parallel_config=None, model_config=None)
    engine = FileWeightTransferEngine(cast("Any", None), vllm_config, torch.device("cpu"), model)
    engine.init_transfer_engine(FileInitInfo([str(path)], ALIASES))
    engine.start_weight_update()
    engine.update_weights({})
    engine.finish_weight_update()


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head_get_the_same_new_values_in_place(tmp_path: Path, tied: bool):
    model = Model(tied=tied)
    before = {name: one.data_ptr() for name, one in model.named_parameters(remove_duplicate=False)}
    new = {"embed.weight": torch.arange(8.0).view(4, 2), "layer.weight": torch.eye(2)}
    update(model, tmp_path, new)
    assert torch.equal(model.embed.weight, new["embed.weight"])
    assert torch.equal(model.lm_head.weight, new["embed.weight"])
    assert torch.equal(model.layer.weight, new["layer.weight"])
    after = {name: one.data_ptr() for name, one in model.named_parameters(remove_duplicate=False)}
    assert after == before  # where CUDA graphs read them
    assert (model.lm_head.weight is model.embed.weight) == tied


def test_for_a_gpu_all_is_read_into_pinned_memory_before_the_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from agent_r1.rollout.vllm.weight_transfer import FileInitInfo, FileWeightTransferEngine

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor * 10)  # needs a GPU
    save_file({"embed.weight": torch.ones(4, 2)}, tmp_path / "weights.safetensors")
    vllm_config: Any = SimpleNamespace(parallel_config=None, model_config=None)
    engine = FileWeightTransferEngine(
        cast("Any", None), vllm_config, torch.device("cuda"), Model(tied=True)
    )
    engine.init_transfer_engine(FileInitInfo([str(tmp_path / "weights.safetensors")], ALIASES))
    (tmp_path / "weights.safetensors").unlink()
    found = dict(engine._tensors({"lm_head.weight"}))
    assert {name: float(tensor.mean()) for name, tensor in found.items()} == {
        "embed.weight": 10.0,
        "lm_head.weight": 10.0,
    }
    engine.shutdown()
    assert not engine._ready


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let memory of this process stand for that of a GPU; torch's calls are bound to its own."""
    shared: dict[bytes, torch.Tensor] = {}
    parameters = inspect.signature(reductions.rebuild_cuda_tensor)

    def reduce_tensor(tensor: torch.Tensor) -> tuple[object, tuple[Any, ...]]:
        handle = f"\0\xff{len(shared)}".encode("latin-1")  # bytes that are no text
        shared[handle] = tensor
        size, none = tensor.nbytes, b"\xfe"
        kinds = (torch.Tensor, tensor.size(), (1,), 0, torch.TypedStorage, tensor.dtype, 0)
        return None, (*kinds, handle, size + 512, 512, False, none, 0, none, True)

    def rebuild_cuda_tensor(**arguments: Any) -> torch.Tensor:
        parameters.bind(**arguments)
        tensor = shared[arguments["storage_handle"]]
        assert arguments["storage_size_bytes"] == tensor.nbytes + 512
        assert arguments["tensor_size"] == (tensor.nbytes,)
        return tensor

    monkeypatch.setattr(reductions, "reduce_tensor", reduce_tensor)
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild_cuda_tensor)
    monkeypatch.setattr(collective, "_backend_problem", lambda backend: None)
    monkeypatch.setattr(ipc, "DEVICE", "cpu")
    monkeypatch.setattr(ipc, "gpu_uuid", lambda device: "GPU-1")


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_an_engine_on_the_learners_gpu_maps_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
):
    new = {"embed.weight": torch.arange(8.0).view(4, 2), "layer.weight": torch.eye(2)}
    weights = Weights({name: value.to(dtype) for name, value in new.items()}, ALIASES)
    shapes = {name: tuple(value.shape) for name, value in new.items()}
    layout = ModelLayout(files=(), shapes=shapes, aliases=ALIASES)
    model = Model(tied=True)
    async with sent(weights, 1, tmp_path, backend="ipc") as manifest:
        fill(model, verify_snapshot(manifest, layout, str(dtype).removeprefix("torch.")))
        assert manifest.location.endswith(SHARED_FILE)
        assert torch.equal(model.lm_head.weight, new["embed.weight"])
        assert torch.equal(model.layer.weight, new["layer.weight"])
        monkeypatch.setattr(ipc, "gpu_uuid", lambda device: "GPU-2")
        with pytest.raises(ValueError, match="lie in GPU GPU-1, and this engine runs on GPU-2"):
            fill(model, Path(manifest.location))


def test_a_model_without_a_head_of_its_own_takes_no_alias(tmp_path: Path):
    model = Headless()
    new = {"embed.weight": torch.ones(4, 2), "layer.weight": torch.eye(2)}
    update(model, tmp_path, new)
    assert torch.equal(model.embed.weight, new["embed.weight"])


def test_a_parameter_that_the_files_leave_out_is_named(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"1 parameters unfilled, first: layer\.weight"):
        update(Model(tied=True), tmp_path, {"embed.weight": torch.ones(4, 2)})
