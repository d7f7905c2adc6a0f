"""The weight-transfer engine in vLLM's processes: loads safetensors files, dies with the server.

vLLM finds `register` through the entry point `vllm.general_plugins` in every process it starts.
policy.py drives the phases: init (map the files, while generation continues), start, update
(copy into the model), finish. Reads the files that weights/snapshot.py verified.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

from agent_r1.rollout.vllm.cpu.norms import register_norms
from agent_r1.rollout.vllm.engine_process import die_with_server
from agent_r1.weights.ipc import open_shared
from agent_r1_proto.weights import SHARED_FILE

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig

BACKEND = "agent_r1_file"


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Names the files of the next update."""

    locations: list[str]
    """Paths of safetensors files that together hold every tensor once, or the one of a file that
    says where in this GPU the learner has them."""
    aliases: dict[str, str]
    """Name that a model may have too -> name of the tensor in the files that fills it."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """Nothing: the files are already open."""


class FileWeightTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Fills the model of one worker from safetensors files on a disk it can see.

    Every update is announced by `init_transfer_engine`, which maps the files: from then on the
    update no longer depends on their names, so a publisher may remove them. For a GPU, it also
    reads them into pinned memory, which torch keeps for the next version.
    """

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        """Take the worker's model; see the base class."""
        super().__init__(config, vllm_config, device, model)
        if device.type == "cpu":
            # Linux lets a process use AMX registers only after it asked. vLLM's bf16 attention
            # does not ask: without this a short first prompt ends the engine with signal 4.
            torch.cpu._init_amx()
        self._open_files = ExitStack()
        self._file_of: dict[str, Any] = {}
        self._ready: dict[str, torch.Tensor] = {}
        """For a GPU: all tensors, where it reads them by itself."""
        self._aliases: dict[str, str] = {}

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Map the files of the next update.

        Raises:
            ValueError: a file cannot be opened, or an alias names no tensor.
        """
        self.shutdown()
        try:
            for location in init_info.locations:
                if location.endswith(SHARED_FILE):
                    self._ready = open_shared(Path(location), self.device)
                    self._file_of = dict.fromkeys(self._ready)
                    continue
                opened = self._open_files.enter_context(safe_open(location, framework="pt"))
                for name in opened.keys():  # noqa: SIM118 - not a dict
                    self._file_of[name] = opened
        except (OSError, RuntimeError) as exc:
            self.shutdown()
            raise ValueError(f"weight file cannot be opened: {exc}") from exc
        self._aliases = dict(init_info.aliases)
        for alias, name in self._aliases.items():
            if name not in self._file_of:
                self.shutdown()
                raise ValueError(f"{alias!r} is an alias of {name!r}, which no weight file holds")
        if self.device.type != "cpu" and not self._ready:
            # Now, while generation continues, and not in the pause.
            self._ready = {name: self._tensor(name).pin_memory() for name in self._file_of}

    def _tensor(self, name: str) -> torch.Tensor:
        return self._ready[name] if self._ready else self._file_of[name].get_tensor(name)

    def start_weight_update(self) -> None:
        """Put back the parameters as a checkpoint fills them, before any packing."""
        if not self._file_of:
            raise ValueError("no weight file is open; init_weight_transfer_engine comes first")
        initialize_layerwise_reload(self.model)

    # The base class ends with torch.accelerator.synchronize(), which a CPU build does not have.
    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Copy every tensor into the model."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Copy every tensor into the model.

        Raises:
            RuntimeError: the files leave a parameter of the model unfilled.
        """
        wanted = {name for name, _ in self.model.named_parameters()}
        load_weights: Any = self.model.load_weights
        filled: set[str] | None = load_weights(self._tensors(wanted))
        if filled is not None and (missing := wanted - filled):
            raise RuntimeError(
                f"weight files leave {len(missing)} parameters unfilled, first: {min(missing)}"
            )

    def _tensors(self, wanted: Set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self._file_of:
            yield name, self._tensor(name)
        # Also of an lm_head that is the embedding: while weights are loaded, the two are apart.
        for alias in self._aliases.keys() & wanted:
            yield alias, self._tensor(self._aliases[alias])

    def finish_weight_update(self) -> None:
        """Pack the new parameters as the kernels want them, and let the files go."""
        finalize_layerwise_reload(self.model, self.model_config)
        self.shutdown()

    def shutdown(self) -> None:
        """Let the files go."""
        self._open_files.close()
        self._file_of = {}
        self._ready = {}
        self._aliases = {}


class LoadOpenedFiles:
    """An extension of vLLM's workers: a whole update in one call instead of three."""

    def load_opened_files(self: Any) -> None:
        """Fill the model from the files that `init_weight_transfer_engine` has opened."""
        self.start_weight_update()
        self.update_weights({})
        self.finish_weight_update()


def register() -> None:
    """Make the backend known to vLLM; called by vLLM once or more in each of its processes."""
    die_with_server()
    if current_platform.is_cpu():
        register_norms()
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FileWeightTransferEngine)
