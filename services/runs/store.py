"""Stored trajectories: one Parquet file for each step and each evaluation, in `trajectories/`.

learner/reporting/run_folder.py --StoredTrajectory--> `TrajectoryStore` --> files
--`stored_files`--> index.py, run.py, `agent-r1 show`, `rescore`, `export`, `train-reward`. A file
has flat columns, by which trajectories are sorted and filtered, the record of record.py as JSON,
and a column for each array of tokens. Older versions wrote JSON lines, which are read alike and
have no tokens.

Dimension key: T = tokens in one trajectory.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json, to_json

from agent_r1.runtime.files.run_folder import TRAJECTORIES_DIR
from agent_r1.runtime.files.state import split_lines
from agent_r1.runtime.files.writing import replace_file
from agent_r1.runtime.imports import import_extra
from agent_r1.runtime.memory import GIB
from agent_r1_proto.trajectory import Trajectory

logger = logging.getLogger(__name__)

EXTRA = "console"
ROWS_AT_ONCE = 64
"""Rows of a part of a file: what is read for one trajectory, and written at once."""
STEP_FILE = re.compile(r"step_(\d+)")
EVALUATION_FILE = re.compile(r"eval_(.+)")
TOOL_FAILURES = ("error", "malformed", "unknown_tool", "over_limit", "failed")
"""Statuses of calls that gave the model no result."""

FLAT = {
    **dict.fromkeys(("evaluation", "set", "task_id"), "text"),
    **dict.fromkeys(("step", "group_id", "sample_index", "attempt"), "int"),
    **dict.fromkeys(("rollout_id", "status", "reason"), "text"),
    "trained": "bool",
    **dict.fromkeys(("reward", "process_reward", "advantage"), "float"),
    **dict.fromkeys(("first_version", "last_version", "staleness"), "int"),
    **dict.fromkeys(("num_tokens", "num_sampled", "num_turns", "num_calls"), "int"),
    "failed_calls": "int",
    **dict.fromkeys(("started_at", "latency_ms"), "float"),
}
"""Columns with one value a trajectory, and their kinds. `evaluation` is None for samples of a step,
and every other one may be None where that was not measured."""
NESTED = ("components", "tools")
"""Columns that go with them: rewards by component, and the tools called, each once."""
ARRAYS = (
    *("token_ids", "action_mask", "rollout_logprobs"),
    *("learner_logprobs", "entropies", "advantages"),
)


class UnreadableError(ValueError):
    """A file cannot be read now, though it may be whole: no descriptor is free, no right to it."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """Arrays of one trajectory, an entry a token."""

    token_ids: npt.NDArray[np.int32]
    """[T] prompt, sampled and tool tokens."""
    action_mask: npt.NDArray[np.bool_]
    """[T] True where the policy sampled the token."""
    rollout_logprobs: npt.NDArray[np.float32]
    """[T] natural-log probability at sampling; 0.0 where action_mask is False."""
    learner_logprobs: npt.NDArray[np.float32] | None = None
    """[T] the same by the learner before the step, 0.0 where it was not asked; None where the
    objective did not need it. The ratio is exp(learner - rollout)."""
    entropies: npt.NDArray[np.float32] | None = None
    """[T] entropy of what each was drawn from, nats, where the learner was asked; None as above."""
    advantages: npt.NDArray[np.float32] | None = None
    """[T] advantage of each token; None for what was not trained on."""

    @classmethod
    def of(cls, trajectory: Trajectory, **of_learner: npt.NDArray[np.float32] | None) -> Tokens:
        """Return those of a trajectory, with what the learner adds."""
        return cls(
            trajectory.token_ids, trajectory.action_mask, trajectory.rollout_logprobs, **of_learner
        )


@dataclass(frozen=True)
class StoredTrajectory:
    """One trajectory of a run folder."""

    record: dict[str, Any]
    """JSON object as `record.readable` makes it."""
    tokens: Tokens | None
    """Arrays; None in files of older versions."""


def flat_row(record: Mapping[str, Any], evaluation: str | None) -> dict[str, Any]:
    """Return the columns of FLAT and NESTED of a record.

    Args:
        record: of this version or an older one.
        evaluation: name of the evaluation it belongs to; None for a sample of a step.
    """
    reward, versions = record.get("reward") or {}, record.get("policy_versions") or [None]
    calls = [call for turn in record["turns"] for call in turn["calls"]]
    own = {name: record.get(name) for name in FLAT}
    set_name = record["metadata"].get("set")
    return own | {
        "evaluation": evaluation,
        "set": None if set_name is None else str(set_name),
        "reward": reward.get("total"),
        "first_version": versions[0],
        "last_version": versions[-1],
        "num_sampled": sum(end - start for start, end in record.get("mask_spans") or []),
        "num_turns": len(record["turns"]),
        "num_calls": len(calls),
        "failed_calls": sum(call["status"] in TOOL_FAILURES for call in calls),
        "components": reward.get("components") or {},
        "tools": sorted({call["tool"] for call in calls if call["tool"]}),
    }


@dataclass(frozen=True)
class StoredFile:
    """One file of `trajectories/`: a step, or an evaluation."""

    path: Path
    step: int | None
    """Learner step; None for an evaluation."""
    evaluation: str | None
    """Name of the evaluation: before, after, step_000010; None for a step."""

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the columns of FLAT and NESTED of each trajectory, in the order of `read`.

        Raises:
            ValueError: the file is damaged.
        """
        if self._is_lines:
            yield from (flat_row(record, self.evaluation) for record in self.records())
            return
        with self._open() as file:
            for row in file.read([*FLAT, *NESTED]).to_pylist():
                yield row | {"components": dict(row["components"])}

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the record of each trajectory.

        Raises:
            ValueError: the file is damaged.
        """
        if not self._is_lines:
            with self._open() as file:
                yield from map(from_json, file.read(["record"])["record"].to_pylist())
            return
        try:
            lines = split_lines(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as exc:
            raise self._problem(exc) from exc
        for number, line in enumerate(lines, start=1):
            try:
                yield json.loads(line)
            except json.JSONDecodeError as exc:
                raise ValueError(f"{self.path}:{number}: not a JSON line: {exc.msg}") from exc

    def read(self, row: int) -> StoredTrajectory:
        """Return one trajectory with its tokens.

        Raises:
            ValueError: the file is damaged, or has no such row.
        """
        if self._is_lines:
            record = next(islice(self.records(), row, None), None)
            if record is not None:
                return StoredTrajectory(record, None)
        else:
            with self._open() as file:
                if row < file.metadata.num_rows:
                    part = file.read_row_group(row // ROWS_AT_ONCE, ["record", *ARRAYS])
                    return _stored(part.slice(row % ROWS_AT_ONCE, 1))
        raise ValueError(f"{self.path} has no row {row}; the run has written it anew: look again")

    def trajectories(self) -> Iterator[StoredTrajectory]:
        """Yield every trajectory with its tokens.

        Raises:
            ValueError: the file is damaged.
        """
        if self._is_lines:
            yield from (StoredTrajectory(record, None) for record in self.records())
            return
        with self._open() as file:
            for batch in file.iter_batches(1, columns=["record", *ARRAYS]):
                yield _stored(batch)

    @property
    def _is_lines(self) -> bool:
        return self.path.suffix == ".jsonl"

    @contextmanager
    def _open(self) -> Iterator[Any]:
        parquet = import_extra("pyarrow.parquet", EXTRA, f"the file {self.path}")
        try:
            with parquet.ParquetFile(self.path) as file:
                yield file
        except FileNotFoundError:
            raise
        except _DAMAGE as exc:
            raise self._problem(exc) from exc

    def _problem(self, exc: Exception) -> ValueError:
        if isinstance(exc, OSError) and exc.errno is not None:  # pyarrow's own have none
            return UnreadableError(f"{self.path} cannot be read ({exc}); look again")
        return ValueError(
            f"{self.path} is damaged ({exc!r}); remove it, and the other steps can be read"
        )


_DAMAGE = (OSError, ValueError, TypeError, LookupError, NotImplementedError)
"""Errors of pyarrow, and of JSON, that a file which was changed has."""


def stored_files(run_folder: Path) -> list[StoredFile]:
    """Return the files of a run: the steps in their order, then the evaluations by name."""
    steps: list[StoredFile] = []
    evaluations: list[StoredFile] = []
    for path in sorted((run_folder / TRAJECTORIES_DIR).glob("[!.]*")):
        if path.suffix not in (".parquet", ".jsonl"):
            continue
        if step := STEP_FILE.fullmatch(path.stem):
            steps.append(StoredFile(path, int(step[1]), None))
        elif evaluation := EVALUATION_FILE.fullmatch(path.stem):
            evaluations.append(StoredFile(path, None, evaluation[1]))
    return [*sorted(steps, key=lambda file: file.step or 0), *evaluations]


class TrajectoryStore:
    """Writes `trajectories/`, a file at a time, each whole or not at all.

    Where the folder would be larger than `max_gib`, the oldest files are removed; the newest step
    stays. Nobody else may be writing there: what a crash left half-written is removed.
    """

    def __init__(self, run_folder: Path, max_gib: float) -> None:
        self._run_folder = run_folder
        self._folder = run_folder / TRAJECTORIES_DIR
        self._max_gib = max_gib
        self._warned = False
        self.removed_steps = 0
        """Steps whose files were removed since this start, for want of room."""
        for half in self._folder.glob(".*.tmp"):
            half.unlink(missing_ok=True)

    def write(self, name: str, trajectories: Iterable[StoredTrajectory]) -> None:
        """Write `trajectories/{name}.parquet`; nothing for no trajectories.

        Raises:
            DiskFullError: there is no room; what was there before is untouched.
        """
        rows = iter(trajectories)
        first = next(rows, None)
        if first is None:
            return
        evaluation = EVALUATION_FILE.fullmatch(name)
        of_evaluation = None if evaluation is None else evaluation[1]
        with replace_file(self._folder / f"{name}.parquet") as output:
            write_parquet(output, ((one, of_evaluation) for one in chain([first], rows)))
        self._make_room()

    def _make_room(self) -> None:
        with os.scandir(self._folder) as entries:
            sizes = {entry.name: entry.stat().st_size for entry in entries}
        total, limit = sum(sizes.values()), self._max_gib * GIB
        if total <= limit:
            return
        files = stored_files(self._run_folder)
        newest = max((file.step for file in files if file.step is not None), default=None)
        for file in sorted(files, key=_age):
            if file.step is not None and file.step == newest:
                continue
            if not self._warned:
                self._warned = True
                logger.warning(
                    "trajectories/ has reached learner.trajectories_max_gib (%g): the oldest steps "
                    "and evaluations are removed from now on; the first is %s",
                    self._max_gib,
                    file.path.name,
                )
            file.path.unlink(missing_ok=True)
            self.removed_steps += file.step is not None
            total -= sizes.get(file.path.name, 0)
            if total <= limit:
                return


def _age(file: StoredFile) -> tuple[float, bool]:
    """Return a key that sorts files from the oldest on: by step, an evaluation after its step."""
    if file.evaluation is None:
        return file.step or 0, False
    at = STEP_FILE.fullmatch(file.evaluation)
    return int(at[1]) if at else 0 if file.evaluation == "before" else math.inf, True


def remove_steps_after(run_folder: Path, step: int) -> None:
    """Remove the files of later steps, which are no part of a run that goes on there."""
    for file in stored_files(run_folder):
        if file.step is not None and file.step > step:
            file.path.unlink()


def remove_evaluation(run_folder: Path, name: str) -> None:
    """Remove the file of an evaluation, if there is one."""
    for file in stored_files(run_folder):
        if file.evaluation == name:
            file.path.unlink()


def write_parquet(output: Any, rows: Iterable[tuple[StoredTrajectory, str | None]]) -> None:
    """Write trajectories as Parquet: the flat columns, records and arrays.

    Args:
        output: open file, for bytes.
        rows: each with the name of its evaluation; None for samples of steps.
    """
    pa = import_extra("pyarrow", EXTRA, "learner.trajectories_per_step")
    parquet = import_extra("pyarrow.parquet", EXTRA, "learner.trajectories_per_step")
    kinds = {"text": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
    of_arrays = {"token_ids": pa.int32(), "action_mask": pa.bool_()}
    schema = pa.schema(
        [
            *((name, kinds[kind]) for name, kind in FLAT.items()),
            ("components", pa.map_(pa.string(), pa.float64())),
            ("tools", pa.list_(pa.string())),
            ("record", pa.string()),
            *((name, pa.list_(of_arrays.get(name, pa.float32()))) for name in ARRAYS),
        ]
    )
    with parquet.ParquetWriter(output, schema, compression="zstd") as writer:
        left = (_parquet_row(stored, evaluation) for stored, evaluation in rows)
        while part := list(islice(left, ROWS_AT_ONCE)):
            writer.write_table(pa.Table.from_pylist(part, schema))


def _parquet_row(stored: StoredTrajectory, evaluation: str | None) -> dict[str, Any]:
    row = flat_row(stored.record, evaluation)
    row["components"] = list(row["components"].items())
    row["record"] = to_json(stored.record, inf_nan_mode="null").decode()
    return row | {name: getattr(stored.tokens, name, None) for name in ARRAYS}


def _stored(one: Any) -> StoredTrajectory:
    """Return the only row of a table or batch."""
    arrays: dict[str, Any] = dict.fromkeys(ARRAYS)
    for name in set(ARRAYS) & set(one.schema.names):  # older versions stored fewer
        value = one.column(name)[0]
        arrays[name] = value.values.to_numpy(zero_copy_only=False) if value.is_valid else None
    record = from_json(one.column("record")[0].as_py())
    return StoredTrajectory(record, None if arrays["token_ids"] is None else Tokens(**arrays))
