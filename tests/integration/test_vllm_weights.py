"""New weights for the real engine: in the middle of its work, damaged, stale, late.

Its deaths are the last tests here: they end the engine that all tests share.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from agent_r1.learner.config import LearnerConfig
from agent_r1.rollout.watchdog import watch
from agent_r1.text.tokens import EngineDeadError, Generation
from agent_r1.weights.http import HttpFetcher
from agent_r1.weights.manifest import WeightsRefusedError
from agent_r1_proto.generation import GeneratedPart, GenerateRequest
from agent_r1_proto.registry import RolloutServer
from agent_r1_proto.weights import NewestVersion, WeightManifest
from tests.support.learner_fakes import eventually, http_transport
from tests.support.live_engine import STEPS_ARE_SLOW, LiveEngine, shared_engine
from tests.support.snapshot_files import (
    EMBEDDING,
    batch_logprobs,
    build_model,
    flip_byte,
    model_logprobs,
    own_tensors,
    write_snapshot,
)

pytestmark = pytest.mark.vllm

PARITY = 1e-4
CANARY = list(range(2, 60))
IN_FLIGHT = (2, 64) if STEPS_ARE_SLOW else (16, 400)
"""Requests that cross updates, and tokens of each."""
LOAD_TIMEOUT_S = 10.0
"""Of an engine that will not answer; its own start loads weights, and must keep it too."""


class NoServers:
    """A registry without any other server."""

    async def rollout_servers(self) -> list[RolloutServer]:
        return []


@pytest.fixture
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LiveEngine:
    return shared_engine(request.config, tmp_path_factory)


def canary_distance(engine: LiveEngine, version: int) -> float:
    """Return max |dlogp| between what the engine holds and the model of a version."""
    held = engine.run(engine.policy.score(CANARY))
    expected = model_logprobs(engine.models[version], CANARY)
    return max(abs(a - b) for a, b in zip(held, expected, strict=True))


async def other_tasks() -> set[asyncio.Task[Any]]:
    current = asyncio.current_task()
    return {task for task in asyncio.all_tasks() if task is not current}


def test_three_pushes_to_a_tied_model_keep_parity(engine: LiveEngine):
    assert engine.models[0].config.tie_word_embeddings
    assert canary_distance(engine, engine.policy.policy_version) <= PARITY
    for seed in (21, 22, 23):
        before = engine.policy.policy_version
        timing = engine.push(build_model(seed))
        version = engine.policy.policy_version
        assert version == max(engine.models)
        assert canary_distance(engine, version) <= PARITY
        # The models differ by far more than the bound, so parity is not agreement by chance.
        assert canary_distance(engine, before) > 100 * PARITY
        assert 0.0 < timing.pause_s < 30.0
        assert timing.fetch_s > 0.0


def test_weights_pulled_over_http_are_loaded(engine: LiveEngine, tmp_path: Path):
    manifest = engine.publish(build_model(seed=27))
    version = manifest.policy_version
    registry: Any = NoServers()

    async def pull_and_load() -> None:
        async with (
            http_transport(LearnerConfig()) as learner,
            HttpFetcher(
                registry,
                run_id="test",
                server_id="one",
                parent=tmp_path,
                timeout_s=60.0,
                token=None,
            ) as fetcher,
        ):
            location = (await learner.publish(version, Path(manifest.location).parent)).location
            newest = NewestVersion(policy_version=version, manifest_location=location)
            pulled = await fetcher.fetch(newest)
            assert Path(pulled.location).is_relative_to(tmp_path)
            await engine.policy.load_weights(pulled)

    before = engine.policy.policy_version
    engine.run(pull_and_load())
    assert engine.policy.policy_version == version
    assert canary_distance(engine, version) <= PARITY
    assert canary_distance(engine, before) > 100 * PARITY


def test_requests_in_flight_cross_updates_and_label_every_token(engine: LiveEngine):
    count, length = IN_FLIGHT
    prompts = [[number + 2, 50, 7] for number in range(count)]
    first = engine.policy.policy_version
    manifests = [engine.publish(build_model(seed)) for seed in (31, 32)]

    async def push_under_load() -> list[Generation]:
        policy = engine.policy
        running = [
            asyncio.ensure_future(
                policy.generate(
                    prompt,
                    max_tokens=length,
                    temperature=1.0,
                    seed=number,
                    request_id=f"running-{number}",
                )
            )
            for number, prompt in enumerate(prompts)
        ]
        for number, manifest in enumerate(manifests):
            # Ends when the others have sampled about 20 more tokens each.
            await policy.generate(
                [3, 4], max_tokens=20, temperature=1.0, seed=0, request_id=f"pace-{number}"
            )
            assert policy.num_in_flight == count
            await policy.load_weights(manifest)
            assert policy.num_in_flight == count
        return await asyncio.gather(*running)

    results = engine.run(push_under_load())
    sequences = [p + r.token_ids for p, r in zip(prompts, results, strict=True)]
    expected = {
        version: batch_logprobs(engine.models[version], sequences)
        for version in (first, first + 1, first + 2)
    }
    for number, result in enumerate(results):
        assert len(result.token_ids) == length
        assert [span.policy_version for span in result.version_spans] == list(expected)
        bounds = [span.start for span in result.version_spans] + [length]
        assert bounds == [0, *(span.end for span in result.version_spans)]
        for span in result.version_spans:
            # The labelled version's log-probability over the whole prefix, older tokens included.
            row = expected[span.policy_version][number][len(prompts[number]) - 1 :]
            sampled = result.logprobs[span.start : span.end]
            assert sampled == pytest.approx(row[span.start : span.end], abs=PARITY)


def flip(manifest: WeightManifest) -> WeightManifest:
    flip_byte(Path(manifest.location))
    return manifest


def truncate(manifest: WeightManifest) -> WeightManifest:
    path = Path(manifest.location)
    path.write_bytes(path.read_bytes()[:-100])
    return manifest


def remove(manifest: WeightManifest) -> WeightManifest:
    Path(manifest.location).unlink()
    return manifest


def drop_tensor(manifest: WeightManifest) -> WeightManifest:
    kept = [entry for entry in manifest.tensors if entry.name != "model.norm.weight"]
    return manifest.model_copy(update={"tensors": kept})


def reshape(manifest: WeightManifest) -> WeightManifest:
    entries = [
        entry.model_copy(update={"shape": [64, 300]}) if entry.name == EMBEDDING else entry
        for entry in manifest.tensors
    ]
    return manifest.model_copy(update={"tensors": entries})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip, "sha256"),
        (truncate, "bytes; its manifest says"),
        (remove, "cannot be read"),
        (drop_tensor, "which its manifest does not name|is missing"),
        (reshape, r"has shape \[64, 300\]"),
    ],
)
def test_damaged_weights_are_refused_without_a_pause_and_the_old_ones_serve_on(
    engine: LiveEngine,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[WeightManifest], WeightManifest],
    message: str,
):
    held = engine.policy.policy_version
    pauses: list[object] = []
    monkeypatch.setattr(engine.policy.engine.engine_core, "pause_scheduler_async", pauses.append)
    version = max(engine.models) + 1
    manifest = write_snapshot(
        engine.folder / f"damaged-{damage.__name__}", own_tensors(build_model(41)), version
    )
    with pytest.raises(WeightsRefusedError, match=message):
        engine.run(engine.policy.load_weights(damage(manifest)))
    assert pauses == []
    assert engine.policy.policy_version == held
    assert canary_distance(engine, held) <= PARITY


def test_stale_weights_under_a_new_version_are_caught(engine: LiveEngine):
    older = engine.publish(build_model(51))
    newer = engine.publish(build_model(52))
    stale = newer.model_copy(update={"location": older.location})
    with pytest.raises(WeightsRefusedError, match="sha256"):
        engine.run(engine.policy.load_weights(stale))
    # A publisher that wrote old data and described it truthfully: only the canary can tell.
    relabelled = older.model_copy(update={"policy_version": newer.policy_version})
    engine.run(engine.policy.load_weights(relabelled))
    assert engine.policy.policy_version == newer.policy_version
    assert canary_distance(engine, newer.policy_version) > 100 * PARITY
    engine.run(engine.policy.load_weights(newer))
    assert canary_distance(engine, newer.policy_version) <= PARITY


def test_a_server_many_versions_behind_loads_the_newest_at_once(engine: LiveEngine):
    held = engine.policy.policy_version
    manifests = [engine.publish(build_model(seed)) for seed in (61, 62, 63)]
    newest = manifests[-1].policy_version
    assert newest > held + 1
    engine.run(engine.policy.load_weights(manifests[-1]))
    assert engine.policy.policy_version == newest
    assert canary_distance(engine, newest) <= PARITY


def test_a_file_removed_while_loading_does_no_harm(engine: LiveEngine):
    manifest = engine.publish(build_model(71))
    policy = engine.policy
    pause = policy.engine.engine_core.pause_scheduler_async

    async def remove_then_pause(**options: object) -> None:
        # The learner keeps the newest two only; it may remove this one from here on.
        await asyncio.to_thread(Path(manifest.location).unlink)
        await pause(**options)

    policy.engine.engine_core.pause_scheduler_async = remove_then_pause
    try:
        engine.run(policy.load_weights(manifest))
    finally:
        policy.engine.engine_core.pause_scheduler_async = pause
    assert canary_distance(engine, manifest.policy_version) <= PARITY


def test_a_caller_that_gives_up_leaves_the_load_complete(engine: LiveEngine):
    manifest = engine.publish(build_model(81))

    async def give_up() -> None:
        policy = engine.policy
        loading = asyncio.ensure_future(policy.load_weights(manifest))
        core = policy.engine.engine_core
        pause = core.pause_scheduler_async

        async def cancel_then_pause(**options: object) -> None:
            loading.cancel()
            await pause(**options)

        core.pause_scheduler_async = cancel_then_pause
        try:
            with pytest.raises(asyncio.CancelledError):
                await loading
        finally:
            core.pause_scheduler_async = pause
        # Loads are served one at a time: this one waits for the one that was given up.
        await policy.load_weights(manifest)

    engine.run(give_up())
    assert engine.policy.policy_version == manifest.policy_version
    assert canary_distance(engine, manifest.policy_version) <= PARITY


def test_a_load_that_fails_half_way_ends_the_sampler_with_the_reason(
    engine: LiveEngine, monkeypatch: pytest.MonkeyPatch
):
    manifest = engine.publish(build_model(91))
    policy = engine.policy

    call = policy.engine.collective_rpc

    async def fail_to_load(method: str, *arguments: Any, **options: Any) -> Any:
        if method == "load_opened_files":
            raise RuntimeError("no space left")
        return await call(method, *arguments, **options)

    async def load_with_a_request_in_flight() -> None:
        running = asyncio.ensure_future(
            policy.generate([3], max_tokens=500, temperature=1.0, seed=0, request_id="running")
        )
        await policy.generate([3], max_tokens=3, temperature=1.0, seed=0, request_id="short")
        with pytest.raises(EngineDeadError, match=r"half-way .*no space left"):
            await policy.load_weights(manifest)
        with pytest.raises(EngineDeadError, match=r"running was cut off: .*half-way"):
            await running

    monkeypatch.setattr(policy.engine, "collective_rpc", fail_to_load)
    engine.run(load_with_a_request_in_flight())
    assert "start the rollout service again" in str(policy.death)
    engine.run(policy.stop())


def test_a_killed_engine_says_what_to_lower_and_refuses_more_work(engine: LiveEngine):
    async def kill() -> None:
        policy = engine.policy
        running = asyncio.ensure_future(
            policy.generate([3], max_tokens=500, temperature=1.0, seed=0, request_id="running")
        )
        await policy.generate([3], max_tokens=3, temperature=1.0, seed=0, request_id="short")
        manager = policy.engine.engine_core.resources.engine_manager
        os.kill(manager.processes[0].pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"signal 9.*rollout\.max_concurrent"):
            await running

    engine.run(kill())
    assert "rollout.kv_cache_gib" in str(engine.policy.death)
    with pytest.raises(EngineDeadError, match="signal 9"):
        engine.run(engine.policy.score(CANARY))
    engine.run(engine.policy.stop())


@pytest.mark.slow
def test_an_engine_that_hangs_when_new_weights_come_is_killed_as_an_idle_one_is(engine: LiveEngine):
    policy = engine.policy
    manifest = engine.publish(build_model(101))
    (process,) = policy.engine.engine_core.resources.engine_manager.processes
    os.kill(process.pid, signal.SIGSTOP)
    loading = engine.submit(policy.load_weights(manifest))  # its own limit is minutes
    with pytest.raises(EngineDeadError, match="gave no sign of work for 2 s"):
        engine.run(watch(policy, 2.0))
    loading.cancel()
    engine.run(policy.stop())
    assert engine.run(other_tasks()) == set()  # the load has ended with the sampler


@pytest.mark.slow
def test_an_engine_that_is_stopped_while_it_loads_is_killed_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    engine = LiveEngine(tmp_path, weight_load_timeout_s=LOAD_TIMEOUT_S)
    policy = engine.policy
    manifest = engine.publish(build_model(101))
    (process,) = policy.engine.engine_core.resources.engine_manager.processes
    pause = policy.engine.engine_core.pause_scheduler_async

    async def stop_then_pause(**options: object) -> None:
        os.kill(process.pid, signal.SIGSTOP)
        await pause(**options)

    monkeypatch.setattr(policy.engine.engine_core, "pause_scheduler_async", stop_then_pause)
    with pytest.raises(EngineDeadError, match=r"half-way \(TimeoutError"):
        engine.run(policy.load_weights(manifest))
    assert not policy.is_loading
    engine.run(eventually(lambda: process.exitcode is not None))  # vLLM waits for it too
    assert process.exitcode == -signal.SIGKILL
    with pytest.raises(EngineDeadError):
        engine.run(policy.probe())
    engine.close()


def test_an_answer_in_parts_is_the_whole_one_and_every_part_has_its_versions(engine: LiveEngine):
    prompt, policy, length = [9, 50, 7], engine.policy, 40
    first = policy.policy_version

    def asked(name: str) -> GenerateRequest:
        return GenerateRequest(request_id=name, token_ids=prompt, max_tokens=length, seed=11)

    async def whole() -> Generation:
        return await policy.generate(
            prompt, max_tokens=length, temperature=1.0, seed=11, request_id="whole"
        )

    async def in_parts(manifest: WeightManifest | None) -> list[GeneratedPart]:
        parts: list[GeneratedPart] = []
        async with aclosing(policy.stream(asked("parts"))) as stream:
            async for part in stream:
                parts.append(part)
                if manifest is not None and len(parts) == 5:
                    await policy.load_weights(manifest)
        return parts

    async def leave() -> None:
        async with aclosing(policy.stream(asked("left"))) as stream:
            await anext(stream)
            with pytest.raises(ValueError, match="in flight already"):
                policy.stream(asked("left"))
        states = policy.engine.output_processor.request_states
        await eventually(lambda: not policy.num_in_flight and not states)

    expected, parts = engine.run(whole()), engine.run(in_parts(None))
    assert len(parts) > 5  # they came while it was sampled
    assert [token for part in parts for token in part.token_ids] == expected.token_ids
    assert [one for part in parts for one in part.logprobs] == expected.logprobs
    assert {part.finish_reason for part in parts[:-1]} == {None}
    assert parts[-1].finish_reason == expected.finish_reason

    crossing = engine.run(in_parts(engine.publish(build_model(41))))
    spans = [span for part in crossing for span in part.version_spans]
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert sorted({span.policy_version for span in spans}) == [first, first + 1]
    tokens = [token for part in crossing for token in part.token_ids]
    logprobs = [one for part in crossing for one in part.logprobs]
    for span in spans:
        model = engine.models[span.policy_version]
        row = batch_logprobs(model, [prompt + tokens])[0][len(prompt) - 1 :]
        sampled = logprobs[span.start : span.end]
        assert sampled == pytest.approx(row[span.start : span.end], abs=PARITY)
    engine.run(leave())
