"""Templates of the pages, and how texts from outside stand in them.

Names of runs, metrics and tools come from files that anybody may have written: they are escaped,
control characters are shown as Python writes them, and a text that runs from right to left does not
turn what stands beside it.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import quote, unquote

from fastapi import Query
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse

from agent_r1.console.run_state import as_number
from agent_r1.runtime.unicode import escaped_line, repair_text

HERE = Path(__file__).parent
STATIC_DIR = HERE / "static"
ROWS = 100
"""Most rows of a table on a page; of the metrics of one step, three times as many."""
MOST_RUNS = 20
"""Most runs that are compared, or on one chart."""
Keys = Annotated[list[str], Query(max_length=MOST_RUNS)]
"""Runs in the query of a page, as `key_of` names them."""
LONGEST_TEXT = 300
"""Most characters of a text that stand in a cell."""
LIST_BYTES = 120_000
"""Bytes of the cells of a table; a page has 200 kB."""
CELL_BYTES = 25
"""Bytes of HTML around a cell, counted with it."""
LARGEST = 1e9
"""Numbers from there on have an exponent."""
T = TypeVar("T")
_UNSAFE_IN_FORMS = re.compile(r"[%\x00-\x1f\x7f]")


def key_of(name: str) -> str:
    """Return a name as forms carry it: browsers change control characters in their fields."""
    return _UNSAFE_IN_FORMS.sub(lambda found: quote(found[0]), name)


def name_of(key: str) -> str:
    """Return the name that a form carries."""
    return unquote(key)


def shown(text: object, longest: int = LONGEST_TEXT) -> Markup:
    """Render a text from outside."""
    line = escaped_line(repair_text(str(text)))
    line = line if len(line) <= longest else f"{line[:longest]}…"
    return Markup("<bdi>{}</bdi>").format(line)


def number(value: object, sign: str = "") -> str:
    """Render a number of a file; "-" for what is none. With sign "+", a positive one has it."""
    known = as_number(value)
    if math.isnan(known):
        return "-"
    return f"{known:{sign}.3f}" if abs(known) < LARGEST else f"{known:{sign}.3g}"


def fitting(rows: Sequence[T], texts: Callable[[T], Iterable[object]], most: int = ROWS) -> list[T]:
    """Return the first rows whose cells fit on a page.

    Args:
        rows: of a table.
        texts: gives the texts of a row, as `shown` renders them.
        most: rows.
    """
    kept: list[T] = []
    left = LIST_BYTES
    for row in rows[:most]:
        left -= sum(len(shown(text).encode()) + CELL_BYTES for text in texts(row))
        if left < 0:
            break
        kept.append(row)
    return kept


def _moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _repaired(value: object) -> object:
    """Make what a template prints sendable: half of a surrogate pair has no UTF-8."""
    return repair_text(value) if type(value) is str else value


_TEMPLATES = Environment(
    loader=FileSystemLoader(HERE / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_repaired,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {
    "shown": shown,
    "key": key_of,
    "path": lambda name: quote(name, safe=""),
    "number": number,
    "moment": _moment,
    "pairs": lambda values: [(one, one) for one in values],
    "signed": lambda value: number(value, "+"),
    "interval": lambda one: f"{number(one.mean)} [{number(one.low)}, {number(one.high)}]",
}


def pager(request: Request, start: int, rows: int, most: int) -> list[tuple[str, str, str]]:
    """Return the links of a list to the page before and after, as (relation, title, address).

    Args:
        request: of the page; the links keep its choices.
        start: first row.
        rows: rows from there on, of which one more than a page is enough.
        most: rows of a page.
    """
    places = [("prev", "Previous", max(0, start - most))] if start else []
    places += [("next", "Next", start + most)] if rows > most else []
    url = request.url
    return [(a, b, f"?{url.include_query_params(start=at).query}") for a, b, at in places]


def page(request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """Return a page."""
    html = _TEMPLATES.get_template(template).render(
        csrf=request.state.csrf, here=request.url.path, mirror=request.app.state.mirror, **values
    )
    return HTMLResponse(html, status)
