"""Weights that a new version replaces in an engine: all of the model's, or its LoRA adapter.

policy.py stages verified files while generation continues, and loads them while it is paused. With
an adapter, the base model never changes; vLLM reads a folder in PEFT's format.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agent_r1.runtime.config import LoraConfig
from agent_r1.runtime.files.own_folder import OwnFolder
from agent_r1.weights.adapters import ADAPTER_FILE, write_adapter_config
from agent_r1.weights.layout import ModelLayout

MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The sizes that vLLM has for the rank of adapters; the next larger one is taken."""
_PLACE = 1
"""Id of the one adapter. Requests in flight stay with it, whatever version fills it."""
_PREFIX = "agent_r1_adapter_"
_ZEROS = "zeros.safetensors"


class EngineWeights:
    """All weights of an engine's model.

    Args:
        layout: of the model.
    """

    def __init__(self, layout: ModelLayout) -> None:
        self._layout = layout

    def request(self) -> Any:
        """Return vLLM's `lora_request` for the version in use; None where there is no adapter."""
        return None

    def first_files(self) -> Sequence[Path]:
        """Return what a new engine has to load as version 0, beside what it has loaded itself."""
        return ()

    async def stage(self, engine: Any, policy_version: int, files: Sequence[Path]) -> None:
        """Make ready what `load` takes: the engine's processes map the files, which may be removed.

        Raises:
            Exception: they cannot be used; the engine is as it was.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        locations, aliases = [str(file) for file in files], dict(self._layout.aliases)
        request = WeightTransferInitRequest({"locations": locations, "aliases": aliases})
        await engine.init_weight_transfer_engine(request)

    async def load(self, engine: Any) -> None:
        """Put the staged version into the engine, whose generation is paused."""
        await engine.collective_rpc("load_opened_files")

    def close(self) -> None:
        """Let go of what was staged."""


class AdapterWeights(EngineWeights):
    """The one LoRA adapter of an engine.

    Args:
        lora: of the run.
        layout: of the adapter's tensors.
    """

    def __init__(self, lora: LoraConfig, layout: ModelLayout) -> None:
        super().__init__(layout)
        self._lora = lora
        self._folder = OwnFolder(None, _PREFIX)
        self._version = -1
        self._request: Any = None

    def request(self) -> Any:
        """See `EngineWeights.request`. vLLM finds cached prefixes by the name of the version."""
        return self._request

    def first_files(self) -> Sequence[Path]:
        """Return the adapter that the run starts from; without one, of zeros."""
        if self._lora.path is not None:
            return [self._lora.path / ADAPTER_FILE]
        from safetensors.numpy import save_file

        path = self._folder.path / _ZEROS
        zeros = {name: np.zeros(shape, np.float32) for name, shape in self._layout.shapes.items()}
        save_file(zeros, path)
        return [path]

    async def stage(self, engine: Any, policy_version: int, files: Sequence[Path]) -> None:
        """Copy a version to where its publisher cannot remove it."""
        await asyncio.to_thread(self._copy, policy_version, *files)
        self._version = policy_version

    def _copy(self, policy_version: int, file: Path) -> None:
        folder = self._of(policy_version)
        folder.mkdir(exist_ok=True)
        write_adapter_config(folder, self._lora, base="")
        shutil.copyfile(file, folder / ADAPTER_FILE)

    def _of(self, policy_version: int) -> Path:
        return self._folder.path / f"v{policy_version}"

    async def load(self, engine: Any) -> None:
        """Put the staged version into the adapter's place."""
        from vllm.lora.request import LoRARequest

        folder = self._of(self._version)
        await engine.add_lora(LoRARequest(folder.name, _PLACE, str(folder), load_inplace=True))
        self._request = LoRARequest(folder.name, _PLACE, str(folder))
        await asyncio.to_thread(shutil.rmtree, folder)

    def close(self) -> None:
        """Remove the files."""
        self._folder.remove()


def adapter_args(lora: LoraConfig) -> dict[str, Any]:
    """Return the arguments of an engine that serves one adapter."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(size for size in MAX_RANKS if size >= lora.rank),
        "lora_target_modules": lora.targets,
    }
