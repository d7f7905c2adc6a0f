"""Parts of one run: configuration tables and data files, read and checked before anything.

`agent_r1.cli.services.serve` makes and prepares it; train.py carries it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from agent_r1.learner.checkpoints.run_store import RunStore, open_run_store
from agent_r1.learner.config import EngineConfig, EvaluationConfig, LearnerConfig
from agent_r1.learner.prompts import PromptOrder
from agent_r1.learner.redis_memory import SERVER_MAXMEMORY, redis_memory_problem
from agent_r1.learner.reporting.run_folder import RunFolder
from agent_r1.runtime.config import ModelConfig, RedisConfig, RunConfig
from agent_r1.runtime.files.tasks import read_sets
from agent_r1_proto.tasks import Task


@dataclass(frozen=True)
class RunSpec:
    """A run, ready to start once it is prepared."""

    run: RunConfig
    model: ModelConfig
    redis: RedisConfig
    learner: LearnerConfig
    engine: EngineConfig
    evaluation: EvaluationConfig
    prompts: PromptOrder
    resolved_config: Mapping[str, Any]
    """Configuration of the run, every table, without secrets."""
    resume: bool
    system_prompt: str | None = None
    """`env.system_prompt`, where the loop of `[env]` samples; an agent has its own."""
    max_segments: int = 1
    """Most segments of one trajectory."""
    take_over: bool = False
    """Whether another learner that trains this run is to end."""

    @cached_property
    def folder(self) -> RunFolder:
        """The run folder."""
        return RunFolder(self.run.folder(), self.learner.trajectories_max_gib)

    @cached_property
    def store(self) -> RunStore | None:
        """Store of checkpoints and ledger besides the folder (`learner.checkpoint_url`)."""
        return open_run_store(self.run, self.learner, resume=self.resume)

    @cached_property
    def eval_sets(self) -> dict[str, list[Task]]:
        """The questions of each evaluation set."""
        return read_sets(self.evaluation.sets, self.evaluation.max_questions)

    def prepare(self) -> RunSpec:
        """Lock the run folder, and read the evaluation sets.

        Raises:
            TaskFileError: a data file is missing, empty or malformed; file and line are named.
            ValueError: the run folder holds another run, or none to resume; redis.url is not set.
            StoreError: the run store cannot be used.
        """
        if self.redis.url is None:
            raise ValueError("redis.url is not set; start the run with `agent-r1 train`, or set it")
        if self.store is not None:
            self.store.require_usable()
        stored = self.store is not None and self.store.last_start() > 0
        self.folder.prepare(resume=self.resume, stored=stored)
        _ = self.eval_sets
        return self

    @property
    def total_steps(self) -> int:
        """Learner steps of the whole run."""
        return self.learner.num_steps(len(self.prompts))

    @property
    def weights_dir(self) -> Path:
        """Folder in which weight versions of this run are published."""
        if self.learner.weights_dir is None:
            return self.folder.path / "weights"
        return self.learner.weights_dir / self.run.id

    @property
    def samples_per_batch(self) -> int:
        """Trajectories of one batch."""
        return self.learner.groups_per_batch * self.learner.slots_per_group

    def check_memory(self, limit: int | None) -> None:
        """Refuse a Redis that the work outstanding could fill.

        Args:
            limit: memory limit of the server, in bytes; None when it has none.

        Raises:
            ValueError: the worst case does not fit.
        """
        if limit is None:
            return
        problem = redis_memory_problem(
            self.learner,
            self.evaluation,
            self.model.max_context,
            self.max_segments,
            limit_bytes=limit,
            limit_name=SERVER_MAXMEMORY,
        )
        if problem is not None:
            raise ValueError(problem)
