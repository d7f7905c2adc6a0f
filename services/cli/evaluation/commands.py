"""Commands that play a policy and measure it: evaluate, diagnose, compare, table, matrix, chat."""

from __future__ import annotations

import argparse
from pathlib import Path

from agent_r1.cli.declare import (
    CONFIG_HELP,
    Commands,
    add_command,
    add_config,
    add_set,
    integer,
    number,
)

DECODING_METHODS = ("best_of_n", "majority", "value_guided", "beam")
"""`agent_r1_proto.tasks.DecodingMethod`."""
METHODS = ("agent", "base_tool_call", "naive_rag")
"""`agent_r1.evaluation.config.Method`, whose module takes too long to import for `--help`."""
TEMPERATURES = (0.01, 2.0)
"""`agent_r1_proto.tasks.PositiveTemperature`."""


def add_to(commands: Commands) -> None:
    """Add all of them."""
    _add_evaluation(commands)
    _add_diagnose(commands)
    _add_comparisons(commands)
    _add_matrix(commands)
    _add_chat(commands)


def _add_evaluation(commands: Commands) -> None:
    evaluate = add_command(
        commands,
        "evaluate",
        "evaluation.evaluate:evaluate",
        "score a policy on the evaluation sets",
        "Start tools, reward and rollout on this machine with a given policy, ask every question "
        "of evaluation.sets, and write one JSON line per answer to FILE. The scores, with 95 % "
        "intervals, go into a file beside it, with the suffix .summary.json. If you run the "
        "command again after an interruption, it asks only the questions that have no answer yet. "
        "`--set run.seed=S` seeds the sampling, `--set evaluation.temperature=T` sets its "
        "temperature.",
    )
    add_config(evaluate)
    evaluate.add_argument(
        "--policy",
        metavar="MODEL_OR_RUN",
        help="model directory, or a run folder (its last checkpoint); base_tool_call uses the "
        "configuration's model.path by default",
    )
    evaluate.add_argument(
        "--method",
        choices=METHODS,
        default=METHODS[0],
        help="agent (the default): the policy with its tools. base_tool_call: the same with the "
        "untrained model that CONFIG names. naive_rag: one retrieval with the question, then one "
        "turn to answer",
    )
    evaluate.add_argument(
        "--attempts",
        type=integer(1),
        default=1,
        metavar="K",
        help="sample K answers to each question, and report pass@k and pass^k as well; needs "
        "evaluation.temperature > 0 (default: 1)",
    )
    _add_decoding(evaluate)
    evaluate.add_argument(
        "--decode-fit",
        type=number(*TEMPERATURES),
        nargs="+",
        metavar="T",
        help="with --decode value_guided: measure how well the scorer tells candidates apart that "
        "were sampled at these temperatures, and write the best setting into the run folder",
    )
    out_help = "JSON-lines file to write"
    evaluate.add_argument("--out", type=Path, required=True, metavar="FILE", help=out_help)
    overwrite_help = "start again and discard the answers in FILE"
    evaluate.add_argument("--overwrite", action="store_true", help=overwrite_help)


CONTINUATIONS_HELP = (
    "in one turn of each interaction, continue M times after every candidate, and write into the "
    "result what each is worth; train-reward learns from it"
)


def _add_decoding(command: argparse.ArgumentParser) -> None:
    """Let a command choose each answer among several branches."""
    add = command.add_argument_group("decoding").add_argument
    add(
        "--decode",
        choices=DECODING_METHODS,
        help="choose each answer among several branches. best_of_n: sample whole interactions and "
        "take the one that the scorer likes best. majority: take the most frequent answer. "
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
        type=number(0, 1),
        metavar="P",
        help="sample candidates only where the greedy turn is less probable than this (default: "
        "everywhere)",
    )
    add("--decode-continuations", type=integer(0), metavar="M", help=CONTINUATIONS_HELP)
    add("--decode-keep", type=integer(1), metavar="B", help="branches that beam keeps (default: 2)")
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


