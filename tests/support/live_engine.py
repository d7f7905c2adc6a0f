"""One real vLLM engine for all tests that need it, on an event loop in a thread of its own.

Starting an engine takes ten seconds and more, so tests share it: they push the weights they want
as the next version, and start a new one after they have killed it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest

from agent_r1.rollout.config import RolloutConfig
from agent_r1.rollout.policy import LoadTiming, PolicyOutOfMemoryError, PolicySetupError
from agent_r1.rollout.vllm.policy import VllmPolicy
from agent_r1.rollout.vllm.settings import VllmSettings
from agent_r1.runtime.config import ModelConfig
from agent_r1_proto.weights import WeightManifest
from tests.support.snapshot_files import build_model, own_tensors, write_snapshot

CALL_TIMEOUT_S = 280.0
MAX_CONTEXT = 512
STEPS_ARE_SLOW = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether tests/runner_v2 runs this, whose kernels are interpreted."""
T = TypeVar("T")


def engine_settings(model_dir: Path | str, **options: Any) -> VllmSettings:
    """Return settings of an engine; `options` are keys of `[model]`, `[rollout]` or `[run]`."""
    model = {name: options.pop(name) for name in ModelConfig.model_fields.keys() & options.keys()}
    run = {name: options.pop(name) for name in {"seed", "deterministic"} & options.keys()}
    return VllmSettings(ModelConfig(path=str(model_dir), **model), RolloutConfig(**options), **run)


class LiveEngine:
    """A started VllmPolicy, and the transformers models of the versions it was given."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.models: dict[int, Any] = {0: build_model(seed=0)}
        self.models[0].save_pretrained(folder / "model")
        self.policy = VllmPolicy(
            engine_settings(
                folder / "model",
                max_context=MAX_CONTEXT,
                max_num_seqs=32,
                kv_cache_gib=0.25,
                **settings,
            )
        )
        self.run(self.policy.start())

    def submit(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the engine's loop."""
        return asyncio.run_coroutine_threadsafe(call, self.loop)

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's loop to its end."""
        return self.submit(call).result(CALL_TIMEOUT_S)

    def publish(self, model: Any) -> WeightManifest:
        """Write a model as the next version, without loading it."""
        version = max(self.models) + 1
        self.models[version] = model
        return write_snapshot(self.folder / f"v{version}", own_tensors(model), version)

    def push(self, model: Any) -> LoadTiming:
        """Write a model as the next version and load it."""
        return self.run(self.policy.load_weights(self.publish(model)))

    def close(self) -> None:
        """Stop the engine and its loop."""
        self.run(self.policy.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(CALL_TIMEOUT_S)
        self.loop.close()


_shared: list[LiveEngine] = []


def shared_engine(config: pytest.Config, folders: pytest.TempPathFactory) -> LiveEngine:
    """Return the test run's engine, started when there is none alive; closed at the run's end."""
    if _shared and _shared[-1].policy.death is None:
        return _shared[-1]
    if not _shared:
        config.add_cleanup(_close_all)
    engine = LiveEngine(folders.mktemp("engine"))
    _shared.append(engine)
    return engine


def _close_all() -> None:
    while _shared:
        _shared.pop().close()


async def start_error(settings: VllmSettings) -> str:
    """Return why an engine with these settings does not start."""
    policy = VllmPolicy(settings)
    with pytest.raises((PolicySetupError, PolicyOutOfMemoryError)) as caught:
        await policy.start()
    assert policy.death is not None
    return str(caught.value)
