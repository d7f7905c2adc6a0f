"""Servers of the case push: a rollout server for each transport, and one that is sent tensors.

push.py starts one process of these for every server it pushes to. Rollout servers are real but for
their policy, which has no engine: it verifies a version and copies it. With `engine`, all of them
have vLLM.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
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
CALLS = "a call for each tensor"
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
        """Copy one tensor; there is nothing to begin or to end."""
        if name in self._held:
            self._held[name].copy_(as_tensor(data, self._held[name].shape))


def as_tensor(data: bytes, shape: Any) -> Any:
    """Return the tensor of some bytes."""
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(shape)


def begin(worker: Any) -> None:
    """Put back the parameters of an engine's worker as checkpoints fill them."""
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    initialize_layerwise_reload(worker.get_model())


def load(worker: Any, name: str, data: bytes, shape: list[int]) -> None:
    """Fill one parameter of an engine's worker."""
    worker.get_model().load_weights([(name, as_tensor(data, shape))])


def end(worker: Any) -> None:
    """Pack the parameters of an engine's worker."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(worker.get_model(), worker.model_config)


async def engine_taker(policy: Any, model: Path) -> Take:
    """Start an engine, and return what fills its model: "begin", each tensor by its name, "end"."""
    shapes = read_model_layout(model, tied=False).shapes
    await policy.start()
    engine = policy.engine

    async def take(name: str, data: bytes) -> None:
        if name == "begin":
            await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)
            await engine.collective_rpc(begin)
        elif name == "end":
            await engine.collective_rpc(end)
            await engine.resume_generation()
        else:
            await engine.collective_rpc(load, args=(name, data, list(shapes[name])))

    return take


async def serve_calls(take: Take, folder: Path, name: str) -> None:
    """Serve `POST /tensors/NAME`, with what such a server has: FastAPI and uvicorn."""
    app, port = FastAPI(), free_port()

    @app.post("/tensors/{tensor}")
    async def tensors(tensor: str, request: Request) -> None:
        await take(tensor, await request.body())

    write_announcement(folder, name, f"http://127.0.0.1:{port}")
    await Server(Config(app, port=port, log_level="warning")).serve()


@dataclass(frozen=True)
class Place:
    """What the servers of one process are told."""

    name: str
    redis_url: str
    folder: str
    model: str
    transports: dict[str, str]
    """Transport of each run id."""
    engine: bool


async def serve(place: Place) -> None:
    """Serve until this process is told to end."""
    model, folder = Path(place.model), Path(place.folder)
    rollout = RolloutConfig(max_num_seqs=2, kv_cache_gib=0.25, max_concurrent=2)
    table = ModelConfig(path=place.model, max_context=MAX_CONTEXT, dtype=DTYPE)
    if place.engine:
        from agent_r1.rollout.vllm.settings import VllmSettings, prepare_environment

        settings = VllmSettings(table, rollout, seed=0)
        prepare_environment(settings)
        from agent_r1.rollout.vllm.policy import VllmPolicy

        make: Callable[[], Any] = partial(VllmPolicy, settings)
        take = await engine_taker(make(), model)
    else:
        make = partial(CopyingPolicy, model)
        take = make().take
    chat = build_chat_format(EnvConfig(), str(BASE), (END_ID,), has_tools=False)
    servers = [
        (
            make(),
            RolloutSettings(
                run=RunConfig(id=run_id),
                model=table,
                redis=RedisConfig(url=place.redis_url),
                env=EnvConfig(),
                rollout=rollout,
                tools={},
                weights_dir=folder,
                transport=transport,  # pyright: ignore
            ),
        )
        for run_id, transport in place.transports.items()
    ]
    calls = asyncio.create_task(serve_calls(take, folder, place.name))
    await serve_together(servers, chat)
    calls.cancel()


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for functions that its workers run
    asyncio.run(serve(Place(**json.loads(sys.argv[1]))))
