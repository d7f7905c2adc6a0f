"""Counts of what the engine has done, as vLLM reports it after each of its steps."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import PrometheusStatLogger

from agent_r1.rollout.policy import EngineWork


def counting_logger(work: EngineWork) -> type[PrometheusStatLogger]:
    """Return a stat logger for `AsyncLLM` that counts into `work`, and does nothing else."""

    class CountingLogger(PrometheusStatLogger):
        """In place of vLLM's own, which keeps some fifty metrics for each step.

        vLLM adds its own beside any logger that is not of this class.
        """

        def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
            """Keep nothing: `work` is all there is."""

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            if scheduler_stats is not None:
                work.steps += 1
                work.running = scheduler_stats.num_running_reqs
                work.waiting = (
                    scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
                )
                work.kv_cache_used = scheduler_stats.kv_cache_usage
            if iteration_stats is not None:
                work.prompt_tokens += iteration_stats.prompt_token_stats.computed
                work.sampled_tokens += iteration_stats.num_generation_tokens

        def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None: ...

        def record_admission_rejection(self, reason: str) -> None: ...

        def log_engine_initialized(self) -> None: ...

    return CountingLogger
