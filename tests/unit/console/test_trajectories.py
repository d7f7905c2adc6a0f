"""Pages of trajectories: filters, pages, and texts that models and tools have written."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import numpy as np
import pytest

from agent_r1.console.pages import key_of
from agent_r1.runs.index import RunIndex
from agent_r1.runs.store import StoredTrajectory, TrajectoryStore
from agent_r1_proto.parts import TextPart
from agent_r1_proto.tasks import Task
from agent_r1_proto.trajectory import Reply, ToolCallRecord, Turn
from tests.support.builders import rollout_task, scored, stored, three_lineages
from tests.support.console_scene import HOSTILE, append_lines, write_run
from tests.unit.console.test_app import Strict, page

LIST = "/runs/run/trajectories"
LISTS = ("groups", "beside?step=1", "flipped")


def sample(group: int, index: int, reward: float, **facts: Any) -> StoredTrajectory:
    """One sample of the question q{group}."""
    task = Task(id=f"q{group}", prompt=f"Who is number {group}?", metadata={"set": "near"})
    rollout = rollout_task(group_id=group, sample_index=index, task=task)
    names = ("answer", "calls", "status", "policy_version", "num_sampled", "turns")
    changes = {key: facts.pop(key) for key in names if key in facts}
    return stored(scored(rollout, total=reward, **changes), **facts)


def call_of(text: str, **facts: Any) -> ToolCallRecord:
    """One call of the tool search, and what it answered."""
    fields = {"tool": "search", "status": "ok", **facts}
    return ToolCallRecord(end_token_index=4, parts=[TextPart(text=text)], **fields)


@pytest.fixture
def store(
    tmp_path: Path, root: Path, scene: Path, monkeypatch: pytest.MonkeyPatch
) -> TrajectoryStore:
    """The empty store of the run `run`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # A page of a busy machine has all rows too.
    monkeypatch.setattr("agent_r1.console.trajectories.pages.INDEX_S", 60.0)
    folder = write_run(scene, root / "run")
    (folder / "trajectories").mkdir()
    return TrajectoryStore(folder, 1.0)


def links(found: Strict, beginning: str) -> list[str]:
    return [one for one in found.values("a", "href") if one and one.startswith(beginning)]


ASKED = {
    "": ["q3", "q2", "q1", "q0"],
    "?step=1": ["q1", "q0"],
    "?step=1&step_to=2": ["q2", "q1", "q0"],
    "?of=steps&sort=reward": ["q2", "q1", "q0"],
    "?of=steps&sort=reward/em&order=up": ["q0", "q1", "q2"],
    "?of=eval:after": ["q3"],
    "?reward=0.2&reward_to=0.6": ["q1"],
    "?component=em&value=0.75&step=2": ["q2"],
    "?tool=search": ["q1"],
    "?status=TRUNCATED": ["q2"],
    "?task=q1": ["q1"],
    "?group=2": ["q2"],
    "?version=7": ["q2"],
    "?version=0": ["q3", "q1", "q0"],
    "?version=3": [],
    "?tokens=10": ["q2"],
    "?staleness=3": ["q0"],
    "?set=near&text=%22number+0%22": ["q0"],
    "?text=nobody": [],
}
"""Questions of the rows, by query."""


async def test_rows_are_those_that_the_address_asks_for(
    browser: httpx.AsyncClient, store: TrajectoryStore
):
    calls = [call_of("Ada")]
    store.write("step_000001", [sample(0, 0, 0.0, staleness=3), sample(1, 0, 0.5, calls=calls)])
    long = {"policy_version": 7, "num_sampled": 9, "status": "TRUNCATED"}
    store.write("step_000002", [sample(2, 0, 1.0, step=2, **long)])
    store.write("eval_after", [sample(3, 0, 1.0, step=3, trained=False)])
    pages = {query: await page(browser, LIST + query) for query in ASKED}
    assert {
        query: [row.split()[0] for row in found.rows[1:]] for query, found in pages.items()
    } == ASKED