def _add_diagnose(commands: Commands) -> None:
    diagnose = add_command(
        commands,
        "diagnose",
        "evaluation.diagnose:diagnose",
        "say whether a task and a model can tell methods apart",
        "Play the scripted policies of [diagnose], ask a model the evaluation questions and "
        "groups of training questions on services of its own, and compare every figure to its "
        "bound: the scores of the scripted policies, greedy and sampled scores of the model, the "
        "share of groups with different rewards, and how alike the gradients of trajectories and "
        "of two estimators are. The exit status is 1 if a bound is missed. `--set "
        "evaluation.max_questions=N` asks fewer questions of each set.",
    )
    add_config(diagnose)
    diagnose.add_argument(
        "--policy",
        metavar="MODEL_OR_RUN",
        help="model directory, or a run folder (its last checkpoint); by default the "
        "configuration's model.path",
    )
    diagnose.add_argument(
        "--out", type=Path, metavar="FILE", help="JSON file to write the figures to"
    )


def _add_comparisons(commands: Commands) -> None:
    compare = add_command(
        commands,
        "compare",
        "evaluation.evaluate:compare",
        "paired test between two evaluations",
        "Compare two files of `agent-r1 evaluate` on the questions that both have, for each set "
        "and for all sets: the difference of the means with its 95 % interval (paired bootstrap), "
        "and an exact McNemar test for exact match.",
    )
    compare.add_argument("a", type=Path, metavar="A", help="JSON-lines file of an evaluation")
    b_help = "file of the other; differences are B - A"
    compare.add_argument("b", type=Path, metavar="B", help=b_help)
    compare.add_argument("--out", type=Path, metavar="FILE", help="write the numbers as JSON")

    table = add_command(
        commands,
        "table",
        "evaluation.table:table",
        "compare methods over several seeds",
        "Start tools, reward and rollout once, evaluate the baselines, train every method of TABLE "
        "with every seed, and write the scores with 95 % intervals as Markdown and JSON. If you "
        "run the command again, it keeps finished rows and continues with the rest.",
    )
    table.add_argument("table", type=Path, metavar="TABLE", help="table file (.toml)")
    table.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for results, runs and cells (default: those of the file, and runs/table)",
    )
    only_help = "only these methods or baselines, by name"
    table.add_argument("--only", metavar="METHOD[,METHOD]", help=only_help)
    table.add_argument("--seeds", metavar="SEED[,SEED]", help="only the runs with these seeds")
    overwrite_help = "start the rows again and discard their results"
    table.add_argument("--overwrite", action="store_true", help=overwrite_help)
    add_set(table)


def _add_matrix(commands: Commands) -> None:
    matrix = add_command(
        commands,
        "matrix",
        "evaluation.matrix:matrix",
        "evaluate models on public data sets, asked in several ways",
        "Ask every model of MATRIX the questions of MATH-500, GSM8K, HumanEval, MBPP, HotpotQA, "
        "2WikiMultihopQA and MuSiQue, or those of task files, by every method and way of decoding, "
        "and write scores with 95 % intervals, tokens, calls and seconds as Markdown, JSON and "
        "pictures, with the comparisons that MATRIX names. If you run the command again, it keeps "
        "finished cells and continues with the rest.",
    )
    matrix.add_argument("matrix", type=Path, metavar="MATRIX", help="matrix file (.toml)")
    matrix.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for results and answers (default: the file's `results`, and runs/matrix)",
    )
    overwrite_help = "start all cells again and discard their answers"
    matrix.add_argument("--overwrite", action="store_true", help=overwrite_help)
    add_set(matrix)


def _add_chat(commands: Commands) -> None:
    chat = add_command(
        commands,
        "chat",
        "evaluation.chat:chat",
        "ask the agent a question and watch its turns",
        "Start tools and rollout on this machine, then ask the agent questions: your own, or "
        "held-out ones (`:pick`). Text from the model and text from tools have different colours.",
    )
    policy_help = "model directory, or run folder (its last checkpoint)"
    chat.add_argument("policy", metavar="MODEL_OR_RUN", help=policy_help)
    config_help = f"{CONFIG_HELP}; a run folder has its own"
    chat.add_argument("--config", type=Path, metavar="CONFIG", help=config_help)
    add_set(chat)
    one = chat.add_mutually_exclusive_group()
    one.add_argument("--question", metavar="TEXT", help="ask this one question and exit")
    task_help = "ask the task of this id in a file of tasks, with its payload, and exit"
    one.add_argument("--task", metavar="FILE:ID", help=task_help)
    _add_decoding(chat)
    chat.add_argument(
        "--temperature",
        type=number(*TEMPERATURES, or_0=True),
        default=0.0,
        metavar="T",
        help="0 (the default) is greedy",
    )
