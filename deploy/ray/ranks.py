"""The ranks of the learner on a Ray cluster: placed, run together, and ended together.

learner.py --> PlacedRanks --> an actor for each rank --process.py--> `agent-r1 serve learner`, with
the variables of every launcher (`RankPlace`).
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agent_r1.config.host_settings import own_address
from agent_r1.config.run import Config
from agent_r1.launch.local_result import summary_of
from agent_r1.learner.engine.ranks.rank_env import RankPlace
from agent_r1_deploy.ray.applications import actor_options, require_redis
from agent_r1_deploy.ray.process import Process

POLL_S = 0.5
LOUD_S = 30.0
TOGETHER_S = 90.0
"""Time within which the others end when one rank has; see docs/learner-ranks.md."""
ANSWER_TIMEOUT_S = 120.0
"""Longest an actor may take to start and answer."""


def say(text: str) -> None:
    """Print a line into the log of the job."""
    print(text, flush=True)


class Node(NamedTuple):
    """Node of a rank."""

    node_id: str
    address: str
    free_port: int


class Ended(NamedTuple):
    """End of a rank."""

    exit_status: int
    run_status: str | None = None
    """Status in rank 0's `summary.json`."""


@ray.remote(max_restarts=0)
class Rank:
    """One rank of the learner."""

    def __init__(self, stop_timeout_s: float) -> None:
        self._stop_timeout_s = stop_timeout_s
        self._process: Process | None = None

    async def node(self) -> Node:
        """Return where this actor is, and a port that is free there."""
        address = get_node_ip_address()
        with socket.create_server((address, 0)) as listener:
            port = listener.getsockname()[1]
        return Node(ray.get_runtime_context().get_node_id(), address, port)

    async def run(
        self, arguments: Sequence[str], place: RankPlace, redis_url: str, folder: Path
    ) -> Ended:
        """Run the rank to its end."""
        host = json.dumps(own_address(redis_url))
        self._process = await Process.start(
            [*arguments, "--set", f"learner.server.host={host}"],
            stop_timeout_s=self._stop_timeout_s,
            environment=place.environment(),
        )
        exit_status = await self._process.wait()
        leads = place.rank == 0
        return Ended(exit_status, summary_of(folder).get("status") if leads else None)

    async def stop(self) -> None:
        """End the rank in order: rank 0 then writes a checkpoint."""
        if self._process is not None:
            await self._process.stop()


class PlacedRanks:
    """An actor for each rank, and the room they take; use as `with`.

    Args:
        config: of the run.
        stop_asked: says whether to give up; asked twice a second.

    Raises:
        RayError: an actor or its node was lost.
    """

    def __init__(self, config: Config, stop_asked: Callable[[], bool]) -> None:
        self._config = config
        self._stop_asked = stop_asked
        table = config.ray
        self._resources = dict(table.rank_resources)
        self._group = placement_group([self._resources] * config.engine.ranks, strategy="PACK")
        self._actors: list[Any] = []
        self._nodes: list[Node] = []

    def __enter__(self) -> Self:
        """Wait for room, and start the actors."""
        try:
            self._wait_for_room()
            for bundle in range(0 if self._stop_asked() else self._config.engine.ranks):
                strategy = PlacementGroupSchedulingStrategy(self._group, bundle)
                options = {**actor_options(self._resources), "scheduling_strategy": strategy}
                stop_timeout_s = self._config.ray.stop_timeout_s
                self._actors.append(Rank.options(**options).remote(stop_timeout_s))
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait_for_room(self) -> None:
        next_word = time.monotonic()
        while not self._stop_asked() and not self._group.wait(POLL_S):
            if time.monotonic() >= next_word:
                say(
                    f"waiting for room on the cluster: {self._config.engine.ranks} times "
                    f"{self._resources} (ray.rank_resources)"
                )
                next_word = time.monotonic() + LOUD_S

    def order(self, near: Node | None) -> Node:
        """Number the ranks by where their actors are; return where rank 0 is.

        Args:
            near: where rank 0 was before, and is again if an actor is there.
        """
        answers = [actor.node.remote() for actor in self._actors]
        nodes: list[Node] = ray.get(answers, timeout=ANSWER_TIMEOUT_S)
        home = None if near is None else near.node_id
        order = sorted(range(len(nodes)), key=lambda i: (nodes[i].node_id != home, nodes[i]))
        self._actors = [self._actors[i] for i in order]
        self._nodes = [nodes[i] for i in order]
        return self._nodes[0]

    def run(self, arguments: Sequence[str]) -> list[Ended | None]:
        """Run all ranks until they have ended; None stands for one that was lost.

        Args:
            arguments: of `agent-r1`.
        """
        leader, size = self._nodes[0], len(self._actors)
        redis_url, folder = require_redis(self._config), self._config.run.folder()
        runs: list[Any] = []
        for rank, actor in enumerate(self._actors):
            # An actor sees its own GPU alone, so that every rank has local rank 0.
            place = RankPlace(rank, size, 0, leader.address, leader.free_port)
            runs.append(actor.run.remote(list(arguments), place, redis_url, folder))
        self._wait_for_end(runs)
        return [_ended(run) for run in runs]

    def _wait_for_end(self, runs: Sequence[Any]) -> None:
        """Wait until all have ended; stop those that do not when one has ended or `stop_asked`."""
        deadline: float | None = None
        left = list(runs)
        while left and not self._stop_asked():
            done, left = ray.wait(left, num_returns=len(left), timeout=POLL_S)
            if done and deadline is None:
                deadline = time.monotonic() + TOGETHER_S
            if deadline is not None and time.monotonic() > deadline:
                break
        self._stop()
        ray.wait(list(runs), num_returns=len(runs), timeout=ANSWER_TIMEOUT_S)

    def _stop(self) -> None:
        stops = [actor.stop.remote() for actor in self._actors]
        timeout_s = self._config.ray.stop_timeout_s + ANSWER_TIMEOUT_S
        ray.wait(stops, num_returns=len(stops), timeout=timeout_s)

    def __exit__(self, *exc_info: object) -> None:
        """End the actors and free the room."""
        for actor in self._actors:
            with suppress(RayError):
                ray.kill(actor)
        remove_placement_group(self._group)


def _ended(run: Any) -> Ended | None:
    try:
        return ray.get(run, timeout=0)
    except RayError:
        return None
