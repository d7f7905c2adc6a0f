"""An evaluation outside of training: a client of running services.

Task files --tasks with purpose `eval`--> rollout --> reward --> one JSON line a question and a
summary. With `naive_rag` the search tool is asked first. An interrupted evaluation continues where
its file ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from agent_r1.evaluation.answer_file import (
    Answer,
    Facts,
    Key,
    ResultFile,
    Retrieved,
    key_of,
    make_answer,
    question_of,
    summary_file,
    write_json,
)
from agent_r1.evaluation.config import QuestioningConfig
from agent_r1.evaluation.retrieval import check_offered, retrieve, with_passages
from agent_r1.evaluation.summary import SetSummary, summarise_answers, summary_record
from agent_r1.runtime.config import RedisConfig, RunConfig
from agent_r1.runtime.evaluation_client import ATTEMPT, EvalClient, EvalResult
from agent_r1.runtime.files.task_source import DataSource
from agent_r1.runtime.files.tasks import read_sets, source_digest
from agent_r1.runtime.http.token import RunToken, find_token
from agent_r1_proto.failures import reason_kind
from agent_r1_proto.registry import Registry
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import SamplingParameters, Task
from agent_r1_proto.weights import NewestVersion

logger = logging.getLogger(__name__)

SHOWN_REASONS = 5


@dataclass(frozen=True)
class Progress:
    """Progress of an evaluation."""

    stage: str
    """`retrieved` (naive_rag, before the model is asked) or `answered`."""
    done: int
    total: int
    failed: int = 0
    reward: float | None = None
    """Mean reward of what was answered since this evaluation was started or continued."""


class EvaluationRun:
    """One evaluation and its result file.

    Args:
        sets: source of tasks per set name.
        questioning: method, sampling and limits.
        out: file to write, one JSON object a question; its facts and its summary go beside it.
        facts: what else makes this evaluation what it is, by dotted name; compared when the
            file exists, and recorded.
        overwrite: forget what the file has.

    Raises:
        TaskFileError: a file is missing, empty or malformed; file and line are named.
        ValueError: there is no set, a task does not fit the method, or the file belongs to another
            evaluation; the text says what differs.
    """

    def __init__(
        self,
        *,
        sets: Mapping[str, DataSource | Path],
        questioning: QuestioningConfig,
        out: Path,
        facts: Facts | None = None,
        overwrite: bool = False,
    ) -> None:
        if not sets:
            raise ValueError("there is no set to evaluate; name a file under evaluation.sets")
        of_sets = read_sets(sets, questioning.max_questions)
        self.questions = [
            attempt_of(task, attempt)
            for tasks in of_sets.values()
            for task in tasks
            for attempt in range(questioning.attempts)
        ]
        for task in self.questions:
            question_of(task)
        if questioning.method == "naive_rag":
            check_offered(self.questions)
        self._questioning = questioning
        self._facts: Facts = {
            "method": questioning.method,
            "max_questions": questioning.max_questions,
            **questioning.facts(),
            **{f"sets.{name}": f"sha256:{source_digest(one)}" for name, one in sets.items()},
            **(facts or {}),
        }
        self.file = ResultFile(out, self._facts, overwrite=overwrite)
        self.notes = self.file.notes

    @property
    def retrieves(self) -> bool:
        """Return whether the search tool is asked before the model."""
        return self._questioning.method == "naive_rag"

    @property
    def left(self) -> list[Task]:
        """The questions without an answer."""
        return [task for task in self.questions if key_of(task) not in self.file.answers]

    def ask(
        self,
        *,
        run: RunConfig,
        redis: RedisConfig,
        search_url: str | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        """Ask running services every question that is left; each answer is written as it comes.

        Raises:
            ValueError: redis.url is not set.
            RetrievalError: the search tool did not answer.
        """
        asyncio.run(self._ask(run, redis, search_url, on_progress or (lambda _: None)))

    def failures(self) -> list[str]:
        """Return why questions failed, the most frequent reasons first, with their counts."""
        return _reasons(a for a in self.file.answers.values() if a.failed)

    def cut_off(self) -> list[str]:
        """Return which limits cut off answers that are scored, with their counts."""
        answers = self.file.answers.values()
        return _reasons(a for a in answers if a.status == "TRUNCATED" and not a.failed)

    def summarise(self) -> dict[str, SetSummary]:
        """Write the summary of the answers so far, and return the scores per set."""
        scores = summarise_answers(self.file.answers.values())
        write_json(summary_file(self.file.out), summary_record(self._facts, scores))
        return scores

    async def _ask(
        self,
        run: RunConfig,
        redis: RedisConfig,
        search_url: str | None,
        report: Callable[[Progress], None],
    ) -> None:
        questioning = self._questioning
        originals = {key_of(task): task for task in self.left}
        asked, retrieved = await self._prepared(
            list(originals.values()), search_url, find_token(run), report
        )
        failed = 0
        rewards: list[float] = []

        def take(result: EvalResult) -> None:
            nonlocal failed
            key = key_of(result.task)
            failed += result.failed
            if result.scored is not None and result.scored.reward is not None:
                rewards.append(result.scored.reward.total)
            if result.failed:
                logger.warning("question failed task_id=%s reason=%s", key[1], result.reason)
            self.file.append(
                make_answer(originals[key], result, questioning.method, retrieved.get(key))
            )
            mean = fmean(rewards) if rewards else None
            done, total = len(self.file.answers), len(self.questions)
            report(Progress("answered", done, total, failed, mean))

        url = redis.connection_url()
        async with await Broker.connect(url, run.id, lease_s=redis.lease_s) as broker:
            registry = Registry(broker)
            if await registry.newest_version() is None:
                # No learner runs: the servers' own weights are the ones to ask.
                await registry.set_newest_version(NewestVersion(policy_version=0))
            client = EvalClient(
                broker,
                run_id=run.id,
                client_id=f"evaluate-{os.getpid()}",
                sampling=SamplingParameters(
                    temperature=questioning.temperature, max_turns=questioning.turns()
                ),
                decoding=questioning.decoding,
                greedy_first=questioning.greedy_first,
                seed=questioning.seed,
                timeout_s=questioning.timeout_s,
                sample_timeout_s=questioning.sample_timeout_s,
                max_attempts=questioning.max_attempts,
                max_in_flight=questioning.max_in_flight,
            )
            await client.run(asked, take)

    async def _prepared(
        self,
        tasks: Sequence[Task],
        search_url: str | None,
        token: RunToken | None,
        report: Callable[[Progress], None],
    ) -> tuple[list[Task], dict[Key, Retrieved]]:
        """Return the tasks as they are asked, and what was retrieved for them."""
        if not self.retrieves:
            return list(tasks), {}
        if search_url is None:
            raise ValueError("naive_rag needs the address of the search tool; set tools.search")
        found = await retrieve(
            search_url,
            tasks,
            timeout_s=self._questioning.tool_timeout_s,
            token=token,
            on_progress=lambda done, total: report(Progress("retrieved", done, total)),
        )
        refused = sum(retrieved.status != "ok" for retrieved in found.values())
        if refused:
            logger.warning("retrievals that the search tool refused count=%d", refused)
        return [with_passages(task, found[key_of(task)]) for task in tasks], found


def _reasons(answers: Iterable[Answer]) -> list[str]:
    counts = Counter(reason_kind(answer.reason) for answer in answers)
    return [f"{count} x {reason}" for reason, count in counts.most_common(SHOWN_REASONS)]


def attempt_of(task: Task, attempt: int) -> Task:
    """Return a question as it is asked for one of several answers; the first one is as it is."""
    if attempt == 0:
        return task
    return task.model_copy(update={"metadata": {**task.metadata, ATTEMPT: attempt}})