async def test_pages_lead_to_each_other_and_keep_the_choices(
    browser: httpx.AsyncClient, store: TrajectoryStore
):
    store.write("step_000001", [sample(number, 0, number / 200) for number in range(120)])
    address, seen = f"{LIST}?sort=reward&reward=0.05", []
    while True:
        found = await page(browser, address)
        seen += [row.split()[0] for row in found.rows[1:]]
        if "Next" not in found.text:
            break
        address = LIST + links(found, "?")[-1]
    assert seen == [f"q{number}" for number in range(119, 9, -1)]
    assert links(found, "?")[-1].endswith("start=50")
    (turned,) = [one for one in links(found, "?") if "order=up" in one]
    assert (await page(browser, LIST + turned)).rows[1].startswith("q10 ")


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("reward=good", "reward ('good') must be a number"),
        ("step=nan", "step ('nan') must be a number"),
        ("group=1e300", "group ('1e300') must be a number"),
        ("sort=reason", "'reason' is no column"),
    ],
)
@pytest.mark.usefixtures("store")
async def test_a_choice_that_cannot_be_is_named(
    browser: httpx.AsyncClient, query: str, problem: str
):
    assert problem in (await page(browser, f"{LIST}?{query}", 409)).text


@pytest.mark.usefixtures("store")
async def test_a_run_without_trajectories_says_so(browser: httpx.AsyncClient):
    found = await page(browser, f"{LIST}?step=3")
    assert "No stored trajectory is like this" in found.text
    assert links(found, "/runs/run?step=3#step")
    await page(browser, "/runs/nobody/trajectories", 404)


@pytest.mark.parametrize("path", [LIST, *(f"/runs/run/{one}" for one in LISTS)])
async def test_files_that_are_not_indexed_yet_are_counted(
    browser: httpx.AsyncClient,
    store: TrajectoryStore,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
):
    store.write("step_000001", [sample(0, 0, 0.0)])
    store.write("step_000002", [sample(1, 0, 0.0, step=2)])
    monkeypatch.setattr("agent_r1.console.trajectories.pages.INDEX_S", -1)
    found = await page(browser, path)
    assert "2 of 2 files are not indexed yet" in found.text
    assert not [text for text in ("No stored", "None.", "fewer than two") if text in found.text]
    assert "/static/live.js" in found.values("script", "src")
    assert "rows" in found.values("div", "data-live")


@pytest.mark.parametrize(
    ("path", "file"),
    [
        (f"{LIST}?step=2", "step_000002"),
        (f"{LIST}?of=eval:step_000002", "eval_step_000002"),
        ("/runs/run/groups?step=2&step_to=2", "step_000002"),
        ("/runs/run/beside?of=steps&step=2&group=0", "step_000002"),
        ("/runs/run/flipped?a=step_000002&b=step_000004", "eval_step_000002"),
    ],
)
@pytest.mark.usefixtures("store")
async def test_what_a_page_asks_for_is_read_first(
    browser: httpx.AsyncClient,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    file: str,
):
    for step in range(1, 6):
        for name in (f"step_{step:06d}", f"eval_step_{step:06d}"):
            (root / "run" / "trajectories" / f"{name}.parquet").touch()
    taken: list[str] = []
    monkeypatch.setattr(RunIndex, "_take", lambda _index, name, _stamp: taken.append(name))
    await page(browser, path)
    first = set(taken[: 2 if "flipped" in path else 1])
    assert f"{file}.parquet" in first
    assert len(taken) == 10


async def test_a_trajectory_leads_on_in_the_list_and_back_to_it(
    browser: httpx.AsyncClient, store: TrajectoryStore
):
    store.write("step_000001", [sample(number, 0, number / 100) for number in range(60)])
    address = f"{LIST}?reward=0.03&sort=reward&order=up&start=50"
    seen: list[str] = []
    link = links(await page(browser, address), LIST + "/")[0]
    while True:
        found = await page(browser, link)
        seen += re.findall(r"<h1><bdi>(q\d+)", found.html)
        if "Next trajectory" not in found.text:
            break
        (link,) = [one for one in links(found, LIST + "/") if f"at={50 + len(seen) + 1}" in one]
    # 57 rows from 0.03 on: the second page has those of 0.53 to 0.59
    assert seen == [f"q{number}" for number in range(53, 60)]
    assert "Previous trajectory" in found.text
    (back,) = links(found, f"{LIST}?sort")
    assert (await page(browser, back)).rows[1].startswith("q53 ")
    first = await page(browser, links(await page(browser, LIST), LIST + "/")[0])
    assert first.values("a", "rel") == ["next"]
    recoloured = links(found, "?")[0]
    assert "reward=0.03" in recoloured
    alone = await page(browser, ONE)
    assert "Next trajectory" not in alone.text
    assert LIST in alone.values("a", "href")


