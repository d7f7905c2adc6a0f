"""The page that says why a score fell: its spans, its links, and what it reads for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httpx
import pytest

from agent_r1.console.app import create_app
from agent_r1.console.fall_view import Numbers, role_of
from agent_r1.console.runs import Runs
from agent_r1.console.series import RunMetrics
from agent_r1.runs.store import StoredTrajectory, TrajectoryStore
from agent_r1_proto.parts import TextPart
from agent_r1_proto.tasks import Task
from agent_r1_proto.trajectory import ToolCallRecord
from tests.support.builders import rollout_task, scored, stored
from tests.support.config_scene import write_scene
from tests.support.console_scene import HOSTILE, append_lines, step_line, write_run
from tests.unit.console.test_app import Strict, page

FALL = "/runs/run/fall"
STEPS, AT, SAMPLES = 24, 13, 8
GOOD = 6
"""Samples of a step that are right before; of those whose call fails, none is."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty run `run`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_run(write_scene(tmp_path / "scene"), tmp_path / "runs" / "run")
    (folder / "trajectories").mkdir()
    return folder


@pytest.fixture
async def browser(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=create_app(Runs(folder.parent), None))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://console.test", headers={"accept": "text/html"}
    ) as client:
        yield client


def write_steps(
    folder: Path,
    tool: str = "search",
    breaks: bool = True,
    bad: Mapping[str, tuple[float, float]] | None = None,
    far_breaks: bool = False,
) -> None:
    """Write a run whose tool fails in 6 of 8 samples from step AT on; or that is wrong in as many,
    with metrics that are bad from then on: their values before and after; or that is wrong from
    then on in every second group, whose set is `far`."""
    store = TrajectoryStore(folder, 1.0)
    for step in range(1, STEPS + 1):
        broken = GOOD if breaks and step >= AT else 0
        wrong = GOOD if step >= AT and bad else broken
        some = []
        for index in range(SAMPLES):
            status = "error" if index < broken else "ok"
            part = TextPart(text=f"Passage {step}/{index}.")
            call = ToolCallRecord(
                end_token_index=4,
                tool=tool,
                status=status,
                arguments={"q": f"{step} {index}"},
                parts=[part],
            )
            # Which samples go wrong before moves on, so that every step has a mean of its own.
            right = float(index >= wrong and (index + step) % SAMPLES < GOOD - step % 2)
            group = 10 * step + index // 2
            of_set = "far" if far_breaks and group % 2 else "near"
            right = 0.0 if of_set == "far" and step >= AT else right
            task = Task(id=f"q{group}", prompt="Who?", metadata={"set": of_set})
            rollout = rollout_task(group_id=group, sample_index=index % 2, task=task)
            facts = {"calls": [call], "policy_version": step - 1}
            some.append(stored(scored(rollout, total=right, **facts), step=step))
        store.write(f"step_{step:06d}", some)
        means = sum(one.record["reward"]["total"] for one in some) / SAMPLES
        lines = {"reward/mean": means, "reward/exact_match": means, "policy/version": step}
        # What is written of a push counts for the steps that follow.
        pushed = {name: values[step >= AT - 1] for name, values in (bad or {}).items()}
        lines |= {name: value for name, value in pushed.items() if name.startswith("canary/")}
        trained = {name: values[step >= AT] for name, values in (bad or {}).items()}
        lines |= {name: value for name, value in trained.items() if name.startswith("logprob/")}
        append_lines(folder / "metrics.jsonl", [step_line(step, **lines)])


async def test_the_biggest_fall_is_looked_for_and_its_cause_named(
    browser: httpx.AsyncClient, folder: Path
):
    write_steps(folder)
    shown = await page(browser, FALL)
    assert "fell by" in shown.text
    assert "search: result (tool)" in " ".join(shown.text.split())
    (row,) = [row for row in shown.rows if row.startswith("search: result")]
    assert "failed 0 % 75 %" in row
    assert "from 0.688 in steps" in shown.text  # 5.5 of 8: by turns 5 and 6 are right
    links = shown.values("a", "href")
    assert "/runs/run/trajectories/step_000014.parquet/0" in links  # 13 is at the border
    assert any(link and f"step={AT}&" in link and "trajectories" in link for link in links)


