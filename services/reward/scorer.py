"""Scores one finished interaction: runs the components and applies the rule.

`worker.py` (stream) and `app.py` (HTTP) hand it a `ScoreRequest` and get a `Reward`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from agent_r1.reward import scoring
from agent_r1.reward.components import (
    ASKING,
    BUILT_IN,
    READS_TOKENS,
    Component,
    load_component,
)
from agent_r1.reward.config import RewardConfig
from agent_r1.reward.critic import Critic
from agent_r1.reward.judge import Judge
from agent_r1.reward.model_server import TOKENS_ASKED
from agent_r1.reward.reward_model import RewardModel
from agent_r1.reward.versions import AskingComponent, Versions
from agent_r1.runtime.unicode import escaped
from agent_r1.text.reading import TurnReader
from agent_r1_proto.component_notes import begin_component
from agent_r1_proto.rewards import (
    Reward,
    ScoreRequest,
    ScoreTurn,
    Value,
    score_turns,
    valued_tokens,
)
from agent_r1_proto.trajectory import Trajectory, Turn

PATIENCE = 0.9
"""Share of a component's time for which a server that is away is asked again, so that the error can
say why."""

MAX_REASON_CHARS = 2000
"""A longer reason is cut."""

_MAKERS: dict[str, Callable[..., AskingComponent]] = {
    "judge": Judge,
    "reward_model": RewardModel,
    "critic": Critic,
}


class ComponentError(Exception):
    """A component raised, took too long, or returned no number; the text names it."""


class Scorer:
    """The configured components and rule.

    Args:
        config: names them.
        reader: reads turns that do not say what they are; None: one without settings.

    Raises:
        ValueError: a component cannot be loaded.
    """

    def __init__(self, config: RewardConfig, reader: TurnReader | None = None) -> None:
        self._config = config
        self._reader = reader or TurnReader()
        self._weights = config.measured()
        self._own: dict[str, Component] = {
            name: load_component(name)
            for name in self._weights
            if name not in BUILT_IN and name not in ASKING
        }
        self.asking: dict[str, Versions[Any]] = {}
        """The components that ask a language model."""
        patience_s = PATIENCE * config.component_timeout_s
        for name, table in config.servers.named().items():
            self.asking[name] = Versions(table, partial(_MAKERS[name], patience_s=patience_s))
        self._threads = ThreadPoolExecutor(config.max_concurrent, thread_name_prefix="component")

    async def score(self, request: ScoreRequest, versions: Mapping[str, str] = {}) -> Reward:
        """Score one interaction as it stands, whether COMPLETED or TRUNCATED.

        Args:
            request: the interaction.
            versions: of the models that components ask, by component; the newest where none is.

        Raises:
            ValueError: the status is FAILED, or the payload lacks what a named component needs.
            ComponentError: one of the user's own components failed.
        """
        if request.status == "FAILED":
            raise ValueError(
                "status FAILED has no reward: an outage is not the model's failure; send "
                "COMPLETED or TRUNCATED interactions"
            )
        await begin_component("the built-in reward components")
        # In a thread, where a long text holds up no other request; not one of `_threads`, which
        # users' components may keep for ever.
        request, values = await asyncio.to_thread(self._measure_built_in, request)
        tokens: dict[str, int] = {}
        asked: dict[str, str] = {}
        reasons: dict[str, str] = {}
        for name, component in self._own.items():
            values[name], reasons[name] = await self._run_own(name, component, request)
        for name in self.asking:
            found, reasons[name] = await self._ask(name, request, versions.get(name))
            values[name], asked[name] = found.value, found.version
            tokens |= {name: found.tokens} if found.tokens else {}
        return Reward(
            total=self._total(values),
            components=values,
            prediction=request.turns[-1].answer,
            tokens=tokens,
            versions=asked,
            reasons={name: reason for name, reason in reasons.items() if reason},
        )

    async def score_trajectory(
        self, trajectory: Trajectory, versions: Mapping[str, str] = {}
    ) -> Reward:
        """Compute every component of a trajectory and combine them; as `score`."""
        request = request_of(
            trajectory,
            tokens="critic" in self.asking,
            turn_tokens=any(getattr(own, READS_TOKENS, False) for own in self._own.values()),
        )
        return await self.score(request, versions)

    async def value(self, name: str, request: ScoreRequest) -> Value:
        """Return what one component says of an interaction, which may not have ended.

        Raises:
            ValueError: there is no such component, or it needs to know the answer.
            ComponentError: it failed.
        """
        if name not in self._config.branch_scorers():
            raise ValueError(
                f"component ({name!r}) cannot score a branch; those of reward.components that can: "
                f"{', '.join(self._config.branch_scorers()) or 'none'}"
            )
        request = await asyncio.to_thread(self._reader.read_request, request)
        if name in self.asking:
            found, _ = await self._ask(name, request)
            return found
        if name in self._own:
            value, _ = await self._run_own(name, self._own[name], request)
            return Value(value=value)
        measure = BUILT_IN[name]
        return Value(value=await asyncio.to_thread(measure, request))

    async def close(self) -> None:
        """Close what components hold open."""
        for versions in self.asking.values():
            for server in versions.servers:
                await server.close()

    async def _ask(
        self, name: str, request: ScoreRequest, version: str | None = None
    ) -> tuple[Value, str]:
        """Return what a version of a component's model says, and why; the newest without one."""
        component = self.asking[name].of(version)
        with _counted() as tokens:
            value, reason = await self._run_own(name, component.score, request)
        return Value(value=value, tokens=sum(tokens), version=component.server.model), reason

    def _measure_built_in(self, request: ScoreRequest) -> tuple[ScoreRequest, dict[str, float]]:
        """Return the interaction, whose turns say what they are, and what is measured of it."""
        request = self._reader.read_request(request)
        return request, {
            name: BUILT_IN[name](request) for name in self._weights if name in BUILT_IN
        }

    def _total(self, values: dict[str, float]) -> float:
        if self._config.rule == "paper":
            return scoring.paper_reward(values["exact_match"], values["format"])
        return math.fsum(weight * values[name] for name, weight in self._weights.items())

    async def _run_own(
        self, name: str, component: Component, request: ScoreRequest
    ) -> tuple[float, str]:
        """Return what a component says, and why; "" where it does not tell."""
        await begin_component(f"reward component {name!r}")
        timeout_s = self._config.component_timeout_s
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                value = await self._call(component, request)
        except Exception as exc:
            if deadline.expired():
                raise ComponentError(
                    f"reward component {name!r} did not answer within {timeout_s:g} s; raise "
                    "reward.component_timeout_s or speed it up"
                ) from exc
            raise ComponentError(
                f"reward component {name!r} raised {type(exc).__name__}: {exc}"
            ) from exc
        value, reason = value if isinstance(value, tuple) and len(value) == 2 else (value, "")
        if not (isinstance(value, int | float) and math.isfinite(value)):
            raise ComponentError(
                f"reward component {name!r} returned {value!r}; it must return a finite number, or "
                "one and a text that says why"
            )
        if not isinstance(reason, str):
            raise ComponentError(
                f"reward component {name!r} returned {reason!r:.100} beside the number; it must be "
                "a text that says why"
            )
        low, high = self._config.ranges.get(name, (-math.inf, math.inf))
        if not low <= value <= high:
            raise ComponentError(
                f"reward component {name!r} returned {value!r}, outside its declared range "
                f"[{low:g}, {high:g}]; correct it or widen reward.ranges"
            )
        return float(value), escaped(reason[:MAX_REASON_CHARS])

    async def _call(self, component: Component, request: ScoreRequest) -> object:
        if inspect.iscoroutinefunction(component):
            return await component(request)
        # In a thread: a plain function of a user's may block.
        loop = asyncio.get_running_loop()
        value = await loop.run_in_executor(self._threads, component, request)
        return await value if inspect.isawaitable(value) else value