async def test_reasons_of_many_components_leave_room_for_the_page(
    browser: httpx.AsyncClient, store: TrajectoryStore
):
    one = sample(0, 0, 1.0, answer="<" * 100_000)
    names = [f"component_{number}" for number in range(100)]
    reward = one.record["reward"] | {
        "components": dict.fromkeys(names, 0.5),
        "reasons": dict.fromkeys(names, '"why" ' * 400),
    }
    store.write("step_000001", [StoredTrajectory(one.record | {"reward": reward}, one.tokens)])
    found = await page(browser, ONE)
    assert sum(row.startswith("component_") for row in found.rows) == 100
    assert '"why"' in found.text
    assert "<<<" in found.text


async def test_a_huge_number_stays_short(browser: httpx.AsyncClient, store: TrajectoryStore):
    store.write("step_000001", [sample(0, 0, 1e300), sample(1, 0, -2e9), sample(2, 0, 1234.5)])
    (high, middle, low) = (await page(browser, f"{LIST}?sort=reward")).rows[1:]
    assert "1e+300" in high
    assert "1234.500" in middle
    assert "-2e+09" in low
    assert "Reward 1e+300" in (await page(browser, ONE)).text


@pytest.mark.parametrize(
    "line",
    ['{"x": 1}', "[1]", "3", '{"task_id": "q", "turns": 5}'],
)
async def test_a_damaged_line_takes_no_list_down(
    browser: httpx.AsyncClient,
    patient_browser: httpx.AsyncClient,
    store: TrajectoryStore,
    root: Path,
    line: str,
):
    store.write("step_000001", [sample(0, 0, 0.5)])
    file = root / "run" / "trajectories" / "step_000002.jsonl"
    file.write_text(line + "\n")
    for path in (LIST, "/runs/run/groups", "/runs/run/beside"):
        found = (await page(browser, path)).text
        assert "q0" in found
        assert "1 of 2 files are left out" in found
        assert "step_000002.jsonl is damaged" in found
    answer = await patient_browser.get(f"{LIST}/step_000002.jsonl/0")
    assert answer.status_code == 409
    assert "step_000002.jsonl, row 0, is damaged" in answer.text
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")


async def test_a_full_page_of_hostile_rows_stays_small_and_plain(
    browser: httpx.AsyncClient, store: TrajectoryStore
):
    rows: list[StoredTrajectory] = []
    for number in range(60):
        name = HOSTILE[number % len(HOSTILE)] + '"' * 500
        one = sample(number, 0, 0.5, calls=[call_of("x", tool=name)])
        changes = {"task_id": name, "reason": name, "metadata": {"set": name}}
        rows.append(StoredTrajectory(one.record | changes, one.tokens))
    store.write("step_000001", rows)
    found = await page(browser, LIST)
    assert len(found.rows) == 51
    assert "\u202e" not in found.text


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_values_are_found_by_the_choice_that_the_page_offers(
    browser: httpx.AsyncClient, store: TrajectoryStore, name: str
):
    one = sample(0, 0, 0.5, calls=[call_of("x", tool=name)])
    changes = {"metadata": {"set": name}, "task_id": name}
    store.write("step_000001", [StoredTrajectory(one.record | changes, one.tokens)])
    value = key_of(name)
    offered = (await page(browser, LIST)).values("option", "value")
    assert offered.count(value) == 2
    query = urlencode({"set": value, "tool": value, "task": value})
    assert len((await page(browser, f"{LIST}?{query}")).rows) == 2


ONE = f"{LIST}/step_000001.parquet/0"


async def test_a_trajectory_is_shown_whole_as_text(
    browser: httpx.AsyncClient, store: TrajectoryStore
):
    """Nothing that a model, tool or environment wrote becomes part of the page."""
    hostile = "".join(HOSTILE)
    calls = [
        call_of(hostile + "answered", version="v9", instance="i7", latency_ms=12.5),
        call_of("", tool=hostile, arguments={hostile: hostile}, status="error", error="no page"),
    ]
    turn = Turn(
        **{"start": 2, "end": 5, "text": "<think>hm</think>שלום", "finish_reason": "stop"},
        **{"thought": "hm " + hostile, "said": "שלום", "calls": calls},
        replies=[
            Reply(role="tool", parts=[TextPart(text="cut")], call=0),
            Reply(role="user", parts=[TextPart(text="go on " + hostile)]),
        ],
    )
    one = sample(4, 0, 0.25, turns=[turn], staleness=2)
    store.write("step_000001", [one])
    (link,) = links(await page(browser, LIST), ONE)
    found = await page(browser, link)
    wanted = ("Who is number 4?", "hm <img", "שלום", "answered", "no page", "version v9")
    wanted += ("instance i7", "12.5 ms", "Result as the model read it", "go on", "Reward 0.250")
    assert [text for text in wanted if text not in found.text] == []
    assert "\\x1b[31mred" in found.text
    assert not {"\x1b", "\u202e", "\r"} & set(found.text)
    assert set(found.values("pre", "dir")) == {"auto"}
    assert "/runs/run/beside?of=steps&step=1&group=4" in found.values("a", "href")
    assert "Its group JSON" in " ".join(found.text.split())
    answer = (await browser.get(f"{ONE}/json")).json()
    assert answer["turns"] == one.record["turns"]
    assert answer["tokens"]["rollout_logprobs"] == [0.0, 0.0, -0.5, -0.5, -0.5]


