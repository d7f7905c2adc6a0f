"""Services of a command's own: started, shown with their progress, and how to continue."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from agent_r1.cli.evaluation.settings import evaluation_facts
from agent_r1.config.run import Config, ConfigError
from agent_r1.evaluation.answer_file import Facts, write_json
from agent_r1.evaluation.config import SEARCH_TOOL, QuestioningConfig
from agent_r1.evaluation.main import EvaluationRun, Progress
from agent_r1.launch.status_line import StatusLine
from agent_r1.runtime.durations import format_duration
from agent_r1.runtime.exit_status import EXIT_INTERRUPTED
from agent_r1.runtime.files.run_folder import LIVE_DIR
from agent_r1.runtime.threads import in_thread
from agent_r1_proto.tasks import Decoding

TELL_EVERY = 50
TELL_EVERY_S = 30.0
SHOW_EVERY_S = 0.2
T = TypeVar("T")


def questioning(
    config: Config, method: str, attempts: int = 1, decoding: Decoding | None = None
) -> QuestioningConfig:
    """Return how questions are asked under a configuration."""
    return QuestioningConfig.model_validate(
        {
            "method": method,
            "attempts": attempts,
            "decoding": decoding,
            "temperature": config.evaluation.temperature,
            "seed": config.run.seed,
            "max_questions": config.evaluation.max_questions,
            "max_attempts": config.learner.max_attempts,
            "sample_timeout_s": config.learner.sample_timeout_s,
            "tool_timeout_s": config.env.tool_timeout_s,
        }
    )


def open_evaluation(
    config: Config,
    asked: QuestioningConfig,
    out: Path,
    *,
    overwrite: bool = False,
    facts: Facts | None = None,
) -> EvaluationRun:
    """Open an evaluation of the sets of a configuration, and its result file.

    Args:
        config: of the services.
        asked: how questions are asked.
        out: the result file.
        overwrite: forget what it has.
        facts: instead of those of the configuration, by dotted name.

    Raises:
        ValueError: the file belongs to another evaluation, or a set cannot be asked.
    """
    return EvaluationRun(
        sets=config.evaluation.sets,
        questioning=asked,
        out=out,
        facts={**evaluation_facts(config), **(facts or {})},
        overwrite=overwrite,
    )


def on_services(config: Config, ask: Callable[[Config, Meter], Coroutine[Any, Any, T]]) -> T:
    """Start tools, reward and rollout, let `ask` use them, and stop them.

    Args:
        config: of the services.
        ask: is given what the launcher lends to its client, and what shows progress.

    Raises:
        ValueError: a service did not come up; the text says which and why.
        KeyboardInterrupt: the user stopped it; everything is stopped.
    """
    from agent_r1.launch import local_client

    meter = Meter()
    try:
        return local_client.run_client(config, lambda served: ask(served, meter), meter.event)
    finally:
        meter.end()


async def ask_left(evaluation: EvaluationRun, served: Config, meter: Meter) -> None:
    """Ask the questions of an evaluation that have no answer."""
    if evaluation.left:
        url = search_url(served) if evaluation.retrieves else None
        await in_thread(
            lambda: evaluation.ask(
                run=served.run, redis=served.redis, search_url=url, on_progress=meter.show
            )
        )


def run_kept(
    work: Callable[[], object], kept: Callable[[], str], any_kept: Callable[[], bool] = lambda: True
) -> int:
    """Do the work; where it ends early, say what is kept and how to continue.

    Args:
        work: to do.
        kept: returns what is said.
        any_kept: whether it is worth saying with an error; an interruption says it always.

    Returns:
        The exit status: 0, or that of an interruption by the user.

    Raises:
        ValueError: the work ended with one.
    """
    try:
        work()
    except KeyboardInterrupt:
        print(f"stopped; {kept()}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except ConfigError:  # nothing was started
        raise
    except ValueError as exc:
        if not any_kept():
            raise
        raise ValueError(f"{exc}\n{kept()}") from exc
    return 0


def write_out(out: Path, record: Mapping[str, Any]) -> None:
    """Write what `--out` asks for.

    Raises:
        ValueError: it cannot be written.
    """
    try:
        write_json(out, record)
    except OSError as exc:
        raise ValueError(f"--out ({out}) cannot be written: {exc.strerror}") from exc


def search_url(served: Config) -> str | None:
    """Return the base URL of the search tool: as configured, or as it announced itself.

    Args:
        served: what the launcher lends to its client; its run folder holds the announcements.

    Returns:
        The URL; None where no search tool is configured.

    Raises:
        ValueError: the tool that was started has not announced itself.
    """
    search = served.tools.get(SEARCH_TOOL)
    if search is None or search.url is not None:
        return None if search is None else search.url
    file = served.run.folder() / LIVE_DIR / "announce" / SEARCH_TOOL / f"{SEARCH_TOOL}.json"
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["url"])
    except (OSError, ValueError, KeyError) as exc:
        raise ValueError(f"the search tool has not announced itself in {file}: {exc!r}") from exc


class Meter:
    """Shows progress: on a terminal in one line that changes, elsewhere in lines now and then."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        line = StatusLine(sys.stdout)
        self.event, self.end = line.print, line.close
        self._line = line
        self._clock = clock
        self._shown_at = 0.0
        self._stage = ""
        self._began = (0.0, 0)
        """Time at which this stage was first told of, in seconds, and how many were done by
        then."""
        self._told = (0.0, 0)
        """The same of the last line that stays."""

    def show(self, progress: Progress) -> None:
        """Take one step into account."""
        now = self._clock()
        if progress.stage != self._stage:
            self._stage = progress.stage
            self._began, self._told = (now, progress.done), (now, 0)
        ended = progress.done == progress.total
        if self._line.live:
            if ended or now - self._shown_at >= SHOW_EVERY_S:
                self._shown_at = now
                self._line.show(self._text(progress, now))
            return
        told_at, told = self._told
        if ended or progress.done - told >= TELL_EVERY or now - told_at >= TELL_EVERY_S:
            self._told = (now, progress.done)
            self.event(self._text(progress, now))

    def _text(self, progress: Progress, now: float) -> str:
        began, first = self._began
        parts = [f"{progress.stage} {progress.done} of {progress.total}"]
        if progress.failed:
            parts.append(f"failed {progress.failed}")
        if progress.reward is not None:
            parts.append(f"reward {progress.reward:.3f}")
        if first < progress.done < progress.total:
            each_s = (now - began) / (progress.done - first)
            parts.append(f"left {format_duration(each_s * (progress.total - progress.done))}")
        return "  ".join(parts)


def command_again(
    command: Sequence[object], options: Sequence[str], named: Mapping[str, object | None]
) -> str:
    """Return a command line that can be pasted; options that are None are left out."""
    words = ["agent-r1", *map(str, command)]
    for name, value in named.items():
        words += [] if value is None else [name, str(value)]
    for option in options:
        words += ["--set", option]
    return shlex.join(words)
