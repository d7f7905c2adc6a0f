"""The rollout server: which weights it loads, and when it samples with them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re

import httpx
import numpy as np
import pytest

from agent_r1.learner.config import LearnerConfig
from agent_r1_proto.weights import (
    CanaryReply,
    CanaryRequest,
    Invitation,
    LoadReply,
    LoadRequest,
    NewestVersion,
)
from tests.support.fakes import FakePolicy
from tests.support.learner_fakes import http_transport
from tests.support.rollout_bench import (
    ANSWER,
    WAIT_S,
    Bench,
    task,
    until,
    until_true,
)
from tests.support.snapshot_files import write_snapshot

pytestmark = pytest.mark.redis


async def test_no_sample_is_taken_before_the_newest_version_is_known(bench: Bench):
    await bench.broker.redis.delete(bench.broker.keys.newest_version)
    policy = bench.policy(ANSWER)
    async with bench.server(policy):
        await bench.submit(task(bench))
        async with httpx.AsyncClient() as client:
            for _ in range(3):
                assert (await client.get(f"{bench.url}/healthz")).json()["in_flight"] == 0
                await asyncio.sleep(0.1)
        assert policy.requests == []
        await bench.registry.set_newest_version(NewestVersion(policy_version=0))
        await bench.trajectories(1)


async def test_a_server_is_ready_while_it_holds_the_newest_version(bench: Bench):
    async def ready(client: httpx.AsyncClient, status: int) -> dict[str, object]:
        async def is_so() -> bool:
            return (await client.get(f"{bench.url}/readyz")).status_code == status

        await until_true(is_so)
        return (await client.get(f"{bench.url}/readyz")).json()

    await bench.broker.redis.delete(bench.broker.keys.newest_version)
    async with bench.server(bench.policy(ANSWER)), httpx.AsyncClient() as client:
        nothing = {"ready": False, "policy_version": 0, "newest_version": None}
        assert await ready(client, 503) == nothing
        await bench.registry.set_newest_version(NewestVersion(policy_version=0))
        assert await ready(client, 200) == nothing | {"ready": True, "newest_version": 0}
        location = bench.folder / "missing.json"
        newest = NewestVersion(policy_version=4, manifest_location=str(location))
        await bench.registry.set_newest_version(newest)
        assert await ready(client, 503) == nothing | {"newest_version": 4}
        later = NewestVersion(policy_version=5, manifest_location=bench.manifest(5))
        await bench.registry.set_newest_version(later)
        held = {"ready": True, "policy_version": 5, "newest_version": 5}
        assert await ready(client, 200) == held


async def test_server_that_is_behind_fetches_the_newest_version_by_itself(bench: Bench):
    policy = bench.policy(ANSWER)
    newest = NewestVersion(policy_version=3, manifest_location=bench.manifest(3))
    await bench.registry.set_newest_version(newest)
    async with bench.server(policy):
        await bench.submit(task(bench))
        (done,) = await bench.trajectories(1)

        async def is_announced() -> bool:
            return (await bench.registry.rollout_servers())[0].policy_version == 3

        await until_true(is_announced)
    assert done.policy_versions() == [3]
    assert policy.loaded == [3]


async def test_a_server_pulls_the_newest_version_over_http_and_serves_it_to_others(bench: Bench):
    written = write_snapshot(bench.folder / "v3", {"weight": np.ones(9, np.float32)}, 3, {})
    of_run = written.model_copy(update={"run_id": bench.run_id})
    (bench.folder / "v3" / "manifest.json").write_text(of_run.model_dump_json())
    policy = FakePolicy([[bench.end_id]], eos_token_ids=[bench.end_id])
    options = {"weights_dir": bench.folder / "pulled"}
    async with (
        http_transport(LearnerConfig()) as learner,
        bench.server(policy, transport="http", rollout=options),
    ):
        location = (await learner.publish(3, bench.folder / "v3")).location
        newest = NewestVersion(policy_version=3, manifest_location=location)
        await bench.registry.set_newest_version(newest)
        await until(lambda: policy.loaded == [3])
        async with httpx.AsyncClient(base_url=bench.url) as client:
            part = await client.get(
                "/weights/files/3/model.safetensors", headers={"range": "bytes=0-7"}
            )
            assert (part.status_code, len(part.content)) == (206, 8)
            path = str(bench.folder / "v3" / "manifest.json")
            by_path = LoadRequest(manifest_location=path, policy_version=3)
            refused = await client.post("/weights/load", json=by_path.model_dump())
            assert (refused.status_code, "learner.transport" in refused.text) == (422, True)
    assert list((bench.folder / "pulled").iterdir()) == []


async def test_a_load_that_nobody_sends_is_an_outage_and_no_fault_of_the_version(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agent_r1.weights.collective.MEET_S", 0.1)
    invitation = Invitation(host="127.0.0.1", port=9, group="g", size_bytes=10, bucket_bytes=10)
    location = "collective://127.0.0.1:9/v1"
    request = LoadRequest(manifest_location=location, policy_version=1, invitation=invitation)
    newest = NewestVersion(policy_version=1, manifest_location=location)
    async with (
        bench.server(bench.policy(ANSWER), transport="collective"),
        httpx.AsyncClient(base_url=bench.url, timeout=60.0) as client,
    ):
        await bench.registry.set_newest_version(newest)
        answer = await client.post("/weights/load", json=request.model_dump())
    assert (answer.status_code, "version 1" in answer.text) == (503, True)


async def test_sample_read_while_a_push_is_announced_waits_for_the_new_weights(bench: Bench):
    # The server is idle in its read, holding version 0, when the learner publishes version 1 and
    # then issues a sample: that sample must not see version 0.
    policy = bench.policy(ANSWER)
    async with bench.server(policy):
        await bench.submit(task(bench, group_id=0))
        (first,) = await bench.trajectories(1)
        newest = NewestVersion(policy_version=1, manifest_location=bench.manifest(1))
        await bench.registry.set_newest_version(newest)
        await bench.submit(task(bench, group_id=1))
        (second,) = await bench.trajectories(1)
    assert (first.policy_versions(), second.policy_versions()) == ([0], [1])


async def test_a_server_that_falls_behind_leaves_the_samples_it_has_read_to_others(bench: Bench):
    # It is idle in its read when a version is published that it cannot load, and a sample issued.
    behind, current = bench.policy(ANSWER), bench.policy(ANSWER)
    async with bench.server(behind):
        await bench.submit(task(bench, group_id=0))
        await bench.trajectories(1)
        behind.refuse_weights = "the pull takes too long"
        newest = NewestVersion(policy_version=1, manifest_location=bench.manifest(1))
        await bench.registry.set_newest_version(newest)
        await bench.submit(task(bench, group_id=1))
        async with bench.server(current):
            (second,) = await bench.trajectories(1)
    assert second.policy_versions() == [1]
    assert current.loaded == [1]


async def test_server_that_cannot_load_the_newest_version_takes_no_samples(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agent_r1.attempts.worker.CATCH_UP_RETRY_S", 0.05)
    policy = bench.policy(ANSWER)
    policy.refuse_weights = "checksum of model.norm.weight does not fit"
    newest = NewestVersion(policy_version=1, manifest_location=bench.manifest(1))
    await bench.registry.set_newest_version(newest)
    async with bench.server(policy):
        await bench.submit(task(bench))
        await until(lambda: sum("stays behind" in r.message for r in caplog.records) >= 2)
        assert policy.requests == []
        policy.refuse_weights = None
        (done,) = await bench.trajectories(1)
    assert done.policy_versions() == [1]


async def post_load(bench: Bench, version: int, location: str) -> httpx.Response:
    request = LoadRequest(manifest_location=location, policy_version=version)
    async with httpx.AsyncClient(base_url=bench.url, timeout=WAIT_S) as client:
        return await client.post("/weights/load", json=request.model_dump())


async def test_weight_routes(bench: Bench):
    policy = bench.policy(ANSWER)
    async with bench.server(policy), httpx.AsyncClient(base_url=bench.url) as client:
        loaded = await post_load(bench, 2, await bench.publish(2))
        reply = LoadReply.model_validate(loaded.json())
        assert (reply.policy_version, reply.pause_s) == (2, 0.125)
        assert reply.fetch_s > 0.25  # the policy's, and the time to read the manifest
        again = await post_load(bench, 2, bench.manifest(2))
        assert (again.json(), policy.loaded) == (loaded.json(), [2])
        (bench.folder / "v3.json").unlink(missing_ok=True)
        await bench.registry.set_newest_version(
            NewestVersion(policy_version=3, manifest_location=str(bench.folder / "v3.json"))
        )
        missing = await post_load(bench, 3, str(bench.folder / "v3.json"))
        assert (missing.status_code, "cannot be read" in missing.text) == (422, True)
        location = bench.manifest(3, named=4)
        await bench.registry.set_newest_version(
            NewestVersion(policy_version=4, manifest_location=location)
        )
        mislabelled = await post_load(bench, 4, location)
        assert (mislabelled.status_code, "of another version" in mislabelled.text) == (422, True)
        foreign = await post_load(bench, 5, await bench.publish(5, run_id="other"))
        assert (foreign.status_code, "of another run" in foreign.text) == (422, True)
        policy.refuse_weights = "checksum"
        refused = await post_load(bench, 6, await bench.publish(6))
        assert (refused.status_code, refused.json()) == (422, {"detail": "checksum"})
        unknown = await client.post("/weights/load", json={"version": 1})
        assert unknown.status_code == 422
        assert policy.loaded == [2]

        request = CanaryRequest(token_ids=[5, 6, 7])
        canary = await client.post("/weights/canary", json=request.model_dump())
        # The scripted policy scores a token as minus its id.
        assert CanaryReply.model_validate(canary.json()) == CanaryReply(
            policy_version=2, logprobs=[-6.0, -7.0]
        )


async def test_a_push_that_comes_late_brings_the_server_to_the_newest_version(
    bench: Bench, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, logger="agent_r1.rollout.weight_versions")
    policy = bench.policy(ANSWER)
    async with bench.server(policy):
        deleted = bench.manifest(1)
        await bench.publish(3)
        (bench.folder / "v1.json").unlink()
        late = await post_load(bench, 1, deleted)
        later = await post_load(bench, 2, deleted)
    assert (late.status_code, late.json()["policy_version"]) == (200, 3)
    assert (later.status_code, later.json()["policy_version"]) == (200, 3)
    assert policy.loaded == [3]
    said = [r for r in caplog.records if r.name == "agent_r1.rollout.weight_versions"]
    assert [(r.levelname, "late" in r.message) for r in said] == [("INFO", True)]


async def test_only_versions_that_the_registry_knows_are_loaded(bench: Bench):
    policy = bench.policy(ANSWER)
    async with bench.server(policy):
        invented = await post_load(bench, 100000, bench.manifest(100000))
        await post_load(bench, 2, await bench.publish(2))
        await bench.publish(1)  # a learner that has lost its ledger
        behind = await post_load(bench, 1, bench.manifest(1))
    assert (invented.status_code, "is not published" in invented.text) == (422, True)
    assert (behind.status_code, "older than 2" in behind.text) == (409, True)
    assert policy.loaded == [2]


SECRET = "hunter2-hunter2-hunter2"


async def test_a_load_reads_nothing_outside_the_weights_folder_and_quotes_nothing(
    bench: Bench, tmp_path_factory: pytest.TempPathFactory
):
    # Each of these is what the registry itself calls the newest version: the worst case.
    outside = tmp_path_factory.mktemp("outside")
    (outside / "launcher.json").write_text(json.dumps({"password": SECRET, SECRET: 1}))
    inside = bench.folder / "notes.json"
    inside.write_text(json.dumps({"run_id": SECRET, "tensors": [{"name": SECRET}], SECRET: 1}))
    (bench.folder / "link.json").symlink_to(outside / "launcher.json")
    os.mkfifo(bench.folder / "pipe.json")
    (bench.folder / "large.json").touch()
    os.truncate(bench.folder / "large.json", 2**31)  # sparse: takes no room on the disk
    refusals = {
        "/dev/zero": "does not lie in",
        str(outside / "launcher.json"): "does not lie in",
        str(bench.folder / ".." / outside.name / "launcher.json"): "does not lie in",
        str(bench.folder / "link.json"): "does not lie in",
        "a\0b": "not a usable path",
        str(inside): "does not parse",
        str(bench.folder / "pipe.json"): "not a regular file",
        str(bench.folder): "not a regular file|cannot be read",
        str(bench.folder / "large.json"): "a manifest has at most",
    }
    policy = bench.policy(ANSWER)
    async with bench.server(policy):
        for version, (location, reason) in enumerate(refusals.items(), start=1):
            await bench.registry.set_newest_version(
                NewestVersion(policy_version=version, manifest_location=location)
            )
            answer = await asyncio.wait_for(post_load(bench, version, location), 10.0)
            assert answer.status_code == 422, location
            assert re.search(reason, answer.text), (location, answer.text)
            assert SECRET not in answer.text
        assert policy.loaded == []
        # A request for another place is refused although the registry names a good one, which the
        # server may have loaded by itself meanwhile.
        good = await bench.publish(50)
        answer = await post_load(bench, 50, "/etc/passwd")
        assert answer.status_code == 422
        assert (await post_load(bench, 50, good)).status_code == 200
        assert policy.loaded == [50]
