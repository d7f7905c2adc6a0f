"""Asking a running system questions: the client that evaluation, chat and the learner share.

client --RolloutTask (purpose eval)--> stream `tasks` --> rollout --> reward --> the client's own
reply stream --> client. Evaluation is outside the learner's credits and incarnations.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import model_validator

from agent_r1.runtime.tracing import begin_trace
from agent_r1_proto.dead_letters import DeadLetter
from agent_r1_proto.failures import FailureBoard
from agent_r1_proto.lost_samples import LostSamples, lost_reason
from agent_r1_proto.messages import Message
from agent_r1_proto.rewards import ScoredTrajectory
from agent_r1_proto.stream_consumer import StreamConsumer
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import Decoding, RolloutKey, RolloutTask, SamplingParameters, Task

logger = logging.getLogger(__name__)

READ_COUNT = 64
READ_BLOCK_S = 0.5
"""Longest one read waits, so that overdue questions are asked again in time."""
CLEAN_UP_TIMEOUT_S = 5.0
NO_RESULT = "no result in time"
ATTEMPT = "evaluation_attempt"
"""Key in a task's metadata: the number of the answer that is asked for; absent for the first."""
GREEDY = SamplingParameters(temperature=0.0)


@dataclass(frozen=True)
class EvalResult:
    """One question and what came of it."""

    task: Task
    scored: ScoredTrajectory | None
    """Result; None when none came."""
    lost: str = ""
    """Why none came; "" when one did."""

    @property
    def failed(self) -> bool:
        """No scored answer: an outage, not the model's fault."""
        scored = self.scored
        return scored is None or scored.reward is None or scored.trajectory.status == "FAILED"

    @property
    def reason(self) -> str:
        """Reason why it failed; "" when it did not."""
        if not self.failed:
            return ""
        if self.scored is None:
            return self.lost or NO_RESULT
        return self.scored.trajectory.reason or "no reward"


OnResult = Callable[[EvalResult], Awaitable[None] | None]


@dataclass
class _Question:
    task: Task
    index: int
    """Among the questions of one `run`."""
    attempt: int = -1
    """-1 while it was never asked."""
    asked_at: float = 0.0
    scored: ScoredTrajectory | None = None
    lost: str = ""

    @property
    def open(self) -> bool:
        return self.scored is None and not self.lost

    def result(self) -> EvalResult:
        return EvalResult(self.task, self.scored, self.lost)


def question_seed(seed: int, task: Task) -> int:
    """Return the sampling seed of a question, below 2**63.

    It depends on nothing but the set's name, the task's id, and the number of the attempt, so that
    part of a set, asked alone or again, is sampled as it is in the whole.
    """
    text = f"{seed}/{task.metadata.get('set', 'all')}/{task.id}"
    if attempt := task.metadata.get(ATTEMPT):
        text = f"{text}/{attempt}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


