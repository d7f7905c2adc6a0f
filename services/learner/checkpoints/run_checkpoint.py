"""The learner's checkpoints: where a run stood, to resume from after any end.

run_end.py --state--> `checkpoints/step_000012/` (`learner.json`, `engine/`, `model/`, and their
checksums), and from there to the run store, if there is one; on a resume, assembly.py loads the
newest.

They are written under a temporary name, flushed to disk and renamed, so that a kill -9 or a full
disk leaves the last complete one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, NonNegativeInt, RootModel

from agent_r1.learner.engine.interface import PolicyEngine
from agent_r1.runtime.files.disk_space import readable_size, require_room
from agent_r1.runtime.files.run_folder import CHECKPOINTS_DIR, STATE_FILE
from agent_r1.runtime.files.state import check_object, read_object
from agent_r1.runtime.files.writing import (
    CHECKSUM_FILE,
    check_seal,
    replace_directory,
    report_full_disk,
    seal,
    write_atomically,
)
from agent_r1_proto.messages import StrictMessage

if TYPE_CHECKING:
    from agent_r1.learner.checkpoints.run_store import RunStore

logger = logging.getLogger(__name__)

SCORES_FILE = "scores.json"
ENGINE_DIR = "engine"
MODEL_DIR = "model"
STEP_NAME = re.compile(r"^step_(\d+)$")
"""Pattern of what `checkpoint_name` returns."""
CHECKSUM_KEY = "sha256"
"""Key of the digest of the rest in `learner.json`, which changes after its checkpoint was
sealed."""


class LearnerState(StrictMessage):
    """State of the learner: all that is not in the engine's own state."""

    step: NonNegativeInt = 0
    """Batches trained."""
    policy_version: NonNegativeInt = 0
    """Version of the weights in this checkpoint; a resume publishes them under a new one."""
    next_group_id: NonNegativeInt = 0
    """Prompt cursor: the first group that was never opened."""
    outstanding_groups: list[NonNegativeInt] = []
    """Groups opened but not trained; a resume issues them again."""
    prompt_fingerprint: str = ""
    """Digest of tasks and seed: the order the cursor counts in."""
    best_score: float | None = None
    """Highest `evaluation.score` so far, its mean over the sets that are trained on."""
    evaluations_since_best: NonNegativeInt = 0
    """Number of evaluations in a row that were no better than the best one before them."""
    canary_floor: float | None = None
    """Mean |difference| of log-probabilities at the first version."""
    wall_s: float = Field(default=0.0, ge=0)
    """Seconds spent by the run so far, all its starts together."""
    totals: dict[str, float] = {}
    """Counters of the summary."""
    evaluations: dict[str, dict[str, Any]] = {}
    """Summaries of the evaluations so far, by name (`before`, `step_000010`)."""
    counts: dict[str, NonNegativeInt] = {}
    """Verdicts on results, by name."""
    failures: dict[str, NonNegativeInt] = {}
    """Failures by kind."""
    failed_tasks: list[str] = []
    """Ids of tasks of which a sample failed for good."""
    history: dict[str, list[float]] = Field(default={})
    """Per-step values of which the summary gives medians."""


class _Scores(RootModel[dict[Annotated[str, Field(pattern=r"^\d+$")], float]]):
    """Evaluation scores by step."""


