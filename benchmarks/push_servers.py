"""Servers of the case push: a rollout server for each transport, and one that is sent tensors.

push.py starts such a process for each server that it pushes to. They are real but for their policy:
one without an engine, which verifies a version and copies it, or vLLM's.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from uvicorn import Config, Server

from agent_r1.launch.local_redis import free_port
from agent_r1.rollout.config import EnvConfig, RolloutConfig
from agent_r1.rollout.main import RolloutSettings, build_chat_format
from agent_r1.rollout.policy import LoadTiming
from agent_r1.runtime.announcements import write_announcement
from agent_r1.runtime.config import ModelConfig, RedisConfig, RunConfig
from agent_r1.weights.layout import read_model_layout
from agent_r1.weights.snapshot import verify_snapshot
from agent_r1_proto.weights import WeightManifest
from benchmarks.models import BASE
from benchmarks.scale import END_ID, ScriptedPolicy, serve_together

Take = Callable[[str, bytes], Awaitable[None]]
"""Fills a tensor, which has a name; "begin" and "end" are told before the first, after the last."""
MAX_CONTEXT = 192
DTYPE = "bfloat16"


class CopyingPolicy(ScriptedPolicy):
    """Copies weights into memory of its own, as an engine would, and samples nothing."""

    def __init__(self, model: Path) -> None:
        import torch

        super().__init__([END_ID], 0.0, 0.0)
        self._layout = read_model_layout(model, tied=False)
        shapes = self._layout.shapes
        self._held = {name: torch.zeros(shapes[name], dtype=torch.bfloat16) for name in shapes}

    async def load_weights(self, manifest: WeightManifest) -> LoadTiming:
        """Verify a version, and copy it."""
        started = time.perf_counter()
        path = await asyncio.to_thread(verify_snapshot, manifest, self._layout, DTYPE)
        verified = time.perf_counter()
        await asyncio.to_thread(self._copy, path)
        self.policy_version = manifest.policy_version
        return LoadTiming(verified - started, time.perf_counter() - verified)

    def _copy(self, path: Path) -> None:
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            for name, tensor in self._held.items():
                tensor.copy_(file.get_tensor(name))

    async def take(self, name: str, data: bytes) -> None:
        """Copy one tensor."""
        if name in self._held:
            self._held[name].copy_(as_tensor(data, self._held[name].shape))


def as_tensor(data: bytes, shape: Any) -> Any:
    """Return the tensor of some bytes."""
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(shape)


def load(worker: Any, name: str, data: bytes, shape: list[int]) -> None:
    """Fill one parameter in a process of an engine; before and after, all are laid out anew."""
    from vllm.model_executor.model_loader import reload

    model = worker.get_model()
    if name == "begin":
        reload.initialize_layerwise_reload(model)
    elif name == "end":
        reload.finalize_layerwise_reload(model, worker.model_config)
    else:
        model.load_weights([(name, as_tensor(data, shape))])


async def engine_taker(policy: Any, model: Path) -> Take:
    """Start an engine, and return what fills its model while it stands still."""
    shapes = read_model_layout(model, tied=False).shapes
    await policy.start()
    engine = policy.engine

    async def take(name: str, data: bytes) -> None:
        if name == "begin":
            await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)
        await engine.collective_rpc(load, args=(name, data, list(shapes.get(name, ()))))
        if name == "end":
            await engine.resume_generation()

    return take


async def serve_calls(take: Take, folder: Path, name: str) -> None:
    """Serve `POST /tensors/NAME` as one would at first: with FastAPI and uvicorn, unguarded."""
    app, port = FastAPI(), free_port()

    @app.post("/tensors/{tensor}")
    async def tensors(tensor: str, request: Request) -> None:
        await take(tensor, await request.body())

    write_announcement(folder, name, f"http://127.0.0.1:{port}")
    await Server(Config(app, port=port, log_level="error")).serve()


async def serve(
    name: str, redis_url: str, folder: str, model: str, transports: dict[str, Any], engine: bool
) -> None:
    """Serve until this process is told to end.

    Args:
        name: Of the announcement of the server that is sent tensors.
        redis_url: Of the runs.
        folder: Of their weights.
        model: Its folder.
        transports: By the id of their runs.
        engine: Whether each server has one.
    """
    env, rollout = EnvConfig(), RolloutConfig(max_concurrent=2, kv_cache_gib=0.25)
    table = ModelConfig(path=model, max_context=MAX_CONTEXT, dtype=DTYPE)
    make: Any = partial(CopyingPolicy, Path(model))
    if engine:
        from agent_r1.rollout.vllm.settings import VllmSettings, prepare_environment

        settings = VllmSettings(table, rollout, seed=0)
        prepare_environment(settings)
        from agent_r1.rollout.vllm.policy import VllmPolicy

        make = partial(VllmPolicy, settings)
    take = await engine_taker(make(), Path(model)) if engine else make().take
    common: dict[str, Any] = {"model": table, "env": env, "rollout": rollout, "tools": {}}
    common |= {"redis": RedisConfig(url=redis_url), "weights_dir": Path(folder)}
    runs = [
        RolloutSettings(run=RunConfig(id=run_id), transport=transport, **common)
        for run_id, transport in transports.items()
    ]
    chat = build_chat_format(env, str(BASE), (END_ID,), has_tools=False)
    calls = asyncio.create_task(serve_calls(take, Path(folder), name))
    await serve_together([(make(), run) for run in runs], chat)
    calls.cancel()


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for the function that its processes run
    asyncio.run(serve(*json.loads(sys.argv[1])))
