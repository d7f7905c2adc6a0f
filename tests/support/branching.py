"""An agent loop that searches, over a scripted model and a scripted scorer.

Both are functions: what the model writes depends on the dialogue so far and on the branch, and a
score on what a scorer sees of it. Tools are real services over HTTP, or `FakeToolServer`s.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from agent_r1.attempts.tool_client import ToolClient
from agent_r1.rollout.agent_loop import AgentLoop
from agent_r1.rollout.config import EnvConfig
from agent_r1.rollout.envs import ToolEnv
from agent_r1.text.chat_format import ChatFormat
from agent_r1.text.tokens import Generation
from agent_r1_proto.rewards import ScoreRequest, Value
from agent_r1_proto.tasks import Decoding, Purpose, RolloutTask, SamplingParameters, Task
from agent_r1_proto.trajectory import VersionSpan
from tests.support.builders import rollout_task
from tests.support.fakes import FakeToolServer, Sampled

COMPONENT = "scorer"
SCORER_TOKENS = 10
"""What every score costs."""

Write = Callable[[str, str, int], str]
"""Dialogue so far, path of the branch ("" without a search), seed --> next turn."""
Score = Callable[[ScoreRequest], float]


@dataclass
class ScriptedModel:
    """A sampler that writes what a function says."""

    chat: ChatFormat
    end_id: int
    write: Write
    max_context: int = 8192
    requests: list[Sampled] = field(default_factory=list)
    num_sampled: int = 0
    """Tokens of all turns."""

    async def generate(
        self,
        token_ids: list[int],
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        request_id: str,
    ) -> Generation:
        await asyncio.sleep(0)
        self.requests.append(Sampled(list(token_ids), max_tokens, temperature, seed, request_id))
        names = request_id.split("/")
        path = names[5] if len(names) == 7 else ""  # after run/incarnation/group/sample/attempt
        text = self.write(self.chat.decode(token_ids), path, seed)
        whole = [*self.chat.encode(text), self.end_id]
        kept = whole[:max_tokens]
        self.num_sampled += len(kept)
        return Generation(
            token_ids=kept,
            logprobs=[-0.5] * len(kept),
            version_spans=[VersionSpan(policy_version=0, start=0, end=len(kept))],
            finish_reason="stop" if len(kept) == len(whole) else "length",
        )


@dataclass
class ScriptedScorer:
    """Scores branches by a function of what it sees."""

    score: Score
    asked: list[ScoreRequest] = field(default_factory=list)
    judged: list[ScoreRequest] = field(default_factory=list)

    async def value(self, component: str, interaction: ScoreRequest) -> Value:
        assert component == COMPONENT
        self.asked.append(interaction)
        return Value(value=self.score(interaction), tokens=SCORER_TOKENS)

    async def outcome(self, interaction: ScoreRequest) -> float:
        self.judged.append(interaction)
        return self.score(interaction)


@dataclass
class Searching:
    """A loop and what is behind it."""

    loop: AgentLoop
    model: ScriptedModel
    scorer: ScriptedScorer


def no_score(_: ScoreRequest) -> float:
    raise AssertionError("nothing is to be scored")


@asynccontextmanager
async def searching(
    chat: ChatFormat,
    end_id: int,
    write: Write,
    score: Score = no_score,
    *servers: FakeToolServer,
    env: Mapping[str, Any] | None = None,
    make_env: Callable[[Task], ToolEnv] = ToolEnv,
) -> AsyncIterator[Searching]:
    """Run a loop over some tools."""
    model, scorer = ScriptedModel(chat, end_id, write), ScriptedScorer(score)
    tools = ToolClient({server.name: server.url for server in servers})
    try:
        await tools.start(wait_s=60.0)
        loop = AgentLoop(
            policy=model,
            chat=chat,
            tools=tools,
            env=EnvConfig(**(env or {})),
            make_env=make_env,
            max_context=model.max_context,
            run_seed=5,
            server_id="server-1",
            scorer=scorer,
        )
        yield Searching(loop, model, scorer)
    finally:
        await tools.stop()


def asks(
    method: str,
    *,
    task: Task | None = None,
    purpose: Purpose = "eval",
    sampling: SamplingParameters | None = None,
    **options: Any,
) -> RolloutTask:
    """Return a sample that is to be searched for."""
    if method != "majority":
        options = {"scorer": COMPONENT} | options
    decoding = Decoding.model_validate({"method": method, **options})
    given = {"task": task, "sampling": sampling}
    given = {name: value for name, value in given.items() if value is not None}
    return rollout_task(run_id="run", purpose=purpose, decoding=decoding, **given)
