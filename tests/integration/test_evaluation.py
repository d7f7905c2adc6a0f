"""Evaluations over a real Redis: naive_rag with a real tool service, and going on after a stop.

Rollout and reward are one coroutine that answers; the search tool is a service over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent_r1.cli.evaluation.asking import search_url
from agent_r1.config.run import Config, load_config
from agent_r1.evaluation.answer_file import read_answers, summary_file
from agent_r1.evaluation.config import QuestioningConfig
from agent_r1.evaluation.main import EvaluationRun, Progress
from agent_r1.evaluation.retrieval import RetrievalError
from agent_r1.launch import local_client
from agent_r1.launch.local_services import LocalServices
from agent_r1.runtime.config import RedisConfig, RunConfig
from agent_r1.runtime.evaluation_client import question_seed
from agent_r1_proto.rewards import Reward
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import RolloutTask
from tests.integration.test_launcher_supervisor import FAKE_SERVICE
from tests.support.builders import scored
from tests.support.config_scene import task_line, write_scene
from tests.support.fakes import FakeToolServer, running
from tests.support.learner_fakes import eventually

pytestmark = [pytest.mark.redis, pytest.mark.timeout(60)]

NUM_QUESTIONS = 12


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "held_out.jsonl"
    lines = [task_line(f"q{i}", prompt=f"question {i}?") for i in range(NUM_QUESTIONS)]
    path.write_text("".join(lines))
    return path


class Answering:
    """Stands in for rollout and reward: even questions are right; some may stay unanswered."""

    def __init__(self, redis_url: str, run_id: str, limit: int | None = None) -> None:
        self.seen: list[RolloutTask] = []
        self._redis_url = redis_url
        self._run_id = run_id
        self._limit = limit

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[Answering]:
        async with running(self._serve()):
            yield self

    async def _serve(self) -> None:
        async with await Broker.connect(self._redis_url, self._run_id) as broker:
            tasks = broker.consumer(
                broker.keys.tasks, RolloutTask, group="rollout", consumer="fake"
            )
            async with tasks:
                while True:
                    for entry in await tasks.read(4, 0.2):
                        self.seen.append(entry.message)
                        replies: list[Any] = []
                        if self._limit is None or len(self.seen) <= self._limit:
                            stream = entry.message.reply_stream
                            replies.append((stream, self._answer(entry.message)))
                        await tasks.finish(entry, replies)

    def _answer(self, rollout: RolloutTask) -> Any:
        right = float(int(rollout.task.id.removeprefix("q")) % 2 == 0)
        components = {"exact_match": right, "f1": right, "substring_match": right}
        reward = Reward(total=right, components=components, prediction="Ada")
        return scored(rollout, seed=rollout.sampling.seed).replace(reward=reward)


def questioning(**changes: Any) -> QuestioningConfig:
    return QuestioningConfig.model_validate({"timeout_s": 20.0, **changes})


async def test_naive_rag_retrieves_once_over_http_and_leaves_one_turn(
    tmp_path: Path, questions: Path, redis_url: str, run_id: str
):
    progress: list[Progress] = []
    evaluation = EvaluationRun(
        sets={"held_out": questions},
        questioning=questioning(method="naive_rag", seed=4),
        out=tmp_path / "rag.jsonl",
        facts={"policy": "m", "top_k": 2},
    )
    async with (
        FakeToolServer() as server,
        Answering(redis_url, run_id).at_work() as services,
    ):
        await asyncio.to_thread(
            evaluation.ask,
            run=RunConfig(id=run_id),
            redis=RedisConfig(url=redis_url),
            search_url=server.url,
            on_progress=progress.append,
        )
    asked = Counter(str(call.arguments["query"]) for call in server.calls)
    assert asked == Counter(f"question {i}?" for i in range(NUM_QUESTIONS))
    assert {rollout.sampling.max_turns for rollout in services.seen} == {1}
    rollout = next(r for r in services.seen if r.task.id == "q3")
    assert rollout.task.tools is None  # offered as in every other method
    assert rollout.sampling.seed == question_seed(4, rollout.task)
    assert [message.role for message in rollout.task.messages()] == ["user", "assistant", "tool"]
    passages = 'result of {"query": "question 3?"}'
    assert rollout.task.messages()[-1].content == passages

    line = next(a for a in read_answers(tmp_path / "rag.jsonl") if a.id == "q3")
    assert (line.method, line.set, line.question) == ("naive_rag", "held_out", "question 3?")
    assert (line.num_turns, line.num_calls, line.seed) == (1, 0, rollout.sampling.seed)
    assert [message.role for message in line.prompt] == ["user"]
    assert line.retrieval is not None
    assert (line.retrieval.text, line.retrieval.version) == (passages, "7")
    scores = evaluation.summarise()["held_out"]
    assert scores.n == NUM_QUESTIONS
    assert scores.measures["em"] is not None
    assert scores.measures["em"].mean == 0.5
    summary = json.loads(summary_file(tmp_path / "rag.jsonl").read_text())
    recorded = {name: summary[name] for name in ("method", "policy", "seed", "top_k")}
    assert recorded == {"method": "naive_rag", "policy": "m", "seed": 4, "top_k": 2}
    assert (progress[-1].stage, progress[-1].done) == ("answered", NUM_QUESTIONS)


async def test_several_answers_to_a_question_have_seeds_of_their_own(
    tmp_path: Path, questions: Path, redis_url: str, run_id: str
):
    evaluation = EvaluationRun(
        sets={"held_out": questions},
        questioning=questioning(attempts=3, temperature=1.0),
        out=tmp_path / "answers.jsonl",
    )
    async with Answering(redis_url, run_id).at_work() as services:
        connection = {"run": RunConfig(id=run_id), "redis": RedisConfig(url=redis_url)}
        await asyncio.to_thread(evaluation.ask, **connection)
    assert len(services.seen) == 3 * NUM_QUESTIONS
    assert len({rollout.sampling.seed for rollout in services.seen}) == 3 * NUM_QUESTIONS
    answers = read_answers(tmp_path / "answers.jsonl")
    assert Counter(answer.attempt for answer in answers) == dict.fromkeys(range(3), NUM_QUESTIONS)
    scores = evaluation.summarise()["held_out"]
    # Half of the questions are right each time, the others never.
    assert {k: rate.mean for k, rate in scores.pass_at.items()} == {"1": 0.5, "2": 0.5, "3": 0.5}
    assert evaluation.left == []


async def test_a_search_tool_that_is_away_asks_nobody_anything(
    tmp_path: Path,
    questions: Path,
    redis_url: str,
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("agent_r1.evaluation.retrieval.FIRST_DELAY_S", 0.0)
    evaluation = EvaluationRun(
        sets={"held_out": questions},
        questioning=questioning(method="naive_rag"),
        out=tmp_path / "rag.jsonl",
    )
    async with FakeToolServer(always=503) as server:
        with pytest.raises(RetrievalError, match="did not answer in 5 attempts"):
            await asyncio.to_thread(
                evaluation.ask,
                run=RunConfig(id=run_id),
                redis=RedisConfig(url=redis_url),
                search_url=server.url,
            )
    assert len(evaluation.left) == NUM_QUESTIONS


ASK = """
import sys
from pathlib import Path
from agent_r1.evaluation.config import QuestioningConfig
from agent_r1.evaluation.main import EvaluationRun
from agent_r1.runtime.config import RedisConfig, RunConfig
questions, out, redis_url, run_id = sys.argv[1:]
evaluation = EvaluationRun(
    sets={"held_out": Path(questions)},
    questioning=QuestioningConfig(max_in_flight=4),
    out=Path(out),
)
evaluation.ask(run=RunConfig(id=run_id), redis=RedisConfig(url=redis_url))
"""


async def test_an_evaluation_that_was_killed_asks_only_what_is_left(
    tmp_path: Path, questions: Path, redis_url: str, run_id: str
):
    out = tmp_path / "scores.jsonl"
    async with Answering(redis_url, run_id, limit=5).at_work():
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", ASK, str(questions), str(out), redis_url, run_id)
        )
        try:
            await eventually(lambda: _num_lines(out) == 5, timeout_s=30.0)
        finally:
            process.kill()
            await process.wait()
    with out.open("ab") as file:
        file.write(b'{"method": "agent", "set": "held')
    answered = {answer.id for answer in await asyncio.to_thread(_whole_lines, out)}
    assert len(answered) == 5

    evaluation = EvaluationRun(
        sets={"held_out": questions}, questioning=QuestioningConfig(max_in_flight=4), out=out
    )
    assert "only half written" in evaluation.notes[0]
    # A run of its own, as the launcher gives to every client.
    async with Answering(redis_url, f"{run_id}-again").at_work() as services:
        await asyncio.to_thread(
            evaluation.ask, run=RunConfig(id=f"{run_id}-again"), redis=RedisConfig(url=redis_url)
        )
    asked = Counter(rollout.task.id for rollout in services.seen)
    assert asked == Counter({f"q{i}" for i in range(NUM_QUESTIONS)} - answered)
    answers = await asyncio.to_thread(read_answers, out)
    assert len({answer.key for answer in answers}) == len(answers) == NUM_QUESTIONS
    # What was asked before the stop and what was asked after it was seeded alike.
    tasks = {task.id: task for task in evaluation.questions}
    assert all(answer.seed == question_seed(0, tasks[answer.id]) for answer in answers)
    assert evaluation.left == []


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _whole_lines(path: Path) -> Any:
    whole = path.with_suffix(".whole")
    whole.write_bytes(path.read_bytes().rpartition(b"\n")[0])
    return read_answers(whole)


async def test_questions_without_an_answer_in_time_fail_and_come_again(
    tmp_path: Path, questions: Path, redis_url: str, run_id: str
):
    out = tmp_path / "scores.jsonl"
    sets = {"held_out": questions}
    first = EvaluationRun(sets=sets, questioning=questioning(timeout_s=2.0), out=out)
    async with Answering(redis_url, run_id, limit=10).at_work():
        await asyncio.to_thread(
            first.ask, run=RunConfig(id=run_id), redis=RedisConfig(url=redis_url)
        )
    scores = first.summarise()["held_out"]
    assert (scores.n, scores.failed) == (10, 2)
    second = EvaluationRun(sets=sets, questioning=questioning(), out=out)
    assert len(second.left) == 2
    async with Answering(redis_url, f"{run_id}-again").at_work():
        await asyncio.to_thread(
            second.ask, run=RunConfig(id=f"{run_id}-again"), redis=RedisConfig(url=redis_url)
        )
    scores = second.summarise()["held_out"]
    assert (scores.n, scores.failed) == (NUM_QUESTIONS, 0)


def test_the_command_finds_the_search_tool_that_the_launcher_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def command(services: LocalServices, service: str, name: str, *_: str) -> list[str]:
        announce_dir = str(services.announce_dir(name))
        journal = str(tmp_path / "journal")
        return [sys.executable, str(FAKE_SERVICE), name, journal, "--announce-dir", announce_dir]

    monkeypatch.setattr(LocalServices, "command", command)
    config = load_config(write_scene(tmp_path / "example"), [], {}).config

    async def client(served: Config) -> int:
        url = search_url(served)
        assert url is not None
        async with httpx.AsyncClient(trust_env=False) as http:
            return (await http.get(f"{url}/healthz")).status_code

    assert local_client.run_client(config, client, lambda _: None) == 200


EVALUATE = """
import sys
from agent_r1.cli import main as cli
from agent_r1.launch.local_services import LocalServices
fake_service, journal, *arguments = sys.argv[1:]
def command(services, service, name, *_):
    announce_dir = str(services.announce_dir(name))
    return [sys.executable, fake_service, name, journal, "--announce-dir", announce_dir]