async def test_long_turns_are_cut_and_go_on_at_the_next_page(
    browser: httpx.AsyncClient, store: TrajectoryStore
):
    turns = [
        Turn(start=2, end=5, text=f"turn{n} " + "&" * 50_000, finish_reason="stop")
        for n in range(3)
    ]
    store.write("step_000001", [sample(0, 0, 1.0, turns=turns)])
    first = await page(browser, ONE)
    assert "turn0" in first.text
    assert "turn1" not in first.text
    assert "more characters are in the JSON" in first.text
    assert first.values("a", "rel") == ["next"]
    assert "turn1" in (await page(browser, f"{ONE}?turn=1")).text
    last = await page(browser, f"{ONE}?turn=9")
    assert "turn2" in last.text
    assert last.values("a", "rel") == []


@pytest.mark.parametrize(
    ("colour", "styles", "title"),
    [
        ("mask", {"read", "high1"}, "sampled"),
        # exp(-0.5) = 0.607 lies between 0.5 and 0.9
        ("logprob", {"read", "mid"}, "-0.500, p = 0.607"),
        ("advantage", {"read", "high3"}, "advantage 0.5"),
        ("version", {"read", "v0"}, "version 7"),
        ("entropy", {"read", "high1"}, "entropy 0.250"),
        # exp(-0.25 - -0.5) = 1.284 lies between 1.25 and 2
        ("ratio", {"read", "high2"}, "ratio 1.284"),
    ],
)
async def test_tokens_have_the_colour_that_is_chosen(
    browser: httpx.AsyncClient, store: TrajectoryStore, colour: str, styles: set[str], title: str
):
    one = sample(0, 0, 1.0, policy_version=7)
    assert one.tokens is not None
    learner = np.where(one.tokens.action_mask, -0.25, 0.0).astype(np.float32)
    tokens = replace(one.tokens, learner_logprobs=learner, entropies=-learner)
    store.write("step_000001", [StoredTrajectory(one.record, tokens)])
    found = await page(browser, f"{ONE}?colour={colour}")
    spans = [
        attributes for tag, attributes in found.tags if tag == "span" and "title" in attributes
    ]
    assert len(spans) == 5
    assert {span["class"] for span in spans} == styles
    assert spans[-1]["title"] == title


@pytest.mark.parametrize("colour", ["ratio", "entropy"])
async def test_a_token_that_the_learner_was_not_asked_for_has_no_value(
    browser: httpx.AsyncClient, store: TrajectoryStore, colour: str
):
    one = sample(0, 0, 1.0)
    assert one.tokens is not None
    zeros = np.zeros(5, np.float32)
    tokens = replace(one.tokens, learner_logprobs=zeros, entropies=zeros)
    store.write("step_000001", [StoredTrajectory(one.record, tokens)])
    found = await page(browser, f"{ONE}?colour={colour}")
    titles = {of["title"] for tag, of in found.tags if tag == "span" and "title" in of}
    assert titles == {"not sampled", "the learner was not asked"}


async def test_what_is_not_stored_cannot_be_chosen(
    browser: httpx.AsyncClient, store: TrajectoryStore
):
    store.write("step_000001", [sample(0, 0, 1.0)])
    colours = links(await page(browser, ONE), "?colour=")
    assert [one for one in colours if "advantage" in one]
    assert not [one for one in colours if "ratio" in one]
    assert "The learner stored no entropy, ratio." in (await page(browser, ONE)).text
    assert (
        "no log-probabilities of the learner"
        in (await page(browser, f"{ONE}?colour=ratio", 409)).text
    )
    for path in (f"{LIST}/step_000009.parquet/0", f"{LIST}/step_000001.parquet/7"):
        assert "has " in (await page(browser, path, 409)).text


