"""The generator of examples/tiny_world: worlds, questions, demonstrations."""

import json
import random
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_r1_proto.tasks import Task

SETS = ("hotpot_like", "wiki2_like", "musique_like")


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def world(tiny_world: SimpleNamespace) -> Any:
    return tiny_world.world.make_world(5)


def test_the_same_seed_gives_the_same_bytes(tiny_world: SimpleNamespace, world_files, tmp_path):
    tiny_world.generate.write_world(5, tmp_path, demonstrations=False)
    names = sorted(path.name for path in tmp_path.glob("*.jsonl"))
    assert names == ["corpus.jsonl", *(f"eval_{s}.jsonl" for s in sorted(SETS)), "train.jsonl"]
    for name in names:
        assert (tmp_path / name).read_bytes() == (world_files / name).read_bytes()


def test_another_seed_gives_another_world(tiny_world: SimpleNamespace, world):
    other = tiny_world.world.make_world(6)
    shared = set(world.entities) & set(other.entities)
    assert len(shared) < 0.6 * len(world.entities)
    same = [n for n in shared if world.entities[n].facts == other.entities[n].facts]
    assert len(same) < 0.01 * len(shared)


def test_no_word_belongs_to_two_kinds(tiny_world: SimpleNamespace):
    pools = [
        word for pair in tiny_world.world.NAME_POOLS.values() for pool in pair for word in pool
    ]
    assert [word for word, count in Counter(pools).items() if count > 1] == []


def test_train_and_test_entities_are_disjoint_and_never_refer_to_each_other(world):
    for entity in world.entities.values():
        for value in entity.facts.values():
            if not value.isdigit():
                assert world.entities[value].split == entity.split


def test_every_fact_is_stated_in_its_own_passage(tiny_world: SimpleNamespace, world):
    clauses = tiny_world.world.CLAUSES
    for entity in world.entities.values():
        assert entity.text.startswith(f"{entity.name} ")
        stated = entity.text.removeprefix(f"{entity.name} ").removesuffix(".").split(", ")
        for relation, value in entity.facts.items():
            assert any(form.format(value) in stated for form in clauses[relation])
        assert len(stated) == len(entity.facts)


def test_parents_are_older_and_spouses_marry_each_other(world):
    people = [e for e in world.entities.values() if e.kind == "person"]
    for person in people:
        for role in ("father", "mother"):
            if role in person.facts:
                parent = world.entities[person.facts[role]]
                assert int(parent.facts["born"]) < int(person.facts["born"])
        if "spouse" in person.facts:
            assert world.entities[person.facts["spouse"]].facts["spouse"] == person.name


def test_the_search_finds_the_own_passage_of_an_entity(
    tiny_world: SimpleNamespace, world, world_files
):
    search = tiny_world.generate.Search(world_files / "corpus.jsonl")
    rng = random.Random(0)
    sample = rng.sample(list(world.entities.values()), 1000)
    found = [(search.titles(f" {e.name} {rng.choice(list(e.facts))}"), e.name) for e in sample]
    # Relatives share words, so BM25 may rank one first; measured 1.3 % and 0.3 % of 5,000 queries.
    assert sum(titles[0] == name for titles, name in found) >= 970
    assert sum(name in titles for titles, name in found) >= 985


@pytest.mark.parametrize("name", ["train", *(f"eval_{s}" for s in SETS)])
def test_task_lines_are_tasks_with_unique_ids(world_files: Path, name: str):
    lines = read_lines(world_files / f"{name}.jsonl")
    assert len({line["id"] for line in lines}) == len(lines)
    assert len({line["prompt"] for line in lines}) >= 0.97 * len(lines)
    for line in lines:
        assert set(line) == {"id", "prompt", "payload", "metadata"}
        Task.model_validate(line)


@pytest.mark.parametrize("name", SETS)
def test_an_evaluation_set_is_large_and_names_test_entities_only(world, world_files, name: str):
    lines = read_lines(world_files / f"eval_{name}.jsonl")
    assert len(lines) >= 200
    for line in lines:
        named = [n for n in re.findall(r"(?=\b(\w+ \w+)\b)", line["prompt"]) if n in world.entities]
        assert named
        assert {world.entities[n].split for n in named} == {"test"}


