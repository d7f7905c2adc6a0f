"""The console in a real browser: every page, live curves, hostile names, a drain by button."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import pytest
from fastapi import FastAPI
from playwright.sync_api import Browser, ConsoleMessage, Page, expect

from agent_r1.runs.remote import add_store_routes
from agent_r1.runs.store import TrajectoryStore
from agent_r1.runtime.files.run_folder import LAUNCHER_FILE
from agent_r1_proto.connection import RedisConnection
from agent_r1_proto.parts import TextPart
from agent_r1_proto.registry import Registry, RolloutServer, ToolRegistry
from agent_r1_proto.streams import Broker
from agent_r1_proto.tool_pool import ToolState
from agent_r1_proto.trajectory import ToolCallRecord
from benchmarks.console import write_runs
from tests.support.browser import chromium, heap_bytes
from tests.support.builders import rollout_task, scored, stored
from tests.support.config_scene import write_scene
from tests.support.console_scene import (
    HOSTILE,
    answer_line,
    append_lines,
    step_line,
    write_run,
)
from tests.support.forked import AGENT_R1, Forked
from tests.support.served import TOKEN, served

pytestmark = pytest.mark.redis

START_TIMEOUT_S = 60.0
SHOWN_TIMEOUT_MS = 30_000
"""Longest that a test waits until a page shows something, on a busy machine."""
ECHO = """
from agent_r1 import Tool


class Echo(Tool):
    name = "echo"
    description = "Answers."
    parameters = {"type": "object", "properties": {}}
    version = "1.0"

    async def call(self, arguments, context):
        return "echo"
"""
T = TypeVar("T")


def wait_for(look: Callable[[], T | None], what: str) -> T:
    """Return what a look finds, once it finds something."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while (found := look()) is None:
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium."""
    with ExitStack() as stack:
        try:
            started = stack.enter_context(chromium())
        except FileNotFoundError as exc:
            pytest.skip(str(exc))
        yield started


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that has logged no message, and raised no error, when the test ends."""
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    context.set_default_timeout(SHOWN_TIMEOUT_MS)
    expect.set_options(timeout=SHOWN_TIMEOUT_MS)
    found: list[str] = []
    opened = context.new_page()

    def note(message: ConsoleMessage) -> None:
        if "status of 409" not in message.text:  # the answer to a form that is refused
            found.append(f"{message.type}: {message.text}")

    opened.on("console", note)
    opened.on("pageerror", lambda error: found.append(str(error)))
    yield opened
    context.close()
    assert found == []


class Console:
    """Starts `agent-r1 ui` over a folder of runs."""

    def __init__(self, folder: Path) -> None:
        self.runs = folder / "runs"
        self.runs.mkdir()
        self.scene = write_scene(folder / "scene")
        self._folder = folder
        self.processes: list[Forked] = []

    def spawn(self, *command: str, **variables: str) -> Path:
        """Start a command in the folder, and return its log."""
        log = self._folder / f"log{len(self.processes)}"
        clean = {k: v for k, v in os.environ.items() if not k.startswith("AGENT_R1_")}
        clean["XDG_CACHE_HOME"] = str(self._folder / "cache")
        env: Mapping[str, str] = {**clean, **variables}
        log.touch()  # the process opens it a moment later
        self.processes.append(Forked(AGENT_R1, *command, env=env, log=log, cwd=self._folder))
        return log

    def start(self, runs: str = "", **variables: str) -> str:
        """Start the console over its runs, or `runs`, and return its URL."""
        log = self.spawn("ui", runs or str(self.runs), "--port", "0", **variables)
        found = wait_for(lambda: re.search(r"is at (http://\S+);", log.read_text()), "no console")
        return found[1]


@pytest.fixture
def console(tmp_path: Path) -> Iterator[Console]:
    made = Console(tmp_path)
    yield made
    for process in made.processes:
        process.kill()
        process.wait()


