"""The run store: what a later start finds there, and what an earlier one can do no more.

The store is a folder, through the same client as S3 (tests/integration/test_run_store_s3.py).
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agent_r1.learner.checkpoints.ledger import Ledger
from agent_r1.learner.checkpoints.object_store import ObjectStore, StoreError
from agent_r1.learner.checkpoints.ownership import TakenOverError
from agent_r1.learner.checkpoints.run_checkpoint import Checkpoints, LearnerState
from agent_r1.learner.checkpoints.run_store import RunStore
from agent_r1.learner.config import LearnerConfig
from tests.support.learner_fakes import FakeEngine


class Start:
    """One start of the learner on a machine of its own: its run folder is its own."""

    def __init__(self, url: str, folder: Path, *, resume: bool = True, keep_last: int = 2) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.store = RunStore(url, folder, resume=resume, retry_s=1.0)
        self.ledger = Ledger(folder, self.store)
        self.incarnation = self.ledger.next_incarnation()
        self.checkpoints = Checkpoints(folder, keep_last=keep_last, keep_best=0, store=self.store)

    def load(self) -> int | None:
        """Return the step that this start goes on from."""
        engine = FakeEngine()
        state = self.checkpoints.load(engine)
        assert state is None or engine.steps == state.step
        return None if state is None else state.step

    def save(self, step: int, **state: object) -> None:
        engine = FakeEngine()
        engine.steps = step
        self.checkpoints.save(engine, LearnerState(step=step, **state))  # pyright: ignore[reportArgumentType]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store" / "run"


@pytest.fixture
def url(root: Path) -> str:
    return f"file://{root}"


def test_another_machine_goes_on_from_the_newest_checkpoint(tmp_path: Path, url: str):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text('{"run": {}}')
    first = Start(url, tmp_path / "a", resume=False)
    assert first.load() is None
    assert [first.ledger.next_policy_version() for _ in range(3)] == [1, 2, 3]
    first.save(1)
    first.save(2, next_group_id=7)
    assert RunStore(url, tmp_path, resume=True, retry_s=1.0).config() == b'{"run": {}}'
    second = Start(url, tmp_path / "b")
    assert second.incarnation == 2
    assert second.load() == 2
    state = second.checkpoints.load(FakeEngine())
    assert state is not None
    assert state.next_group_id == 7
    assert second.ledger.next_policy_version() == 4


def test_saving_a_step_again_renews_its_state(tmp_path: Path, url: str):
    first = Start(url, tmp_path / "a", resume=False)
    first.save(1, wall_s=1.0)
    first.save(1, wall_s=2.0)
    second = Start(url, tmp_path / "b")
    state = second.checkpoints.load(FakeEngine())
    assert state is not None
    assert state.wall_s == 2.0


def test_old_checkpoints_are_deleted_whoever_wrote_them(tmp_path: Path, url: str, root: Path):
    first = Start(url, tmp_path / "a", resume=False, keep_last=2)
    for step in (1, 2, 3):
        first.save(step)
    second = Start(url, tmp_path / "b", keep_last=2)
    second.load()
    second.save(4)
    found = sorted(str(path.parent.relative_to(root)) for path in root.rglob("learner.json"))
    assert found == ["000001/step_000003", "000002/step_000004"]


def test_a_torn_upload_is_never_taken_as_complete_and_costs_no_older_one(
    tmp_path: Path, url: str, root: Path, monkeypatch: pytest.MonkeyPatch
):
    first = Start(url, tmp_path / "a", resume=False, keep_last=1)
    first.save(1)
    upload, uploaded = ObjectStore.upload, list[str]()

    def cut(self: ObjectStore, path: str, file: Path) -> None:
        if len(uploaded) == 2:
            raise StoreError("the network is gone")
        uploaded.append(path)
        upload(self, path, file)

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "upload", cut)
        with pytest.raises(StoreError, match="the network is gone"):
            first.save(2)
    assert all((root / path).is_file() for path in uploaded)
    second = Start(url, tmp_path / "b")
    assert second.load() == 1
    assert not [path for path in uploaded if (root / path).exists()]  # what was torn is tidied up


def test_the_folder_of_the_last_start_keeps_a_checkpoint_that_was_not_uploaded(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
):
    first = Start(url, tmp_path / "a", resume=False)
    first.save(1)

    def gone(self: ObjectStore, path: str, file: Path) -> None:
        raise StoreError("the network is gone")

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "upload", gone)
        with pytest.raises(StoreError):
            first.save(2)
    again = Start(url, tmp_path / "a")
    assert again.load() == 2
    again.save(2)  # as at its end, before another step
    assert Start(url, tmp_path / "b").load() == 2


def test_a_folder_that_another_machine_has_left_behind_is_brought_up_to_date(
    tmp_path: Path, url: str
):
    first = Start(url, tmp_path / "a", resume=False)
    first.save(1)
    second = Start(url, tmp_path / "b")
    second.load()
    # The first goes on without the store for a while: this is not part of the run.
    Checkpoints(tmp_path / "a", keep_last=2, keep_best=0).save(FakeEngine(), LearnerState(step=5))
    second.save(2)
    third = Start(url, tmp_path / "a")
    assert third.load() == 2
    assert third.checkpoints.steps() == [1, 2]


@pytest.mark.parametrize("damage", ["flipped", "shorter", "missing"])
def test_a_damaged_object_is_named_and_nothing_of_it_is_kept(
    tmp_path: Path, url: str, root: Path, damage: str
):
    first = Start(url, tmp_path / "a", resume=False)
    first.save(1)
    first.save(2)
    file = root / "000001" / "step_000002" / "model" / "config.json"
    content = bytearray(file.read_bytes())
    if damage == "flipped":
        content[0] ^= 1
        file.write_bytes(content)
    elif damage == "shorter":
        file.write_bytes(content[:-1])
    else:
        file.unlink()
    second = Start(url, tmp_path / "b")
    reason = rf"checkpoint {url}/000001/step_000002 cannot be restored: .*model/config\.json"
    with pytest.raises(
        ValueError, match=rf"{reason}.*continue from step 1 instead, delete what is there"
    ):
        second.load()
    assert second.checkpoints.steps() == []
    for path in sorted((root / "000001" / "step_000002").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert Start(url, tmp_path / "c").load() == 1


def test_a_learner_that_was_replaced_writes_no_more(tmp_path: Path, url: str):
    zombie = Start(url, tmp_path / "a", resume=False)
    zombie.save(1)
    successor = Start(url, tmp_path / "b")
    assert successor.load() == 1
    with pytest.raises(TakenOverError, match=rf"learner start 2 has taken over {url} .*start 1"):
        zombie.save(2)
    with pytest.raises(TakenOverError):
        zombie.ledger.next_policy_version()
    successor.save(2, next_group_id=5)
    third = Start(url, tmp_path / "c")
    state = third.checkpoints.load(FakeEngine())
    assert state is not None
    assert (state.step, state.next_group_id) == (2, 5)


def test_a_learner_replaced_in_the_middle_of_an_upload_changes_nothing(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
):
    zombie = Start(url, tmp_path / "a", resume=False, keep_last=1)
    zombie.save(1)
    upload, successors = ObjectStore.upload, list[Start]()

    def suspended(self: ObjectStore, path: str, file: Path) -> None:
        if not successors:  # while the zombie sleeps
            successors.append(Start(url, tmp_path / "b"))
            assert successors[0].load() == 1
        upload(self, path, file)

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "upload", suspended)
        with pytest.raises(TakenOverError):
            zombie.save(2)
    # The successor ended before a checkpoint of its own: what it began from is what counts.
    assert Start(url, tmp_path / "c").load() == 1


def test_a_version_that_a_replaced_learner_has_taken_is_not_used_again(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
):
    first = Start(url, tmp_path / "a", resume=False)
    assert first.ledger.next_policy_version() == 1
    last_start, taken = RunStore.last_start, list[int]()

    def meanwhile(self: RunStore) -> int:
        found = last_start(self)
        if self is not first.store and not taken:  # between the look and the claim
            taken.append(0)
            taken.append(first.ledger.next_policy_version())
        return found

    monkeypatch.setattr(RunStore, "last_start", meanwhile)
    second = Start(url, tmp_path / "b")
    assert taken == [0, 2]
    assert second.ledger.next_policy_version() == 3


def test_of_claims_at_one_moment_exactly_one_succeeds(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
):
    Start(url, tmp_path / "a", resume=False).save(1)
    claimants, looked = 4, threading.local()
    together, folders = threading.Barrier(claimants), ObjectStore.folders

    def look(self: ObjectStore) -> list[str]:
        found = folders(self)
        if not hasattr(looked, "once"):
            looked.once = True
            together.wait(60)
        return found

    monkeypatch.setattr(ObjectStore, "folders", look)

    def claim(number: int) -> int | str:
        try:
            return Start(url, tmp_path / str(number)).incarnation
        except ValueError as exc:
            return str(exc)

    with ThreadPoolExecutor(claimants) as threads:
        results = list(threads.map(claim, range(claimants)))
    lost = [result for result in results if isinstance(result, str)]
    assert [result for result in results if isinstance(result, int)] == [2]
    assert len(lost) == claimants - 1
    assert all(f"start 2 of the run at {url} was taken by another learner" in text for text in lost)


def test_a_fresh_run_does_not_mix_with_one_that_is_there(tmp_path: Path, url: str):
    Start(url, tmp_path / "a", resume=False)
    with pytest.raises(ValueError, match=r"holds a run already .*--resume .*another run\.id"):
        Start(url, tmp_path / "b", resume=False)


def test_a_run_that_began_in_its_folder_goes_on_with_a_store(tmp_path: Path, url: str):
    folder = tmp_path / "a"
    folder.mkdir()
    ledger = Ledger(folder)
    assert [ledger.next_incarnation() for _ in range(3)] == [1, 2, 3]
    Checkpoints(folder, keep_last=2, keep_best=0).save(FakeEngine(), LearnerState(step=4))
    start = Start(url, folder)
    assert start.incarnation == 4
    state = start.checkpoints.load(FakeEngine())
    assert state is not None
    assert state.step == 4


def test_a_damaged_record_is_named(tmp_path: Path, url: str, root: Path):
    Start(url, tmp_path / "a", resume=False).save(1)
    (root / "000001" / "record.json").write_text("{")
    with pytest.raises(ValueError, match=rf"{url}/000001/record\.json does not parse .*restore it"):
        Start(url, tmp_path / "b")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("ftp://host/x", r"must start with one of s3://, gs://, az://, file://"),
        ("runs/store", r"must start with one of"),
        ("s3:///x", r"names no bucket: s3://BUCKET/PATH"),
        ("file://x/y", r"must name a folder: file:///FOLDER"),
        ("s3://key:secret@bucket/x", r"must hold no credentials"),
        ("s3://bucket/x?secret=1", r"must hold no credentials and no options"),
    ],
)
def test_a_url_that_cannot_work_is_refused_without_showing_a_secret(url: str, expected: str):
    with pytest.raises(ValueError, match=rf"learner\.checkpoint_url .*{expected}") as error:
        LearnerConfig(checkpoint_url=url)
    message = str(error.value).partition("[type=")[0]
    assert "secret" not in message


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch, url: str):
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(StoreError, match=r"needs the package obstore; install it: pip install"):
        ObjectStore(url, retry_s=1.0)