async def test_a_set_that_fell_while_another_held_is_named(
    browser: httpx.AsyncClient, folder: Path
):
    write_steps(folder, breaks=False, far_breaks=True)
    shown = await page(browser, FALL)
    text = " ".join(shown.text.split())
    assert "It fell within set: far, and less or not at all elsewhere." in text
    assert any("within" in row and "far 50 % 50 %" in row for row in shown.rows)
    far, near = [row for row in shown.rows if "36 36" in row]
    # Every second group of four, with two samples, of ten steps without the border; worst first.
    assert "far 36 36 0.667 0.000 -0.667" in far
    assert "near 36 36 0.694 0.667 -0.028" in near
    assert "No cause" not in text


async def test_a_fall_without_a_clear_cause_says_where_to_look(
    browser: httpx.AsyncClient, folder: Path
):
    write_steps(folder, breaks=False, bad={"time/nothing": (0.0, 0.0)})
    shown = await page(browser, f"{FALL}?step={AT}")
    assert "No cause is named, since none is clear from what is stored." in shown.text


async def test_the_reader_chooses_span_and_score(browser: httpx.AsyncClient, folder: Path):
    write_steps(folder)
    shown = await page(browser, f"{FALL}?score=exact_match&step={AT}&step_to={AT + 3}")
    assert "exact_match fell" in shown.text
    links = shown.values("a", "href")
    # Four steps, against the four before them.
    assert f"/runs/run/trajectories?of=steps&step={AT - 4}&step_to={AT - 1}" in links
    # A chart names its metric; of one that is no score, what fell most is shown.
    assert "exact_match fell" in (await page(browser, f"{FALL}?metric=reward/exact_match")).text
    assert "fell by" in (await page(browser, f"{FALL}?metric=time/step_s")).text
    # One step alone begins a span.
    assert f"step={AT}&step_to={AT + 9}" in (await page(browser, f"{FALL}?step={AT}")).html.replace(
        "&amp;", "&"
    )


async def test_a_run_that_did_not_fall_has_no_cause(browser: httpx.AsyncClient, folder: Path):
    write_steps(folder, breaks=False)
    shown = await page(browser, FALL)
    assert "No fall" in shown.text
    assert "What explains" not in shown.text


@pytest.mark.parametrize(
    ("metric", "values", "named"),
    [
        ("canary/dlogp_mean", (1e-6, 0.01), ["the canary warned 0 % 100 %"]),
        ("logprob/abs_diff_mean", (1e-5, 0.01), ["log-probabilities differ 0 % 100 %"]),
        ("logprob/abs_diff_mean", (2e-3, 0.01), []),  # five times as much is no other engine
    ],
)
async def test_bad_weights_explain_a_fall(
    browser: httpx.AsyncClient,
    folder: Path,
    metric: str,
    values: tuple[float, float],
    named: list[str],
):
    write_steps(folder, breaks=False, bad={metric: values})
    shown = await page(browser, f"{FALL}?step={AT}&step_to={AT + 9}")
    assert "fell by" in shown.text
    rows = [row for row in shown.rows if row.startswith("weights")]
    assert len(rows) == len(named)
    assert all(text in row for text, row in zip(named, rows, strict=True))


async def test_only_the_files_of_the_two_spans_are_read(browser: httpx.AsyncClient, folder: Path):
    write_steps(folder)
    outside = [f for f in (folder / "trajectories").iterdir() if f.stem < "step_000009"]
    assert len(outside) == 8
    for file in outside:
        file.write_bytes(b"damaged")
    shown = await page(browser, f"{FALL}?step={AT}&step_to={AT + 3}")
    assert "search: result" in shown.text
    (folder / "trajectories" / f"step_{AT:06d}.parquet").write_bytes(b"damaged")
    answer = await browser.get(f"{FALL}?step={AT}&step_to={AT + 3}")
    assert answer.status_code == 409
    assert "is damaged" in answer.text