LocalServices.command = command
sys.exit(cli.main(arguments))
"""


async def test_ctrl_c_ends_the_services_and_names_the_command_that_goes_on(tmp_path: Path):
    file = write_scene(tmp_path / "example")
    journal, out = tmp_path / "journal", tmp_path / "scores.jsonl"
    policy = str(file.parent / "model")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", EVALUATE, str(FAKE_SERVICE), str(journal)),
        *("evaluate", str(file), "--policy", policy, "--out", str(out)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        await eventually(lambda: "start rollout" in _text(journal), timeout_s=40.0)
        process.send_signal(signal.SIGINT)
        _, error = await asyncio.wait_for(process.communicate(), 20.0)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 130
    text = error.decode()
    assert "Traceback" not in text
    command = f"agent-r1 evaluate {file} --policy {policy} --method agent --out {out}"
    assert f"stopped; 0 of 1 answers are kept; continue with: {command}" in text
    stopped = {line.split()[1] for line in _text(journal).splitlines() if line.startswith("stop")}
    assert stopped == {"search", "reward", "rollout"}


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_search_tool_that_runs_elsewhere_is_where_it_is_said_to_be(tmp_path: Path):
    file = write_scene(tmp_path / "example")
    elsewhere = load_config(file, ["tools.search.url=http://h:1"], {}).config
    assert search_url(elsewhere) == "http://h:1"
    started = load_config(file, [f"run.dir={tmp_path}"], {}).config
    with pytest.raises(ValueError, match="has not announced itself"):
        search_url(started)
