"""Arguments of the commands that play a policy and measure it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from agent_r1.cli.declare import CONFIG_HELP, add_config, add_set, integer, number
from agent_r1.cli.evaluation.chat import chat
from agent_r1.cli.evaluation.diagnose import diagnose
from agent_r1.cli.evaluation.evaluate import compare, evaluate
from agent_r1.cli.evaluation.matrix import matrix
from agent_r1.cli.evaluation.table import table
from agent_r1.evaluation.config import Method
from agent_r1_proto.tasks import LEAST_TEMPERATURE, MOST_TEMPERATURE, DecodingMethod

__all__ = ["chat", "compare", "diagnose", "evaluate", "matrix", "table"]

METHODS: tuple[Method, ...] = get_args(Method)
LEAST_PROBABILITY = 1e-6
"""Of `--decode-branch-below`; with 0, nothing would be searched."""
CONTINUATIONS_HELP = (
    "in one turn of each interaction, continue M times after every candidate, and write into the "
    "result what each is worth; train-reward learns from it"
)


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
        choices=METHODS,
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
    _add_decoding(parser)
    parser.add_argument(
        "--decode-continuations", type=integer(1), metavar="M", help=CONTINUATIONS_HELP
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


def _add_decoding(command: argparse.ArgumentParser) -> None:
    """Let a command choose each answer among several branches."""
    add = command.add_argument_group("decoding").add_argument
    add(
        "--decode",
        choices=get_args(DecodingMethod),
        help="choose each answer among several branches. best_of_n: sample whole interactions and "
        "take the highest-scoring one. majority: take the most frequent answer. "
        "value_guided: after every turn, take the candidate that is likely and that the scorer "
        "values; alone, with the setting that was fitted for the run. beam: the same with several "
        "branches kept",
    )
    add(
        "--decode-candidates",
        type=integer(1),
        metavar="K",
        help="interactions, or turns sampled after every branch beside the greedy one (default: 4)",
    )
    add(
        "--decode-beta",
        type=number(0),
        metavar="B",
        help="weight of a value beside a log-probability in value_guided and beam (default: 1)",
    )
    add(
        "--decode-branch-below",
        type=number(LEAST_PROBABILITY, 1),
        metavar="P",
        help="sample candidates only where the greedy turn is less probable than this (default: "
        "everywhere)",
    )
    add(
        "--decode-answer-bias",
        type=number(-100, 100),
        metavar="X",
        help="add this to the log-probability of a turn that calls nothing; below 0, only answers "
        "are taken that are likely (default: 0)",
    )
    add("--decode-keep", type=integer(1), metavar="B", help="branches that beam keeps (default: 4)")
    add(
        "--decode-lookahead",
        type=integer(0),
        metavar="D",
        help="turns whose calls are run before a candidate is scored, its own included; with 0 "
        "only the calls of those kept are run (default: 1)",
    )
    add(
        "--decode-max-calls",
        metavar="N|NAME",
        help="most tool calls of all branches together: a number, or the name under which the "
        "task's payload has it",
    )
    add(
        "--decode-scorer",
        metavar="COMPONENT",
        help="component of reward.components that scores branches (default: the first of "
        "reward_model, critic and judge that is named)",
    )


def diagnose_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `diagnose`."""
    add_config(parser)
    parser.add_argument(
        "--policy",
        metavar="MODEL_OR_RUN",
        help="model directory, or a run folder (its last checkpoint); by default the "
        "configuration's model.path",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="JSON file to write the figures to"
    )


def compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `compare`."""
    parser.add_argument("a", type=Path, metavar="A", help="JSON-lines file of an evaluation")
    b_help = "file of the other; differences are B - A"
    parser.add_argument("b", type=Path, metavar="B", help=b_help)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the numbers as JSON")


def table_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `table`."""
    parser.add_argument("table", type=Path, metavar="TABLE", help="table file (.toml)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for results, runs and cells (default: those of the file, and runs/table)",
    )
    only_help = "only these methods or baselines, by name"
    parser.add_argument("--only", metavar="METHOD[,METHOD]", help=only_help)
    parser.add_argument("--seeds", metavar="SEED[,SEED]", help="only the runs with these seeds")
    overwrite_help = "start the rows again and discard their results"
    parser.add_argument("--overwrite", action="store_true", help=overwrite_help)
    add_set(parser)


def matrix_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `matrix`."""
    parser.add_argument("matrix", type=Path, metavar="MATRIX", help="matrix file (.toml)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for results and answers (default: the file's `results`, and runs/matrix)",
    )
    overwrite_help = "start all cells again and discard their answers"
    parser.add_argument("--overwrite", action="store_true", help=overwrite_help)
    add_set(parser)


def chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `chat`."""
    policy_help = "model directory, or run folder (its last checkpoint)"
    parser.add_argument("policy", metavar="MODEL_OR_RUN", help=policy_help)
    config_help = f"{CONFIG_HELP}; a run folder has its own"
    parser.add_argument("--config", type=Path, metavar="CONFIG", help=config_help)
    add_set(parser)
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--question", metavar="TEXT", help="ask this one question and exit")
    task_help = "ask the task of this id in a file of tasks, with its payload, and exit"
    one.add_argument("--task", metavar="FILE:ID", help=task_help)
    _add_decoding(parser)
    parser.add_argument(
        "--temperature",
        type=number(LEAST_TEMPERATURE, MOST_TEMPERATURE, or_0=True),
        default=0.0,
        metavar="T",
        help="0 (the default) is greedy",
    )