def checkpoint_name(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step_{step:06d}"


def complete_steps(directory: Path) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, oldest first."""
    named = ((STEP_NAME.match(path.name), path) for path in directory.glob("step_*"))
    return sorted(int(step[1]) for step, path in named if step and (path / STATE_FILE).is_file())


def read_scores(directory: Path) -> dict[str, float]:
    """Return the evaluation scores of checkpoints by step, as `keep_best` reads them.

    Raises:
        ValueError: the file is damaged; the message has the remedy.
    """
    path = directory / SCORES_FILE
    if not path.exists():
        return {}
    try:
        return check_object(_Scores, read_object(path)).root
    except ValueError as exc:
        raise ValueError(
            f"{path} cannot be read: {exc}; delete it: then learner.keep_best chooses by the "
            "scores that follow"
        ) from exc


def newest_state(directory: Path) -> LearnerState | None:
    """Read where the learner stood at the newest checkpoint; None when there is none.

    Raises:
        ValueError: its `learner.json` is damaged; the message names it and an older checkpoint.
    """
    with _newest(directory) as path:
        return None if path is None else _read_state(path)[0]


def check_newest(directory: Path, engine_facts: Mapping[str, Any]) -> LearnerState | None:
    """Check every file of the newest checkpoint, without an engine; None when there is none.

    Args:
        directory: of the checkpoints.
        engine_facts: what the engine's files must match.

    Raises:
        ValueError: the checkpoint is damaged or of another engine; the message names it and an
            older one.
    """
    with _newest(directory) as path:
        if path is None:
            return None
        check_seal(path / ENGINE_DIR, engine_facts)
        return check_checkpoint(path)


def check_prompts(state: LearnerState, fingerprint: str) -> None:
    """Refuse to continue in another order of prompts than the checkpoint's.

    Raises:
        ValueError: it is another one.
    """
    if state.prompt_fingerprint != fingerprint:
        raise ValueError(
            "the training data, its order or its seed changed since the checkpoint of step "
            f"{state.step}: the prompt order would skip and repeat prompts; restore them, or "
            "start a new run"
        )


@contextlib.contextmanager
def _newest(directory: Path) -> Generator[Path | None]:
    """Give the newest complete checkpoint; errors in the block name it, and an older one."""
    *older, newest = [None, *complete_steps(directory)]
    path = None if newest is None else directory / checkpoint_name(newest)
    try:
        yield path
    except (ValueError, OSError) as exc:
        hint = (
            f"; to continue from step {older[-1]} instead, delete that folder" if older[1:] else ""
        )
        raise ValueError(f"checkpoint {path} cannot be restored: {exc}{hint}") from exc


def sealed_state(state: LearnerState) -> str:
    """Return the state as text, with the checksum of everything else in it."""
    values = state.model_dump(mode="json")
    return json.dumps({**values, CHECKSUM_KEY: _digest(values)}, indent=2) + "\n"


def check_checkpoint(path: Path) -> LearnerState:
    """Check every file of a checkpoint, and return the learner's state in it.

    Raises:
        ValueError: a file is missing or was changed; the message names it.
    """
    state, sealed = _read_state(path)
    if sealed:
        check_seal(path)
    else:
        # Version 0.1.0 checked the engine's files only; load_state still does.
        logger.warning("checkpoint of version 0.1.0: only engine/ has checksums path=%s", path)
    return state


def _read_state(path: Path) -> tuple[LearnerState, bool]:
    """Return the learner's state in a checkpoint, and whether its other files have checksums."""
    try:
        values = read_object(path / STATE_FILE)
        digest = values.pop(CHECKSUM_KEY, None)
        sealed = digest is not None or (path / CHECKSUM_FILE).exists()
        if sealed and digest != _digest(values):
            raise ValueError("its checksum differs")
        state = check_object(LearnerState, values)
        if path.name != checkpoint_name(state.step):
            raise ValueError(f"it is of step {state.step}")
    except ValueError as exc:
        raise ValueError(f"{path / STATE_FILE} is corrupted: {exc}") from exc
    return state, sealed


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(
        self,
        run_folder: Path,
        *,
        keep_last: int,
        keep_best: int,
        require_owner: Callable[[], None] = lambda: None,
        store: RunStore | None = None,
    ) -> None:
        """Open the checkpoints of a run folder.

        Args:
            run_folder: of the run.
            keep_last: newest checkpoints kept.
            keep_best: checkpoints kept besides, by their score.
            require_owner: called before every write; raises where this learner may not write.
            store: gets a copy of every checkpoint, and has the newest for a resume.
        """
        self._require_owner = require_owner
        self._store = store
        self.directory = run_folder / CHECKPOINTS_DIR
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._being_scored: set[int] = set()
        self.directory.mkdir(parents=True, exist_ok=True)
        for leftover in self.directory.glob(".*step_*"):
            if leftover.is_dir():
                shutil.rmtree(leftover)

    def check_disk(self, checkpoint_bytes: int) -> None:
        """Refuse to start a run whose checkpoints will not fit.

        Raises:
            ValueError: free space is below keep_last + keep_best + 1 checkpoints (one is written
                before an old one is deleted), those already there counted.
        """
        wanted = self._keep_last + self._keep_best + 1
        missing = max(0, wanted - len(self.steps()))
        require_room(
            f"{missing} checkpoints of {readable_size(checkpoint_bytes)}",
            self.directory,
            missing * checkpoint_bytes,
            f"lower learner.keep_last ({self._keep_last}) and learner.keep_best "
            f"({self._keep_best})",
        )

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, oldest first."""
        return complete_steps(self.directory)

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.directory / checkpoint_name(step)

    def save(self, engine: PolicyEngine, state: LearnerState) -> Path:
        """Write one checkpoint (blocking), then delete those beyond `keep_last` and `keep_best`.

        Where the step has a complete one, only the learner's state is written again: the weights
        of a step never change.

        Raises:
            DiskFullError: the disk is full; older checkpoints are untouched.
            StoreError: the run store cannot be reached; older checkpoints are untouched.
            TakenOverError: a later start has taken over the run.
        """
        self._require_owner()
        final = self.path(state.step)
        text = sealed_state(state)
        if (final / STATE_FILE).is_file():
            write_atomically(final / STATE_FILE, text)
        else:
            self._write(engine, final, text)
        if self._store is not None:
            scores = read_scores(self.directory)
            self._store.save(final, state.step, scores=scores, kept=self._kept)
        self._delete_surplus()
        logger.info("checkpoint written step=%d path=%s", state.step, final)
        return final

    def _write(self, engine: PolicyEngine, final: Path, text: str) -> None:
        remedy = "lower learner.keep_last and learner.keep_best; then continue with --resume"
        with (
            report_full_disk("a checkpoint", final, remedy=remedy),
            replace_directory(final) as staging,
        ):
            engine.save_state(staging / ENGINE_DIR)
            engine.export_model(staging / MODEL_DIR)
            seal(staging)  # before the state, which is written again and has its own
            write_atomically(staging / STATE_FILE, text)
            self._require_owner()  # a learner may be suspended while it writes

    def expect_score(self, step: int) -> None:
        """Keep the checkpoint of a step that is being evaluated until its score is known."""
        self._being_scored.add(step)

    def record_score(self, step: int, score: float | None) -> None:
        """Note the evaluation score of a step, by which `keep_best` chooses."""
        self._require_owner()
        self._being_scored.discard(step)
        if score is not None and step in self.steps():
            scores = read_scores(self.directory) | {str(step): score}
            write_atomically(self.directory / SCORES_FILE, json.dumps(scores, indent=2) + "\n")
        self._delete_surplus()

    def _delete_surplus(self) -> None:
        steps = self.steps()
        keep = self._kept(steps, read_scores(self.directory))
        for step in steps:
            if step not in keep:
                shutil.rmtree(self.path(step))

    def _kept(self, steps: list[int], scores: Mapping[str, float]) -> set[int]:
        """Return which of some steps, oldest first, are kept by these scores."""
        scored = sorted(
            (step for step in steps if str(step) in scores),
            key=lambda step: (scores[str(step)], step),
            reverse=True,
        )
        keep = set(steps[-self._keep_last :]) | set(scored[: self._keep_best])
        if self._keep_best:
            keep |= self._being_scored & set(steps)
        return keep

    def load(self, engine: PolicyEngine) -> LearnerState | None:
        """Restore the newest checkpoint into the engine (blocking); None when there is none.

        Raises:
            ValueError: the checkpoint is damaged; the message names it and an older one.
            StoreError: the run store cannot be reached.
        """
        if self._store is not None:
            self._store.restore(self.directory)
        with _newest(self.directory) as path:
            if path is None:
                return None
            state = check_checkpoint(path)
            engine.load_state(path / ENGINE_DIR)
        logger.info("checkpoint restored step=%d path=%s", state.step, path)
        return state
