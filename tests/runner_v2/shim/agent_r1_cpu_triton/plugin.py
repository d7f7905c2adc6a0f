"""What vLLM loads in each of its processes: scheduling stays asynchronous, as on a GPU."""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Keep vLLM's CPU platform from switching asynchronous scheduling off; may be called twice."""
    from vllm.platforms.cpu import CpuPlatform

    platform: Any = CpuPlatform
    if hasattr(platform, "keeps_scheduling"):
        return
    platform.keeps_scheduling = True
    before = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        before(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    platform.check_and_update_config = classmethod(check_and_update_config)
