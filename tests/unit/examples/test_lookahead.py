"""The world, tools, environment, scripted agents and base model of examples/lookahead."""

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from agent_r1 import ToolEnv
from agent_r1.cli.task.scripted import play_all
from agent_r1.config.checks import use_plugins
from agent_r1.config.run import load_config
from agent_r1.rollout.envs import CallResult, EnvStep, ModelTurn
from agent_r1.runtime.files.tasks import read_task_file
from agent_r1.tools.base import CallContext
from agent_r1_proto.rewards import ScoreCall, ScoreTurn
from agent_r1_proto.tasks import Task

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "lookahead"
SETS = ("in_domain", "longer", "development")
MAX_BASE_BYTES = 3_000_000


def read_set(folder: Path, name: str) -> list[Task]:
    return list(read_task_file(folder / f"{name}.jsonl"))


def payload_of(task: Task) -> Any:
    return task.payload


def names_of(tasks: Iterable[Task]) -> set[str]:
    return {payload_of(task)["plan"]["name"] for task in tasks}


def name_in(question: str) -> str:
    (name,) = re.findall(r"[A-Z]\w+ [A-Z]\w+", question)
    return name


def read_dialogues(folder: Path) -> list[list[str]]:
    lines = (folder / "sft.jsonl").read_text(encoding="utf-8").splitlines()
    return [[message["content"] for message in json.loads(line)["messages"]] for line in lines]


@pytest.fixture(scope="module")
def said_to(lookahead: SimpleNamespace, lookahead_files: Path) -> Callable[[Task], list[str]]:
    """What the oracle is answered, in turn."""
    look_up = lookahead.generate.open_sources(lookahead_files)

    def play(task: Task) -> list[str]:
        oracle = lookahead.policies.Oracle(task)
        messages = lookahead.demonstrations.demonstrate(task, oracle, look_up)
        return [message.text() for message in messages if message.role == "tool"]

    return play


@pytest.fixture(scope="module")
def facts(lookahead: SimpleNamespace, lookahead_size: dict[str, int]) -> Any:
    return lookahead.residents.make_world(5, lookahead_size["num_people"])


def test_the_same_seed_gives_the_same_bytes(
    lookahead: SimpleNamespace, lookahead_files: Path, lookahead_size, tmp_path: Path
):
    lookahead.generate.write_world(5, tmp_path, **lookahead_size)
    names = sorted(path.name for path in tmp_path.iterdir())
    sets = (f"eval_{name}.jsonl" for name in sorted(SETS))
    others = ("pages.jsonl", "register.jsonl", "rumours.jsonl", "sft.jsonl", "train.jsonl")
    assert names == [*sets, *others]
    for name in names:
        assert (tmp_path / name).read_bytes() == (lookahead_files / name).read_bytes()


def test_people_are_trained_developed_or_reported_on_and_never_two_of_these(
    facts, lookahead_files: Path
):
    people = {
        split: {fact.name for fact in facts if fact.split == split}
        for split in ("train", "development", "test")
    }
    assert sum(map(len, people.values())) == len(set().union(*people.values()))
    assert names_of(read_set(lookahead_files, "train")) <= people["train"]
    assert names_of(read_set(lookahead_files, "eval_development")) <= people["development"]
    for name in ("in_domain", "longer"):
        assert names_of(read_set(lookahead_files, f"eval_{name}")) <= people["test"]
    assert {name_in(question) for question, *_ in read_dialogues(lookahead_files)} <= people[
        "train"
    ]


@pytest.mark.parametrize("name", ["train", "eval_in_domain", "eval_development"])
def test_for_half_of_the_questions_the_register_names_a_page(
    said_to: Callable[[Task], list[str]], lookahead_files: Path, name: str
):
    tasks = read_set(lookahead_files, name)
    firsts = [said_to(task)[0] for task in tasks]
    assert sum(" see " in said for said in firsts) == len(tasks) / 2
    assert sum(" says " in said for said in firsts) == len(tasks) / 2


def test_the_allowed_calls_just_suffice_and_stand_in_the_question(
    said_to: Callable[[Task], list[str]], lookahead_files: Path
):
    for name in SETS:
        for task in read_set(lookahead_files, f"eval_{name}"):
            calls = payload_of(task)["calls"]
            assert len(said_to(task)) == calls
            assert f" Use {calls} call{'' if calls == 1 else 's'}." in str(task.prompt)


