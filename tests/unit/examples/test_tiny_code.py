"""The exercises, tool, scripted agents, demonstrations and base model of examples/tiny_code."""

import ast
import hashlib
import itertools
import json
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from agent_r1.cli.task.scripted import play_all
from agent_r1.config.checks import use_plugins
from agent_r1.config.run import load_config
from agent_r1.runtime.files.tasks import read_task_file
from agent_r1.text.reading import parse_turn
from agent_r1.tools.base import CallContext, ToolUnavailableError
from agent_r1_proto.rewards import ScoreCall, ScoreRequest, ScoreTurn
from agent_r1_proto.tasks import Task
from tests.unit.evaluation.lines import answer, write

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "tiny_code"
SETS = ("in_domain", "compositions", "development")
MAX_BASE_BYTES = 5_000_000
SOLUTIONS: dict[str, Any] = {
    "keep even": lambda x: [v for v in x if v % 2 == 0],
    "keep positive": lambda x: [v for v in x if v > 0],
    "double": lambda x: [2 * v for v in x],
    "square": lambda x: [v**2 for v in x],
    "reverse": lambda x: list(reversed(x)),
    "sort": sorted,
    "drop first": lambda x: x[1:],
    "drop last": lambda x: x[: len(x) - 1],
    "sum": sum,
    "count": len,
    "largest": max,
    "last": lambda x: x[-1],
}


def operations_of(prompt: str) -> list[str]:
    """The operations that a task's text names."""
    return prompt.removeprefix(" Write f(x): ").removesuffix(".").split(", ")


def numbers_of(argument: Any) -> list[int]:
    """The numbers of an argument, in whichever form they arrive."""
    flat = itertools.chain(*(v if isinstance(v, list) else [v] for v in argument))
    return [int(value) for value in flat if value is not None]


def asked(folder: Path, name: str) -> list[Task]:
    return read_task_file(folder / name)