def write_trajectories(run: Path) -> None:
    """Store one step: a trajectory that is right, and a hostile one that calls a tool."""
    (run / "trajectories").mkdir()
    part = TextPart(text="".join(HOSTILE))
    call = ToolCallRecord(end_token_index=4, tool="search", status="ok", parts=[part])
    right = stored(scored(rollout_task(group_id=1)))
    wrong = stored(scored(rollout_task(group_id=2), total=0.0, answer=HOSTILE[0], calls=[call]))
    TrajectoryStore(run, 1.0).write("step_000001", [right, wrong])


def unlabelled(page: Page) -> list[str]:
    """Return the controls of a page that a screen reader has no name for."""
    return page.evaluate(
        """() => [...document.querySelectorAll("a, button, input:not([type=hidden]), select")]
          .filter((one) => !(one.textContent.trim() || one.ariaLabel || one.labels?.length))
          .map((one) => one.outerHTML)"""
    )


def test_every_page_is_whole_on_a_desk_and_on_a_phone(console: Console, page: Page):
    two = "a_run_with_a_long_word_as_its_name"
    for name in ("one", two):
        folder = write_run(console.scene, console.runs / name)
        append_lines(folder / "metrics.jsonl", [step_line(step) for step in range(1, 9)])
        answers = [answer_line(number, float(number > 2)) for number in range(6)]
        append_lines(folder / "evaluation_after.jsonl", answers)
    write_trajectories(console.runs / "one")
    url = console.start()
    pages = {
        "/": "Runs",
        "/runs/one?step=3": "one",
        f"/curves?run=one&run={two}&metric=reward/mean&metric=time/step_s&smooth=0.5&x=time": (
            "Curves"
        ),
        f"/compare?run=one&run={two}": "Runs side by side",
        "/runs/one/services": "Services of one",
        "/runs/one/trajectories": "Trajectories of one",
        "/runs/one/groups": "Groups of one",
        "/runs/one/beside?step=1": "Side by side",
        "/runs/one/flipped": "Flipped answers of one",
        "/runs/one/fall?step=5&step_to=8": "Why did one fall?",
        "/runs/one/trajectories/step_000001.parquet/1?colour=logprob": "q2",
        "/runs/one/services/stop": "Stop: one",
        f"/evaluations?a=one/evaluation_after.jsonl&b={two}/evaluation_after.jsonl": "Evaluations",
    }
    for path, title in pages.items():
        page.goto(url + path)
        expect(page.get_by_role("heading", level=1)).to_have_text(title)
        assert unlabelled(page) == []
        for width in (360, 1200):
            page.set_viewport_size({"width": width, "height": 800})
            root = "document.documentElement"
            page.wait_for_function(f"{root}.scrollWidth <= {root}.clientWidth")
    page.goto(f"{url}/curves?run=one&run={two}&metric=reward/mean&metric=time/step_s")
    expect(page.locator(".plot canvas")).to_have_count(2)
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    page.goto(url)
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to the content")).to_be_focused()


