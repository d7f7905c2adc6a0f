"""Loading new weights into an engine: all of the model's (here), or its adapter's (adapter.py).

policy.py stages a verified snapshot while generation continues, and loads it while it is paused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent_r1.weights.layout import ModelLayout


class EngineWeights:
    """The part of an engine's model that a new version replaces: all of its weights.

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
        """Make ready what `load` takes; afterwards the files may be removed.

        Raises:
            Exception: they cannot be used; the engine is as it was.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        # The engine's processes map the files.
        locations, aliases = [str(file) for file in files], dict(self._layout.aliases)
        request = WeightTransferInitRequest({"locations": locations, "aliases": aliases})
        await engine.init_weight_transfer_engine(request)

    async def load(self, engine: Any) -> None:
        """Put the staged version into the engine, whose generation is paused."""
        await engine.collective_rpc("load_opened_files")

    def close(self) -> None:
        """Let go of what was staged."""
