"""The run store: a run's checkpoints and ledger in an object store, to resume from anywhere.

run_checkpoint.py --complete checkpoints-->, ledger.py --numbers--> `{checkpoint_url}/{run.id}/`:

    000002/claim.json       created by start 2 of the learner, and by it alone
    000002/config.json      the configuration of that start, without secrets
    000002/record.json      its numbers, and the checkpoints of the run as it sees them
    000002/step_000012/     a checkpoint, as in the run folder

No lock reaches another machine, so a store is fenced by what is written where. A start claims its
number by creating an object, which only one writer can do, and writes below its own folder only.
The record of the highest start counts. A start writes its record first and then looks for a higher
claim; a later start claims first and then reads the record before. So either the later one knows
what was written, or the earlier one finds the claim, and ends.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from uuid import uuid4

from pydantic import ValidationError

from agent_r1.learner.checkpoints.ledger import LedgerNumbers
from agent_r1.learner.checkpoints.object_store import ObjectStore
from agent_r1.learner.checkpoints.ownership import TakenOverError
from agent_r1.learner.checkpoints.run_checkpoint import SCORES_FILE, checkpoint_name, complete_steps
from agent_r1.learner.config import LearnerConfig
from agent_r1.runtime.config import RunConfig
from agent_r1.runtime.files.run_folder import CONFIG_FILE, STATE_FILE
from agent_r1.runtime.files.writing import (
    CHECKSUM_FILE,
    check_seal,
    replace_directory,
    report_full_disk,
    require_space,
)
from agent_r1_proto.messages import StrictMessage

logger = logging.getLogger(__name__)

CLAIM_FILE, RECORD_FILE = "claim.json", "record.json"
"""Files of one start, in its folder."""


class StoredCheckpoint(StrictMessage):
    """One checkpoint in the store."""

    incarnation: int
    """The start that wrote it."""
    step: int

    @property
    def path(self) -> str:
        """Its folder."""
        return f"{_folder(self.incarnation)}/{checkpoint_name(self.step)}"


class StoreRecord(StrictMessage):
    """Record of one start: the run as it stands, until a later start's record."""

    numbers: LedgerNumbers = LedgerNumbers()
    checkpoints: list[StoredCheckpoint] = []
    """The complete ones, oldest first."""
    scores: dict[str, float] = {}
    """Evaluation scores by step."""


def _folder(incarnation: int) -> str:
    return f"{incarnation:06d}"


def open_run_store(
    run: RunConfig, learner: LearnerConfig, *, resume: bool, retry_s: float | None = None
) -> RunStore | None:
    """Return the run store that a configuration names; None where it names none.

    Args:
        run: gives the id and the folder.
        learner: gives the URL.
        resume: whether this start continues a run.
        retry_s: as for RunStore; None is the configured one.

    Raises:
        StoreError: the package is missing, or the URL is incomplete.
    """
    if learner.checkpoint_url is None:
        return None
    url = f"{learner.checkpoint_url.rstrip('/')}/{run.id}"
    retry_s = learner.checkpoint_retry_s if retry_s is None else retry_s
    return RunStore(url, run.folder(), resume=resume, retry_s=retry_s)