async def test_agents_and_segments_are_a_tree(browser: httpx.AsyncClient, store: TrajectoryStore):
    fields = three_lineages()
    store.write("step_000001", [stored(scored(**fields))])
    text = " ".join((await page(browser, ONE)).text.split())
    assert "main segment 0, tokens 0 to 4 turn 1 search segment 1, tokens 4 to 9 turn 2" in text
    assert "judge (not trained: another model) segment 2" in text
    headings = [f"Turn {n}" for n in ("1 of main", "2 of search", "3 of search", "4 of judge")]
    assert [text.find(one) for one in headings] == sorted(text.find(one) for one in headings)
    assert all(one in text for one in headings)
    beside = " ".join((await page(browser, "/runs/run/beside?of=steps&step=1")).text.split())
    assert "mainask searchlook searchfound judgegood" in beside


async def test_the_system_prompt_is_read_found_and_in_the_json(
    browser: httpx.AsyncClient, store: TrajectoryStore
):
    store.write("step_000001", [sample(4, 0, 0.25, system_prompt="Use the tools.")])
    (link,) = links(await page(browser, f"{LIST}?text=tools"), ONE)
    messages = "".join((await page(browser, link)).text.split())
    assert "MessagessystemUsethetools.userWhoisnumber4?" in messages
    assert (await browser.get(f"{ONE}/json")).json()["system_prompt"] == "Use the tools."


async def test_a_trajectory_of_an_older_version_has_no_tokens(
    browser: httpx.AsyncClient, store: TrajectoryStore, root: Path
):
    record = sample(0, 0, 1.0, calls=[call_of("Ada")]).record
    new = ("version_spans", "segment_starts", "lineages", "staleness", "process_reward")
    record = {key: value for key, value in record.items() if key not in new}
    file = root / "run" / "trajectories" / "step_000001.jsonl"
    append_lines(file, [record])
    found = await page(browser, f"{LIST}/step_000001.jsonl/0")
    assert "stored no tokens" in found.text
    assert "Ada" in found.text


async def test_groups_lead_to_their_samples_side_by_side(
    browser: httpx.AsyncClient, store: TrajectoryStore
):
    for step in (1, 2):
        rows = [sample(g, i, i / 2, step=step, answer=f"a{g}{i}") for g in (4, 5) for i in range(3)]
        store.write(f"step_{step:06d}", rows)
    found = await page(browser, "/runs/run/groups?step=2")
    # rewards 0, 0.5 and 1 in each group
    assert found.rows[1:] == [f"2 {group} q{group} near 3 0.500 0.000 1.000" for group in (5, 4)]
    (group,) = links(found, "/runs/run/beside?of=steps&step=2&group=4")
    side_by_side = await page(browser, group)
    assert all(f"<answer>a4{index}" in side_by_side.text for index in range(3))
    assert "<answer>a5" not in side_by_side.text
    assert len(links(side_by_side, f"{LIST}/step_000002.parquet/")) == 3


async def test_long_trajectories_fit_side_by_side(
    browser: httpx.AsyncClient, store: TrajectoryStore
):
    store.write("step_000001", [sample(1, i, 0.0, answer="<" * 100_000) for i in range(20)])
    found = await page(browser, "/runs/run/beside?task=q1")
    assert len(links(found, f"{LIST}/step_000001.parquet/")) == 16
    assert "At most the first 16 of the list" in found.text
    assert "No stored trajectory" in (await page(browser, "/runs/run/beside?task=q2")).text


async def test_answers_that_flipped_lead_to_both_trajectories(
    browser: httpx.AsyncClient, store: TrajectoryStore
):
    assert "fewer than two evaluations" in (await page(browser, "/runs/run/flipped")).text
    for name, rewards in (("before", (0, 1, 1)), ("step_000002", (0, 0, 0)), ("after", (1, 0, 1))):
        answers = [sample(g, 0, r, trained=False) for g, r in enumerate(rewards)]
        store.write(f"eval_{name}", answers)
    found = await page(browser, "/runs/run/flipped")
    assert found.rows[1:] == ["q1 near 1.000 0.000", "q0 near 0.000 1.000"]
    assert f"{LIST}/eval_before.parquet/1" in found.values("a", "href")
    chosen = await page(browser, "/runs/run/flipped?a=step_000002&b=after")
    assert chosen.rows[1:] == ["q0 near 0.000 1.000", "q2 near 0.000 1.000"]