def test_curves_follow_the_file_and_lead_to_a_step_by_key_and_by_click(
    console: Console, page: Page
):
    folder = write_run(console.scene, console.runs / "long")
    append_lines(folder / "metrics.jsonl", [step_line(step) for step in range(1, 5000)])
    url = console.start()
    page.goto(url)
    page.get_by_role("checkbox").check()
    page.get_by_role("heading", level=1).click()  # a part that has the focus stays as it is
    append_lines(folder / "metrics.jsonl", [step_line(5000)])
    expect(page.get_by_text("5000 of 3")).to_be_visible()
    expect(page.get_by_role("checkbox")).to_be_checked()
    page.goto(f"{url}/curves?run=long&metric=reward/mean")
    last = page.locator(".legend td").first
    expect(last).to_have_text("50")  # step 5000: 5000 / 100
    append_lines(folder / "metrics.jsonl", [step_line(5001)])
    expect(last).to_have_text("50.01")
    sent = page.evaluate(
        "fetch('/api/series?run=long&metric=reward/mean').then((answer) => answer.json())"
    )
    assert 1000 < len(sent["metrics"]["reward/mean"]["long"]["step"]) <= 2000
    plot = page.locator(".plot")
    plot.focus()
    page.keyboard.press("End")
    expect(page.get_by_text("long, step 5001: 50.01")).to_be_visible()
    page.keyboard.press("Enter")
    page.wait_for_url("**/runs/long/trajectories?of=steps&step=5001")
    page.get_by_role("link", name="Numbers of step 5001").click()
    expect(page.get_by_role("heading", name="Step 5001")).to_be_visible()
    page.go_back()
    page.go_back()
    under_the_mouse = page.get_by_text(re.compile(r"^long, step \d+: [\d.]+$"))
    expect(under_the_mouse).to_have_count(0)
    page.locator(".plot .u-over").hover(position={"x": 300, "y": 100})
    expect(under_the_mouse).to_be_visible()
    page.locator(".plot .u-over").click(position={"x": 300, "y": 100})
    page.wait_for_url("**/runs/long/trajectories?of=steps&step=*")
    assert 1 < int(page.url.partition("step=")[2]) < 5001


def test_of_several_runs_the_nearest_is_opened(console: Console, page: Page):
    for name, reward in (("low", 0.0), ("high", 1.0)):
        folder = write_run(console.scene, console.runs / name)
        lines = [step_line(step, **{"reward/mean": reward}) for step in range(1, 9)]
        append_lines(folder / "metrics.jsonl", lines)
    address = f"{console.start()}/curves?run=low&run=high&metric=reward/mean"
    page.goto(address)
    over = page.locator(".plot .u-over")
    for name, y in (("high", 10), ("low", 190)):
        over.click(position={"x": 150, "y": y})
        page.wait_for_url(f"**/runs/{name}/trajectories?of=steps&step=*")
        page.go_back()
        expect(page.locator(".plot canvas")).to_have_count(1)
    page.locator(".plot").focus()
    for keys, name in ((("Home", "ArrowDown"), "low"), (("End", "ArrowUp"), "high")):
        for key in keys:
            page.keyboard.press(key)
        expect(page.locator(".chart > .hint")).to_have_text(re.compile(f"^{name}, step"))