def test_two_pages_are_asked_of_test_people_and_learned_nowhere(lookahead_files: Path):
    longer = read_set(lookahead_files, "eval_longer")
    assert {payload_of(task)["calls"] for task in longer} == {3}
    assert {payload_of(task)["calls"] for task in read_set(lookahead_files, "train")} == {1, 2}
    for dialogue in read_dialogues(lookahead_files):
        assert not any(said.startswith(" page see") for said in dialogue)


def test_a_rumour_is_right_where_its_speaker_knows_the_topic(lookahead: SimpleNamespace, facts):
    for fact in facts:
        reliable = lookahead.residents.is_reliable(fact.speaker, fact.topic)
        assert (fact.rumour == fact.town) == reliable
    # One of seven speakers knows a topic. 300 people have 8 facts each, so the standard error
    # of the share is sqrt(1/7 x 6/7 / 2400) = .007.
    share = sum(fact.rumour == fact.town for fact in facts) / len(facts)
    assert share == pytest.approx(1 / 7, abs=0.03)


def test_only_the_book_of_the_topic_is_right_and_the_others_look_like_it(
    lookahead: SimpleNamespace, facts
):
    for fact in facts:
        right = {book for book, town in fact.entries.items() if town == fact.town}
        assert right == {lookahead.residents.TOPICS[fact.topic]}
        assert len({len(pages) for pages in fact.pages.values()}) == 1
    assert len(lookahead.residents.BOOKS) == 4


def test_no_page_has_two_meanings(facts):
    pages = [page for fact in facts for pages in fact.pages.values() for page in pages]
    assert len(set(pages)) == len(pages) > 4000


def test_only_the_oracle_is_always_right(lookahead_files: Path):
    options = [
        f"tools.{name}.settings.data={lookahead_files}" for name in ("rumour", "register", "page")
    ]
    config = load_config(EXAMPLE / "run.toml", options).config
    use_plugins(config)
    oracle = config.diagnose.oracle
    assert oracle is not None
    tasks = {name: read_set(lookahead_files, f"eval_{name}") for name in SETS}
    policies = {"oracle": oracle, **config.diagnose.degenerate}
    scores = play_all(config, policies, tasks)
    means = {name: {s: sum(v) / len(v) for s, v in of.items()} for name, of in scores.items()}
    assert set(means.pop("oracle").values()) == {1.0}
    # Who believes a rumour is right in one case of seven: with 160 questions the standard error is
    # sqrt(1/7 x 6/7 / 160) = .028.
    assert means["believes"]["in_domain"] == pytest.approx(1 / 7, abs=0.09)
    # The call that verifies a rumour is one too many where one call is allowed; where two are, the
    # register names a page, which would be the third.
    assert means["verifies"] == dict.fromkeys(SETS, 0.0)
    assert means["opens_no_page"] == {"in_domain": 0.5, "longer": 0.0, "development": 0.5}
    books = [means[f"asks_{book}"]["in_domain"] for book in ("parish", "guild", "college", "court")]
    assert sum(books) == pytest.approx(1.0)  # every question is answered by one book
    assert max(value for of in means.values() for value in of.values()) <= 0.5


def react(env: ToolEnv, *results: CallResult) -> EnvStep:
    return asyncio.run(env.step(ModelTurn(0, "", thought=None, answer=None), results))


def called() -> CallResult:
    return CallResult("rumour", {"query": " Belan Abrak live"}, "ok", " nurse says Elmham")


def test_the_call_that_is_one_too_many_ends_the_interaction(lookahead: SimpleNamespace):
    env = lookahead.sources.AllowedCalls(Task(id="a", prompt="Where?", payload={"calls": 2}))
    first = react(env, called())
    assert not first.done
    assert first.observations == [" nurse says Elmham"]
    assert not react(env, called()).done
    step = react(env, called())
    assert (step.done, step.reason) == (True, "too_many_calls")


def test_a_branch_counts_its_own_calls(lookahead: SimpleNamespace):
    env = lookahead.sources.AllowedCalls(Task(id="a", prompt="Where?", payload={"calls": 2}))
    react(env, called())
    branch = env.fork()
    react(env, called())
    assert react(env, called()).done
    assert not react(branch, called()).done
    step = react(branch)
    assert (step.done, step.reason) == (True, "answer")


