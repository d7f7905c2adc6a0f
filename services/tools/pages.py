"""`agent_r1.tools.pages:PageFetcher`: the model reads documents of a folder, page by page.

A session tool: each trajectory has a place where it reads, so that the next page needs no name.
"""

from __future__ import annotations

import asyncio
import difflib
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from pydantic import JsonValue

from agent_r1.tools.base import Arguments, CallContext, Tool

SUFFIXES = (".txt", ".md", ".html", ".htm")
_UNSEEN = ("script", "style", "head")
_BLOCKS = {"p", "div", "br", "li", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "section", "table"}


@dataclass(frozen=True)
class _Place:
    """Place at which a trajectory reads."""

    document: str = ""
    page: int = 0
    """Number of the page, from 1; 0 before the first one."""


class PageFetcher(Tool):
    """Returns a page of a document.

    Args:
        folder: has the documents: .txt, .md and .html files, in folders below it too. A document
            is called by its path within the folder.
        page_chars: most characters of a page; pages end between lines where they can.
        description: what the model reads about the tool.

    Raises:
        ValueError: the folder is missing or has no document.
    """

    name = "fetch_page"
    parameters = {
        "type": "object",
        "properties": {
            "document": {
                "type": "string",
                "description": "Name of the document. Leave it out for the one that is open.",
            },
            "page": {
                "type": "integer",
                "minimum": 1,
                "description": "Number of the page. Leave it out for the next one.",
            },
        },
        "additionalProperties": False,
    }
    sessions = True

    def __init__(
        self,
        folder: str,
        page_chars: int = 2000,
        description: str = "Returns a page of a document.",
    ) -> None:
        if page_chars < 1:
            raise ValueError(f"page_chars ({page_chars}) must be >= 1")
        self.description = description
        self._page_chars = page_chars
        self._places: dict[str, _Place] = {}
        root = Path(folder)
        # Only what is listed here can be asked for: no name leads out of the folder.
        self._documents = {
            path.relative_to(root).as_posix(): path
            for path in sorted(root.rglob("*"))
            if path.suffix in SUFFIXES and path.is_file()
        }
        if not self._documents:
            raise ValueError(f"folder ({folder}) has no document ({', '.join(SUFFIXES)})")

    async def open(self, rollout_id: str, tool_context: JsonValue) -> None:
        """Begin to read; nothing is open yet."""
        self._places[rollout_id] = _Place()

    async def fork(self, rollout_id: str, fork_id: str) -> None:
        """Let another branch read on from the same place."""
        self._places[fork_id] = self._places[rollout_id]

    async def close(self, rollout_id: str) -> None:
        """Forget where the trajectory read."""
        self._places.pop(rollout_id, None)

    async def call(self, arguments: Arguments, context: CallContext) -> str:
        """Return a page.

        Raises:
            ValueError: there is no such document or page; the text says which there are.
        """
        place = self._places[context.rollout_id]
        document = str(arguments.get("document", place.document))
        pages = await asyncio.to_thread(self._pages, document)
        following = place.page + 1 if document == place.document else 1
        page = int(str(arguments.get("page", following)))
        if not 1 <= page <= len(pages):
            raise ValueError(f"{document} has {len(pages)} pages, and no page {page}")
        self._places[context.rollout_id] = _Place(document, page)
        return f"{document}, page {page} of {len(pages)}\n\n{pages[page - 1]}"

    def _pages(self, document: str) -> list[str]:
        if not document:
            raise ValueError("no document is open; name one in `document`")
        path = self._documents.get(document)
        if path is None:
            near = difflib.get_close_matches(document, self._documents, n=3, cutoff=0.0)
            raise ValueError(f"there is no document {document!r}; near are {', '.join(near)}")
        text = path.read_text(encoding="utf-8-sig", errors="replace")
        return split_pages(html_text(text) if "htm" in path.suffix else text, self._page_chars)


def split_pages(text: str, page_chars: int) -> list[str]:
    """Cut a text into pages, at the last end of a line or word that fits; one for an empty text."""
    pages: list[str] = []
    rest = text.strip()
    while len(rest) > page_chars:
        window = rest[: page_chars + 1]
        cut = max(window.rfind("\n"), 0) or max(window.rfind(" "), 0) or page_chars
        pages.append(rest[:cut].rstrip())
        rest = rest[cut:].lstrip()
    return [*pages, rest]


def html_text(html: str) -> str:
    """Return what a reader of an HTML page sees, one block a line."""
    reader = _TextReader()
    reader.feed(html)
    reader.close()
    lines = (" ".join(line.split()) for line in "".join(reader.pieces).splitlines())
    return "\n".join(line for line in lines if line)


class _TextReader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self._unseen = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._unseen += tag in _UNSEEN
        if tag in _BLOCKS:
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._unseen -= tag in _UNSEEN
        if tag in _BLOCKS:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if self._unseen <= 0:
            self.pieces.append(data)