async def test_without_trajectories_the_scores_are_compared_alone(
    browser: httpx.AsyncClient, folder: Path
):
    write_steps(folder)
    for file in (folder / "trajectories").iterdir():
        file.unlink()
    shown = await page(browser, FALL)
    assert "fell by" in shown.text
    assert "No cause is named: trajectories of both spans are needed" in shown.text


async def test_before_there_are_steps_the_page_says_so(browser: httpx.AsyncClient, folder: Path):
    assert "too few steps" in (await page(browser, FALL)).text
    assert "Why did it fall?" in (await page(browser, "/runs/run")).text


@pytest.mark.parametrize(
    ("query", "status", "text"),
    [
        ("score=style", 409, "'style' is no score of this run; choose one of reward"),
        ("step=9&step_to=3", 409, "ends at step 3, before step 9"),
        ("step_to=3", 409, "begins nowhere"),
        ("step=two", 422, "step"),
    ],
)
async def test_a_choice_that_cannot_be_is_named(
    browser: httpx.AsyncClient, folder: Path, query: str, status: int, text: str
):
    append_lines(folder / "metrics.jsonl", [step_line(step) for step in range(1, 9)])
    answer = await browser.get(f"{FALL}?{query}")
    assert answer.status_code == status
    assert text in Strict(answer.text).text


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_names_of_tools_are_text(browser: httpx.AsyncClient, folder: Path, name: str):
    write_steps(folder, tool=name)
    shown = await page(browser, FALL)
    assert shown.text.count(": result") >= 1
    assert "img" not in [tag for tag, _ in shown.tags]
    assert len(shown.html) < 200_000


def test_scores_say_what_they_are_for(folder: Path):
    append_lines(folder / "metrics.jsonl", [step_line(1, **{"reward/exact_match": 1.0})])
    metrics = RunMetrics(folder)
    metrics.update()
    config = Runs(folder.parent).run("run").config
    numbers = Numbers.of(metrics, config)
    assert numbers.scores == {"reward": "reward/mean", "exact_match": "reward/exact_match"}
    assert role_of("reward", config) == "what is trained on"
    assert role_of("exact_match", config) == "weight 1"


async def test_trajectories_that_were_not_trained_on_do_not_count(
    browser: httpx.AsyncClient, folder: Path
):
    store = TrajectoryStore(folder, 1.0)
    one = stored(scored(rollout_task()))
    for step in range(1, 9):
        mean = (0.8 if step <= 4 else 0.3) + step % 3 / 100
        append_lines(folder / "metrics.jsonl", [step_line(step, **{"reward/mean": mean})])
        record = one.record | {"step": step, "reward": one.record["reward"] | {"total": mean}}
        some = [StoredTrajectory(record | {"trained": t}, one.tokens) for t in (True, True, False)]
        store.write(f"step_{step:06d}", some)
    shown = await page(browser, f"{FALL}?step=5&step_to=8")
    # 4 steps of 2 each
    assert "8 before and 8 after" in shown.text


async def test_of_a_long_span_so_many_steps_and_trajectories_are_read(
    browser: httpx.AsyncClient, folder: Path
):
    """52 steps on each side, of which every second is read, with 70 samples of each."""
    long, each = 52, 70
    store = TrajectoryStore(folder, 1.0)
    one = stored(scored(rollout_task()))
    for step in range(1, 2 * long + 1):
        mean = (0.8 if step <= long else 0.3) + step % 3 / 100
        append_lines(folder / "metrics.jsonl", [step_line(step, **{"reward/mean": mean})])
        record = one.record | {"step": step, "reward": one.record["reward"] | {"total": mean}}
        store.write(f"step_{step:06d}", [StoredTrajectory(record, one.tokens)] * each)
    shown = await page(browser, f"{FALL}?step={long + 1}&step_to={2 * long}")
    # 26 steps of 1500 // 26 = 57
    assert "1482 before and 1482 after" in shown.text
