"""The prompt order: reads the sources of `[data]`, gives the learner the task of every group id.

A group id is a position in one endless, seeded order: every epoch holds each task once (or as often
as the weight of its source says), shuffled anew. So the whole state of the order is one number, the
next group id (the cursor), and a resumed run continues exactly where its checkpoint stood.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from agent_r1.learner.config import DataConfig
from agent_r1.runtime.files.task_source import DataSource
from agent_r1.runtime.files.tasks import read_task_file
from agent_r1_proto.tasks import Task

ReadSource = Callable[[DataSource], list[Task]]


def epoch_order(num_tasks: int, seed: int, epoch: int) -> list[int]:
    """Shuffle the positions 0 .. num_tasks - 1, the same way on every machine.

    Sorting by a keyed hash stays the same across versions of Python and numpy, which their own
    shuffles do not promise.
    """

    def rank(position: int) -> bytes:
        return hashlib.blake2b(f"{seed}/{epoch}/{position}".encode(), digest_size=16).digest()

    return sorted(range(num_tasks), key=rank)


class PromptOrder:
    """The endless order of prompts of one run.

    Args:
        tasks: of all sources, in their order.
        seed: of the shuffles.
        shuffle: False keeps the order of the sources in every epoch.
        weights: [S] number of tasks of each source, and how often an epoch goes through them;
            none: each task is in every epoch once.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        seed: int,
        *,
        shuffle: bool = True,
        weights: Sequence[tuple[int, float]] = (),
    ) -> None:
        if not tasks:
            raise ValueError("the training data holds no task; data.train needs at least one")
        self._tasks = list(tasks)
        self._seed = seed
        self._shuffle = shuffle
        self._weights = [(n, w) for n, w in weights or [(len(self._tasks), 1.0)] if n]
        self._orders: dict[int, list[int]] = {}

    @classmethod
    def of(
        cls, data: DataConfig, run_seed: int, *, read: ReadSource = read_task_file
    ) -> PromptOrder:
        """Read the sources of `[data]`.

        Args:
            data: names them.
            run_seed: seeds the order where `data.seed` does not.
            read: reads one source; may leave tasks out.

        Raises:
            TaskFileError: a source is missing, empty or malformed; file and line are named.
            MissingPackageError: the package that reads a source is not installed.
        """
        read_tasks = [read(source) for source in data.train]
        return cls(
            [task for tasks in read_tasks for task in tasks],
            run_seed if data.seed is None else data.seed,
            shuffle=data.shuffle,
            weights=[(len(t), s.weight) for t, s in zip(read_tasks, data.train, strict=True)],
        )

    def __len__(self) -> int:
        """Return the number of prompts of one epoch."""
        return sum(_per_epoch(size, weight) for size, weight in self._weights)

    def task(self, group_id: int) -> Task:
        """Return the task at a position of the order."""
        epoch, position = divmod(group_id, len(self))
        if epoch not in self._orders:
            # Outstanding groups reach back one epoch at most in practice; older ones are redone.
            self._orders = {e: order for e, order in self._orders.items() if e >= epoch - 1}
            self._orders[epoch] = self._order(epoch)
        return self._tasks[self._orders[epoch][position]]

    def _order(self, epoch: int) -> list[int]:
        """Return the positions of an epoch's tasks, in the order of the epoch."""
        held = list(self._held(epoch))
        if not self._shuffle:
            return held
        return [held[position] for position in epoch_order(len(held), self._seed, epoch)]

    def _held(self, epoch: int) -> Iterator[int]:
        """Yield the positions of the tasks that an epoch holds, source by source.

        A source goes round its tasks without end, and every epoch takes the next ones. So no task
        comes a second time before each other task of its source has come once.
        """
        starts = accumulate((size for size, _ in self._weights), initial=0)
        for start, (size, weight) in zip(starts, self._weights, strict=False):
            per_epoch = _per_epoch(size, weight)
            for drawn in range(epoch * per_epoch, (epoch + 1) * per_epoch):
                yield start + drawn % size

    def set_names(self) -> set[str]:
        """Return the values of `metadata.set` that occur."""
        return {str(t.metadata["set"]) for t in self._tasks if "set" in t.metadata}

    def fingerprint(self) -> str:
        """Return a digest of tasks, weights and seed: a resumed run must see the same order."""
        digest = hashlib.sha256(f"{self._seed}/{self._shuffle}".encode())
        if any(weight != 1.0 for _, weight in self._weights):
            digest.update(repr(self._weights).encode())
        for task in self._tasks:
            digest.update(task.model_dump_json().encode())
        return digest.hexdigest()


def _per_epoch(size: int, weight: float) -> int:
    return max(1, round(size * weight))
