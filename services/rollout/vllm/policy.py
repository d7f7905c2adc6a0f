"""The sampler: vLLM's AsyncLLM, token ids in, token ids and log-probabilities out.

turns.py calls `generate`; weight_versions.py calls `load_weights` with the learner's manifests and
`score` for its canary. The engine runs in a process of its own, which loads weights through
weight_transfer.py.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from agent_r1.rollout.policy import EngineWork, LoadTiming, Policy, PolicySetupError
from agent_r1.rollout.vllm.engine_answers import (
    check_prompt,
    to_generation,
    to_part,
    to_prompt_logprobs,
)
from agent_r1.rollout.vllm.engine_process import (
    StartedEngine,
    check_release,
    death_reason,
    engine_processes,
    start_engine,
    wait_for_exit,
)
from agent_r1.rollout.vllm.engine_weights import AdapterWeights, EngineWeights
from agent_r1.rollout.vllm.settings import (
    ModelFacts,
    VllmSettings,
    prepare_environment,
    read_model,
)
from agent_r1.text.tokens import EngineDeadError, Generation, PolicyError
from agent_r1.weights.manifest import WeightsRefusedError, time_limit_s
from agent_r1.weights.snapshot import verify_snapshot
from agent_r1_proto.generation import GeneratedPart, GenerateRequest
from agent_r1_proto.trajectory import VersionSpan
from agent_r1_proto.weights import WeightManifest

logger = logging.getLogger(__name__)

SCORE_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 0.5
"""Time an engine gets to end by itself, which takes seconds; nothing in it is worth the wait."""


class VllmPolicy(Policy):
    """A vLLM engine with versioned weights.

    Requests in flight when weights are loaded continue: they are computed again under the new
    weights from their first token, so a token labelled v has v's log-probability over its whole
    prefix.
    """

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self.policy_version = 0
        self._in_flight: set[str] = set()
        self._earlier_spans: defaultdict[str, list[VersionSpan]] = defaultdict(list)
        """By request in flight: its tokens from before the last update."""
        self.work = EngineWork()
        self._num_scores = 0
        self._num_probes = 0
        self._death: str | None = "the sampler has not been started"
        self._load_lock = asyncio.Lock()
        self._limit_s = settings.rollout.weight_load_timeout_s
        """Of each phase of the load that goes on."""
        self._loads: set[asyncio.Task[LoadTiming]] = set()
        self.is_loading = False
        self.engine: Any = None
        """vLLM's own; None before `start` and after `stop`."""
        self._started: StartedEngine
        self._facts: ModelFacts | None = None
        self._weights: EngineWeights | None = None

    @property
    def eos_token_ids(self) -> Sequence[int]:
        return self._model().eos_token_ids

    @property
    def max_context(self) -> int:
        return self._settings.model.max_context

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def death(self) -> str | None:
        if self._death is None and self.engine.errored:
            return death_reason(self.engine)
        return self._death

    async def start(self) -> None:
        started, limit_s = time.perf_counter(), self._settings.rollout.engine_start_timeout_s
        prepare_environment(self._settings)
        self._facts = await asyncio.to_thread(read_model, self._settings)
        try:
            async with asyncio.timeout(limit_s):
                await self._start_engine()
                self._death = None
                await self._load_first_weights()
                await self.engine.update_weight_version("0")
                # An engine's first steps are its slowest: take them before requests wait, and
                # before anybody judges how long a step takes.
                await self.score([self._facts.eos_token_ids[0]] * 2)
                await self.probe()
        except TimeoutError as exc:
            await self.stop()
            raise PolicySetupError(
                f"the engine did not start within {limit_s:g} s; raise "
                "rollout.engine_start_timeout_s"
            ) from exc
        except EngineDeadError as exc:
            await self.stop()
            raise PolicySetupError(str(exc)) from exc
        except (PolicyError, WeightsRefusedError):
            await self.stop()
            raise
        logger.info(
            "policy started model=%s dtype=%s model_runner=%s %s start_s=%.1f",
            self._facts.directory,
            self._settings.model.dtype,
            self._started.model_runner,
            self._started.description,
            time.perf_counter() - started,
        )

    async def generate(
        self,
        token_ids: list[int],
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        request_id: str,
    ) -> Generation:
        if max_tokens < 1:
            raise ValueError(f"max_tokens ({max_tokens}) must be >= 1")
        self._check_request(token_ids, request_id)
        params = self._sampling(len(token_ids), max_tokens, temperature, seed)
        with self._flight(request_id):
            async with self._engine_errors():
                output = await self._run(token_ids, params, request_id)
            return to_generation(output.outputs[0], self._earlier_spans[request_id])

    def stream(self, request: GenerateRequest) -> AsyncGenerator[GeneratedPart]:
        self._check_request(request.token_ids, request.request_id)
        if (reason := self.death) is not None:
            raise EngineDeadError(reason)
        return self._stream(request)

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[GeneratedPart]:
        token_ids, name = request.token_ids, request.request_id
        limits = len(token_ids), request.max_tokens
        params = self._sampling(*limits, request.temperature, request.seed, in_parts=True)
        sent = 0
        with self._flight(name):
            async with self._engine_errors(), aclosing(self._ask(token_ids, params, name)) as parts:
                async for output in parts:
                    part = to_part(output.outputs[0], self._labels(name), sent)
                    sent += len(part.token_ids)
                    yield part

    def _labels(self, request_id: str) -> Sequence[tuple[str, int]]:
        """Return the versions of a request that goes on, each with the first of its tokens."""
        processor = self.engine.output_processor
        for engine_id in processor.external_req_ids.get(request_id, ()):
            return processor.request_states[engine_id].weight_version_starts
        return ()

    def _check_request(self, token_ids: list[int], request_id: str) -> None:
        check_prompt(token_ids, self.max_context, self._model().vocab_size, min_tokens=1)
        if request_id in self._in_flight:
            raise ValueError(f"request_id ({request_id}) is in flight already")

    @contextmanager
    def _flight(self, request_id: str) -> Iterator[None]:
        self._in_flight.add(request_id)
        try:
            yield
        finally:
            self._in_flight.discard(request_id)
            self._earlier_spans.pop(request_id, None)

    def _sampling(
        self,
        prompt_tokens: int,
        max_tokens: int,
        temperature: float,
        seed: int,
        *,
        in_parts: bool = False,
    ) -> Any:
        return _params(
            in_parts=in_parts,
            max_tokens=min(max_tokens, self.max_context - prompt_tokens),
            temperature=temperature,
            seed=seed,
            stop_token_ids=list(self._model().eos_token_ids),
            logprobs=0,
        )

    async def probe(self) -> None:
        async with self._engine_errors():
            if self._in_flight:
                # The engine answers such questions between two steps.
                await self.engine.is_paused()
                return
            self._num_probes += 1
            prompt = [self._model().eos_token_ids[0]]
            await self._run(prompt, self._sampling(1, 1, 1.0, 0), f"probe-{self._num_probes}")

    def kill(self, reason: str) -> None:
        self._death = reason
        if self.engine is not None:
            for process in engine_processes(self.engine):
                process.kill()  # ends a stopped process too, which SIGTERM does not

    async def score(self, token_ids: list[int], first: int = 1) -> list[float]:
        check_prompt(token_ids, self.max_context, self._model().vocab_size, min_tokens=2)
        after_cached, cached = await self._score(token_ids, reads_cache=True)
        if cached < first:
            return after_cached[first - 1 - cached :]
        computed, cached_again = await self._score(token_ids, reads_cache=False)
        if cached_again:
            raise PolicyError(
                f"the engine took {cached_again} tokens of a prompt from its cache, and was to "
                "compute all of them; set run.deterministic = true, which has no cache"
            )
        return computed[first - 1 : cached] + after_cached

    async def _score(self, token_ids: list[int], *, reads_cache: bool) -> tuple[list[float], int]:
        """Return the log-probabilities after the cached prefix, and the length of that prefix."""
        params = _params(
            max_tokens=1,
            temperature=1.0,
            prompt_logprobs=0,
            skip_reading_prefix_cache=not reads_cache,
        )
        self._num_scores += 1
        async with self._engine_errors(), asyncio.timeout(SCORE_TIMEOUT_S):
            output = await self._run(token_ids, params, f"score-{self._num_scores}")
        cached = output.num_cached_tokens or 0
        return to_prompt_logprobs(output, len(token_ids), cached), cached

    async def load_weights(self, manifest: WeightManifest) -> LoadTiming:
        # Shielded: a caller that gives up must not leave the engine paused.
        loading = asyncio.create_task(self._load_next(manifest))
        self._loads.add(loading)
        loading.add_done_callback(self._loads.discard)
        return await asyncio.shield(loading)

    async def _load_next(self, manifest: WeightManifest) -> LoadTiming:
        async with self._load_lock, self._engine_errors():
            started = time.perf_counter()
            self._limit_s = self._load_limit_s(manifest.size_bytes)
            path = await self._verify(manifest)
            await self._stage(manifest.policy_version, [path])
            fetch_s = time.perf_counter() - started
            self.is_loading = True
            try:
                pause_s = await self._swap_weights(manifest.policy_version)
            finally:
                self.is_loading = False
        logger.info(
            "weights loaded policy_version=%d fetch_s=%.3f pause_s=%.3f in_flight=%d",
            manifest.policy_version,
            fetch_s,
            pause_s,
            self.num_in_flight,
        )
        return LoadTiming(fetch_s=fetch_s, pause_s=pause_s)

    async def _verify(self, manifest: WeightManifest) -> Path:
        try:
            async with asyncio.timeout(self._limit_s):
                return await asyncio.to_thread(
                    verify_snapshot, manifest, self._model().versions, self._settings.model.dtype
                )
        except TimeoutError as exc:
            raise WeightsRefusedError(
                f"weights of version {manifest.policy_version} were not read and verified within "
                f"{self._limit_s:g} s (rollout.weight_load_timeout_s); see whether the disk of "
                "learner.weights_dir answers"
            ) from exc

    async def stop(self) -> None:
        engine, self.engine = self.engine, None
        weights, self._weights = self._weights, None
        self._death = self._death or "the sampler was stopped"
        loads = list(self._loads)
        for loading in loads:
            loading.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
        if weights is not None:
            weights.close()
        if engine is None:
            return
        if not engine.errored:
            await engine.abort(list(self._in_flight))
        # It would log the end of the engine process as an error.
        handler, engine.output_handler = engine.output_handler, None
        if handler is not None:
            handler.cancel()
        await asyncio.to_thread(engine.shutdown, timeout=STOP_TIMEOUT_S)
        del engine
        # AsyncLLM shuts down again when it is collected; at interpreter exit that fails loudly.
        gc.collect()

    def _model(self) -> ModelFacts:
        if self._facts is None:
            raise EngineDeadError("the sampler has not been started; call start() first")
        return self._facts

    async def _start_engine(self) -> None:
        facts = self._model()
        # On its own: vLLM keeps a frame of its import, and so every object of the calls around it.
        await asyncio.to_thread(check_release)
        started = await asyncio.to_thread(start_engine, self._settings, facts, self.work)
        self._started, self.engine = started, started.engine
        if self._settings.model.lora is None:
            self._weights = EngineWeights(facts.layout)
        else:
            self._weights = AdapterWeights(self._settings.model.lora, facts.versions)

    def _held(self) -> EngineWeights:
        assert self._weights is not None  # there are weights where there is an engine
        return self._weights

    async def _load_first_weights(self) -> None:
        """Load what of version 0 a new engine does not have."""
        if files := self._held().first_files():
            self._limit_s = self._load_limit_s(sum(map(os.path.getsize, files)))
            async with self._engine_errors():
                await self._stage(0, files)
                await self._swap_weights(0)

    def _load_limit_s(self, size_bytes: int) -> float:
        return time_limit_s(self._settings.rollout.weight_load_timeout_s, size_bytes)

    async def _stage(self, policy_version: int, files: Sequence[Path]) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                await self._held().stage(self.engine, policy_version, files)
        except TimeoutError as exc:
            reason = (
                f"the engine did not open new weights within {self._limit_s:g} s "
                "(rollout.weight_load_timeout_s) and was killed"
            )
            self.kill(reason)
            raise EngineDeadError(reason) from exc
        except Exception as exc:
            if self.death is not None:
                raise
            raise WeightsRefusedError(f"the engine cannot open the weights: {exc}") from exc

    async def _swap_weights(self, policy_version: int) -> float:
        """Pause, load what is staged, resume; return the seconds generation stood still."""
        engine = self.engine
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self._limit_s):
                # AsyncLLM.pause_generation does the same, and then sleeps for 20 ms.
                await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)
                if self._in_flight and self._started.sends_whole_answers:
                    await self._note_sampled()
                await self._held().load(engine)
                await engine.update_weight_version(str(policy_version))
                self.policy_version = policy_version
                await engine.resume_generation()
        except Exception as exc:
            if engine.errored:
                raise
            # Half the parameters may be new: nothing sampled from now on could be labelled.
            self._death = (
                f"loading weights of version {policy_version} failed half-way "
                f"({type(exc).__name__}: {exc}); start the rollout service again"
            )
            if isinstance(exc, TimeoutError):
                self.kill(self._death)  # it does not answer, nor would it to the abort
            await engine.abort(list(self._in_flight))
            raise EngineDeadError(self._death) from exc
        return time.perf_counter() - started

    async def _note_sampled(self) -> None:
        """Note of each request in flight how many of its tokens the present version sampled."""
        counts: list[dict[str, int]] = await self.engine.collective_rpc("count_sampled")
        states = self.engine.output_processor.request_states
        for engine_id, count in counts[0].items():
            if (state := states.get(engine_id)) is None:
                continue  # its answer is on its way, and has the version
            spans = self._earlier_spans[state.external_req_id]
            start = spans[-1].end if spans else 0
            if count > start:
                spans.append(
                    VersionSpan(policy_version=self.policy_version, start=start, end=count)
                )

    async def _run(self, token_ids: list[int], params: Any, request_id: str) -> Any:
        final: Any = None
        async for output in self._ask(token_ids, params, request_id):
            final = output
        return final

    async def _ask(self, token_ids: list[int], params: Any, request_id: str) -> AsyncGenerator[Any]:
        """Yield what the engine says of a request, to its end."""
        from vllm.inputs.engine import tokens_input

        prompt, adapter, reason = tokens_input(token_ids), self._held().request(), None
        async for output in self.engine.generate(prompt, params, request_id, lora_request=adapter):
            if (reason := output.outputs[0].finish_reason) == "abort":
                break
            yield output
        if reason in (None, "abort"):
            raise EngineDeadError(f"request {request_id} was cut off: {self.death or 'aborted'}")

    @asynccontextmanager
    async def _engine_errors(self) -> AsyncIterator[None]:
        """Turn what goes wrong in the engine into PolicyError."""
        if (reason := self.death) is not None:
            raise EngineDeadError(reason)
        try:
            yield
        except (PolicyError, WeightsRefusedError, asyncio.CancelledError):
            raise
        except Exception as exc:
            if self.engine is not None and self.engine.errored:
                await asyncio.to_thread(wait_for_exit, self.engine)
            reason = self.death
            if reason is None:
                raise PolicyError(f"the engine failed ({type(exc).__name__}: {exc})") from exc
            raise EngineDeadError(reason) from exc


def _params(*, in_parts: bool = False, **options: Any) -> Any:
    """Return vLLM's parameters of a request whose answer is wanted as tokens, whole or in parts."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if in_parts else RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
        **options,
    )
