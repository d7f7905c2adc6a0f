"""The two tools of the catalogue, its environment and its reward.

`run.toml` names the classes; the generator and the tests call them directly. Tools sometimes
answer that they are unavailable: a result that the model reads, and no outage. Such an answer costs
nothing of the question's budget of calls; every other one does.
"""

import asyncio
import hashlib
import json
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripted import NOTHING, UNAVAILABLE

from agent_r1 import Tool, ToolEnv
from agent_r1.reward import scoring
from agent_r1.rollout.envs import CallResult, EnvStep, ModelTurn
from agent_r1.tools.base import Arguments, CallContext, text_result
from agent_r1_proto.parts import TextPart
from agent_r1_proto.rewards import ScoreRequest
from agent_r1_proto.tasks import Task
from agent_r1_proto.tools import ToolResult

FOLDER = Path(__file__).parent
TOP_K = 3
PASSAGE_TEMPLATE = " {number} {id} {text} {title}"
_OFFLINE: dict[str, Any] = {"unavailable": True}


def is_unavailable(rollout_id: str, turn: int, share: float) -> bool:
    """Draw whether a call is answered "unavailable": the same for the same call, in any process.

    A trajectory makes one call a turn and has one branch, which its rollout id names. The name of
    the run, with which a rollout id begins, does not count: a repeated evaluation draws the same.
    """
    name = "/".join(rollout_id.rsplit("/", 4)[1:])
    digest = hashlib.blake2b(f"{name}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) < share * 2**64


class _CatalogueTool(Tool):
    """A tool that is sometimes unavailable.

    Args:
        data: folder of the world's files; a relative one is found beside this file.
        unavailable_share: share of the calls that are answered "unavailable".
    """

    def __init__(self, data: str = "data", unavailable_share: float = 0.15) -> None:
        if not 0.0 <= unavailable_share < 1.0:
            raise ValueError(
                f"unavailable_share ({unavailable_share}) must be from 0 to below 1; at 1 no call "
                "would ever be answered"
            )
        self.data = FOLDER / data
        self._share = unavailable_share

    async def call(self, arguments: Arguments, context: CallContext) -> ToolResult:
        """Answer, or say that the tool is unavailable."""
        if is_unavailable(context.rollout_id, context.turn, self._share):
            return ToolResult(parts=[TextPart(text=UNAVAILABLE)], data=_OFFLINE)
        (value,) = arguments.values()
        return text_result(self.look_up(str(value)))

    @abstractmethod
    def look_up(self, value: str) -> str:
        """Return the catalogue's answer."""


class CatalogueSearch(_CatalogueTool):
    """Lists the entries that match best: position, id, heading and name."""

    name = "search"
    description = "Lists catalogue entries for a name and a heading."
    parameters = {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
        "additionalProperties": False,
    }

    async def start(self) -> None:
        """Open the BM25 index, which is built at the first start."""
        await asyncio.to_thread(self.load)

    def load(self) -> None:
        """Open the index."""
        from agent_r1.tools.search.tantivy_bm25 import open_index

        self._index = open_index(self.data / "corpus.jsonl")

    def look_up(self, value: str) -> str:
        """Return the listing of a query."""
        hits = self._index.search([value], TOP_K)[0]
        lines = [
            PASSAGE_TEMPLATE.format(
                number=number, id=hit.passage.id, text=hit.passage.text, title=hit.passage.title
            )
            for number, hit in enumerate(hits, start=1)
        ]
        return "\n".join(lines) or NOTHING


class CatalogueRead(_CatalogueTool):
    """Returns one entry by its id."""

    name = "read"
    description = "Returns the catalogue entry with an id."
    parameters = {
        "type": "object",
        "properties": {"id": {"type": "string"}},
        "required": ["id"],
        "additionalProperties": False,
    }

    async def start(self) -> None:
        """Read the entries."""
        await asyncio.to_thread(self.load)

    def load(self) -> None:
        """Read the entries."""
        with (self.data / "entries.jsonl").open(encoding="utf-8") as file:
            entries = map(json.loads, file)
            self._texts: dict[str, str] = {entry["id"]: entry["text"] for entry in entries}

    def look_up(self, value: str) -> str:
        """Return the text of an entry."""
        return self._texts.get(value.strip(), NOTHING)


class CatalogueEnv(ToolEnv):
    """Ends an interaction at the call that exceeds the question's budget.

    `state_key` names what has been found out and how many calls are left, so that estimators can
    compare turns taken in the same state.

    Args:
        task: the question; its payload has `budget` and `facts`, the entries that lead to the
            answer.
        fact_reward: process reward of a turn that reads one of these entries for the first time,
            divided by their number; the headline has none.
    """

    def __init__(self, task: Task, fact_reward: float = 0.0) -> None:
        super().__init__(task)
        payload: Any = task.payload
        self._left: int = payload["budget"]
        self._facts: list[str] = payload["facts"]
        self._fact_reward = fact_reward
        self._seen: set[str] = set()

    async def step(self, turn: ModelTurn, results: Sequence[CallResult]) -> EnvStep:
        """Count the calls that were answered."""
        if not results:
            return EnvStep(done=True, reason="answer")
        answered = [result for result in results if result.data != _OFFLINE]
        self._left -= len(answered)
        if self._left < 0:
            return EnvStep(done=True, reason="over_budget")
        new = {json.dumps([result.name, result.arguments]) for result in answered} - self._seen
        self._seen |= new
        return EnvStep(
            observations=[result.text for result in results],
            turn_reward=self._reward(answered, new) if self._fact_reward else None,
            state_key=self._state(results),
        )

    def _state(self, results: Sequence[CallResult]) -> str:
        refused = any(result.data == _OFFLINE for result in results)
        seen = hashlib.blake2b("".join(sorted(self._seen)).encode(), digest_size=8).hexdigest()
        return f"{seen}/{self._left}/{'refused' if refused else results[-1].name}"

    def _reward(self, answered: Sequence[CallResult], new: set[str]) -> float:
        facts = sum(
            str(result.arguments.get("id", "")).strip() in self._facts
            for result in answered
            if json.dumps([result.name, result.arguments]) in new
        )
        return self._fact_reward * facts / max(len(self._facts), 1)


def right_within_budget(request: ScoreRequest) -> float:
    """Exact match of the answer; 0 where more calls were answered than the question allows."""
    calls = sum(call.data != _OFFLINE for turn in request.turns for call in turn.calls)
    budget: Any = request.payload["budget"]
    if calls > budget:
        return 0.0
    answer = request.turns[-1].answer
    return scoring.exact_match(answer, scoring.accepted_answers(request.payload))
