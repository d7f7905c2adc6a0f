"""Refuses a vLLM that lacks what policy.py builds on, before an engine is started."""

from __future__ import annotations

from dataclasses import fields
from importlib.metadata import entry_points

from agent_r1.rollout.policy import PolicySetupError
from agent_r1.rollout.vllm.settings import PLUGIN
from agent_r1.runtime.imports import quick_imports


def check_release() -> None:
    """Refuse a vLLM release, or an installation, without what this module needs.

    Raises:
        PolicySetupError: names what is missing.
    """
    try:
        with quick_imports():
            import vllm
            from vllm.config.weight_transfer import WeightTransferConfig as _Config
            from vllm.distributed.weight_transfer.base import WeightTransferInitRequest as _Request
            from vllm.outputs import CompletionOutput
            from vllm.v1.engine.async_llm import AsyncLLM
            from vllm.v1.engine.core_client import AsyncMPClient
    except ImportError as exc:
        raise PolicySetupError(
            f"vLLM cannot be used ({exc}); install the release this version is made for: "
            "pip install 'agent-r1[rollout]' (CPU) or 'agent-r1[rollout-gpu]'"
        ) from exc
    del _Config, _Request
    missing = [
        name
        for name, present in {
            "weight version spans": "weight_versions"
            in {field.name for field in fields(CompletionOutput)},
            "pause_scheduler_async": hasattr(AsyncMPClient, "pause_scheduler_async"),
            "update_weight_version": hasattr(AsyncLLM, "update_weight_version"),
        }.items()
        if not present
    ]
    if missing:
        raise PolicySetupError(
            f"vLLM {vllm.__version__} lacks {', '.join(missing)}; install release 0.32"
        )
    # vLLM's own processes find our weight transfer by it.
    if PLUGIN not in {entry.name for entry in entry_points(group="vllm.general_plugins")}:
        raise PolicySetupError(
            f"vLLM's processes cannot find the entry point {PLUGIN}; install this project "
            "(pip install -e .) instead of only putting it on the import path"
        )
