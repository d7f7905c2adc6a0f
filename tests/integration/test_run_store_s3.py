"""Checkpoints in S3: a stand-in (moto) behind a socket, the real client, and the learner's loop."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agent_r1.learner.checkpoints import object_store
from agent_r1.learner.checkpoints.ledger import LedgerNumbers
from agent_r1.learner.checkpoints.object_store import ObjectStore, StoreError
from agent_r1.learner.checkpoints.ownership import TakenOverError
from agent_r1.learner.checkpoints.run_store import RunStore
from agent_r1.learner.train import Learner
from agent_r1_proto.streams import Broker
from tests.support.learner_fakes import (
    FakeEngine,
    FakeServices,
    eventually,
    samples_of,
    training_spec,
    write_tasks,
)
from tests.support.s3_server import (
    ACCESS_KEY,
    BUCKET,
    SECRET_KEY,
    S3Server,
    s3_server,
    unload_moto,
)

URL = f"s3://{BUCKET}/team"


@pytest.fixture(scope="module", autouse=True)
def _moto_is_only_here() -> Iterator[None]:
    yield
    unload_moto()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with s3_server() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server


def machine(tmp_path: Path, name: str) -> Path:
    """Return a run folder of its own; the tasks are the same on every machine."""
    folder = tmp_path / name / "run"
    write_tasks(folder.with_name("run-data") / "train.jsonl", 6)
    return folder


@pytest.mark.redis
async def test_a_run_goes_on_from_s3_on_a_machine_with_an_empty_folder(
    tmp_path: Path,
    redis_url: str,
    run_id: str,
    s3: S3Server,
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.DEBUG)
    options = {"checkpoint_url": URL, "checkpoint_every": 1, "keep_last": 1}
    first = FakeEngine()
    spec = training_spec(machine(tmp_path, "a"), redis_url, run_id, **options)
    learner = Learner(spec, first)
    async with (
        await Broker.connect(redis_url, run_id) as broker,
        FakeServices(broker).running() as servers,
    ):
        run = asyncio.create_task(learner.run())
        await eventually(lambda: bool(servers.loads), run)
        learner.request_stop("SIGTERM")
        await asyncio.wait_for(run, 60)
    stopped_at = first.steps
    assert 1 <= stopped_at < 3

    second = FakeEngine()
    folder = machine(tmp_path, "b")
    spec = training_spec(folder, redis_url, run_id, resume=True, **options)
    async with (
        await Broker.connect(redis_url, run_id) as broker,
        FakeServices(broker).running() as services,
    ):
        await asyncio.wait_for(Learner(spec, second).run(), 60)
    # Each sample of the three batches (6 groups of 2) was trained once, here or there.
    assert second.trained == samples_of(range(6))
    assert first.trained == second.trained[: len(first.trained)]
    assert second.steps == 3
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["starts"]) == ("finished", 3, 2)
    assert min(services.loads) > max(servers.loads)  # no version is used twice
    stored = s3.objects(f"team/{run_id}/")
    states = [name for name in stored if name.endswith("learner.json")]
    assert states == [f"team/{run_id}/000002/step_000003/learner.json"]
    # The claims were conditional.
    claims = [r["path"] for r in s3.requests if r["if_none_match"] == "*" and "claim" in r["path"]]
    assert claims == [f"/{BUCKET}/team/{run_id}/00000{start}/claim.json" for start in (1, 2)]
    config = (folder / "config.json").read_text() if (folder / "config.json").exists() else ""
    for secret in (ACCESS_KEY, SECRET_KEY):
        assert secret not in caplog.text
        assert secret not in config
        assert not [name for name, content in stored.items() if secret.encode() in content]


@pytest.mark.redis
async def test_a_run_whose_store_stays_away_ends_with_the_reason(
    tmp_path: Path, redis_url: str, run_id: str, s3: S3Server
):
    engine = FakeEngine()
    folder = machine(tmp_path, "a")
    options = {"checkpoint_url": URL, "checkpoint_every": 1, "checkpoint_retry_s": 1.0}
    spec = training_spec(folder, redis_url, run_id, **options)

    async with await Broker.connect(redis_url, run_id) as broker, FakeServices(broker).running():
        run = asyncio.create_task(Learner(spec, engine).run())
        await eventually(lambda: engine.steps >= 1, run)
        s3.failure = ("503 Service Unavailable", "SlowDown")
        with pytest.raises(StoreError, match=r"s3://runs/team/\S+ cannot be used: SlowDown; check"):
            await asyncio.wait_for(run, 60)
        assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
        s3.failure = None
        spec = training_spec(folder, redis_url, run_id, resume=True, **options)
        await asyncio.wait_for(Learner(spec, FakeEngine()).run(), 60)
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"


def claim(tmp_path: Path, name: str) -> RunStore:
    """Return the store as a new start on another machine sees it."""
    store = RunStore(f"{URL}/x", tmp_path / name, resume=True, retry_s=1.0)
    store.claim(LedgerNumbers())
    return store


def test_of_claims_at_one_moment_exactly_one_succeeds(tmp_path: Path, s3: S3Server):
    store = ObjectStore(f"{URL}/x", retry_s=1.0)
    with ThreadPoolExecutor(8) as threads:
        won = list(threads.map(lambda i: store.create("000001/claim.json", b"%d" % i), range(8)))
    assert won.count(True) == 1
    assert store.read("000001/claim.json") == b"%d" % won.index(True)


def test_a_replaced_learner_writes_no_more(tmp_path: Path, s3: S3Server):
    zombie, successor = claim(tmp_path, "a"), claim(tmp_path, "b")
    before = s3.objects()
    checkpoint = tmp_path / "step_000001"
    checkpoint.mkdir()
    (checkpoint / "learner.json").write_text("{}")
    with pytest.raises(TakenOverError, match=r"learner start 2 has taken over s3://runs/team/x"):
        zombie.save(checkpoint, 1, {}, lambda steps, _: set(steps))
    assert s3.objects() == before
    successor.save(checkpoint, 1, {}, lambda steps, _: set(steps))
    assert "team/x/000002/step_000001/learner.json" in s3.objects()


def test_a_corrupted_object_is_found_out(tmp_path: Path, s3: S3Server):
    from agent_r1.learner.checkpoints.run_checkpoint import Checkpoints, LearnerState

    store = claim(tmp_path, "a")
    checkpoints = Checkpoints(tmp_path / "a", keep_last=1, keep_best=0, store=store)
    checkpoints.save(FakeEngine(), LearnerState(step=1))
    name = "team/x/000001/step_000001/model/config.json"
    ObjectStore(f"s3://{BUCKET}", retry_s=1.0).write(name, s3.objects()[name][::-1])
    there = Checkpoints(tmp_path / "b", keep_last=1, keep_best=0, store=claim(tmp_path, "b"))
    with pytest.raises(
        ValueError, match=rf"s3://{BUCKET}/{name} is corrupted: its checksum differs"
    ):
        there.load(FakeEngine())
    assert there.steps() == []


def test_a_large_file_travels_in_parts_and_comes_back_whole(
    tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
):
    part = 5 * 1024 * 1024  # the least that S3 allows
    monkeypatch.setattr(object_store, "PART_BYTES", part)
    content = os.urandom(2 * part + 1)
    (tmp_path / "file").write_bytes(content)
    store = ObjectStore(f"{URL}/x", retry_s=1.0)
    store.upload("big", tmp_path / "file")
    assert store.sizes("") == {"big": len(content)}
    store.download("big", len(content), tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == content
    assert len([r for r in s3.requests if r["method"] == "PUT"]) == 3
    assert len([r for r in s3.requests if r["method"] == "GET" and r["path"].endswith("big")]) == 3


def test_a_store_that_is_away_for_a_while_is_asked_again(s3: S3Server):
    store = ObjectStore(f"{URL}/x", retry_s=60.0)
    s3.failure, s3.failures_left = ("503 Service Unavailable", "SlowDown"), 3
    store.write("a", b"1")
    assert s3.failures_left == 0
    assert store.read("a") == b"1"


def test_a_create_whose_answer_was_lost_finds_its_own_work(s3: S3Server):
    store = ObjectStore(f"{URL}/x", retry_s=1.0)
    assert store.create("claim", b"mine")
    assert store.create("claim", b"mine")
    assert not store.create("claim", b"another's")


def test_a_server_without_conditional_writes_is_refused(tmp_path: Path, s3: S3Server):
    s3.ignores_conditions = True
    with pytest.raises(StoreError, match=r"ignores conditional writes .*use another store"):
        claim(tmp_path, "a")
    assert s3.objects() == {}


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (("403 Forbidden", "SignatureDoesNotMatch"), r"refuses the credentials \(Signature.*check"),
        (
            ("403 Forbidden", "AccessDenied"),
            r"refuses the credentials \(AccessDenied\); check AWS_",
        ),
        (("404 Not Found", "NoSuchBucket"), r"there is no bucket runs; create it, or correct"),
        (("500 Internal Server Error", "InternalError"), r"cannot be used: InternalError; check"),
    ],
)
def test_what_is_wrong_with_the_store_is_one_line(
    s3: S3Server, tmp_path: Path, failure: tuple[str, str], expected: str
):
    s3.failure = failure
    store = RunStore(f"{URL}/x", tmp_path, resume=True, retry_s=1.0)
    for ask in (store.require_usable, store.config, lambda: store.claim(LedgerNumbers())):
        with pytest.raises(StoreError, match=rf"^s3://runs/team/x:? {expected}") as error:
            ask()
        assert "\n" not in str(error.value)
        assert SECRET_KEY not in str(error.value)


def test_a_bucket_that_does_not_exist_is_named(s3: S3Server, tmp_path: Path):
    store = RunStore("s3://elsewhere/x", tmp_path, resume=False, retry_s=1.0)
    with pytest.raises(
        StoreError, match=r"^s3://elsewhere/x: there is no bucket elsewhere; create"
    ):
        store.require_usable()


def test_a_server_that_does_not_answer_is_named_soon(
    tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # discard: nobody listens
    store = RunStore(f"{URL}/x", tmp_path, resume=False, retry_s=1.0)
    started = time.monotonic()
    with pytest.raises(
        StoreError,
        match=r"used: Error performing GET http:.* check the network, .*AWS_ENDPOINT_URL",
    ):
        store.require_usable()
    assert time.monotonic() - started < 60


def test_missing_credentials_are_named(
    tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    # No machine's role: what would tell it answers with an error.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"{s3.endpoint}/nothing")
    s3.failure = ("404 Not Found", "")
    store = RunStore(f"{URL}/x", tmp_path, resume=False, retry_s=1.0)
    with pytest.raises(StoreError, match=r"needs credentials, and there are none; set AWS_ACCESS"):
        store.require_usable()
