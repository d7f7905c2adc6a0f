"""`agent-r1 ray train`: the learner as a Ray job, with an actor for each rank.

up.py or `ray job submit` --> `train`, the job --> ranks.py: an actor for each rank, which runs
`agent-r1 serve learner`. When a rank is lost, with its process, actor or node, all ranks end, and
are started again from the newest checkpoint on the nodes that are there.
"""

from __future__ import annotations

import logging
import signal
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

import ray
from ray.exceptions import RayError

from agent_r1.config.run import Config, ConfigError
from agent_r1.launch.local_result import EXIT_OF_STATUS
from agent_r1.runtime.exit_status import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REASON, STOP_SIGNALS
from agent_r1_deploy.ray.applications import require_redis
from agent_r1_deploy.ray.ranks import Ended, Node, PlacedRanks, say


class Stop:
    """Signal that tells the job to stop: SIGTERM or SIGINT."""

    def __init__(self) -> None:
        self.asked = False
        for number in STOP_SIGNALS:
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def was_asked(self) -> bool:
        """Say whether it was."""
        return self.asked


def train(config: Config, file: str, options: Sequence[str]) -> int:
    """Run the learner until it has finished, starting its ranks again when one is lost.

    Args:
        config: the configuration of the run.
        file: where it is, on every node.
        options: `KEY=VALUE` texts that it was read with.

    Returns:
        Exit status (`agent_r1.runtime.exit_status`).

    Raises:
        ConfigError: the run cannot be trained like this; the text says what to do.
    """
    require_redis(config)
    folder = config.run.folder()
    if not folder.is_absolute():
        raise ConfigError(
            f"run.dir ({folder}) must be an absolute path: it is a folder of rank 0's node, where "
            "the current folder goes with the job; set run.dir=/FOLDER"
        )
    if config.learner.checkpoint_url is None:
        say("learner.checkpoint_url is not set, so the run would be lost with the node of rank 0")
    ray.init(logging_level=logging.WARNING)
    stop = Stop()
    losses = RankLosses(config.placement.max_restarts, config.placement.restart_window_s)
    home: Node | None = None
    while not stop.asked:
        ended: list[Ended | None] = []
        with suppress(RayError), PlacedRanks(config, stop.was_asked) as ranks:
            if stop.asked:
                break
            home = _same_home(config, home, ranks.order(near=home))
            ended = ranks.run(learner_arguments(config, file, options))
        if stop.asked:
            break
        status = final_status(ended)
        if status is not None:
            where = "" if home is None else f" on {home.address}"
            say(f"the learner has ended with status {status}; its folder is {folder}{where}")
            return status
        if losses.too_many(time.monotonic()):
            say(f"{losses.text}; the lines above say why")
            return EXIT_FAILED
        say(f"ranks were lost: {_describe(ended)}; all start again from the newest checkpoint")
    return EXIT_INTERRUPTED


def learner_arguments(config: Config, file: str, options: Sequence[str]) -> list[str]:
    """Return the arguments of `agent-r1` that run a rank on any node."""
    sets = [*options]
    if config.learner.transport == "file":  # nodes share no folder
        sets.append('learner.transport="http"')
    flags = [part for option in sets for part in ("--set", option)]
    return ["serve", "learner", file, *flags, "--resume-if-begun"]


def _same_home(config: Config, before: Node | None, now: Node) -> Node:
    """Return where rank 0 is.

    Raises:
        ConfigError: it left its node, and all that the run has is there.
    """
    if before is None or before.node_id == now.node_id:
        return now
    if config.learner.checkpoint_url is None:
        raise ConfigError(
            f"the node of rank 0 ({before.address}) is lost, and the run folder with it; start "
            "again with learner.checkpoint_url, which keeps checkpoints in an object store"
        )
    return now


def final_status(ended: Sequence[Ended | None]) -> int | None:
    """Return the exit status of a learner that is not to be started again; None where it is.

    Ranks whose node is shut down are told to stop, and end with the status of an interruption.
    """
    if not ended:
        return None
    leader = ended[0]
    if leader is not None and leader.exit_status in EXIT_OF_STATUS.values():
        return EXIT_OF_STATUS.get(leader.run_status or "")
    mistakes = [one for one in ended if one is not None and one.exit_status == EXIT_REASON]
    return EXIT_REASON if mistakes else None


def _describe(ended: Sequence[Ended | None]) -> str:
    if not ended:
        return "an actor could not be started"
    return ", ".join(
        f"rank {rank} " + ("is gone" if one is None else f"ended with {one.exit_status}")
        for rank, one in enumerate(ended)
    )


class RankLosses:
    """Count of ranks that were lost of late."""

    def __init__(self, most: int, window_s: float) -> None:
        self._most, self._window_s = most, window_s
        self._times: deque[float] = deque()

    def too_many(self, now: float) -> bool:
        """Count one more; say whether that is one too many."""
        self._times.append(now)
        while now - self._times[0] > self._window_s:
            self._times.popleft()
        return len(self._times) > self._most

    @property
    def text(self) -> str:
        """Return what too many are."""
        return (
            f"ranks were lost {len(self._times)} times within {self._window_s:g} s "
            "(placement.max_restarts)"
        )