def demonstrations(folder: Path) -> list[list[dict[str, str]]]:
    lines = (folder / "sft.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines]


def compositions_learned(folder: Path) -> set[tuple[str, ...]]:
    prompts = [str(task.prompt) for task in asked(folder, "train.jsonl")]
    prompts += [messages[0]["content"] for messages in demonstrations(folder)]
    return {tuple(operations_of(prompt)) for prompt in prompts}


def code_in(turn: str) -> str:
    (call,) = parse_turn(turn).calls
    return str(call.arguments["code"])


def context(task: Any) -> CallContext:
    return CallContext("run/0/0/0/0", 0, task, timeout_s=30.0)


def test_the_same_seed_gives_the_same_bytes(
    tiny_code: SimpleNamespace,
    tiny_code_size: dict[str, int],
    tiny_code_files: Path,
    tmp_path: Path,
):
    tiny_code.generate.write_exercises(5, tmp_path, **tiny_code_size)
    names = sorted(path.name for path in tmp_path.iterdir())
    sets = (f"eval_{name}.jsonl" for name in sorted(SETS))
    others = ("repair.jsonl", "repair_silent.jsonl", "sft.jsonl", "train.jsonl")
    assert names == [*sets, *others]
    for name in names:
        assert (tmp_path / name).read_bytes() == (tiny_code_files / name).read_bytes()


def test_what_a_test_expects_follows_from_the_text(tiny_code_files: Path):
    for name in (*(f"eval_{s}.jsonl" for s in SETS), "train.jsonl"):
        for task in asked(tiny_code_files, name):
            trial: Any = task.tool_context
            for case in (*trial["examples"], *trial["tests"]):
                value: Any = numbers_of(case["argument"])
                for operation in operations_of(str(task.prompt)):
                    value = SOLUTIONS[operation](value)
                assert value == case["expected"]


def test_compositions_that_are_evaluated_are_learned_nowhere(tiny_code_files: Path):
    learned = compositions_learned(tiny_code_files)
    pairs = {pair for one in learned for pair in itertools.pairwise(one)}
    assert len(pairs) > 40
    for name in ("compositions", "development"):
        for task in asked(tiny_code_files, f"eval_{name}.jsonl"):
            assert set(itertools.pairwise(operations_of(str(task.prompt)))) - pairs


def test_each_operation_begins_as_many_held_out_pairs_of_either_use(tiny_code: SimpleNamespace):
    operations = tiny_code.operations
    for first in operations.TRANSFORMATIONS:
        uses = [operations.use_of((first, second)) for second in operations.OPERATIONS]
        assert [uses.count(use) for use in ("report", "choose", "train")] == [3, 1, 8]


def test_only_the_oracle_is_always_right(tiny_code_files: Path):
    config = load_config(EXAMPLE / "run.toml").config
    use_plugins(config)
    oracle = config.diagnose.oracle
    assert oracle is not None
    tasks = {name: asked(tiny_code_files, f"eval_{name}.jsonl")[:8] for name in SETS}
    scores = play_all(config, {"oracle": oracle, **config.diagnose.degenerate}, tasks)
    means = {name: sum(map(sum, of.values())) / 24 for name, of in scores.items()}
    assert means.pop("oracle") == 1.0
    assert means["same_program"] < 0.1 < means["never_repairs"] <= means["one_repair"] < 0.9


async def test_demonstrations_say_what_the_sandbox_says(
    tiny_code: SimpleNamespace, tiny_code_files: Path
):
    tool = tiny_code.trials.PythonTrial(max_workers=1, reuse_calls=1000)
    await tool.start()
    try:
        for task in asked(tiny_code_files, "repair.jsonl"):
            _, first, answer = task.messages()
            code: Any = {"code": code_in(first.text())}
            ran = await tool.call(code, context(task.tool_context))
            assert (ran.status, ran.text()) == ("ok", answer.content)
    finally:
        await tool.stop()


async def test_the_tool_shows_examples_and_counts_hidden_tests(tiny_code: SimpleNamespace):
    example, test = {"argument": [3, 1], "expected": 2}, {"argument": [4], "expected": 1}
    task = {"examples": [example], "tests": [test, {"argument": [5, 6, 7], "expected": 2}]}
    answers = {
        "def f(x): return len(x)": ("ok", 1),
        "def f(x): return 1": ("f([3, 1]) is 1, not 2", 1),
        "def f(x): return y": ("NameError: name 'y' is not defined", 0),
        "def f(x) return 1": ("SyntaxError: expected ':'", 0),
        "def f(x): return 2\nprint('[]')": ("ok", 1),
        "def f(x): return 2\nexit()": ("the program printed something else", 0),
    }
    for show_errors in (True, False):
        trials = tiny_code.trials
        tool = trials.PythonTrial(max_workers=1, reuse_calls=1000, show_errors=show_errors)
        await tool.start()
        try:
            for code, (text, passed) in answers.items():
                ran = await tool.call({"code": code}, context(task))
                shown = text if show_errors or text == "ok" else "wrong"
                assert ran.text() == shown
                assert ran.data == {"passed": passed, "failed": 2 - passed, "total": 2}
            with pytest.raises(ToolUnavailableError, match="tool_context is no Trial"):
                await tool.call({"code": ""}, context({"examples": []}))
        finally:
            await tool.stop()


def test_the_last_program_that_ran_is_rewarded(tiny_code: SimpleNamespace):
    def turn(passed: int | None) -> ScoreTurn:
        data: Any = None if passed is None else {"passed": passed, "failed": 2 - passed, "total": 2}
        return ScoreTurn(text="", num_calls=1, calls=[ScoreCall(tool="python_exec", data=data)])

    def reward(*turns: ScoreTurn) -> float:
        return tiny_code.trials.all_tests_passed(ScoreRequest(payload={}, turns=list(turns)))

    assert [reward(turn(1), turn(2)), reward(turn(2), turn(None))] == [1.0, 1.0]
    assert [reward(turn(2), turn(1)), reward(ScoreTurn(text="done"))] == [0.0, 0.0]


def test_repairs_begin_after_the_same_wrong_programs(tiny_code_files: Path):
    told, silent = (asked(tiny_code_files, f"repair{of}.jsonl") for of in ("", "_silent"))
    assert len(told) == 20
    for one, other in zip(told, silent, strict=True):
        assert one.messages()[:2] == other.messages()[:2]
        assert one.tool_context == other.tool_context
        assert one.messages()[2].content not in ("ok", "wrong")
        assert other.messages()[2].content == "wrong"


def test_programs_are_of_single_tokens(tiny_code: SimpleNamespace, tiny_code_files: Path):
    tokenizer = tiny_code.tokenizer.build_tokenizer()
    for messages in demonstrations(tiny_code_files):
        for message in messages:
            ids = tokenizer(message["content"]).input_ids
            assert tokenizer.decode(ids) == message["content"]
            if message["role"] != "tool":
                single = {t for t in tokenizer.batch_decode([[i] for i in ids]) if len(t) == 1}
                assert single <= set("xv=[]().,:-012")
            if message["role"] == "assistant" and parse_turn(message["content"]).calls:
                ast.parse(code_in(message["content"]))
                assert len(ids) <= 80


def test_the_committed_base_is_the_one_of_the_recipe(tiny_code: SimpleNamespace):
    base = EXAMPLE / "base"
    listed = [line.split() for line in (EXAMPLE / "base.sha256").read_text().splitlines()]
    assert sorted(name for _, name in listed) == sorted(f"base/{p.name}" for p in base.iterdir())
    for digest, name in listed:
        assert hashlib.sha256((EXAMPLE / name).read_bytes()).hexdigest() == digest
    sizes = [tensor.size for tensor in load_file(base / "model.safetensors").values()]
    assert sum(sizes) <= 1_000_000
    assert sum(path.stat().st_size for path in base.iterdir()) <= MAX_BASE_BYTES
    committed, built = AutoTokenizer.from_pretrained(base), tiny_code.tokenizer.build_tokenizer()
    assert committed.get_vocab() == built.get_vocab()
    assert committed.chat_template == built.chat_template


def write_repairs(folder: Path, name: str, passed: dict[str, list[float]]) -> None:
    write(
        folder / f"{name}.jsonl",
        [
            answer(str(number), set=of_set, components={"trials:all_tests_passed": score})
            for of_set, scores in passed.items()
            for number, score in enumerate(scores)
        ],
    )


def test_an_agent_repairs_the_mean_over_its_seeds(tiny_code: SimpleNamespace, tmp_path: Path):
    others = {"repair_silent": [0.0, 0.0], "in_domain": [1.0, 0.0], "compositions": [1.0]}
    for names in tiny_code.repair.AGENTS.values():
        for name in names:
            repaired = [1.0, 1.0] if name == "grpo_seed1" else [0.0, 0.0]
            write_repairs(tmp_path, name, {"repair": repaired, **others})
    found = tiny_code.repair.estimates(tmp_path)
    # One of three seeds repairs both programs, the others none.
    assert found["grpo"]["repair"].mean == pytest.approx(1 / 3)
    assert (found["grpo"]["repair"].low, found["grpo"]["repair"].high) == (0.0, 1.0)
    assert {found[name]["repair"].mean for name in ("base", "grpo_silent")} == {0.0}
    assert found["base"]["in_domain"].mean == 0.5


def test_exercises_are_paired_however_their_answers_came(
    tiny_code: SimpleNamespace, tmp_path: Path
):
    for names in tiny_code.repair.AGENTS.values():
        for name in names:
            write_repairs(tmp_path, name, dict.fromkeys(tiny_code.repair.SETS, [0.0, 1.0] * 50))
    lines = (tmp_path / "grpo_seed1.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "grpo_seed1.jsonl").write_text("".join(reversed(lines)))
    found = tiny_code.repair.estimates(tmp_path)["grpo"]["repair"]
    # Three equal seeds are 100 exercises: 1/2 -+ 1.96 * sqrt(1/4 / 100) = 0.098.
    assert (found.low, found.high) == pytest.approx((0.402, 0.598), abs=0.015)


def test_an_agent_that_has_not_been_asked_is_named(tiny_code: SimpleNamespace, tmp_path: Path):
    with pytest.raises(ValueError, match=r"base\.jsonl"):
        tiny_code.repair.estimates(tmp_path)


def test_the_base_of_pi_reads_its_lines_as_tokens(
    tiny_code: SimpleNamespace, tiny_code_files: Path
):
    base = tiny_code.pi_base
    text = (
        "You work in a terminal.\n\nBe brief.\nBe brief and kind.\nCurrent date: 2026-11-27\n"
        "Current working directory: /tmp/work"
    )
    tokenizer = base.build_tokenizer(text)
    told = next(base.demonstrations(text, tiny_code_files / "sft.jsonl", random.Random(0)))
    system = str(told.messages[0].content)
    words = [tokenizer.decode([token]) for token in tokenizer.encode(system)]
    assert {"You work in a terminal.", "Be brief.", "Be brief and kind."} <= set(words)
    assert system != text  # on another day, and nothing else
    assert re.sub(r"date: \S+", "", system) == re.sub(r"date: \S+", "", text)
    call = str(told.messages[2].content)
    assert call.startswith(f"<tool_call>{base.CALL}")
    assert call.endswith(f"{base.END}</tool_call>")
    assert tokenizer.decode(tokenizer.encode(call)) == call
    assert len(tokenizer.encode(call)) < 60
