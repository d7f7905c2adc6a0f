"""The prompt order: reads task files, gives the learner the task of every group id.

A group id is a position in one endless, seeded order: every epoch holds each task once, shuffled
anew. So the whole state of the order is one number, the next group id (the cursor), and a resumed
run continues exactly where its checkpoint stood.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from agent_r1_proto.tasks import Task
from agent_r1_service.files.tasks import read_task_file


def epoch_order(num_tasks: int, seed: int, epoch: int) -> list[int]:
    """Shuffle the positions 0 .. num_tasks - 1, the same way on every machine.

    Sorting by a keyed hash stays the same across versions of Python and numpy, which their own
    shuffles do not promise.
    """

    def rank(position: int) -> bytes:
        return hashlib.blake2b(f"{seed}/{epoch}/{position}".encode(), digest_size=16).digest()

    return sorted(range(num_tasks), key=rank)


class PromptOrder:
    """The endless order of prompts of one run."""

    def __init__(self, tasks: Sequence[Task], seed: int, *, shuffle: bool = True) -> None:
        if not tasks:
            raise ValueError("the training data holds no task; data.train needs at least one")
        self._tasks = list(tasks)
        self._seed = seed
        self._shuffle = shuffle
        self._orders: dict[int, list[int]] = {}

    @classmethod
    def from_files(cls, paths: Sequence[Path], seed: int, *, shuffle: bool = True) -> PromptOrder:
        """Read the training files, in the order given.

        Raises:
            TaskFileError: a file is missing, empty or malformed; file and line are named.
        """
        tasks = [task for path in paths for task in read_task_file(path)]
        return cls(tasks, seed, shuffle=shuffle)

    def __len__(self) -> int:
        """Return the number of tasks of one epoch."""
        return len(self._tasks)

    def task(self, group_id: int) -> Task:
        """Return the task at a position of the order."""
        if group_id < 0:
            raise ValueError(f"group_id ({group_id}) must be >= 0")
        epoch, position = divmod(group_id, len(self._tasks))
        if not self._shuffle:
            return self._tasks[position]
        if epoch not in self._orders:
            # Outstanding groups reach back one epoch at most in practice; older ones are redone.
            self._orders = {e: order for e, order in self._orders.items() if e >= epoch - 1}
            self._orders[epoch] = epoch_order(len(self._tasks), self._seed, epoch)
        return self._tasks[self._orders[epoch][position]]

    def set_names(self) -> set[str]:
        """Return the values of `metadata.set` that occur."""
        return {str(t.metadata["set"]) for t in self._tasks if "set" in t.metadata}

    def fingerprint(self) -> str:
        """Return a digest of tasks and seed: a resumed run must see the same order."""
        digest = hashlib.sha256(f"{self._seed}/{self._shuffle}".encode())
        for task in self._tasks:
            digest.update(task.model_dump_json().encode())
        return digest.hexdigest()
