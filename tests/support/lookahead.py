"""Tasks that are wrong by construction for whoever takes the turn that looks best at the moment.

Where somebody lives: a rumour says it at once and is wrong in six cases of seven. The register is
right. In half of the tasks it says where; in the other half it names a page, which says it. The
calls that are allowed just suffice for that, so a rumour is one too many.

`python -m tests.support.lookahead [NUM_TASKS]` prints what scripted agents and searches reach.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from agent_r1.rollout.envs import CallResult, EnvStep, ModelTurn, ToolEnv
from agent_r1.text.chat_format import ChatFormat
from agent_r1_proto.parts import TextPart
from agent_r1_proto.rewards import ScoreRequest
from agent_r1_proto.tasks import Decoding, Task
from agent_r1_proto.tools import ToolCall, ToolResult
from agent_r1_proto.trajectory import Trajectory
from tests.support.branching import COMPONENT, Write, searching
from tests.support.builders import rollout_task
from tests.support.fakes import FakeToolServer, build_tokenizer, call_text

TOWNS = ("Ashby", "Brill", "Corwen", "Diss", "Ely", "Frome")
RIGHT_RUMOUR_EVERY = 7
"""One rumour in so many is right."""
LIKES_RUMOURS = 0.8
"""How often the sampled agent begins with a rumour."""
READS_PAGE = 0.95
"""How often it reads a page that the register names."""
CANDIDATES = 16


@dataclass(frozen=True)
class Resident:
    """One task: who, where, what the rumour says, and whether the register names a page."""

    name: str
    town: str
    rumour: str
    on_page: bool

    @property
    def task(self) -> Task:
        """What the agent is asked."""
        allowed = 2 if self.on_page else 1
        prompt = f"Where does {self.name} live? You may call {allowed} times."
        return Task(id=self.name, prompt=prompt, payload={"allowed": allowed})


def make_residents(seed: int, count: int) -> list[Resident]:
    """Return tasks, half of them with a page; the same for the same arguments."""
    rng = random.Random(f"lookahead-{seed}")
    made: list[Resident] = []
    for i in range(count):
        town = rng.choice(TOWNS)
        wrong = rng.choice([other for other in TOWNS if other != town])
        rumour = town if i % RIGHT_RUMOUR_EVERY == 3 else wrong
        made.append(Resident(f"resident {i}", town, rumour, on_page=i % 2 == 1))
    return made


class AllowedCalls(ToolEnv):
    """Ends an interaction at the call that is one too many."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._left = int(str(task.payload["allowed"]))

    async def step(self, turn: ModelTurn, results: Sequence[CallResult]) -> EnvStep:
        """Count the calls."""
        self._left -= len(results)
        if self._left < 0:
            return EnvStep(done=True, reason="too_many_calls")
        return await super().step(turn, results)


def tools_of(residents: Sequence[Resident]) -> list[FakeToolServer]:
    """Return the services of the three tools."""
    by_name = {resident.name: resident for resident in residents}

    def serve(name: str, says: Callable[[Resident], str]) -> FakeToolServer:
        def answer(call: ToolCall) -> ToolResult:
            asked = by_name[str(call.arguments["query"])]
            return ToolResult(parts=[TextPart(text=says(asked))])

        return FakeToolServer(name=name, answer=answer)

    return [
        serve("rumour", lambda one: f"lives in {one.rumour}"),
        serve("register", lambda one: "see page" if one.on_page else f"lives in {one.town}"),
        serve("page", lambda one: f"lives in {one.town}"),
    ]


_ASKED = re.compile(r"Where does (resident \d+) live")
_SAID = re.compile(r"(lives in \w+|see page)\n</tool_response>")


def _turn(dialogue: str, begin: str, at_page: str) -> str:
    """Return the next turn: whoever has read a town believes it."""
    (name,) = _ASKED.findall(dialogue)
    said = _SAID.findall(dialogue)
    if said and said[-1] != "see page":
        return f"<answer>{said[-1].rpartition(' ')[2]}</answer>"
    return call_text(at_page if said else begin, query=name)