class RunStore:
    """The run store as one start of the learner sees it; every call blocks."""

    def __init__(self, url: str, run_folder: Path, *, resume: bool, retry_s: float) -> None:
        """Open the store of a run; nothing is asked yet.

        Args:
            url: of this run.
            run_folder: where its checkpoints are written first, and restored to.
            resume: whether this start continues a run.
            retry_s: longest that one request is repeated while the store does not answer.

        Raises:
            StoreError: the package is missing, or the URL is incomplete.
        """
        self.url = url.rstrip("/")
        self._objects = ObjectStore(self.url, retry_s=retry_s)
        self._run_folder = run_folder
        self._resume = resume
        self._incarnation = 0
        self._record = StoreRecord()
        self._folder_is_stale = False

    def require_usable(self) -> None:
        """Make sure that this start can use the store, before anything else is started.

        Raises:
            StoreError: it cannot be reached, or not be written.
            ValueError: it holds a run, and this start does not continue one.
        """
        self._refuse_a_run(self.last_start())
        self._objects.require_conditional_writes()

    def last_start(self) -> int:
        """Return the number of the run's last start; 0 where there was none."""
        return max((int(name) for name in self._objects.folders() if name.isdigit()), default=0)

    def config(self) -> bytes | None:
        """Return the `config.json` of the last start that wrote one."""
        return self._newest(CONFIG_FILE, self.last_start())[1]

    def _newest(self, name: str, last_start: int) -> tuple[str, bytes | None]:
        """Return path and content of a file of the last start that wrote it; None without one."""
        for start in range(last_start, 0, -1):
            path = f"{_folder(start)}/{name}"
            if (content := self._objects.read(path)) is not None:
                return path, content
        return "", None

    def claim(self, numbers: LedgerNumbers, after: int = 0) -> LedgerNumbers:
        """Take the next start of the run: whoever wrote there before writes no more.

        Args:
            numbers: of the run folder's ledger.
            after: newest incarnation that the run's services know.

        Returns:
            The run's numbers, with this start as the newest.

        Raises:
            ValueError: another learner took it at the same moment, or the store holds a run and
                this start does not continue one.
            StoreError: the store cannot be reached, or ignores conditional writes.
        """
        last = self.last_start()
        self._refuse_a_run(last)
        self._objects.require_conditional_writes()
        newest = max(numbers.incarnation, last)
        incarnation = max(newest, after) + 1
        who = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        claim = json.dumps({**who, "id": uuid4().hex}).encode()
        path = f"{_folder(incarnation)}/{CLAIM_FILE}"
        if not self._objects.create(path, claim):
            other = json.loads(self._objects.read(path) or b"{}")
            raise ValueError(
                f"start {incarnation} of the run at {self.url} was taken by another learner at the "
                f"same moment (process {other.get('pid')} on {other.get('host')}); let it run, or "
                "stop it and try again"
            )
        self._incarnation = incarnation
        self._folder_is_stale = numbers.incarnation < last
        before = self._newest_record(last)
        stored = before.numbers if self._folder_is_stale else numbers
        versions = (numbers.last_policy_version, before.numbers.last_policy_version)
        taken = stored.model_copy(
            update={
                "incarnation": incarnation,
                "last_policy_version": max(versions),
                "incarnations_elsewhere": stored.incarnations_elsewhere + incarnation - 1 - newest,
            }
        )
        self._write_config()
        # Who wants to go back to an older checkpoint deletes the newer one.
        there = [stored for stored in before.checkpoints if self._is_complete(stored)]
        self._write(before.model_copy(update={"numbers": taken, "checkpoints": there}))
        self._delete_unfinished()
        logger.info("run store claimed incarnation=%d url=%s", incarnation, self.url)
        return taken

    def _refuse_a_run(self, last_start: int) -> None:
        if last_start and not self._resume:
            raise ValueError(
                f"{self.url} holds a run already (its last start is {last_start}); continue it "
                f"with `agent-r1 train --resume {shlex.quote(self.url)}`, or choose another run.id"
            )

    def _newest_record(self, start: int) -> StoreRecord:
        path, content = self._newest(RECORD_FILE, start)
        if content is None:
            return StoreRecord()
        try:
            return StoreRecord.model_validate_json(content)
        except ValidationError as exc:
            raise ValueError(
                f"{self.url}/{path} does not parse ({exc.errors()[0]['msg']}); restore it from a "
                "backup, or delete it to go back to the start before"
            ) from exc

    def _write_config(self) -> None:
        file = self._run_folder / CONFIG_FILE
        if file.is_file():
            path = f"{_folder(self._incarnation)}/{CONFIG_FILE}"
            self._objects.write(path, file.read_bytes())

    def _is_complete(self, stored: StoredCheckpoint) -> bool:
        return CHECKSUM_FILE in self._objects.sizes(stored.path)

    def _delete_unfinished(self) -> None:
        """Delete what earlier starts have begun to upload, or to delete."""
        kept = tuple(f"{stored.path}/" for stored in self._record.checkpoints)
        earlier = _folder(self._incarnation)
        self._objects.delete(
            [
                path
                for path in self._objects.sizes("")
                if path.count("/") >= 2 and path < earlier and not path.startswith(kept)
            ]
        )

    def require_newest(self) -> None:
        """Make sure that no later start has claimed the run.

        Raises:
            TakenOverError: one has.
        """
        newest = self.last_start()
        if newest > self._incarnation:
            raise TakenOverError(
                f"learner start {newest} has taken over {self.url} (this is start "
                f"{self._incarnation}); nothing that this start writes is part of the run any more"
            )

    def _write(self, record: StoreRecord) -> None:
        """Write the record of this start, and find out whether it counts."""
        content = record.model_dump_json(indent=2).encode()
        self._objects.write(f"{_folder(self._incarnation)}/{RECORD_FILE}", content)
        self.require_newest()
        self._record = record

    def write_numbers(self, numbers: LedgerNumbers) -> None:
        """Write the ledger's numbers, before they are used.

        Raises:
            TakenOverError: a later start has taken over the run.
            StoreError: the store cannot be reached.
        """
        self._write(self._record.model_copy(update={"numbers": numbers}))

    def save(
        self,
        directory: Path,
        step: int,
        scores: Mapping[str, float],
        kept: Callable[[list[int], Mapping[str, float]], set[int]],
    ) -> None:
        """Upload a complete checkpoint; one that is there gets the learner's state alone.

        Only then are those deleted that are not kept.

        Args:
            directory: the checkpoint in the run folder.
            step: its step.
            scores: evaluation scores by step, as far as this start knows them.
            kept: tells which of some steps are kept, by these scores.

        Raises:
            TakenOverError: a later start has taken over the run.
            StoreError: the store cannot be reached, or is full.
        """
        self.require_newest()
        started = time.monotonic()
        checkpoint = StoredCheckpoint(incarnation=self._incarnation, step=step)
        if checkpoint in self._record.checkpoints:
            self._objects.upload(f"{checkpoint.path}/{STATE_FILE}", directory / STATE_FILE)
        else:
            for file in sorted(path for path in directory.rglob("*") if path.is_file()):
                name = file.relative_to(directory).as_posix()
                self._objects.upload(f"{checkpoint.path}/{name}", file)
        stored = {other.step: other for other in self._record.checkpoints} | {step: checkpoint}
        scores = {**self._record.scores, **scores}
        keep = sorted(kept(sorted(stored), scores))
        before = self._record.checkpoints
        self._write(
            StoreRecord(
                numbers=self._record.numbers,
                checkpoints=[stored[other] for other in keep],
                scores={name: score for name, score in scores.items() if int(name) in keep},
            )
        )
        for other in before:
            if other not in self._record.checkpoints:
                names = self._objects.sizes(other.path)
                self._objects.delete([f"{other.path}/{name}" for name in names])
        logger.info(
            "checkpoint stored step=%d url=%s/%s duration_s=%.2f",
            step,
            self.url,
            checkpoint.path,
            time.monotonic() - started,
        )

    def restore(self, directory: Path) -> None:
        """Bring the checkpoints of the run folder up to date: the newest one is there then.

        A folder in which the run's last start wrote keeps what it has, uploaded or not. From
        another one, all that is not part of the run any more is deleted.

        Raises:
            StoreError: the store cannot be reached.
            ValueError: the checkpoint is damaged; the message names it and an older one.
        """
        stored = {checkpoint.step: checkpoint for checkpoint in self._record.checkpoints}
        if self._folder_is_stale:
            (directory / SCORES_FILE).unlink(missing_ok=True)
            for step in complete_steps(directory):
                if step not in stored or not self._has(directory, stored[step]):
                    shutil.rmtree(directory / checkpoint_name(step))
        newest = max(stored, default=-1)
        if newest > max(complete_steps(directory), default=-1):
            older = sorted(stored)[-2] if len(stored) > 1 else None
            self._fetch(stored[newest], directory / checkpoint_name(newest), older)

    def _has(self, directory: Path, stored: StoredCheckpoint) -> bool:
        file = directory / checkpoint_name(stored.step) / CHECKSUM_FILE
        same = self._objects.read(f"{stored.path}/{CHECKSUM_FILE}")
        return file.is_file() and file.read_bytes() == same

    def _fetch(self, stored: StoredCheckpoint, final: Path, older: int | None) -> None:
        sizes = self._objects.sizes(stored.path)
        need = sum(sizes.values())
        require_space("a checkpoint from the run store", final, need, "move run.dir")
        with (
            report_full_disk("a checkpoint from the run store", final, need),
            replace_directory(final) as staging,
        ):
            for name, size in sizes.items():
                file = staging / name
                file.parent.mkdir(parents=True, exist_ok=True)
                self._objects.download(f"{stored.path}/{name}", size, file)
            try:
                for seal in staging.rglob(CHECKSUM_FILE):
                    check_seal(seal.parent)
            except ValueError as exc:
                where = f"{self.url}/{stored.path}"
                hint = (
                    f"; to continue from step {older} instead, delete what is there"
                    if older
                    else ""
                )
                reason = str(exc).replace(str(staging), where)
                raise ValueError(f"checkpoint {where} cannot be restored: {reason}{hint}") from exc
        logger.info("checkpoint fetched step=%d url=%s/%s", stored.step, self.url, stored.path)
