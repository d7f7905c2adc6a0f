"""An evaluation outside of training: a client of running services.

Task files --tasks with purpose `eval`--> rollout --> reward --> one JSON line a question and a
summary.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent_r1.evaluation.config import QuestioningTable
from agent_r1_proto.config import RedisTable, RunTable
from agent_r1_proto.evaluation import EvalClient, EvalResult, SetScores, summarise
from agent_r1_proto.registry import Registry
from agent_r1_proto.streams import Broker
from agent_r1_proto.task_files import read_task_file
from agent_r1_proto.tasks import SamplingParameters, Task
from agent_r1_proto.weights import NewestVersion

logger = logging.getLogger(__name__)

LOG_EVERY = 50


def run_evaluation(
    *,
    run: RunTable,
    redis: RedisTable,
    sets: Mapping[str, Path],
    questioning: QuestioningTable,
    out: Path,
) -> dict[str, SetScores]:
    """Ask running services every question of the sets.

    Args:
        run: names the run whose services answer.
        redis: the run's Redis.
        sets: file of tasks per set name.
        questioning: sampling and limits.
        out: file to write, one JSON object a question; the summary goes beside it, to
            `{out without suffix}.summary.json`.

    Returns:
        Scores per set, and per question type within it.

    Raises:
        TaskFileError: a file is missing, empty or malformed; file and line are named.
        ValueError: there is no set, or redis.url is not set.
    """
    if not sets:
        raise ValueError("there is no set to evaluate; name a file under evaluation.sets")
    if redis.url is None:
        raise ValueError("redis.url is not set; give the address of the run's Redis server")
    tasks = [task for name, path in sets.items() for task in _read_set(name, path, questioning)]
    out.parent.mkdir(parents=True, exist_ok=True)
    results = asyncio.run(_ask(run, redis, redis.url, questioning, tasks))
    with out.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(answer_line(r), ensure_ascii=False) + "\n" for r in results)
    summary = summarise(results)
    record = {name: scores.model_dump(mode="json") for name, scores in summary.items()}
    out.with_suffix(".summary.json").write_text(json.dumps(record, indent=2) + "\n")
    return summary


def _read_set(name: str, path: Path, questioning: QuestioningTable) -> list[Task]:
    tasks = read_task_file(path)[: questioning.max_questions]
    return [task.model_copy(update={"metadata": {**task.metadata, "set": name}}) for task in tasks]


async def _ask(
    run: RunTable, redis: RedisTable, url: str, questioning: QuestioningTable, tasks: list[Task]
) -> list[EvalResult]:
    broker = await Broker.connect(url, run.id, lease_s=redis.lease_s)
    async with broker:
        registry = Registry(broker)
        if await registry.newest_version() is None:
            # No learner runs: the servers' own weights are the ones to ask.
            await registry.set_newest_version(NewestVersion(policy_version=0))
        client = EvalClient(
            broker,
            run_id=run.id,
            client_id=f"evaluate-{os.getpid()}",
            sampling=SamplingParameters(
                temperature=questioning.temperature, max_turns=questioning.max_turns
            ),
            timeout_s=questioning.timeout_s,
            sample_timeout_s=questioning.sample_timeout_s,
            max_attempts=questioning.max_attempts,
            max_in_flight=questioning.max_in_flight,
        )
        done = 0

        def report(result: EvalResult) -> None:
            nonlocal done
            done += 1
            if result.failed:
                logger.warning(
                    "question failed task_id=%s reason=%s", result.task.id, result.reason
                )
            if done % LOG_EVERY == 0 or done == len(tasks):
                logger.info("evaluated questions=%d total=%d", done, len(tasks))

        return await client.run(tasks, report)


def answer_line(result: EvalResult) -> dict[str, Any]:
    """Render one question and its answer."""
    task, scored = result.task, result.scored
    line: dict[str, Any] = {
        "id": task.id,
        "set": task.metadata.get("set"),
        "type": task.metadata.get("type"),
        "prompt": [message.model_dump() for message in task.messages()],
        "payload": task.payload,
        "failed": result.failed,
        "reason": result.reason,
    }
    if scored is None:
        return line
    trajectory, reward = scored.trajectory, scored.reward
    calls = trajectory.calls()
    return line | {
        "status": trajectory.status,
        "reason": trajectory.reason,
        "prediction": None if reward is None else reward.prediction,
        "reward": None if reward is None else reward.total,
        "components": {} if reward is None else reward.components,
        "num_turns": len(trajectory.turns),
        "num_calls": len(calls),
        "policy_versions": trajectory.policy_versions(),
        "turns": [
            {
                "text": turn.text,
                "calls": [
                    {"tool": call.tool, "arguments": call.arguments, "status": call.status}
                    for call in turn.calls
                ],
            }
            for turn in trajectory.turns
        ],
    }
