"""A rank of the learner that has not found rank 0 yet, in a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from agent_r1.learner.engine.ranks.rank_env import RankPlace
from tests.support.config_scene import write_scene

WAIT_S = 60.0


def test_a_rank_that_looks_for_rank_0_can_be_stopped(tmp_path: Path):
    command = [str(Path(sys.executable).with_name("agent-r1")), "serve", "learner"]
    command += [str(write_scene(tmp_path / "example")), "--set", "engine.ranks=2"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens there
        place = RankPlace(1, 2, 0, *taken.getsockname())
        environment = {**os.environ, **place.environment()}
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as rank:
            assert rank.stderr is not None
            assert next(line for line in rank.stderr if "learner rank starts" in line)
            rank.terminate()
            try:
                assert rank.wait(WAIT_S) == -signal.SIGTERM
            finally:
                rank.kill()
