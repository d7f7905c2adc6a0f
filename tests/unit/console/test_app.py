"""Pages of the console: what they say of runs, of hostile names, and of what is missing."""

from __future__ import annotations

import hashlib
import json
import os
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from agent_r1.console import runs as runs_module
from agent_r1.console.pages import MOST_RUNS, ROWS, STATIC_DIR, key_of, name_of
from agent_r1.console.run_state import RunState
from agent_r1.console.runs import Runs, UnknownRunError
from tests.support.console_scene import (
    HOSTILE,
    answer_line,
    append_lines,
    step_line,
    write_run,
)

UPLOT = {
    "uplot.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""SHA-256 of the files of uPlot 1.6.32 as npm has them: dist/uPlot.iife.min.js, uPlot.min.css."""


class Strict(HTMLParser):
    """Collects what a page has of elements, and what it would run or load."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.html = html
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    @property
    def rows(self) -> list[str]:
        """Texts of the rows of its tables."""
        rows = re.findall(r"<tr>(.*?)</tr>", self.html, re.S)
        return [" ".join(unescape(re.sub(r"<[^>]+>", " ", row)).split()) for row in rows]

    def handle_data(self, data: str) -> None:
        self.text += data

    def values(self, tag: str, name: str) -> list[str | None]:
        return [
            attributes[name]
            for found, attributes in self.tags
            if found == tag and name in attributes
        ]


async def page(browser: httpx.AsyncClient, path: str, status: int = 200) -> Strict:
    answer = await browser.get(path)
    assert answer.status_code == status, answer.text
    found = Strict(answer.text)
    assert len(answer.content) < 200_000
    scripts = [attributes for tag, attributes in found.tags if tag == "script"]
    assert all((one["src"] or "").startswith("/static/") for one in scripts)
    assert not [tag for tag, _ in found.tags if tag in ("img", "style", "iframe")]
    assert not [
        name
        for _, attributes in found.tags
        for name in attributes
        if name == "style" or name.startswith("on")
    ]
    return found


def test_the_vendored_charts_are_those_of_the_release():
    found = {name: hashlib.sha256((STATIC_DIR / name).read_bytes()).hexdigest() for name in UPLOT}
    assert found == UPLOT
    assert "MIT License" in (STATIC_DIR / "uplot.LICENSE").read_text()


async def test_the_runs_are_listed_with_status_score_rate_and_age(
    browser: httpx.AsyncClient, root: Path, scene: Path
):
    done = write_run(scene, root / "done")
    append_lines(done / "metrics.jsonl", [step_line(step) for step in (1, 2, 3)])
    nothing = {"mean_calls": 0.0, "em": None, "f1": None}
    sets = {
        name: {"n": 2, "failed": 0, "reward": r, "components": {"exact_match": r}, **nothing}
        for name, r in (("a", 0.5), ("b", 1.0))
    }
    append_lines(done / "evaluations.jsonl", [{"name": "after", "sets": sets, "score": 0.5}])
    (done / "summary.json").write_text('{"status": "finished"}')
    write_run(scene, root / "new")
    (root / "broken").mkdir()
    (root / "broken" / "config.json").write_text('{"learner": {"stepps": 3}}')
    (root / "no run").mkdir()
    found = await page(browser, "/")
    by_name = {found_row.split()[0]: found_row for found_row in found.rows[1:]}
    assert set(by_name) == {"done", "new", "broken"}
    assert re.search(
        r"finished 3 of 3 0\.030 0\.500 100 tokens/s, 2\.0 s a step \d+s ago", by_name["done"]
    )
    assert "no launcher on this machine - - - - -" in by_name["new"]
    assert "stepps" in by_name["broken"]
    assert "3 in" in found.text


async def test_a_page_has_so_many_runs_and_leads_to_the_others(
    browser: httpx.AsyncClient, root: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agent_r1.console.run_pages.ROWS", 3)
    for number in range(7):
        (root / f"run{number}").mkdir()
        config = root / f"run{number}" / "config.json"
        config.write_text("{}")
        os.utime(config, (number, number))
    append_lines(root / "run2" / "metrics.jsonl", [step_line(1)])
    first, second, third = [await page(browser, f"/?start={start}") for start in (0, 3, 6)]
    names = [found.values("input", "value") for found in (first, second, third)]
    # The one that was written to last comes first.
    assert names == [["run2", "run6", "run5"], ["run4", "run3", "run1"], ["run0"]]
    assert "?start=3" in first.values("a", "href")
    assert [one for one in third.values("a", "href") if one and "start=" in one] == ["?start=3"]


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_names_are_shown_linked_and_chosen_as_they_are(
    browser: httpx.AsyncClient, root: Path, scene: Path, name: str
):
    folder = root / name.replace("/", "\u2215")
    name = folder.name
    write_run(scene, folder)
    append_lines(folder / "metrics.jsonl", [step_line(1, **{name: 0.5})])
    listed = await page(browser, "/")
    (href,) = [one for one in listed.values("a", "href") if one and one.startswith("/runs/")]
    assert (await page(browser, href)).tags
    (value,) = listed.values("input", "value")
    assert value is not None
    assert name_of(value) == name
    assert not re.search(r"[\x00-\x1f]", value)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202a-\u202e]", listed.text)
    curves = await page(browser, f"/curves?run={quote(value)}&metric={quote(key_of(name))}")
    assert value in curves.values("input", "value")
    asked = {"run": value, "metric": key_of(name)}
    answer = (await browser.get("/api/series", params=asked)).json()
    assert answer["metrics"][key_of(name)][value]["y"] == [0.5]
    await page(browser, f"/compare?run={quote(value)}")
    await page(browser, f"{href}?step=1")
    shown = await page(browser, f"{href}/services")
    assert "has stopped with it" in shown.text


@pytest.mark.parametrize("name", ["..", ".", "%2e%2e", "a%2fb", "..%2f..%2fetc", "nobody", "%00"])
async def test_what_is_no_run_is_not_found(browser: httpx.AsyncClient, root: Path, name: str):
    (root.parent / "config.json").write_text("{}")
    answer = await browser.get(f"http://console.test/runs/{name}/services")
    assert answer.status_code == 404


def test_one_run_folder_shows_that_run_alone(root: Path, scene: Path):
    for name in ("one", "other"):
        write_run(scene, root / name)
    runs = Runs(root / "one")
    assert runs.names() == ["one"]
    with pytest.raises(UnknownRunError, match="there is no run 'other'"):
        runs.run("other")


async def test_configurations_are_compared_key_by_key(
    browser: httpx.AsyncClient, root: Path, scene: Path
):
    write_run(scene, root / "a", "learner.steps=5")
    write_run(scene, root / "b", "engine.lr=0.5")
    texts = (await page(browser, "/compare?run=a&run=b")).rows
    assert "learner.steps 5 3" in texts
    assert any(text.startswith("engine.lr ") and text.endswith(" 0.5") for text in texts)
    assert not any(text.startswith("learner.group_size") for text in texts)
    too_many = "&".join(["run=a"] * (MOST_RUNS + 1))
    assert (await browser.get(f"/compare?{too_many}")).status_code == 422


async def test_a_step_shows_what_was_measured_in_it(
    browser: httpx.AsyncClient, root: Path, scene: Path
):
    folder = write_run(scene, root / "run")
    append_lines(folder / "metrics.jsonl", [step_line(1), step_line(2, **{"loss/total": 0.25})])
    failure = {"step": 1, "where": "tools", "kind": "k", "reason": "tool search: no corpus"}
    append_lines(folder / "failures.jsonl", [failure | {"step": 0}] * 7 + [failure] * ROWS)
    found = await page(browser, "/runs/run?step=2")
    assert re.search(r"loss/total\s*0\.25", found.text)
    assert found.text.count("tool search: no corpus") == ROWS
    assert "7 older ones are in failures.jsonl" in found.text
    assert "loss/total" not in (await page(browser, "/runs/run?step=1")).text
    assert "The run has no step 9" in (await page(browser, "/runs/run?step=9")).text


async def test_curves_are_sent_again_only_when_they_have_changed(
    browser: httpx.AsyncClient, root: Path, scene: Path
):
    folder = write_run(scene, root / "run")
    append_lines(folder / "metrics.jsonl", [step_line(1), step_line(2)])
    path = "/api/series?run=run&metric=reward/mean&x=tokens&smooth=0.5"
    first = await browser.get(path)
    # 2 s a step at 100 tokens/s; smoothed by half: (0.5 * 0.005 + 0.5 * 0.02) / 0.75
    assert first.json()["metrics"]["reward/mean"]["run"] == {
        "x": [200.0, 400.0],
        "y": [0.01, 0.02],
        "step": [1, 2],
        "smooth": [0.01, pytest.approx(0.0166667, abs=1e-7)],
    }
    marks: list[dict[str, Any]] = first.json()["marks"]
    assert [(mark["kind"], mark["x"]) for mark in marks] == [("push", 200.0), ("push", 400.0)]
    headers = {"if-none-match": first.headers["etag"]}
    unchanged = await browser.get(path, headers=headers)
    assert (unchanged.status_code, unchanged.content) == (304, b"")
    append_lines(folder / "metrics.jsonl", [step_line(3)])
    assert (await browser.get(path, headers=headers)).json()["metrics"]["reward/mean"]["run"][
        "step"
    ] == [1, 2, 3]


async def test_evaluations_have_intervals_and_paired_differences(
    browser: httpx.AsyncClient, root: Path, scene: Path
):
    for name, right in (("a", 1), ("b", 3)):
        folder = write_run(scene, root / name)
        lines = [answer_line(n, float(n < right)) for n in range(4)]
        append_lines(folder / "evaluation_after.jsonl", lines)
    listed = await page(browser, "/evaluations")
    assert listed.values("input", "value").count("a/evaluation_after.jsonl") == 2
    found = await page(
        browser, "/evaluations?a=a/evaluation_after.jsonl&b=b/evaluation_after.jsonl"
    )
    text = " ".join(found.text.split())
    # 3 of 4 right after 1 of 4; two questions that only B has right: McNemar 2 * 0.5^2
    row = "near em 4 0.250 0.750 +0.500 [+0.000, +1.000] p = 0.5"
    assert row in found.rows
    assert "Answered better by one of them: 2" in text
    wrong = await browser.get("/evaluations?a=../../etc/passwd")
    assert wrong.status_code == 409
    assert "there is no evaluation" in wrong.text


@pytest.mark.parametrize("damage", [{"failed": "perhaps"}, {"calls": [1]}, {"components": [1]}])
async def test_a_damaged_evaluation_is_named(
    browser: httpx.AsyncClient, root: Path, scene: Path, damage: dict[str, Any]
):
    folder = write_run(scene, root / "a")
    append_lines(folder / "evaluation_after.jsonl", [answer_line(1, 1.0) | damage])
    found = await page(browser, "/evaluations?a=a/evaluation_after.jsonl", 409)
    assert "question 'q1' is damaged" in found.text


async def test_a_chart_has_a_bound_on_its_points(
    browser: httpx.AsyncClient, root: Path, scene: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agent_r1.console.series.MOST_POINTS_TOGETHER", 400)
    for name in ("a", "b"):
        lines = [step_line(step) for step in range(1, 151)]
        append_lines(write_run(scene, root / name) / "metrics.jsonl", lines)
    asked = {"run": ["a", "b"], "metric": "reward/mean"}
    # Two curves of up to 200 points, or four of up to 100: two in each of 49 stretches.
    for smooth, points in ((0.0, 150), (0.5, 98)):
        answer = (await browser.get("/api/series", params=asked | {"smooth": smooth})).json()
        sent = [len(one["y"]) for one in answer["metrics"]["reward/mean"].values()]
        assert sent == [points, points]


async def test_what_is_asked_wrongly_is_named_with_its_limit(
    browser: httpx.AsyncClient, root: Path, scene: Path
):
    write_run(scene, root / "run")
    lacking = await page(browser, "/runs/run/services/drain?tool=search", 422)
    assert "drain needs the field 'instance'" in lacking.text
    answer = await browser.get("/api/series?smooth=2", headers={"accept": "application/json"})
    assert answer.status_code == 422
    assert "smooth ('2')" in answer.json()["detail"]
    assert (await browser.get("/healthz")).json() == {"status": "ok"}


async def test_a_lone_surrogate_does_not_break_a_page(
    browser: httpx.AsyncClient, root: Path, scene: Path
):
    folder = write_run(scene, root / "run")
    failure = {"step": 1, "where": "tools", "kind": "k", "reason": "half \ud800 a pair"}
    (folder / "failures.jsonl").write_text(json.dumps(failure) + "\n")
    assert "half \ufffd a pair" in (await page(browser, "/runs/run")).text


DAMAGED = [
    ("metrics.jsonl", '{"step": 9, "reward/mean": "x"}'),
    ("metrics.jsonl", '{"step": 9, "reward/mean": [1], "time/step_s": "1"}'),
    ("metrics.jsonl", '{"step": 9, "throughput/tokens_per_s": null, "time/step_s": 1}'),
    ("metrics.jsonl", '{"step": 9, "reward/mean": NaN, "time/step_s": 1e400}'),
    ("metrics.jsonl", '{"step": 9, "reward/mean": ' + "9" * 400 + "}"),
    ("metrics.jsonl", '{"step": ' + "9" * 400 + ', "reward/mean": 1}'),
    ("metrics.jsonl", '{"step": true}'),
    ("metrics.jsonl", '{"reward/mean": 1}'),
    ("evaluations.jsonl", '{"sets": {"a": null}}'),
    ("evaluations.jsonl", '{"sets": {"a": {"n": 1, "reward": "x", "components": [1]}}, "name": 5}'),
    ("evaluations.jsonl", '{"sets": {"a": {"reward": 1e300, "components": {"k": "x"}}}}'),
    ("evaluations.jsonl", '{"sets": [1], "step": "a"}'),
    ("failures.jsonl", '{"step": [1], "where": {}, "reason": null}'),
    ("conditions.jsonl", '{"began_at": "x"}'),
    ("dead_letters.jsonl", '{"letter_id": 1}'),
    ("summary.json", '{"status": 5, "reason": {}, "starts": "x"}'),
    ("summary.json", "[]"),
    ("launcher.json", '{"pid": "x"}'),
    ("config.json", "{"),
    ("config.json", "[1]"),
]
"""Files of a run, and lines that this program has not written."""


@pytest.mark.parametrize(("file", "line"), DAMAGED)
async def test_damage_of_one_run_takes_no_page_down(
    browser: httpx.AsyncClient, root: Path, scene: Path, file: str, line: str
):
    for name in ("good", "bad"):
        folder = write_run(scene, root / name)
        append_lines(folder / "metrics.jsonl", [step_line(step) for step in (1, 2)])
    damaged = root / "bad" / file
    kept = damaged.read_text() if file == "metrics.jsonl" and damaged.exists() else ""
    damaged.write_text(kept + line + "\n")
    rows = (await page(browser, "/")).rows
    (good,) = [row for row in rows if row.startswith("good")]
    assert "2 of 3 0.020" in good
    curves = "run=bad&run=good&metric=reward/mean&metric=time/step_s"
    for path in ("/runs/bad", "/runs/bad?step=2", "/compare?run=bad&run=good", f"/curves?{curves}"):
        await page(browser, path)
    answer = await browser.get(f"/api/series?{curves}&x=time")
    assert answer.json()["metrics"]["reward/mean"]["good"]["step"] == [1, 2]


async def test_a_summary_that_cannot_be_read_is_named(
    browser: httpx.AsyncClient, root: Path, scene: Path
):
    folder = write_run(scene, root / "run")
    (folder / "summary.json").write_text("{half")
    for path in ("/", "/runs/run"):
        assert "summary.json cannot be read" in (await page(browser, path)).text


async def test_a_run_whose_folder_cannot_be_read_is_listed_with_the_reason(
    browser: httpx.AsyncClient, root: Path, scene: Path, monkeypatch: pytest.MonkeyPatch
):
    write_run(scene, root / "good")
    write_run(scene, root / "bad")
    read = runs_module.read_run_state

    def read_or_fail(folder: Path, at_work: str | None = None) -> RunState:
        if folder.name == "bad":
            raise TypeError("a number was expected")
        return read(folder, at_work)

    monkeypatch.setattr(runs_module, "read_run_state", read_or_fail)
    rows = (await page(browser, "/")).rows
    assert [row.split()[0] for row in rows if "a number was expected" in row] == ["bad"]
    assert any(row.startswith("good") for row in rows)


async def test_an_unknown_error_has_a_page_and_the_headers_of_every_page(
    patient_browser: httpx.AsyncClient, root: Path, scene: Path, monkeypatch: pytest.MonkeyPatch
):
    write_run(scene, root / "run")

    def fail(*_: object) -> None:
        raise KeyError("turns")

    monkeypatch.setattr("agent_r1.console.run_pages.load_letters", fail)
    shown = await patient_browser.get("/runs/run")
    told = await patient_browser.get("/runs/run", headers={"accept": "application/json"})
    for answer in (shown, told):
        assert answer.status_code == 500
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert "This page cannot be shown" in shown.text
    assert "KeyError: 'turns'" in told.json()["detail"]


async def test_a_comparison_of_many_long_values_fits_on_a_page(
    browser: httpx.AsyncClient, root: Path
):
    for number in range(MOST_RUNS):
        folder = root / f"run{number}"
        folder.mkdir()
        values = {f"key{key}": f"<{number}>" + '"' * 500 for key in range(110)}
        (folder / "config.json").write_text(json.dumps(values))
    chosen = "&".join(f"run=run{number}" for number in range(MOST_RUNS))
    found = await page(browser, f"/compare?{chosen}")
    kept = sum(row.startswith("key") for row in found.rows)
    assert 0 < kept < 100
    assert f"{110 - kept} more keys differ" in found.text
    two = await page(browser, "/compare?run=run1&run=run2")
    assert sum(row.startswith("key") for row in two.rows) > kept


async def test_a_step_leads_to_its_samples_alone(
    browser: httpx.AsyncClient, root: Path, scene: Path
):
    append_lines(write_run(scene, root / "run") / "metrics.jsonl", [step_line(2)])
    found = await page(browser, "/runs/run?step=2")
    assert "/runs/run/trajectories?of=steps&step=2" in found.values("a", "href")


async def test_thousands_of_metrics_fit_on_a_page(
    browser: httpx.AsyncClient, root: Path, scene: Path
):
    many = {f"area{number % 7}/a_metric_with_a_name_{number:04d}": 1.0 for number in range(1900)}
    append_lines(write_run(scene, root / "run") / "metrics.jsonl", [step_line(1, **many)])
    last = "area6/a_metric_with_a_name_1896"
    found = await page(browser, f"/curves?run=run&metric={last}")
    listed = [one for one in found.values("input", "value") if one and "a_metric" in one]
    assert last in listed
    # Those of the run besides: reward/mean, time/step_s, throughput/tokens_per_s, push/servers.
    assert f"{1900 - len(listed) + 4} more are not listed" in found.text
    await page(browser, "/runs/run?step=1")
