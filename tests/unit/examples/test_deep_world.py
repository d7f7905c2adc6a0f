"""The generator of examples/deep_world: world, questions, budgets, demonstrations."""

import hashlib
import json
import random
import re
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from agent_r1_proto.tasks import Task

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "deep_world"
SETS = ("in_domain", "longer", "compositions", "wording", "unanswerable", "development")


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_tasks(folder: Path, name: str) -> list[Task]:
    return [Task.model_validate(line) for line in read_lines(folder / name)]


def plan_of(task: Task) -> Any:
    return task.payload["plan"]


def answer_of(task: Task) -> str:
    answers: Any = task.payload["answers"]
    (answer,) = answers
    return answer


@pytest.fixture(scope="module")
def world(deep_world: SimpleNamespace, deep_world_size: dict[str, int]) -> Any:
    return deep_world.world.make_world(5, deep_world_size["num_names"])


@pytest.fixture(scope="module")
def tokenizer(deep_world: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    deep_world.tokenizer.build_tokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_the_same_seed_gives_the_same_bytes(
    deep_world: SimpleNamespace, deep_world_files: Path, deep_world_size, tmp_path: Path
):
    deep_world.generate.write_world(5, tmp_path, **deep_world_size)
    names = sorted(path.name for path in tmp_path.glob("*.jsonl"))
    sets = (f"eval_{name}.jsonl" for name in sorted(SETS))
    others = ("sft.jsonl", "train.jsonl", "unlabelled.jsonl")
    assert names == ["corpus.jsonl", "entries.jsonl", *sets, *others]
    for name in names:
        assert (tmp_path / name).read_bytes() == (deep_world_files / name).read_bytes()


def test_no_fact_links_two_splits(world):
    linked = 0
    for person in world.people.values():
        for value in person.facts.values():
            if value in world.people:
                linked += 1
                assert world.people[value].split == person.split
    assert linked > len(world.people)


def test_every_answer_follows_from_the_facts(world, deep_world_files: Path):
    for name in (*(f"eval_{s}.jsonl" for s in SETS), "train.jsonl", "unlabelled.jsonl"):
        for task in read_tasks(deep_world_files, name):
            plan, answer = plan_of(task), answer_of(task)
            if plan["order"]:
                pick = min if plan["order"] == "earlier" else max
                born = {start: int(world.people[start].facts["born"]) for start in plan["starts"]}
                assert answer == pick(born, key=lambda start: born[start])
                continue
            values = world.follow(plan["starts"][0], plan["relations"])
            if len(values) < len(plan["relations"]):
                assert answer == "unknown"
            else:
                assert answer == values[-1]


def test_labelled_unlabelled_and_reported_questions_are_about_different_people(
    world, deep_world_files: Path
):
    splits = {"train": "train", "unlabelled": "dev", "eval_development": "dev"}
    splits |= {f"eval_{name}": "test" for name in SETS if name != "development"}
    for name, split in splits.items():
        for task in read_tasks(deep_world_files, f"{name}.jsonl"):
            assert {world.people[start].split for start in plan_of(task)["starts"]} == {split}


def test_an_eighth_of_the_training_questions_has_no_answer(deep_world_files: Path):
    tasks = read_tasks(deep_world_files, "train.jsonl")
    unanswerable = [task for task in tasks if task.payload["answers"] == ["unknown"]]
    assert len(unanswerable) / len(tasks) == pytest.approx(0.12, abs=0.02)


def test_longer_chains_are_demonstrated_in_one_family_and_asked_in_the_other(
    deep_world: SimpleNamespace, deep_world_files: Path
):
    for task in read_tasks(deep_world_files, "eval_longer.jsonl"):
        assert len(plan_of(task)["relations"]) == 4
        assert set(plan_of(task)["relations"]) <= set(deep_world.world.CHAIN_B)
    for task in read_tasks(deep_world_files, "train.jsonl"):
        assert len(plan_of(task)["relations"]) <= 3
    plans = [chain for chain in demonstrated_chains(deep_world_files) if len(chain) > 3]
    assert {len(chain) for chain in plans} == {4, 5}
    assert all(set(chain) <= set(deep_world.world.CHAIN_A) for chain in plans)


def read_chains(folder: Path) -> list[tuple[list[str], list[str]]]:
    """Relations in the question of every dialogue about a chain, and what follows the question."""
    dialogues = [line["messages"] for line in read_lines(folder / "sft.jsonl")]
    texts = [[message["content"] for message in messages] for messages in dialogues]
    paths = [re.search(r" (?:follow|by|then)((?: [a-z]+)+)\.", question) for question, *_ in texts]
    found = zip(paths, texts, strict=True)
    return [(path[1].split(), said) for path, (_, *said) in found if path]


def demonstrated_chains(folder: Path) -> list[list[str]]:
    """Relations of every chain whose run is demonstrated."""
    return [chain for chain, said in read_chains(folder) if "<tool_call>" in said[0]]


def test_a_recital_says_the_relations_of_a_chain_and_nothing_else(
    deep_world: SimpleNamespace, deep_world_files: Path
):
    recited = [
        (chain, said)
        for chain, said in read_chains(deep_world_files)
        if "<tool_call>" not in said[0]
    ]
    family_b = set(deep_world.world.CHAIN_B)
    assert any(len(chain) == 4 and set(chain) <= family_b for chain, _ in recited)
    for chain, said in recited:
        assert said == [f"<think> {' '.join(chain)}</think>"]


def test_every_thought_lists_what_is_still_to_be_found(deep_world: SimpleNamespace):
    plan = {"starts": ["Belan Abrak I"], "relations": ["boss", "town"], "order": ""}
    oracle = deep_world.scripted.Oracle(Task(id="a", prompt="Go.", payload={"plan": plan}))
    replies = [
        [],
        [" 1 K01.001 boss Belan Abrak"],
        [" boss of Belan Abrak I: Corim Zadu III."],
        [" 1 K01.002 town Corim Zadu"],
        [" town of Corim Zadu III: Elmstow."],
    ]
    thoughts = [re.match(r"<think>(.*?)</think>", oracle.turn(reply)) for reply in replies]
    said = [thought and thought[1] for thought in thoughts]
    assert said == [" boss town", None, " I I yes town", None, " III III yes done"]


def test_held_out_pairs_are_asked_in_one_set_and_trained_nowhere(
    deep_world: SimpleNamespace, deep_world_files: Path
):
    held_out = deep_world.questions.has_held_out
    trained = [plan_of(t)["relations"] for t in read_tasks(deep_world_files, "train.jsonl")]
    chains = [chain for chain, _ in read_chains(deep_world_files)]
    assert len(chains) > 50
    assert not any(map(held_out, [*trained, *chains]))
    asked = read_tasks(deep_world_files, "eval_compositions.jsonl")
    assert all(held_out(plan_of(task)["relations"]) for task in asked)


def test_every_word_of_the_other_wording_is_demonstrated(
    deep_world: SimpleNamespace, deep_world_files: Path
):
    def words(text: str) -> set[str]:
        return set(re.findall(r"\w+|[^\w\s]", text))

    questions = deep_world.questions
    others = [text for w in questions.OTHER_WORDINGS for text in (w.chain, w.comparison)]
    own = [text for w in questions.WORDINGS for text in (w.chain, w.comparison)]
    assert not set(others) & set(own)
    assert words(" ".join(others)) <= words(" ".join(own))


def test_namesakes_hide_the_wanted_entry_behind_others(
    deep_world: SimpleNamespace, deep_world_files: Path
):
    look_up = deep_world.generate.catalogue(deep_world_files)
    first = reads = 0
    for task in read_tasks(deep_world_files, "eval_in_domain.jsonl"):
        texts, _ = deep_world.demonstrations.play(deep_world.scripted.Oracle(task), look_up)
        verdicts = re.findall(r" (yes|no)\b", " ".join(texts[::2]))
        reads += len(verdicts)
        first += verdicts.count("yes")
    # Of 2 or 3 namesakes, 2 or 3 lines fit: the wanted one is read first less than half the time
    # only where there are three, so on the whole more than a quarter of all reads is of another.
    assert (reads - first) / reads > 0.25


def test_a_budget_allows_the_needed_calls_and_at_most_two_more(
    deep_world: SimpleNamespace, deep_world_files: Path
):
    look_up = deep_world.generate.catalogue(deep_world_files)
    slacks = []
    for task in read_tasks(deep_world_files, "eval_in_domain.jsonl"):
        _, needed = deep_world.demonstrations.play(deep_world.scripted.Oracle(task), look_up)
        slacks.append(int(str(task.payload["budget"])) - needed)
        assert f" Use {task.payload['budget']} calls." in str(task.prompt)
    assert set(slacks) == {0, 1, 2}


def test_demonstrations_are_short_and_often_wrong(
    deep_world: SimpleNamespace, deep_world_files: Path, tokenizer
):
    look_up = deep_world.generate.catalogue(deep_world_files)
    tasks = read_tasks(deep_world_files, "train.jsonl")
    rng = random.Random(0)
    right, totals, sampled = 0, [], []
    for task in tasks:
        agent = deep_world.demonstrations.Careless(task, rng)
        messages = deep_world.demonstrations.demonstrate(str(task.prompt), agent, look_up, rng)
        right += messages[-1]["content"].endswith(f"<answer> {answer_of(task)}</answer>")
        totals.append(len(tokenizer.apply_chat_template(messages)["input_ids"]))
        said = [m["content"] for m in messages if m["role"] == "assistant"]
        sampled.append(sum(len(tokenizer(text).input_ids) + 1 for text in said))
    assert 0.2 < right / len(tasks) < 0.6
    assert fmean(totals) < 500
    assert fmean(sampled) < 120


def test_only_punctuation_is_spelled_in_bytes(deep_world_files: Path, tokenizer):
    spelled = set()
    for line in read_lines(deep_world_files / "sft.jsonl"):
        for message in line["messages"]:
            ids = tokenizer(message["content"]).input_ids
            spelled |= set(tokenizer.batch_decode([[i] for i in ids]))
    single = {text for text in spelled if len(text) == 1}
    assert single <= set(".,:?\n")
    assert "�" not in spelled


def test_the_committed_base_is_the_one_of_the_recipe(deep_world: SimpleNamespace, tokenizer):
    listed = [line.split() for line in (EXAMPLE / "base.sha256").read_text().splitlines()]
    assert sorted(name for _, name in listed) == sorted(
        f"base/{path.name}" for path in (EXAMPLE / "base").iterdir()
    )
    for digest, name in listed:
        assert hashlib.sha256((EXAMPLE / name).read_bytes()).hexdigest() == digest
    weights = load_file(EXAMPLE / "base" / "model.safetensors")
    sizes = [tensor.size for tensor in weights.values()]
    assert 1_000_000 <= sum(sizes) <= 1_500_000
    base = AutoTokenizer.from_pretrained(EXAMPLE / "base")
    assert base.get_vocab() == tokenizer.get_vocab()
    assert base.chat_template == tokenizer.chat_template