@dataclass
class EvalClient:
    """Submits tasks and gathers their scored trajectories on a reply stream of its own."""

    broker: Broker
    """Connection to the run's Redis."""
    run_id: str
    """Names the run whose services answer."""
    client_id: str
    """Names the reply stream; unique among the clients that run at one time."""
    sampling: SamplingParameters = GREEDY
    decoding: Decoding | None = None
    """Search for each answer among several branches; None samples one."""
    greedy_first: bool = False
    """The first of several answers to a question is greedy."""
    seed: int | None = None
    """Seed from which each question's own derives (`question_seed`), whatever else is asked; None
    leaves seeds to the rollout server."""
    timeout_s: float = 1800.0
    """Longest one `run` may take, in seconds."""
    sample_timeout_s: float = 600.0
    """A question without a result for so long is asked again, in seconds."""
    max_attempts: int = 3
    """Attempts of the rollout server at one question."""
    max_in_flight: int | None = None
    """Most questions asked at one time, which leaves room for training; None asks all at once."""
    _last_letter: str = field(default="", init=False)
    """Id of the newest dead letter that was looked at."""

    @property
    def _stream(self) -> str:
        return self.broker.keys.replies(self.client_id)

    async def run(
        self, tasks: Sequence[Task], on_result: OnResult | None = None
    ) -> list[EvalResult]:
        """Ask every question and wait for the answers.

        Args:
            tasks: the questions.
            on_result: called with each result once, in order of completion, those that never came
                included.

        Returns:
            One result per task, in the order of `tasks`; those that no service could read, and
            those without an answer within `timeout_s`, have `scored` None.
        """
        questions = [_Question(task, index) for index, task in enumerate(tasks)]
        self._last_letter = await self.broker.newest_dead_letter()
        try:
            async with self.broker.consumer(
                self._stream, ScoredTrajectory, group="client", consumer=self.client_id
            ) as consumer:
                await self._gather(questions, consumer, on_result)
        finally:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.broker.delete_stream(self._stream), CLEAN_UP_TIMEOUT_S)
        return [question.result() for question in questions]

    async def _gather(
        self,
        questions: list[_Question],
        consumer: StreamConsumer[ScoredTrajectory],
        on_result: OnResult | None,
    ) -> None:
        deadline = time.monotonic() + self.timeout_s
        lost = LostSamples(self.broker, self._stream)
        while left := sum(question.open for question in questions):
            await self._ask(questions)
            await self._ask_for_lost(questions, lost)
            wait_s = min(READ_BLOCK_S, deadline - time.monotonic())
            if wait_s <= 0:
                logger.warning(
                    "evaluation ran out of time client_id=%s missing=%d timeout_s=%g",
                    self.client_id,
                    left,
                    self.timeout_s,
                )
                for question in questions:
                    if question.open:
                        question.lost = NO_RESULT
                        await _tell(question, on_result)
                return
            entries = await consumer.read(READ_COUNT, wait_s)
            for entry in entries:
                question = self._question_of(entry.message, questions)
                if question is None or not question.open:
                    continue  # a late duplicate, or another client's of the same name
                question.scored = entry.message
                await _tell(question, on_result)
            await consumer.finish_many(entries)
            await self._give_up_unreadable(questions, on_result)

    async def _give_up_unreadable(
        self, questions: list[_Question], on_result: OnResult | None
    ) -> None:
        """Give up questions that no service can parse, or whose result nobody can."""
        for letter in await self.broker.dead_letters(self._last_letter):
            self._last_letter = letter.letter_id
            if not letter.unreadable or letter.reply_stream != self._stream:
                continue
            question = _asked_in(letter, questions)
            if question is not None and question.open:
                question.lost = letter.failure
                await _tell(question, on_result)

    async def _ask(self, questions: list[_Question]) -> None:
        now = time.monotonic()
        waiting = [q for q in questions if q.attempt >= 0 and q.open]
        overdue = [q for q in waiting if now - q.asked_at >= self.sample_timeout_s]
        fresh = [q for q in questions if q.attempt < 0]
        if self.max_in_flight is not None:
            fresh = fresh[: max(0, self.max_in_flight - len(waiting))]
        for question in [*overdue, *fresh]:
            question.attempt += 1
            question.asked_at = now
        if overdue:
            logger.warning(
                "asking overdue questions again client_id=%s count=%d",
                self.client_id,
                len(overdue),
            )
        await self._publish([*overdue, *fresh])

    async def _publish(self, questions: Sequence[_Question]) -> None:
        messages = [self._message(question) for question in questions]
        await self.broker.publish_many(self.broker.keys.tasks, messages)

    async def _ask_for_lost(self, questions: list[_Question], lost: LostSamples) -> None:
        """Ask questions again that Redis has lost; none of their attempts has failed."""
        now = time.monotonic()
        youngest = now - self.broker.lease_s / 2
        asked = {
            str(self._key(question)): question
            for question in questions
            if question.open and question.attempt >= 0 and question.asked_at <= youngest
        }
        found = await lost.find(asked)
        if not found:
            return
        logger.warning("asking lost questions again client_id=%s n=%d", self.client_id, len(found))
        await FailureBoard(self.broker).note("evaluation", lost_reason(len(found)))
        for key in found:
            asked[key].asked_at = now
        await self._publish([asked[key] for key in found])

    def _key(self, question: _Question) -> RolloutKey:
        return RolloutKey(
            run_id=self.run_id,
            incarnation=0,
            group_id=question.index,
            sample_index=0,
            attempt=question.attempt,
        )

    def _message(self, question: _Question) -> RolloutTask:
        sampling = self.sampling
        if self.seed is not None:
            seed = question_seed(self.seed, question.task)
            sampling = sampling.model_copy(update={"seed": seed})
        if self.greedy_first and ATTEMPT not in question.task.metadata:
            sampling = sampling.model_copy(update={"temperature": 0.0})
        return RolloutTask(
            key=self._key(question),
            group_size=1,
            task=question.task,
            purpose="value" if self.decoding and self.decoding.continuations else "eval",
            sampling=sampling,
            decoding=self.decoding,
            reply_stream=self._stream,
            max_attempts=question.attempt + self.max_attempts,
            traceparent=begin_trace("question", task_id=question.task.id),
        )

    @staticmethod
    def _question_of(scored: ScoredTrajectory, questions: list[_Question]) -> _Question | None:
        rollout = scored.trajectory.rollout
        index = rollout.key.group_id
        if index >= len(questions) or questions[index].task.id != rollout.task.id:
            return None
        return questions[index]