def test_a_curve_leads_to_why_it_fell(console: Console, page: Page):
    folder = write_run(console.scene, console.runs / "run")
    means = {step: (0.9 if step < 21 else 0.3) + step % 3 / 100 for step in range(1, 41)}
    lines = [step_line(step, **{"reward/mean": mean}) for step, mean in means.items()]
    append_lines(folder / "metrics.jsonl", lines)
    page.goto(f"{console.start()}/curves?run=run&metric=reward/mean")
    why = page.get_by_role("link", name="Why did it fall?")
    expect(page.locator(".plot canvas")).to_have_count(1)
    page.locator(".plot").focus()
    page.keyboard.press("Tab")
    expect(why).to_be_focused()
    page.keyboard.press("Enter")  # no step is chosen: the biggest fall
    page.wait_for_url("**/runs/run/fall?metric=reward%2Fmean")
    expect(page.get_by_role("status")).to_contain_text("reward fell by 0.6")
    page.go_back()
    plot = page.locator(".plot")
    plot.focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_url("**/runs/run/fall?metric=reward%2Fmean&step=39")
    page.go_back()
    box = page.locator(".plot .u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 50, steps=5)
    page.mouse.up()
    why.click()
    page.wait_for_url(re.compile(r"/fall\?metric=reward%2Fmean&step=1\d&step_to=3\d$"))
    page.get_by_label("Score", exact=True).select_option("reward")
    page.get_by_label("From step", exact=True).fill("21")
    page.get_by_label("to step", exact=True).fill("30")
    page.get_by_role("button", name="Explain").click()
    page.wait_for_url("**/fall?score=reward&step=21&step_to=30")
    expect(page.get_by_role("status")).to_contain_text("steps 11 to 20 to 0.")


def test_a_metric_is_found_chosen_and_smoothed_without_a_reload(console: Console, page: Page):
    folder = write_run(console.scene, console.runs / "run")
    append_lines(folder / "metrics.jsonl", [step_line(step) for step in range(1, 9)])
    page.goto(f"{console.start()}/curves")
    expect(page.locator(".chart")).to_have_count(1)
    page.get_by_label("Find").fill("TOKENS_per")
    expect(page.get_by_label("time/step_s")).to_be_hidden()
    page.get_by_label("throughput/tokens_per_s").check()
    expect(page.locator(".chart")).to_have_count(2)
    page.get_by_label("Find").fill("reward/m")
    page.get_by_role("checkbox", name="reward/mean").uncheck()
    expect(page.locator(".chart")).to_have_count(1)
    expect(page.locator(".chart h2")).to_have_text("throughput/tokens_per_s")
    page.get_by_label("Smoothing").fill("0.9")
    page.get_by_label("By").select_option("tokens")
    expect(page).to_have_url(re.compile(r"metric=throughput%2Ftokens_per_s&x=tokens&smooth=0\.9$"))
    page.reload()
    expect(page.locator(".chart h2")).to_have_text("throughput/tokens_per_s")


def test_hostile_names_are_text_on_every_page_and_can_be_chosen(console: Console, page: Page):
    page.on("dialog", lambda dialog: pytest.fail(f"a name opened a dialog: {dialog.message}"))
    for name in HOSTILE:
        folder = write_run(console.scene, console.runs / name.replace("/", "\u2215"))
        append_lines(folder / "metrics.jsonl", [step_line(1, **{name: 0.5}), step_line(2)])
    url = console.start()
    page.goto(url)
    boxes = page.get_by_role("checkbox")
    expect(boxes).to_have_count(len(HOSTILE))
    links = page.locator("tbody a")
    for place in range(len(HOSTILE)):
        page.goto(url)
        links.nth(place).click()
        expect(page.get_by_text("step", exact=True)).to_be_visible()
        page.get_by_role("link", name="Curves").last.click()
        expect(page.locator(".plot canvas")).to_have_count(1)
        page.locator(".plot").focus()
        page.keyboard.press("Home")
        page.keyboard.press("Enter")
        page.get_by_role("link", name="Numbers of step 1").click()
        expect(page.get_by_role("heading", name="Step 1")).to_be_visible()
    page.goto(url)
    for box in boxes.all():
        box.check()
    page.get_by_role("button", name="Curves").click()
    expect(page.locator(".legend tr")).to_have_count(len(HOSTILE) + 1)
    for box in page.locator("#metrics input").all()[: len(HOSTILE)]:
        box.check()
    chosen = page.locator("#metrics input:checked").count()
    expect(page.locator(".chart")).to_have_count(chosen)
    assert page.evaluate("document.body.innerText.match(/[\\u202a-\\u202e\\x1b]/)") is None


def test_a_trajectory_is_found_read_and_copied(console: Console, page: Page):
    write_trajectories(write_run(console.scene, console.runs / "run"))
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(f"{console.start()}/runs/run")
    page.get_by_role("link", name="Trajectories").click()
    expect(page.locator("tbody tr")).to_have_count(2)
    page.get_by_label("Reward from").fill("-1")
    page.get_by_label("to reward").fill("0.5")
    page.get_by_label("Tool", exact=True).select_option("search")
    page.get_by_role("button", name="Show").click()
    expect(page.locator("tbody tr")).to_have_count(1)
    page.get_by_role("link", name="q2").click()
    expect(page.get_by_text('<img src=x onerror="alert(1)">').first).to_be_visible()
    page.get_by_role("link", name="log-probability").click()
    tokens = page.locator(".tokens span")
    expect(page.locator(".tokens .mid")).to_have_count(3)  # the tokens sampled, at p = 0.607
    tokens.first.focus()
    expect(page.locator("#value")).to_contain_text(re.compile("^Token 0 .*: not sampled"))
    for key, number in (("ArrowRight", 1), ("End", 4), ("ArrowRight", 4), ("ArrowLeft", 3)):
        page.keyboard.press(key)
        expect(page.locator("#value")).to_contain_text(f"Token {number} ")
    expect(page.locator("#value")).to_contain_text("-0.500, p = 0.607")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")
    expect(tokens.nth(3)).to_be_focused()
    tokens.nth(1).hover()
    expect(page.locator("#value")).to_contain_text("Token 1 ")
    page.get_by_role("button", name="Copy as JSON").click()
    expect(page.get_by_text("Copied.")).to_be_visible()
    copied = json.loads(page.evaluate("navigator.clipboard.readText()"))
    assert copied["turns"][0]["calls"][0]["text"] == "".join(HOSTILE)
    page.get_by_role("link", name="Trajectories").click()
    expect(page.get_by_label("Tool", exact=True)).to_have_value("search")
    page.get_by_role("link", name="Clear").click()
    page.locator("tbody a").first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text("q2")
    page.get_by_role("link", name="Next trajectory").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("q1")
    page.get_by_role("link", name="Previous trajectory").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("q2")


def test_a_tap_shows_the_value_of_a_token(console: Console, browser: Browser):
    write_trajectories(write_run(console.scene, console.runs / "run"))
    url = console.start()
    with closing(
        browser.new_context(has_touch=True, viewport={"width": 360, "height": 800})
    ) as one:
        page = one.new_page()
        page.goto(f"{url}/runs/run/trajectories/step_000001.parquet/0?colour=logprob")
        page.locator(".tokens span").nth(3).tap()
        expect(page.locator("#value")).to_contain_text(re.compile("^Token 3 .*p = 0.607"))


def test_turning_pages_keeps_the_heap_of_the_browser_as_it_is(
    console: Console, page: Page, tmp_path: Path
):
    write_runs(tmp_path / "large", 1, steps=10, trajectories=1100)
    page.goto(f"{console.start(str(tmp_path / 'large' / 'runs'))}/runs/run0/trajectories")
    heap: list[int] = []
    for number in range(12):
        heap.append(heap_bytes(page))
        expect(page.locator("tbody tr")).to_have_count(50)
        page.get_by_role("link", name="Next").click()
        page.wait_for_url(f"**start={50 * (number + 1)}")
    assert max(heap[2:]) < heap[1] + 500_000  # the first page was not come to by a link


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run asynchronous work in a thread: Playwright's own event loop has this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


async def state_of(redis_url: str, pool: str) -> ToolState | None:
    async with await RedisConnection.connect(redis_url, "tools") as connection:
        return (await ToolRegistry(connection, pool).read()).get("echo")


async def announce_server(redis_url: str, run_id: str) -> None:
    async with await Broker.connect(redis_url, run_id) as broker:
        server = RolloutServer(
            server_id="one", url="http://h:1", policy_version=2, pid=1, host="h", started_at=0.0
        )
        await Registry(broker).announce_rollout_server(server, 60.0)


def test_an_instance_is_drained_put_back_and_weighed_by_button(
    console: Console, page: Page, tmp_path: Path, redis_url: str, run_id: str
):
    (tmp_path / "my_tool.py").write_text(ECHO)
    options = ("--set", f"run.tool_pool={run_id}", "--set", "tools.echo.announce_expiry_s=1")
    console.spawn("serve", "tool", "my_tool:Echo", *options, AGENT_R1__REDIS__URL=redis_url)
    write_run(console.scene, console.runs / "live", f"run.id={run_id}", f'redis.url="{redis_url}"')
    run(announce_server(redis_url, run_id))
    url = console.start()

    def state() -> ToolState | None:
        return run(state_of(redis_url, run_id))

    wait_for(state, "the tool is not announced")
    page.goto(f"{url}/runs/live/services")
    expect(page.get_by_role("cell", name="takes calls")).to_be_visible()
    expect(page.get_by_role("row", name="one v2 h http://h:1")).to_be_visible()
    tools = page.get_by_role("row", name="echo")
    tools.get_by_role("link", name="Drain").click()
    expect(page.get_by_text("Drain this instance?")).to_be_visible()
    found = state()
    assert found is not None
    assert not found.instances[0].draining  # the question alone changes nothing
    page.get_by_role("button", name="Drain").click()
    expect(page.get_by_text("The instance drains.")).to_be_visible()
    expect(page.get_by_role("cell", name="draining")).to_be_visible()
    found = state()
    assert found is not None
    assert found.instances[0].draining
    tools.get_by_role("link", name="Undrain").click()
    page.get_by_role("button", name="Undrain").click()
    expect(page.get_by_role("cell", name="takes calls")).to_be_visible()
    page.get_by_role("link", name="Weights").click()
    page.get_by_label("Version 1.0").fill("0")
    page.get_by_role("button", name="Set weights").click()
    expect(page.get_by_role("alert")).to_contain_text("give no version any traffic")
    page.get_by_label("Version 1.0").fill("0.5")
    page.get_by_role("button", name="Set weights").click()
    expect(page.get_by_text("The weights are set.")).to_be_visible()
    found = state()
    assert found is not None
    assert found.weights == {"1.0": 0.5}
    page.get_by_role("link", name="Roll back").click()
    page.get_by_role("button", name="Roll back").click()
    expect(page.get_by_role("alert")).to_contain_text("no instance of a version before 1.0")


def test_a_run_is_stopped_after_a_question(console: Console, page: Page):
    folder = write_run(console.scene, console.runs / "run")
    console.start()
    launcher = console.processes[-1]
    command = Path(f"/proc/{launcher.pid}/cmdline").read_bytes().decode()
    values = {"pid": launcher.pid, "command": command, "state_dir": str(folder / "live")}
    (folder / LAUNCHER_FILE).write_text(json.dumps(values))
    page.goto(f"{console.start()}/runs/run/services")
    page.get_by_role("link", name="Stop the run").click()
    assert launcher.poll() is None
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text("The launcher has been asked to stop the run.")).to_be_visible()
    assert launcher.wait(START_TIMEOUT_S) == 0


