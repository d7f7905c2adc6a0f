"""The learner's ledger: the numbers of a run that are never used twice.

assembly.py (incarnations), weights/publisher.py (policy versions) --> `ledger.json`, and from there
to the run store, if there is one; a resumed run takes the next ones.

It is written under a temporary name, flushed to disk and renamed, before a number is used. The
number of a start is claimed first (ownership.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from pydantic import Field

from agent_r1.learner.checkpoints.ownership import TakenOverError, claim_start, newest_claim
from agent_r1.runtime.files.run_folder import LEDGER_FILE
from agent_r1.runtime.files.state import check_object, read_object
from agent_r1.runtime.files.writing import write_atomically
from agent_r1_proto.messages import StrictMessage


class LedgerNumbers(StrictMessage):
    """The numbers that are never used twice in one run."""

    incarnation: int = Field(default=0, ge=0)
    """Starts of the learner so far."""
    last_policy_version: int = Field(default=0, ge=0)
    """Highest policy version ever assigned, published or not."""
    incarnations_elsewhere: int = Field(default=0, ge=0)
    """Incarnations that were starts of other run folders on the same services, or were claimed by
    starts that were killed before they got here."""


class NumberStore(Protocol):
    """Store of the numbers besides the run folder: `RunStore`."""

    def claim(self, numbers: LedgerNumbers, after: int = 0) -> LedgerNumbers:
        """Take the next incarnation, above `after`; return the run's numbers with it."""
        ...

    def write_numbers(self, numbers: LedgerNumbers) -> None:
        """Write numbers before they are used."""
        ...


class Ledger:
    """Hands out incarnations and policy versions; each is on disk before it is used."""

    def __init__(self, run_folder: Path, store: NumberStore | None = None) -> None:
        self.path = run_folder / LEDGER_FILE
        self._store = store
        self._numbers = self._read()
        self._newest_start = self._newest_on_disk()

    def _read(self) -> LedgerNumbers:
        if not self.path.exists():
            return LedgerNumbers()
        try:
            numbers = check_object(LedgerNumbers, read_object(self.path))
            if numbers.incarnation < numbers.incarnations_elsewhere:
                raise ValueError(
                    f"incarnation ({numbers.incarnation}) must be at least "
                    f"incarnations_elsewhere ({numbers.incarnations_elsewhere})"
                )
        except ValueError as exc:
            raise ValueError(
                f"{self.path} cannot be read: {exc}; restore it from a backup"
            ) from exc
        return numbers

    def _newest_on_disk(self) -> int:
        # Folders of older releases have no claims; a start that was killed early has no more.
        return max(self._read().incarnation, newest_claim(self.path.parent))

    def require_newest(self) -> None:
        """Make sure that no later start has taken over the run folder, before writing there.

        Raises:
            TakenOverError: one has.
        """
        newest = self._newest_on_disk()
        if newest > self._newest_start:
            raise TakenOverError(
                f"learner start {newest} has taken over {self.path.parent} (this is start "
                f"{self._numbers.incarnation}); nothing more was written there"
            )

    @property
    def last_policy_version(self) -> int:
        """Highest policy version ever assigned."""
        return self._numbers.last_policy_version

    @property
    def last_incarnation(self) -> int:
        """Newest incarnation."""
        return self._numbers.incarnation

    @property
    def starts(self) -> int:
        """Starts of the learner in this run folder."""
        return self._numbers.incarnation - self._numbers.incarnations_elsewhere

    def go_on_after(self, *, incarnation: int, policy_version: int) -> None:
        """Use no number again that another run folder has used on the same services.

        Args:
            incarnation: newest incarnation those services know.
            policy_version: highest policy version they may hold.
        """
        numbers = self._numbers
        newest = max(numbers.incarnation, incarnation)
        if newest == numbers.incarnation and policy_version <= numbers.last_policy_version:
            return
        policy_version = max(numbers.last_policy_version, policy_version)
        self._write(_skipped_to(numbers, newest, last_policy_version=policy_version))

    def next_incarnation(self, after: int = 0) -> int:
        """Take the next incarnation (the first is 1).

        Args:
            after: newest incarnation that the run's services know: the folder may be a copy, or
                older than they are.

        Raises:
            ValueError, StoreError: another learner has it, or the run store cannot be used.
            TakenOverError: another learner has a later one.
        """
        self.require_newest()
        after = max(after, self._newest_start)
        if self._store is None:
            self._claim(after + 1)
            # Whoever wrote here before has taken policy versions until the claim, and takes none
            # after it: so they are read now.
            taken = _skipped_to(self._read(), after, incarnation=after + 1)
        else:
            taken = self._store.claim(self._numbers, after)
            self._claim(taken.incarnation)
        self._write(taken)
        return self._numbers.incarnation

    def _claim(self, incarnation: int) -> None:
        claim_start(self.path.parent, incarnation)
        self._newest_start = incarnation

    def next_policy_version(self, after: int = 0) -> int:
        """Take the next policy version (the first is 1; 0 is the configured model).

        Args:
            after: highest version that a rollout server holds.

        Raises:
            TakenOverError: a later start has taken over the run.
            StoreError: the run store cannot be reached.
        """
        version = max(self._numbers.last_policy_version, after) + 1
        self._write(self._numbers.model_copy(update={"last_policy_version": version}))
        if self._store is not None:
            self._store.write_numbers(self._numbers)
        return self._numbers.last_policy_version

    def _write(self, numbers: LedgerNumbers) -> None:
        self.require_newest()
        write_atomically(self.path, numbers.model_dump_json(indent=2) + "\n")
        self._newest_start = max(self._newest_start, numbers.incarnation)
        self.require_newest()  # a start that was claimed meanwhile may not have seen these numbers
        self._numbers = numbers


def _skipped_to(numbers: LedgerNumbers, newest: int, **changes: int) -> LedgerNumbers:
    """Return the numbers after incarnations, up to `newest`, that were no starts of this folder."""
    elsewhere = numbers.incarnations_elsewhere + newest - numbers.incarnation
    skipped = {"incarnation": newest, "incarnations_elsewhere": elsewhere}
    return numbers.model_copy(update=skipped | changes)