def test_a_turn_is_rewarded_with_what_it_adds_to_the_value(lookahead: SimpleNamespace):
    task = Task(id="a", prompt="Where?", payload={"calls": 2})
    env = lookahead.valued.ValuedTurns(task, model=str(EXAMPLE / "base"))
    steps = [react(env, called()), react(env, called()), react(env)]
    # Asked behind the calls that were made before, and not behind those of the turn itself.
    call = ScoreCall(tool="rumour", arguments=called().arguments, text=called().text)
    turns = [ScoreTurn(text="", num_calls=1, calls=[call])] * 2
    model = lookahead.valued.TurnValues(str(EXAMPLE / "base"))
    first, second = (model.value(task, [*turns[:n], ScoreTurn(text="")]) for n in range(2))
    assert 0.0 < first != second < 1.0
    assert [step.turn_reward for step in steps[:2]] == pytest.approx([first, second - first])
    # The last turn has the outcome alone, so that MT-GRPO without turn rewards is GRPO.
    assert (steps[2].done, steps[2].turn_reward) == (True, None)


def test_tools_answer_from_the_files_in_whatever_order_arguments_come(
    lookahead: SimpleNamespace, lookahead_files: Path, facts
):
    def ask(tool: Any, **arguments: str) -> str:
        return asyncio.run(tool.call(arguments, CallContext("run/1/0/0/0", 0, None, 1.0)))

    def open_tools() -> Iterator[Any]:
        for kind in (lookahead.sources.Rumour, lookahead.sources.Register, lookahead.sources.Page):
            tool = kind(str(lookahead_files))
            asyncio.run(tool.start())
            yield tool

    rumour, register, page = open_tools()
    fact = next(fact for fact in facts if fact.calls == 2 and fact.topic == "work")
    query = f" {fact.name} work"
    assert ask(rumour, query=query) == f" {fact.speaker} says {fact.rumour}"
    (entry,) = fact.pages["guild"]
    assert ask(register, book=" guild", query=query) == f" guild see {entry}"
    assert ask(register, query=query, book=" guild") == f" guild see {entry}"
    assert ask(page, id=f" {entry}") == f" page says {fact.town}"
    assert ask(register, book=" tavern", query=query) == " no entry"


def test_demonstrations_mostly_begin_with_a_rumour_and_are_mostly_wrong(
    lookahead: SimpleNamespace, lookahead_files: Path, facts
):
    dialogues = read_dialogues(lookahead_files)
    begun = sum('"rumour"' in first for _, first, *_ in dialogues) / len(dialogues)
    # Every share is as frequent as the others: (.9 + .75 + .6 + .45) / 4 = .675.
    assert begun == pytest.approx(0.675, abs=0.05)
    towns = {(fact.name, fact.topic): fact.town for fact in facts}
    right = 0
    for question, *_, last in dialogues:
        (topic,) = (topic for topic in lookahead.residents.TOPICS if f" {topic}" in question)
        right += last == f"<answer> {towns[name_in(question), topic]}</answer>"
    # A rumour is right in one case of seven: .675 / 7 = .096. Else the right book is asked in
    # (.85 + .3) / 2 = .575 of the cases, and half of its entries are pages, which are opened in
    # .575 of the cases; for every topic pairs of both shares occur: .325 x .575 x .7875 = .147.
    # A rumour instead of a page: .325 x .5 x .425 / 7 = .01. In all .253.
    assert right / len(dialogues) == pytest.approx(0.253, abs=0.05)


def test_only_punctuation_is_spelled_in_bytes(lookahead: SimpleNamespace, lookahead_files: Path):
    tokenizer = lookahead.tokenizer.build_tokenizer()
    for text in (text for dialogue in read_dialogues(lookahead_files) for text in dialogue):
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids) == text
        single = {token for token in tokenizer.batch_decode([[i] for i in ids]) if len(token) == 1}
        assert single <= set(".:?")


def test_the_committed_base_is_the_one_of_the_recipe(lookahead: SimpleNamespace):
    base = EXAMPLE / "base"
    listed = [line.split() for line in (EXAMPLE / "base.sha256").read_text().splitlines()]
    assert sorted(name for _, name in listed) == sorted(f"base/{p.name}" for p in base.iterdir())
    for digest, name in listed:
        assert hashlib.sha256((EXAMPLE / name).read_bytes()).hexdigest() == digest
    sizes = [tensor.size for tensor in load_file(base / "model.safetensors").values()]
    assert sum(sizes) <= 700_000
    assert sum(path.stat().st_size for path in base.iterdir()) <= MAX_BASE_BYTES
    committed, built = AutoTokenizer.from_pretrained(base), lookahead.tokenizer.build_tokenizer()
    assert committed.get_vocab() == built.get_vocab()
    assert committed.chat_template == built.chat_template
