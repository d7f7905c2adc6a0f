"""The problems, scripted agents, demonstrations and base model of examples/tiny_math."""

import hashlib
import itertools
import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from safetensors.numpy import load_file
from transformers import AutoTokenizer

from agent_r1.cli.task.scripted import play_all
from agent_r1.config.checks import use_plugins
from agent_r1.config.run import load_config
from agent_r1.runtime.files.tasks import read_task_file
from agent_r1_proto.tasks import Task

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "tiny_math"
SETS = ("in_domain", "compositions", "longer", "development")
MAX_BASE_BYTES = 3_000_000


def clauses_of(prompt: str) -> list[list[str]]:
    """The clauses of every chain, read from the problem's text."""
    return [told.split(", ") for told in re.findall(r": (.+?)\.", prompt)]


def pairs_of(prompt: str) -> set[tuple[str, str]]:
    """Kinds of neighbouring clauses."""
    kinds = [[re.sub(r" \d+", "", clause) for clause in chain] for chain in clauses_of(prompt)]
    return {pair for chain in kinds for pair in itertools.pairwise(chain)}


def solve(prompt: str) -> float:
    """Work a problem out from its text."""
    values: list[float] = []
    starts = map(int, re.findall(r"has (\d+)", prompt))
    for start, clauses in zip(starts, clauses_of(prompt), strict=True):
        value = float(start)
        for clause in clauses:
            number = int((re.findall(r"\d+", clause) or ["0"])[0])
            kind = re.sub(r" \d+", "", clause)
            value = {
                "add": value + number,
                "lose": value - number,
                "times": value * number,
                "share by": value / (number or 1),
                "double": value * 2,
                "halve": value / 2,
                "add the start": value + start,
                "lose the start": value - start,
            }[kind]
        values.append(value)
    return values[0] - values[1] if "apart" in prompt else sum(values)


def prompts_of_tasks(folder: Path, name: str) -> list[str]:
    return [str(task.prompt) for task in read_task_file(folder / name)]


