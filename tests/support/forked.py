"""Python programs in processes forked from one that has imported what services need.

A start takes a tenth of the CPU time of a new Python, for tests that start many.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping
from pathlib import Path

AGENT_R1 = "import sys\nfrom agent_r1.cli.main import main\nsys.exit(main())"
"""What the command `agent-r1` is."""
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["agent_r1.cli.services.serve", "agent_r1.tools.main", "agent_r1.reward.main", "pytest"]
)


class Forked:
    """A program that runs, with the methods of `subprocess.Popen` that tests use.

    Args:
        program: its text, as for `python -c`.
        arguments: its command line.
        env: its environment.
        log: gets what it prints, behind what is there.
        cwd: the folder that it runs in.
    """

    def __init__(
        self,
        program: str,
        *arguments: str,
        env: Mapping[str, str],
        log: Path,
        cwd: Path = Path(),
    ) -> None:
        values = (program, ["-c", *arguments], dict(env), log.absolute(), cwd)
        self._process = _CONTEXT.Process(target=_run, args=values)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end.

        Raises:
            TimeoutError: it does not come.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it by SIGKILL, if it still runs."""
        self._process.kill()


def _run(program: str, argv: list[str], env: dict[str, str], log: Path, cwd: Path) -> None:
    with log.open("ab") as out:
        for stream in (1, 2):
            os.dup2(out.fileno(), stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = env.get("PYTHONPATH", "").split(os.pathsep)
    sys.argv = argv
    exec(program, {"__name__": "__main__"})
