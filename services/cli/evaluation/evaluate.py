"""`agent-r1 evaluate` and `agent-r1 compare`: scores of a policy, and two of them side by side.

`evaluate` reads the configuration, lets the local launcher start tools, reward and rollout, and
asks them through `agent_r1.evaluation`; `compare` reads two files that it wrote.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import JsonValue

from agent_r1.cli.evaluation.decoding import (
    check_tools,
    decoding_of,
    fitted_setting,
)
from agent_r1.cli.policy import describe_policy, with_policy
from agent_r1.config import checks as config_checks
from agent_r1.config.run import Config, ConfigError, dump_config, load_given
from agent_r1.evaluation.answers import summary_file, write_json
from agent_r1.evaluation.comparison import compare_files, comparison_lines, flip_lines
from agent_r1.evaluation.config import SEARCH_TOOL, QuestioningConfig
from agent_r1.evaluation.main import EvaluationRun, Progress
from agent_r1.evaluation.retrieval import check_spec
from agent_r1.evaluation.summary import SetSummary, summary_lines
from agent_r1.launch.status_line import StatusLine
from agent_r1.launch.threads import in_thread
from agent_r1.runtime.durations import format_duration
from agent_r1.runtime.exit_status import EXIT_INTERRUPTED, EXIT_LOSSES
from agent_r1.runtime.files.run_folder import LIVE_DIR
from agent_r1.tools.search.config import SearchConfig
from agent_r1_proto.tasks import Decoding

TELL_EVERY = 50
TELL_EVERY_S = 30.0
SHOW_EVERY_S = 0.2
ENV_FACTS = (
    *("type", "options", "max_turns", "max_calls_per_turn", "max_tokens_per_turn"),
    *("max_tool_response_tokens", "max_tool_response_chars", "system_prompt", "enable_tools"),
    *("answer_pattern", "chat_template_kwargs"),
)
TOOL_FACTS = (
    *("type", "settings", "backend", "corpus", "index", "description", "top_k"),
    *("passage_template", "separator", "empty_text", "max_chars", "max_query_chars"),
)
"""Keys that can change an answer; addresses, threads and time limits cannot."""


def evaluate(arguments: argparse.Namespace) -> int:
    """Ask a policy every question of evaluation.sets, and score its answers.

    Tools, reward and rollout start on this machine. FILE gets one JSON line per answer; the
    scores, with 95 % intervals, go into a file beside it, with the suffix .summary.json. If you
    run the command again after an interruption, it asks only the questions that have no answer
    yet. `--set run.seed=S` seeds the sampling, `--set evaluation.temperature=T` sets its
    temperature.
    """
    loaded = load_given(arguments.config, arguments.options).config
    config = _with_policy(loaded, arguments.method, arguments.policy)
    if arguments.method == "naive_rag":
        check_search(config)
    _check_attempts(arguments.attempts, config)
    if arguments.decode_fit is not None:
        from agent_r1.cli.evaluation.fit import fit

        return fit(arguments, config)
    config, decoding = with_decoding(config, arguments)
    specs = config_checks.check(config, "evaluate").specs
    check_tools(decoding, specs)
    if arguments.method == "naive_rag" and SEARCH_TOOL in specs:
        check_spec(specs[SEARCH_TOOL], f"[tools.{SEARCH_TOOL}]")
    out: Path = arguments.out.resolve()
    if out.is_dir():
        raise ConfigError(f"--out ({out}) is a folder; name a file, such as {out}/scores.jsonl")
    evaluation = EvaluationRun(
        sets=config.evaluation.sets,
        questioning=questioning(config, arguments.method, arguments.attempts, decoding),
        out=out,
        facts=evaluation_facts(config),
        overwrite=arguments.overwrite,
    )
    for note in evaluation.notes:
        print(note)
    policy, model = describe_policy(config.model.policy), config.model.policy
    print(policy if policy == model else f"{policy} ({model})")
    print(f"method: {arguments.method}")
    if evaluation.left:
        code = _ask(evaluation, config, arguments)
        if code:
            return code
    else:
        print("every question is answered; --overwrite asks them again")
    scores = evaluation.summarise()
    for line in summary_lines(scores, config.score_names()):
        print(line)
    failed = sum(of_set.failed for of_set in scores.values())
    if failed:
        print(f"!! {failed} questions failed: {'; '.join(evaluation.failures())}")
        print(f"ask them again with: {again(arguments)}")
    print(f"answers: {out}")
    print(f"scores:  {summary_file(out)}")
    return _status(scores, config.learner.max_lost_share)


def with_decoding(config: Config, arguments: argparse.Namespace) -> tuple[Config, Decoding | None]:
    """Return how answers are chosen, and the configuration with what that needs.

    Raises:
        ConfigError: an option does not fit the method or the configuration.
    """
    fitted = fitted_setting(arguments, config.model.policy)
    if fitted is None:
        return config, decoding_of(arguments, config, config.evaluation.temperature)
    print(fitted.shown)
    evaluation = config.evaluation.model_copy(update={"temperature": fitted.temperature})
    return fitted.applied(config).model_copy(update={"evaluation": evaluation}), fitted.decoding


def _status(scores: Mapping[str, SetSummary], max_share: float) -> int:
    """Return the exit status; say which sets lost more questions than is allowed."""
    status = 0
    for name, of_set in scores.items():
        asked = of_set.n + of_set.failed
        if of_set.failed > max_share * asked:
            print(
                f"!! {of_set.failed} of the {asked} questions of the set {name} failed, and "
                f"learner.max_lost_share allows {max_share:.0%}: its means cover only the rest"
            )
            status = EXIT_LOSSES
    return status


def _ask(evaluation: EvaluationRun, config: Config, arguments: argparse.Namespace) -> int:
    """Ask what is left on services of its own; say how to continue if that does not end."""
    from agent_r1.launch import local_client

    total, before = len(evaluation.questions), len(evaluation.left)
    if before < total:
        print(f"{total - before} of {total} questions are answered; continuing with the rest")
    meter = Meter()
    searches = arguments.method == "naive_rag"

    async def ask(served: Config) -> None:
        await in_thread(
            lambda: evaluation.ask(
                run=served.run,
                redis=served.redis,
                search_url=search_url(served) if searches else None,
                on_progress=meter.show,
            )
        )

    def kept() -> str:
        done = total - len(evaluation.left)
        return f"{done} of {total} answers are kept; continue with: {again(arguments)}"

    try:
        local_client.run_client(config, ask, meter.event)
    except KeyboardInterrupt:
        meter.end()
        print(f"stopped; {kept()}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except ValueError as exc:
        meter.end()
        if len(evaluation.left) == total:
            raise
        raise ValueError(f"{exc}\n{kept()}") from exc
    meter.end()
    return 0


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
        """When this stage was first told of, in seconds, and how many were done by then."""
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


def _with_policy(config: Config, method: str, policy: str | None) -> Config:
    if policy is not None:
        return with_policy(config, policy)
    if method == "base_tool_call":
        return config
    raise ConfigError(
        f"--method {method} needs --policy MODEL_OR_RUN: a model directory or a run folder (only "
        "--method base_tool_call takes the configuration's model.path)"
    )


def _check_attempts(attempts: int, config: Config) -> None:
    if attempts > 1 and config.evaluation.temperature == 0.0:
        raise ConfigError(
            f"--attempts ({attempts}) with evaluation.temperature 0 would get the same answer each "
            "time; add --set evaluation.temperature=1"
        )


def check_search(config: Config) -> None:
    """Refuse a configuration whose search tool `naive_rag` cannot ask.

    Raises:
        ConfigError: there is none, the model is not offered it, or it writes other calls.
    """
    if config.env.tool_format != "hermes":
        raise ConfigError(
            "--method naive_rag shows its retrieval as a call in the format hermes, and "
            f"env.tool_format is {config.env.tool_format!r}; choose another --method"
        )
    if SEARCH_TOOL not in config.tools:
        raise ConfigError(
            f"--method naive_rag asks the tool {SEARCH_TOOL!r}, and the configured tools are "
            f"{sorted(config.tools)}; add a table [tools.{SEARCH_TOOL}] or choose another --method"
        )
    enabled = config.env.enable_tools
    if enabled is not None and SEARCH_TOOL not in enabled:
        raise ConfigError(
            f"--method naive_rag asks the tool {SEARCH_TOOL!r}, which env.enable_tools ({enabled}) "
            "leaves out; add it there or choose another --method"
        )


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


def evaluation_facts(config: Config) -> dict[str, JsonValue]:
    """Return what of a configuration can change an answer or a score, by dotted name.

    `top_k` is that of the search tool: None without one, and of one that runs elsewhere.
    """
    values = dump_config(config)[0]
    search = config.tools.get(SEARCH_TOOL)
    facts: dict[str, JsonValue] = {
        "policy": config.model.policy,
        "top_k": search.top_k if isinstance(search, SearchConfig) and search.url is None else None,
        "model.dtype": config.model.dtype,
        "model.max_context": config.model.max_context,
        "reward.rule": config.reward.rule,
        "reward.components": dict(config.reward.components),
    }
    facts |= {f"env.{key}": values["env"][key] for key in ENV_FACTS}
    facts |= dict(_tool_facts(values["tools"]))
    return facts


def _tool_facts(tools: dict[str, dict[str, JsonValue]]) -> Iterator[tuple[str, JsonValue]]:
    for name, table in tools.items():
        for key in TOOL_FACTS:
            # Of a tool that runs elsewhere the table says nothing but its address.
            if key in table and table.get("url") is None:
                yield f"tools.{name}.{key}", table[key]


def again(arguments: argparse.Namespace) -> str:
    """Return the command that continues an evaluation."""
    if isinstance(arguments.config, Mapping):
        return "the same call"
    named = {
        "--policy": arguments.policy,
        "--method": arguments.method,
        "--attempts": None if arguments.attempts == 1 else arguments.attempts,
        "--decode": arguments.decode,
        "--decode-candidates": arguments.decode_candidates,
        "--decode-keep": arguments.decode_keep,
        "--decode-lookahead": arguments.decode_lookahead,
        "--decode-beta": arguments.decode_beta,
        "--decode-branch-below": arguments.decode_branch_below,
        "--decode-continuations": arguments.decode_continuations,
        "--decode-max-calls": arguments.decode_max_calls,
        "--decode-scorer": arguments.decode_scorer,
        "--out": arguments.out,
    }
    return command_again(("evaluate", arguments.config), arguments.options, named)


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


def compare(arguments: argparse.Namespace) -> int:
    """Compare two files of `agent-r1 evaluate` on the questions that both have.

    For each set and for all sets: the difference of the means with its 95 % interval (paired
    bootstrap), and an exact McNemar test for exact match.
    """
    comparison = compare_files(arguments.a, arguments.b)
    for line in [*comparison_lines(comparison), *flip_lines(comparison.flips)]:
        print(line)
    if arguments.out is not None:
        try:
            write_json(arguments.out, comparison.record())
        except OSError as exc:
            raise ValueError(f"--out ({arguments.out}) cannot be written: {exc.strerror}") from exc
    return 0