def prompts_of_dialogues(folder: Path, name: str) -> list[str]:
    lines = (folder / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"][0]["content"] for line in lines]


def learned_prompts(folder: Path) -> list[str]:
    return [
        *prompts_of_tasks(folder, "train.jsonl"),
        *prompts_of_dialogues(folder, "sft.jsonl"),
        *prompts_of_dialogues(folder, "correct.jsonl"),
    ]


def test_the_same_seed_gives_the_same_bytes(
    tiny_math: SimpleNamespace, tiny_math_files: Path, tmp_path: Path
):
    tiny_math.generate.write_problems(5, tmp_path, num_train=200, num_eval=60, num_demos=400)
    names = sorted(path.name for path in tmp_path.iterdir())
    sets = (f"eval_{name}.jsonl" for name in sorted(SETS))
    assert names == ["correct.jsonl", *sets, "sft.jsonl", "train.jsonl"]
    for name in names:
        assert (tmp_path / name).read_bytes() == (tiny_math_files / name).read_bytes()


def test_every_answer_follows_from_the_text(tiny_math_files: Path):
    for name in (*(f"eval_{s}.jsonl" for s in SETS), "train.jsonl"):
        for task in read_task_file(tiny_math_files / name):
            assert [str(int(solve(str(task.prompt))))] == task.payload["answers"]


def test_no_problem_is_asked_twice(tiny_math_files: Path):
    asked = [p for s in SETS for p in prompts_of_tasks(tiny_math_files, f"eval_{s}.jsonl")]
    demonstrated = prompts_of_dialogues(tiny_math_files, "sft.jsonl")
    every = [*asked, *prompts_of_tasks(tiny_math_files, "train.jsonl"), *demonstrated]
    assert len(every) > 700
    assert len(set(every)) == len(every)


def test_held_out_pairs_are_asked_in_one_set_and_learned_nowhere(tiny_math_files: Path):
    learned = set[tuple[str, str]]().union(*map(pairs_of, learned_prompts(tiny_math_files)))
    asked = prompts_of_tasks(tiny_math_files, "eval_compositions.jsonl")
    assert len(learned) > 30
    assert all(pairs_of(prompt) - learned for prompt in asked)
    for name in ("in_domain", "longer", "development"):
        for prompt in prompts_of_tasks(tiny_math_files, f"eval_{name}.jsonl"):
            assert pairs_of(prompt) <= learned


def test_both_arms_start_from_one_base_and_learn_the_same_problems(tiny_math_files: Path):
    run, sft = (tomllib.loads((EXAMPLE / f"{arm}.toml").read_text()) for arm in ("run", "sft"))
    assert run["model"]["path"] == sft["model"]["path"] == "base"
    assert [Path(name).name for name in sft["sft"]["data"]] == ["correct.jsonl"]
    learned = prompts_of_dialogues(tiny_math_files, "correct.jsonl")
    assert learned == prompts_of_tasks(tiny_math_files, "train.jsonl")


def test_longer_problems_have_shapes_that_are_learned_nowhere(tiny_math_files: Path):
    def shapes(prompts: list[str]) -> set[tuple[int, ...]]:
        return {tuple(map(len, clauses_of(prompt))) for prompt in prompts}

    longer = shapes(prompts_of_tasks(tiny_math_files, "eval_longer.jsonl"))
    assert longer == {(5,), (1, 2), (2, 2)}
    assert not longer & shapes(learned_prompts(tiny_math_files))


def test_only_the_oracle_is_always_right(tiny_math_files: Path):
    config = load_config(EXAMPLE / "run.toml").config
    use_plugins(config)
    oracle = config.diagnose.oracle
    assert oracle is not None
    tasks = {name: read_task_file(tiny_math_files / f"eval_{name}.jsonl") for name in SETS}
    policies = {"oracle": oracle, **config.diagnose.degenerate}
    scores = play_all(config, policies, tasks)
    means = {name: {s: sum(v) / len(v) for s, v in of.items()} for name, of in scores.items()}
    assert set(means.pop("oracle").values()) == {1.0}
    assert len(means) == 2
    assert max(value for of in means.values() for value in of.values()) <= 0.5


def test_demonstrations_are_often_wrong_and_say_what_they_compute(
    tiny_math: SimpleNamespace, tiny_math_files: Path
):
    lines = (tiny_math_files / "sft.jsonl").read_text(encoding="utf-8").splitlines()
    right = 0
    for line in lines:
        first, *_, last = json.loads(line)["messages"]
        right += (
            last["content"] == f"<think> done</think><answer>{solve(first['content']):.0f}</answer>"
        )
    assert 0.3 < right / len(lines) < 0.7
    plan: Any = [
        {"name": "Anna", "kind": "add", "after": "", "text": "add 2", "expression": "{v}+2"},
        {"name": "Ben", "kind": "double", "after": "", "text": "double", "expression": "{v}*2"},
        {"name": "", "kind": "apart", "after": "", "text": "apart", "expression": "{a}-{b}"},
    ]
    starts = ("40", "7", "")
    plan = [{**clause, "start": start} for clause, start in zip(plan, starts, strict=True)]
    oracle = tiny_math.solvers.Oracle(Task(id="a", prompt="Solve.", payload={"plan": plan}))
    said = [oracle.turn(seen) for seen in ([], ["42"], ["14"], ["28"])]
    thoughts = [re.sub(r"<think>(.*)</think>.*", r"\1", text) for text in said]
    assert thoughts == [
        " Anna add 2",
        " Anna has 42. Ben double",
        " Anna has 42. Ben has 14. apart",
        " done",
    ]
    expressions = [found for text in said for found in re.findall(r'"expression":"(.+?)"', text)]
    assert expressions == ["40+2", "7*2", "42-14"]
    assert said[-1].endswith("<answer>28</answer>")


def test_numbers_and_words_are_single_tokens(tiny_math: SimpleNamespace, tiny_math_files: Path):
    tokenizer = tiny_math.tokenizer.build_tokenizer()
    for line in (tiny_math_files / "sft.jsonl").read_text(encoding="utf-8").splitlines():
        for message in json.loads(line)["messages"]:
            ids = tokenizer(message["content"]).input_ids
            assert tokenizer.decode(ids) == message["content"]
            single = {text for text in tokenizer.batch_decode([[i] for i in ids]) if len(text) == 1}
            assert single <= set(".,:?+-*/0123456789")


def test_the_committed_base_is_the_one_of_the_recipe(tiny_math: SimpleNamespace):
    base = EXAMPLE / "base"
    listed = [line.split() for line in (EXAMPLE / "base.sha256").read_text().splitlines()]
    assert sorted(name for _, name in listed) == sorted(f"base/{p.name}" for p in base.iterdir())
    for digest, name in listed:
        assert hashlib.sha256((EXAMPLE / name).read_bytes()).hexdigest() == digest
    sizes = [tensor.size for tensor in load_file(base / "model.safetensors").values()]
    assert sum(sizes) <= 1_000_000
    assert sum(path.stat().st_size for path in base.iterdir()) <= MAX_BASE_BYTES
    committed, built = AutoTokenizer.from_pretrained(base), tiny_math.tokenizer.build_tokenizer()
    assert committed.get_vocab() == built.get_vocab()
    assert committed.chat_template == built.chat_template