def greedy(dialogue: str, path: str, seed: int) -> str:
    """Take what is likeliest for the agent, whose rumours come first."""
    return _turn(dialogue, "rumour", "page")


def oracle(dialogue: str, path: str, seed: int) -> str:
    """Make no mistake."""
    return _turn(dialogue, "register", "page")


def sampled(dialogue: str, path: str, seed: int) -> str:
    """Draw a turn."""
    draw = random.Random(seed).random()
    return _turn(
        dialogue,
        "rumour" if draw < LIKES_RUMOURS else "register",
        "page" if draw < READS_PAGE else "rumour",
    )


def exact_scorer(residents: Sequence[Resident]) -> Callable[[ScoreRequest], float]:
    """Return a scorer that makes no mistake about what stands in a branch, and sees no further.

    A branch is worth 1 if its last turn says, or has found out, the right town.
    """
    towns = {resident.name: resident.town for resident in residents}

    def score(interaction: ScoreRequest) -> float:
        (name,) = _ASKED.findall(interaction.prompt[-1].text())
        last = interaction.turns[-1]
        return float(towns[name] in last.text + " ".join(call.text for call in last.calls))

    return score


@dataclass(frozen=True)
class Outcome:
    """Means over tasks."""

    right: float
    sampled_tokens: float
    calls: float
    scores: float


async def play(
    chat: ChatFormat,
    end_id: int,
    residents: Sequence[Resident],
    write: Write,
    decoding: Decoding | None = None,
) -> Outcome:
    """Let an agent answer every task, alone or with a search over its turns."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(one) for one in tools_of(residents)]
        scorer = exact_scorer(residents)
        loop = searching(chat, end_id, write, scorer, *servers, make_env=AllowedCalls)
        built = await stack.enter_async_context(loop)
        ended = [
            await built.loop.run(
                rollout_task(group_id=i, task=one.task, purpose="eval", decoding=decoding)
            )
            for i, one in enumerate(residents)
        ]
    costs = [trajectory.decoding for trajectory in ended if trajectory.decoding is not None]
    return Outcome(
        right=fmean(_is_right(*pair) for pair in zip(residents, ended, strict=True)),
        sampled_tokens=built.model.num_sampled / len(residents),
        calls=sum(len(server.calls) for server in servers) / len(residents),
        scores=sum(cost.scores for cost in costs) / len(residents),
    )


def _is_right(resident: Resident, trajectory: Trajectory) -> bool:
    said = f"<answer>{resident.town}</answer>"
    return trajectory.reason == "answer" and trajectory.turns[-1].text == said


def looking_ahead(num_turns: int) -> Decoding:
    """Return a value-guided search."""
    return Decoding(
        method="value_guided", candidates=CANDIDATES, lookahead=num_turns, scorer=COMPONENT
    )


async def report(count: int) -> None:
    """Print a table of what agents and searches reach."""
    tokenizer: Any = build_tokenizer()
    end_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    chat = ChatFormat(tokenizer, end_of_turn_ids=[end_id])
    rows: list[tuple[str, Write, Decoding | None]] = [
        ("greedy", greedy, None),
        ("sampled", sampled, None),
        *((f"value_guided, d = {d}", sampled, looking_ahead(d)) for d in (0, 1, 2)),
        ("oracle", oracle, None),
    ]
    residents = make_residents(0, count)
    lines = ["| agent | right | sampled tokens | calls | scores |", "|---|---|---|---|---|"]
    for name, write, decoding in rows:
        of = await play(chat, end_id, residents, write, decoding)
        spent = f"{of.sampled_tokens:.0f} | {of.calls:.1f} | {of.scores:.1f}"
        lines.append(f"| {name} | {of.right:.3f} | {spent} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    asyncio.run(report(int(sys.argv[1]) if len(sys.argv) > 1 else 200))