@contextlib.contextmanager
def _counted() -> Iterator[list[int]]:
    """Give the list that gets the tokens of each request to a model's server in the block."""
    tokens: list[int] = []
    outer = TOKENS_ASKED.set(tokens)
    try:
        yield tokens
    finally:
        TOKENS_ASKED.reset(outer)


def request_of(
    trajectory: Trajectory, *, tokens: bool = False, turn_tokens: bool = False
) -> ScoreRequest:
    """Return a trajectory as the components see it: what its main agent wrote and read.

    Args:
        trajectory: all of it.
        tokens: whether one of them reads token ids; that takes milliseconds for a long trajectory.
        turn_tokens: whether one of them reads those of each turn.
    """
    _, end = trajectory.lineage_bounds()[0]
    turns = [turn for turn in trajectory.turns if turn.start < end]
    token_ids = trajectory.token_ids[:end].tolist() if tokens else []
    segment_starts = [start for start in trajectory.segment_starts if start < end]
    return ScoreRequest(
        prompt=trajectory.rollout.task.messages(),
        payload=trajectory.rollout.task.payload,
        turns=_with_tokens(trajectory, turns) if turn_tokens else score_turns(turns),
        status=trajectory.status,
        token_ids=valued_tokens(token_ids, segment_starts, turns),
    )


def _with_tokens(trajectory: Trajectory, turns: Sequence[Turn]) -> list[ScoreTurn]:
    """Return the turns as components see them, with the tokens that were sampled."""
    sampled = [trajectory.token_ids[turn.start : turn.end].tolist() for turn in turns] or [[]]
    return [
        turn.model_copy(update={"token_ids": token_ids})
        for turn, token_ids in zip(score_turns(turns), sampled, strict=True)
    ]
