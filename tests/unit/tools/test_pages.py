"""The page fetcher: documents of a folder, read page by page, each trajectory at its own place."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.tools.base import CallContext
from agent_r1.tools.pages import PageFetcher, html_text, split_pages


def context(rollout: str) -> CallContext:
    return CallContext(rollout_id=rollout, turn=0, tool_context=None, timeout_s=5.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "guide").mkdir()
    (tmp_path / "guide" / "start.md").write_text("first line\nsecond line\nthird line\n")
    (tmp_path / "page.html").write_text("<head><title>x</title></head><p>Hello <b>you</b></p>")
    (tmp_path / "secret.key").write_text("no document")
    return tmp_path


async def test_each_trajectory_reads_on_where_it_is(folder: Path):
    tool = PageFetcher(str(folder), page_chars=12)
    for rollout in ("a", "b"):
        await tool.open(rollout, None)
    first = await tool.call({"document": "guide/start.md"}, context("a"))
    assert first == "guide/start.md, page 1 of 3\n\nfirst line"
    assert (await tool.call({}, context("a"))).endswith("page 2 of 3\n\nsecond line")
    with pytest.raises(ValueError, match="no document is open"):
        await tool.call({}, context("b"))
    assert (await tool.call({"document": "page.html"}, context("b"))).endswith("Hello you")
    assert (await tool.call({}, context("a"))).endswith("page 3 of 3\n\nthird line")
    with pytest.raises(ValueError, match="has 3 pages, and no page 4"):
        await tool.call({}, context("a"))
    assert "first line" in await tool.call({"page": 1}, context("a"))
    await tool.close("a")
    await tool.open("a", None)
    with pytest.raises(ValueError, match="no document is open"):
        await tool.call({}, context("a"))


@pytest.mark.parametrize("name", ["../outside.txt", "/etc/passwd", "secret.key", "guide/begin.md"])
async def test_only_documents_of_the_folder_can_be_asked_for(folder: Path, name: str):
    (folder.parent / "outside.txt").write_text("outside")
    tool = PageFetcher(str(folder))
    await tool.open("a", None)
    with pytest.raises(ValueError, match=r"there is no document .*; near are .*guide/start\.md"):
        await tool.call({"document": name}, context("a"))


def test_a_folder_without_documents_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="has no document"):
        PageFetcher(str(tmp_path))
    with pytest.raises(ValueError, match="has no document"):
        PageFetcher(str(tmp_path / "gone"))


@pytest.mark.parametrize(
    ("text", "pages"),
    [
        ("", [""]),
        ("abc", ["abc"]),
        ("one two three", ["one", "two", "three"]),  # "one two" has 7 characters
        ("one\ntwo", ["one", "two"]),
        ("abcdefgh", ["abcdef", "gh"]),
    ],
)
def test_pages_end_between_lines_or_words(text: str, pages: list[str]):
    assert split_pages(text, 6) == pages


def test_what_is_not_seen_of_a_page_is_left_out():
    html = "<html><head><title>t</title></head><body><script>var x</script><h1>A</h1>b &amp; c"
    assert html_text(html) == "A\nb & c"


async def test_another_branch_reads_on_from_the_same_place(folder: Path):
    tool = PageFetcher(str(folder), page_chars=12)
    await tool.open("a", None)
    await tool.call({"document": "guide/start.md"}, context("a"))
    await tool.fork("a", "b")
    assert "page 2 of 3" in await tool.call({}, context("b"))
    assert "page 3 of 3" in await tool.call({}, context("b"))
    assert "page 2 of 3" in await tool.call({}, context("a"))
    await tool.close("a")
    assert "first line" in await tool.call({"page": 1}, context("b"))
