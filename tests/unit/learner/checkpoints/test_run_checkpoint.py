"""The ledger never hands out a number twice; checkpoints are whole, or not there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.learner.checkpoints import ledger as ledger_module
from agent_r1.learner.checkpoints.ledger import Ledger
from agent_r1.learner.checkpoints.ownership import TakenOverError
from agent_r1.learner.checkpoints.run_checkpoint import Checkpoints, LearnerState
from agent_r1.learner.reporting.run_folder import RunFolder
from agent_r1.runtime.files.run_folder import run_folder_problem
from agent_r1.runtime.files.writing import DiskFullError
from agent_r1_proto.failures import failure
from tests.support.builders import stored
from tests.support.learner_fakes import FakeEngine


def make(folder: Path, *, keep_last: int = 2, keep_best: int = 1) -> Checkpoints:
    return Checkpoints(folder, keep_last=keep_last, keep_best=keep_best)


def save(checkpoints: Checkpoints, step: int, **state: object) -> None:
    engine = FakeEngine()
    engine.steps = step
    checkpoints.save(engine, LearnerState(step=step, **state))  # pyright: ignore[reportArgumentType]


@settings(max_examples=15, deadline=None)  # every number is flushed to a disk that may be slow
@given(
    restarts=st.lists(st.lists(st.sampled_from(["incarnation", "version"]), max_size=5), max_size=5)
)
def test_no_number_is_ever_used_twice(
    tmp_path_factory: pytest.TempPathFactory, restarts: list[list[str]]
):
    folder = tmp_path_factory.mktemp("ledger")
    incarnations, versions = list[int](), list[int]()
    for calls in restarts:
        ledger = Ledger(folder)  # as after a kill -9: only the file is left
        for call in calls:
            if call == "incarnation":
                incarnations.append(ledger.next_incarnation())
            else:
                versions.append(ledger.next_policy_version())
    assert incarnations == list(range(1, len(incarnations) + 1))
    assert versions == list(range(1, len(versions) + 1))


def test_a_number_is_on_disk_before_it_is_used(tmp_path: Path):
    ledger = Ledger(tmp_path)
    version = ledger.next_policy_version()
    assert json.loads(ledger.path.read_text())["last_policy_version"] == version
    assert Ledger(tmp_path).last_policy_version == version


def test_numbers_of_another_run_folder_are_not_used_again(tmp_path: Path):
    ledger = Ledger(tmp_path)
    ledger.go_on_after(incarnation=4, policy_version=200)
    assert ledger.starts == 0
    assert (ledger.next_incarnation(), ledger.next_policy_version()) == (5, 201)
    assert Ledger(tmp_path).starts == 1
    # Another folder's run came in between, and an older one changes nothing.
    ledger.go_on_after(incarnation=9, policy_version=400)
    ledger.go_on_after(incarnation=1, policy_version=1)
    assert (ledger.next_incarnation(), ledger.next_policy_version()) == (10, 401)
    assert Ledger(tmp_path).starts == 2


def test_a_number_that_could_not_be_written_is_not_used_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ledger = Ledger(tmp_path)
    ledger.next_policy_version()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(DiskFullError, match=r"the disk is full: ledger\.json"):
            ledger.next_policy_version()
    assert Ledger(tmp_path).last_policy_version == ledger.last_policy_version == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ledger.json"]


def test_a_damaged_ledger_is_refused(tmp_path: Path):
    (tmp_path / "ledger.json").write_text('{"incarnation": ')
    with pytest.raises(ValueError, match=r"ledger\.json cannot be read: .*cut off.*restore it"):
        Ledger(tmp_path)


def test_a_checkpoint_restores_engine_and_state(tmp_path: Path):
    checkpoints = make(tmp_path)
    save(checkpoints, 3, next_group_id=9, outstanding_groups=[6, 8], best_score=0.5)
    engine = FakeEngine()
    state = make(tmp_path).load(engine)
    assert state is not None
    assert (state.step, state.next_group_id, state.outstanding_groups) == (3, 9, [6, 8])
    assert engine.steps == 3
    assert (checkpoints.path(3) / "model" / "config.json").exists()


def test_a_copy_that_somebody_has_made_beside_a_checkpoint_is_none(tmp_path: Path):
    checkpoints = make(tmp_path)
    save(checkpoints, 2)
    shutil.copytree(checkpoints.path(2), checkpoints.directory / "step_000002.bak")
    assert checkpoints.steps() == [2]


def test_without_a_checkpoint_there_is_nothing_to_restore(tmp_path: Path):
    assert make(tmp_path).load(FakeEngine()) is None


def test_the_newest_are_kept_and_the_best_beside_them(tmp_path: Path):
    checkpoints = make(tmp_path, keep_last=2, keep_best=1)
    for step, score in ((1, 0.2), (2, 0.9), (3, 0.4), (4, 0.5), (5, 0.6)):
        checkpoints.expect_score(step)
        save(checkpoints, step)
        checkpoints.record_score(step, score)
    assert checkpoints.steps() == [2, 4, 5]


def test_a_checkpoint_being_scored_waits_for_its_score(tmp_path: Path):
    checkpoints = make(tmp_path, keep_last=1, keep_best=1)
    save(checkpoints, 1)
    checkpoints.expect_score(1)
    save(checkpoints, 2)
    save(checkpoints, 3)
    assert checkpoints.steps() == [1, 3]
    checkpoints.record_score(1, 0.1)
    assert checkpoints.steps() == [1, 3]
    save(checkpoints, 4)
    checkpoints.record_score(4, 0.2)
    assert checkpoints.steps() == [4]


def test_without_keep_best_scores_keep_nothing(tmp_path: Path):
    checkpoints = make(tmp_path, keep_last=1, keep_best=0)
    save(checkpoints, 1)
    checkpoints.expect_score(1)
    save(checkpoints, 2)
    assert checkpoints.steps() == [2]


def test_saving_a_step_again_keeps_its_weights_and_renews_its_state(tmp_path: Path):
    checkpoints = make(tmp_path)
    save(checkpoints, 1, next_group_id=2)
    inode = (checkpoints.path(1) / "engine" / "state.json").stat().st_ino
    save(checkpoints, 1, next_group_id=5)
    state = checkpoints.load(FakeEngine())
    assert state is not None
    assert state.next_group_id == 5
    assert (checkpoints.path(1) / "engine" / "state.json").stat().st_ino == inode


def test_a_full_disk_keeps_what_was_there(tmp_path: Path):
    checkpoints = make(tmp_path)
    save(checkpoints, 1)
    engine = FakeEngine(full_disk_at=2)
    engine.steps = 2
    with pytest.raises(DiskFullError, match="continue with --resume"):
        checkpoints.save(engine, LearnerState(step=2))
    assert [path.name for path in checkpoints.directory.iterdir()] == ["step_000001"]


def test_half_a_checkpoint_is_not_a_checkpoint(tmp_path: Path):
    checkpoints = make(tmp_path)
    save(checkpoints, 1)
    shutil.copytree(checkpoints.path(1), checkpoints.directory / ".step_000002.17.tmp")
    (checkpoints.path(3)).mkdir()
    again = make(tmp_path)
    assert again.steps() == [1]
    assert not (checkpoints.directory / ".step_000002.17.tmp").exists()


def test_a_damaged_checkpoint_names_itself_and_an_older_one(tmp_path: Path):
    checkpoints = make(tmp_path)
    save(checkpoints, 1)
    save(checkpoints, 2)
    (checkpoints.path(2) / "learner.json").write_text("{")
    with pytest.raises(
        ValueError, match=r"(?s)step_000002 cannot be restored.*from step 1 instead"
    ):
        checkpoints.load(FakeEngine())


def test_too_little_disk_is_refused_at_start(tmp_path: Path):
    checkpoints = make(tmp_path, keep_last=2, keep_best=1)
    free = shutil.disk_usage(tmp_path).free
    checkpoints.check_disk(free // 8)
    # keep_last + keep_best + 1 = 4 checkpoints of a third of the disk each.
    with pytest.raises(ValueError, match=r"4 checkpoints of .*lower learner\.keep_last \(2\)"):
        checkpoints.check_disk(free // 3)
    save(checkpoints, 1)
    save(checkpoints, 2)
    checkpoints.check_disk(free // 3)  # two are there already


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("learner.json", lambda text: text.replace('"next_group_id": 7', '"next_group_id": 9')),
        ("learner.json", lambda text: text.replace("sha256", "sha255")),
        ("model/config.json", lambda text: text + " "),
        ("model/config.json", lambda text: text.replace("{", "[")),
        ("engine/state.json", lambda text: text.replace("3", "4")),
        ("checksums.json", lambda text: text[:-5]),
    ],
)
def test_a_checkpoint_that_was_edited_is_refused_by_the_name_of_the_file(
    tmp_path: Path, name: str, change: Callable[[str], str]
):
    checkpoints = make(tmp_path)
    save(checkpoints, 3, next_group_id=7)
    file = checkpoints.path(3) / name
    before = file.read_text()
    file.write_text(change(before))
    assert file.read_text() != before
    with pytest.raises(ValueError, match=rf"{name}.* is corrupted"):
        checkpoints.load(FakeEngine())


def test_a_state_that_is_written_again_keeps_the_checkpoint_whole(tmp_path: Path):
    checkpoints = make(tmp_path)
    save(checkpoints, 3, next_group_id=7)
    save(checkpoints, 3, next_group_id=8)
    state = checkpoints.load(FakeEngine())
    assert state is not None
    assert state.next_group_id == 8


def test_a_later_start_ends_the_writing_of_an_earlier_one(tmp_path: Path):
    zombie = Ledger(tmp_path)
    zombie.next_incarnation()
    zombie.require_newest()
    heir = Ledger(tmp_path)
    heir.next_incarnation()
    heir.require_newest()
    checkpoints = Checkpoints(
        tmp_path, keep_last=2, keep_best=0, require_owner=zombie.require_newest
    )
    folder = RunFolder(tmp_path)
    folder.prepare(resume=True)
    folder.open_at(0, zombie.require_newest)
    before = sorted(tmp_path.rglob("*"))
    numbers = heir.path.read_text()
    writes: list[Callable[[], object]] = [
        zombie.next_policy_version,
        zombie.next_incarnation,
        lambda: save(checkpoints, 1),
        lambda: checkpoints.record_score(1, 0.5),
        lambda: folder.write_metrics(1, {"a": 1.0}),
        lambda: folder.write_evaluation(1, "before", {}),
        lambda: folder.write_answers([{}]),
        lambda: folder.write_trajectories("step_000001", [stored()]),
        lambda: folder.write_failure(1, failure("rollout", "boom")),
        lambda: folder.write_scalars(1, {"a": 1.0}),
        lambda: folder.write_summary({}),
    ]
    for write in writes:
        with pytest.raises(TakenOverError, match=r"learner start 2 has taken over .* start 1"):
            write()
    folder.close()
    assert sorted(tmp_path.rglob("*")) == before
    assert heir.path.read_text() == numbers


def test_a_version_is_not_used_by_a_start_that_is_replaced_while_it_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    zombie = Ledger(tmp_path)
    zombie.next_incarnation()
    write, heirs = ledger_module.write_atomically, list[Ledger]()

    def meanwhile(path: Path, content: str) -> None:
        if not heirs:
            heirs.append(Ledger(tmp_path))
            heirs[0].next_incarnation()
        write(path, content)

    monkeypatch.setattr(ledger_module, "write_atomically", meanwhile)
    with pytest.raises(TakenOverError, match="learner start 2 has taken over"):
        zombie.next_policy_version()
    assert heirs[0].next_policy_version() == 1
    assert Ledger(tmp_path).last_incarnation == 2


def test_a_version_that_was_taken_until_the_claim_is_not_used_again(tmp_path: Path):
    zombie = Ledger(tmp_path)
    zombie.next_incarnation()
    heir = Ledger(tmp_path)
    assert zombie.next_policy_version() == 1
    heir.next_incarnation()
    assert heir.next_policy_version() == 2


def test_a_later_claim_ends_an_earlier_start_whatever_the_ledger_says(tmp_path: Path):
    zombie = Ledger(tmp_path)
    zombie.next_incarnation()
    older = zombie.path.read_text()
    heir = Ledger(tmp_path)
    assert heir.next_incarnation() == 2
    zombie.path.write_text(older)  # a write of the zombie that was under way
    with pytest.raises(TakenOverError, match="learner start 2 has taken over"):
        zombie.require_newest()
    heir.next_policy_version()
    assert Ledger(tmp_path).last_incarnation == 2


def test_a_learner_that_is_taken_over_while_it_writes_a_checkpoint_leaves_none(tmp_path: Path):
    zombie = Ledger(tmp_path)
    zombie.next_incarnation()
    checkpoints = Checkpoints(
        tmp_path, keep_last=2, keep_best=0, require_owner=zombie.require_newest
    )

    class Suspended(FakeEngine):
        def export_model(self, directory: Path) -> None:
            super().export_model(directory)
            Ledger(tmp_path).next_incarnation()

    with pytest.raises(TakenOverError):
        checkpoints.save(Suspended(), LearnerState(step=1))
    assert checkpoints.steps() == []
    assert list(checkpoints.directory.iterdir()) == []


def test_of_learners_that_start_at_one_moment_without_locks_exactly_one_gets_the_number(
    tmp_path: Path,
):
    rounds, learners = 20, 4
    together = threading.Barrier(learners)

    def start(ledger: Ledger) -> int | None:
        together.wait(60)
        try:
            return ledger.next_incarnation()
        except (ValueError, TakenOverError):
            return None

    with ThreadPoolExecutor(learners) as threads:
        for number in range(1, rounds + 1):
            # All of them have seen the folder as the start before has left it.
            ledgers = [Ledger(tmp_path) for _ in range(learners)]
            results = list(threads.map(start, ledgers))
            assert [result for result in results if result is not None] == [number]
            ledgers[results.index(number)].require_newest()


def test_a_start_between_the_look_and_the_claim_of_another_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    slow, require_newest = Ledger(tmp_path), Ledger.require_newest

    def meanwhile(self: Ledger) -> None:
        require_newest(self)
        if self is slow:
            Ledger(tmp_path).next_incarnation()

    monkeypatch.setattr(Ledger, "require_newest", meanwhile)
    with pytest.raises(
        ValueError,
        match=rf"start 1 of the run in {tmp_path} .* another learner .*process {os.getpid()} on",
    ):
        slow.next_incarnation()


KILLED = """
import os, signal, sys
from pathlib import Path
from agent_r1.learner.checkpoints import ledger

ledger.write_atomically = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
ledger.Ledger(Path(sys.argv[1])).next_incarnation()
"""


@pytest.mark.parametrize("starts", [0, 1])
def test_a_start_that_was_killed_before_its_number_was_in_the_ledger_can_be_repeated(
    tmp_path: Path, starts: int
):
    for _ in range(starts):
        Ledger(tmp_path).next_incarnation()
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    resume = starts > 0
    assert run_folder_problem(tmp_path, resume=resume) is None
    RunFolder(tmp_path).prepare(resume=resume)
    ledger = Ledger(tmp_path)
    assert ledger.next_incarnation() == starts + 2
    ledger.require_newest()
    assert Ledger(tmp_path).starts == starts + 1


def test_a_folder_has_one_learner_at_a_time_and_names_it(tmp_path: Path):
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    first.prepare(resume=False)
    with pytest.raises(ValueError, match=rf"another learner is writing .*process {os.getpid()} on"):
        second.prepare(resume=False)
    first.close()
    second.prepare(resume=False)
    second.close()
