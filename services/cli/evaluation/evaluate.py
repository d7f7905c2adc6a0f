"""`agent-r1 evaluate` and `agent-r1 compare`: scores of a policy, and two of them side by side.

`evaluate` reads the configuration, lets the local launcher start tools, reward and rollout, and
asks them through `agent_r1.evaluation`; `compare` reads two files that it wrote.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from agent_r1.cli.declare import add_config, integer, number
from agent_r1.cli.evaluation.asking import (
    Meter,
    ask_left,
    command_again,
    on_services,
    open_evaluation,
    questioning,
    run_kept,
    write_out,
)
from agent_r1.cli.evaluation.decoding import (
    OPTIONS,
    add_decoding,
    check_tools,
    decoding_of,
    fitted_setting,
)
from agent_r1.cli.policy import describe_policy, with_policy
from agent_r1.config import checks as config_checks
from agent_r1.config.run import Config, ConfigError, load_given
from agent_r1.evaluation.answer_file import summary_file
from agent_r1.evaluation.comparison import compare_files, comparison_lines, flip_lines
from agent_r1.evaluation.config import SEARCH_TOOL, Method
from agent_r1.evaluation.main import EvaluationRun
from agent_r1.evaluation.retrieval import check_spec
from agent_r1.evaluation.summary import SetSummary, summary_lines
from agent_r1.runtime.exit_status import EXIT_LOSSES
from agent_r1_proto.tasks import LEAST_TEMPERATURE, MOST_TEMPERATURE, Decoding


def evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `evaluate`."""
    add_config(parser)
    parser.add_argument(
        "--policy",
        metavar="MODEL_OR_RUN",
        help="model directory, or a run folder (its last checkpoint); base_tool_call uses the "
        "configuration's model.path by default",
    )
    parser.add_argument(
        "--method",
        choices=get_args(Method),
        default="agent",
        help="agent (the default): the policy with its tools. base_tool_call: the same with the "
        "untrained model that CONFIG names. naive_rag: one retrieval with the question, then one "
        "turn to answer",
    )
    parser.add_argument(
        "--attempts",
        type=integer(1),
        default=1,
        metavar="K",
        help="sample K answers to each question, and report pass@k and pass^k as well; needs "
        "evaluation.temperature > 0 (default: 1)",
    )
    add_decoding(parser)
    parser.add_argument(
        "--decode-continuations",
        type=integer(1),
        metavar="M",
        help="in one turn of each interaction, continue M times after every candidate, and write "
        "into the result what each is worth; train-reward learns from it",
    )
    parser.add_argument(
        "--decode-fit",
        type=number(LEAST_TEMPERATURE, MOST_TEMPERATURE),
        nargs="+",
        metavar="T",
        help="with --decode value_guided: measure how well the scorer tells candidates apart that "
        "were sampled at these temperatures, compare the best search with greedy answers and "
        "votes, and write what is best into the run folder",
    )
    out_help = "JSON-lines file to write"
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=out_help)
    overwrite_help = "start again and discard the answers in FILE"
    parser.add_argument("--overwrite", action="store_true", help=overwrite_help)


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
    if arguments.decode_fit is not None:
        from agent_r1.cli.evaluation.fit import fit

        return fit(arguments, config)
    config, decoding = with_decoding(config, arguments)
    _check_attempts(arguments, config)
    specs = config_checks.check(config, "evaluate").specs
    check_tools(decoding, specs)
    if arguments.method == "naive_rag" and SEARCH_TOOL in specs:
        check_spec(specs[SEARCH_TOOL], f"[tools.{SEARCH_TOOL}]")
    out: Path = arguments.out.resolve()
    if out.is_dir():
        raise ConfigError(f"--out ({out}) is a folder; name a file, such as {out}/scores.jsonl")
    asked = questioning(config, arguments.method, arguments.attempts, decoding)
    evaluation = open_evaluation(config, asked, out, overwrite=arguments.overwrite)
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
    if cut := evaluation.cut_off():
        print(f"cut off by a limit, and scored: {'; '.join(cut)}")
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
    print(fitted.instead_of("evaluation.temperature", config.evaluation.temperature))
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
    total, before = len(evaluation.questions), len(evaluation.left)
    if before < total:
        print(f"{total - before} of {total} questions are answered; continuing with the rest")

    async def ask(served: Config, meter: Meter) -> None:
        await ask_left(evaluation, served, meter)

    def kept() -> str:
        done = total - len(evaluation.left)
        return f"{done} of {total} answers are kept; continue with: {again(arguments)}"

    return run_kept(lambda: on_services(config, ask), kept, lambda: len(evaluation.left) < total)


def _with_policy(config: Config, method: str, policy: str | None) -> Config:
    if policy is not None:
        return with_policy(config, policy)
    if method == "base_tool_call":
        return config
    raise ConfigError(
        f"--method {method} needs --policy MODEL_OR_RUN: a model directory or a run folder (only "
        "--method base_tool_call takes the configuration's model.path)"
    )


def _check_attempts(arguments: argparse.Namespace, config: Config) -> None:
    if arguments.attempts > 1 and config.evaluation.temperature == 0.0:
        fitted = "leave --decode out, and " if arguments.decode else ""
        raise ConfigError(
            f"--attempts ({arguments.attempts}) with evaluation.temperature 0 would get the same "
            f"answer each time; {fitted}add --set evaluation.temperature=1"
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


def again(arguments: argparse.Namespace) -> str:
    """Return the command that continues an evaluation."""
    if isinstance(arguments.config, Mapping):
        return "the same call"
    named = {
        "--policy": arguments.policy,
        "--method": arguments.method,
        "--attempts": None if arguments.attempts == 1 else arguments.attempts,
        "--decode": arguments.decode,
        **{f"--decode-{n.replace('_', '-')}": getattr(arguments, f"decode_{n}") for n in OPTIONS},
        "--out": arguments.out,
    }
    return command_again(("evaluate", arguments.config), arguments.options, named)


def compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `compare`."""
    parser.add_argument("a", type=Path, metavar="A", help="JSON-lines file of an evaluation")
    b_help = "file of the other; differences are B - A"
    parser.add_argument("b", type=Path, metavar="B", help=b_help)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the numbers as JSON")


def compare(arguments: argparse.Namespace) -> int:
    """Compare two files of `agent-r1 evaluate` on the questions that both have.

    For each set and for all sets: the difference of the means with its 95 % interval (paired
    bootstrap), and an exact McNemar test for exact match.
    """
    comparison = compare_files(arguments.a, arguments.b)
    for line in [*comparison_lines(comparison), *flip_lines(comparison.flips)]:
        print(line)
    if arguments.out is not None:
        write_out(arguments.out, comparison.record())
    return 0
