"""Loading new weights into an engine: all of the model's (here), or its adapter's (adapter.py).

policy.py stages a verified snapshot while generation continues, and loads it while it is paused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from agent_r1.weights.layout import ModelLayout


class EngineWeights(Protocol):
    """The part of an engine's model that a new version replaces."""

    def request(self) -> Any:
        """Return vLLM's `lora_request` for the version in use; None where there is no adapter."""
        ...

    def first_files(self) -> Sequence[Path]:
        """Return what a new engine has to load as version 0, beside what it has loaded itself."""
        ...

    async def stage(self, engine: Any, policy_version: int, files: Sequence[Path]) -> None:
        """Make ready what `load` takes; afterwards the files may be removed.

        Raises:
            Exception: they cannot be used; the engine is as it was.
        """
        ...

    async def load(self, engine: Any) -> None:
        """Put the staged version into the engine, whose generation is paused."""
        ...

    def close(self) -> None:
        """Let go of what was staged."""
        ...


class DenseWeights(EngineWeights):
    """All weights of an engine's model; implements `EngineWeights`.

    Args:
        layout: of the model.
    """

    def __init__(self, layout: ModelLayout) -> None:
        self._layout = layout

    def request(self) -> Any:
        """Return None."""
        return None

    def first_files(self) -> Sequence[Path]:
        """Return nothing."""
        return ()

    async def stage(self, engine: Any, policy_version: int, files: Sequence[Path]) -> None:
        """Let the engine's processes map the files."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        locations, aliases = [str(file) for file in files], dict(self._layout.aliases)
        request = WeightTransferInitRequest({"locations": locations, "aliases": aliases})
        await engine.init_weight_transfer_engine(request)

    async def load(self, engine: Any) -> None:
        """Fill the model from the mapped files."""
        await engine.collective_rpc("load_opened_files")

    def close(self) -> None:
        """Do nothing: the files are open in the engine's processes only."""