def test_a_learner_elsewhere_is_followed_until_it_is_gone(
    console: Console, page: Page, tmp_path: Path
):
    folder = write_run(console.scene, tmp_path / "elsewhere")
    append_lines(folder / "metrics.jsonl", [step_line(1)])
    app = FastAPI()
    add_store_routes(app, folder)
    with served(nullcontext(app)) as learner:
        url = console.start(learner, AGENT_R1_TOKEN=TOKEN.value)
        page.goto(f"{url}/?token={TOKEN.value}")
        expect(page.get_by_role("row", name="elsewhere running 1 of 3")).to_be_visible()
        page.goto(f"{url}/curves?run=elsewhere&metric=reward/mean")
        expect(page.locator(".legend td").first).to_have_text("0.01")
        append_lines(folder / "metrics.jsonl", [step_line(2)])
        expect(page.locator(".legend td").first).to_have_text("0.02")
    expect(page.get_by_text(f"{learner} has not answered since")).to_be_visible()
    page.reload()
    expect(page.locator(".legend td").first).to_have_text("0.02")


def test_a_browser_sends_the_token_once(console: Console, page: Page):
    write_run(console.scene, console.runs / "run")
    url = console.start(AGENT_R1_TOKEN=TOKEN.value)
    page.goto(f"{url}/runs/run")
    page.get_by_label("Token").fill(TOKEN.value)
    page.get_by_role("button", name="Go on").click()
    expect(page).to_have_url(f"{url}/runs/run")
    page.goto(f"{url}/curves?token={TOKEN.value}&run=run")
    expect(page.get_by_role("heading", level=1)).to_have_text("Curves")
    assert TOKEN.value not in page.url
    assert page.evaluate("document.cookie") == ""