@pytest.mark.parametrize("name", ["hotpot_like", "wiki2_like"])
def test_a_fifth_of_each_in_domain_set_compares(world_files: Path, name: str):
    lines = read_lines(world_files / f"eval_{name}.jsonl")
    types = Counter(line["payload"]["type"] for line in lines)
    assert types["comparison"] >= len(lines) / 5


def test_comparisons_cannot_be_guessed_from_their_wording(world_files: Path):
    lines = [
        line
        for line in read_lines(world_files / "train.jsonl")
        if line["payload"]["type"] == "comparison"
    ]
    first = sum(f"{line['payload']['answers'][0]} or" in line["prompt"] for line in lines)
    # A fair coin over 1,000 questions stays within 5 standard errors (8 points) of a half.
    assert len(lines) == 1000
    assert first / len(lines) == pytest.approx(0.5, abs=0.08)


def test_answers_follow_from_the_passages(tiny_world: SimpleNamespace, world):
    questions = tiny_world.questions
    rng = random.Random(1)
    shares = {maker: 1.0 for shares in questions.SETS.values() for maker in shares}
    for question in questions.make_questions(world, "test", shares, 60, rng):
        for entity, relation, value in question.steps:
            text = world.entities[entity].text
            assert any(form.format(value) in text for form in tiny_world.world.CLAUSES[relation])
        values = [value for _, _, value in question.steps]
        if question.order:
            wanted = (min if question.order == "earlier" else max)(values, key=int)
            assert question.answer == question.steps[values.index(wanted)][0]
        else:
            assert question.answer == values[-1]
            assert question.answer not in question.text
            links = [entity for entity, _, _ in question.steps[1:]]
            assert links == values[:-1]
            assert not any(link in question.text for link in links)


def test_three_hop_questions_need_three_passages_and_are_never_trained_on(
    tiny_world: SimpleNamespace, world, world_files
):
    lines = read_lines(world_files / "eval_musique_like.jsonl")
    assert {line["metadata"]["hops"] for line in lines} == {3}
    assert {line["metadata"]["hops"] for line in read_lines(world_files / "train.jsonl")} == {2}
    makers = set(tiny_world.generate.DEMO_SHARES)
    assert tiny_world.questions.three_hop not in makers


def demonstration(tiny_world: SimpleNamespace, world, *, flawed: bool) -> list[dict[str, str]]:
    questions = tiny_world.questions
    (question,) = questions.make_questions(
        world, "train", {questions.bridge: 1.0}, 1, random.Random(2)
    )
    return questions.demonstrate(
        question, lambda query: f" found {query}", tiny_world.questions.call_text, flawed=flawed
    )


def test_a_good_demonstration_searches_twice_and_answers(tiny_world: SimpleNamespace, world):
    messages = demonstration(tiny_world, world, flawed=False)
    roles = ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [message["role"] for message in messages] == roles
    for message in (messages[1], messages[3]):
        call = json.loads(message["content"].split("<tool_call>")[1].removesuffix("</tool_call>"))
        assert call["name"] == "search"
        assert list(call["arguments"]) == ["query"]
    assert re.search(r"<answer> .+</answer>$", messages[-1]["content"])


def test_a_flawed_demonstration_answers_after_one_search(tiny_world: SimpleNamespace, world):
    messages = demonstration(tiny_world, world, flawed=True)
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
    good = demonstration(tiny_world, world, flawed=False)
    answers = [re.findall(r"<answer> (.+)</answer>$", m[-1]["content"]) for m in (messages, good)]
    assert answers[0] != answers[1]


def test_demonstrations_name_no_test_entity_outside_tool_text(
    tiny_world: SimpleNamespace, world, world_files, monkeypatch
):
    monkeypatch.setattr(tiny_world.generate, "NUM_DEMOS", 100)
    search = tiny_world.generate.Search(world_files / "corpus.jsonl")
    held_out = {e.name for e in world.entities.values() if e.split == "test"}
    for line in tiny_world.generate.make_demonstrations(world, search, 5):
        assert set(line) == {"messages"}
        spoken = " ".join(m["content"] for m in line["messages"] if m["role"] != "tool")
        assert not held_out & set(re.findall(r"(?=\b(\w+ \w+)\b)", spoken))