async def _tell(question: _Question, on_result: OnResult | None) -> None:
    """Pass on what became of a question."""
    noted = on_result(question.result()) if on_result is not None else None
    if noted is not None:
        await noted


def _asked_in(letter: DeadLetter, questions: list[_Question]) -> _Question | None:
    try:
        index = RolloutKey.parse(letter.key).group_id
    except ValueError:
        return None  # its key is damaged too: the question will be overdue
    return questions[index] if index < len(questions) else None


class EvalScores(Message):
    """Means over a set of questions; questions that failed count in `failed` only."""

    n: int
    """Questions that were answered and scored."""
    failed: int
    """Questions without a scored answer (an outage, or no result in time)."""
    reward: float | None
    """Mean outcome reward; None without questions."""
    components: dict[str, float] = {}
    """Mean of every reward component by name, over the questions that have it."""
    calls: dict[str, float] = {}
    """Calls per question that a tool answered, by the tool's name; of every tool that answered one
    in this evaluation."""
    mean_calls: float | None
    """Calls of any tool per question, malformed ones included."""
    em: float | None
    """The component `exact_match`; None where it was not measured."""
    f1: float | None
    """The component `f1`; None where it was not measured."""

    @model_validator(mode="before")
    @classmethod
    def _read_older(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Read scores of versions that knew one tool, and kept `mean_searches` of it."""
        searches = values.get("mean_searches")
        return values if searches is None else {"calls": {"search": searches}, **values}


class SetScores(EvalScores):
    """Scores of one set, and of each question type in it."""

    types: dict[str, EvalScores] = {}


def mean_by_name(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each name over the rows that have it, by name."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in sorted(values.items())}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _scores(results: Sequence[EvalResult], tools: Sequence[str]) -> dict[str, Any]:
    answered = [
        (result.scored.trajectory, result.scored.reward)
        for result in results
        if not result.failed and result.scored is not None and result.scored.reward is not None
    ]
    calls = [trajectory.answered_calls() for trajectory, _ in answered]
    components = mean_by_name(reward.components for _, reward in answered)
    return {
        "n": len(answered),
        "failed": len(results) - len(answered),
        "reward": _mean([reward.total for _, reward in answered]),
        "components": components,
        "calls": {t: sum(c.get(t, 0) for c in calls) / len(calls) for t in tools if calls},
        "mean_calls": _mean([len(trajectory.calls()) for trajectory, _ in answered]),
        "em": components.get("exact_match"),
        "f1": components.get("f1"),
    }


def _grouped(results: Sequence[EvalResult], key: str) -> dict[str, list[EvalResult]]:
    groups: dict[str, list[EvalResult]] = {}
    for result in results:
        groups.setdefault(str(result.task.metadata.get(key, "all")), []).append(result)
    return groups


def _tools(results: Sequence[EvalResult]) -> list[str]:
    """Return the names of the tools that answered a call."""
    scored = [result.scored for result in results if result.scored is not None]
    return sorted({tool for s in scored for tool in s.trajectory.answered_calls()})


def summarise(results: Sequence[EvalResult]) -> dict[str, SetScores]:
    """Average results per `metadata.set` and, within it, per `metadata.type`.

    Tasks without one of them count under "all".
    """
    summary: dict[str, SetScores] = {}
    tools = _tools(results)
    for name, members in _grouped(results, "set").items():
        types = {
            kind: EvalScores.model_validate(_scores(group, tools))
            for kind, group in _grouped(members, "type").items()
        }
        summary[name] = SetScores.model_validate({**_scores(members, tools), "types": types})
    return summary


def mean_over_sets(summary: dict[str, SetScores], field: str, sets: Sequence[str]) -> float | None:
    """Return the plain mean of one field over the named sets; None when none has it.

    Args:
        summary: what `summarise` returned.
        field: name of a number in `EvalScores`.
        sets: names of the sets to average over; each weighs the same.
    """
    values = [getattr(summary[name], field) for name in sets if name in summary]
    return _mean([value for value in values if value is not None])


def means_over_sets(
    summary: dict[str, SetScores], field: str, sets: Sequence[str]
) -> dict[str, float]:
    """Return the plain means of `components` or `calls` over the named sets that have each.

    Args:
        summary: what `summarise` returned.
        field: `components` or `calls`.
        sets: names of the sets to average over; each weighs the same.
    """
    return mean_by_name(getattr(summary[name], field) for name in sets if name in summary)
