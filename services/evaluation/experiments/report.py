"""Reports of experiments: numbers --> `{results}.md`, `{results}.json`, and pictures.

table_report.py and matrix_report.py say what is found; a template beside them puts it in words. A
report is made of its JSON file and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from agent_r1.evaluation.answer_file import write_json
from agent_r1.evaluation.experiments.drawing import Picture, draw
from agent_r1.evaluation.experiments.findings import share
from agent_r1.runtime.files.writing import write_atomically
from agent_r1.runtime.imports import MissingPackageError

NOT_RUN = "not run"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a table; the first one names the columns."""
    head, *others = rows
    lines = [head, ["---"] * len(head), *others]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)  # no escapes: it is Markdown
_TEMPLATES.filters |= {
    "paragraph": lambda text: " ".join(text.split()) + "\n",  # a tag takes its line end with it
    "table": markdown_table,
    "share": share,
    "versions": lambda found: ", ".join(f"{name} {version}" for name, version in found.items()),
    "sentence": lambda text: text[:1].upper() + text[1:],
}


def render(template: str, found: Mapping[str, Any], **more: Any) -> str:
    """Return the text of a report."""
    text = _TEMPLATES.get_template(template).render(found, **more)
    # Parts that are left out leave their blank lines.
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def write_report(
    out: Path,
    record: Callable[[Mapping[str, str]], dict[str, Any]],
    report: Callable[[Mapping[str, Any]], str],
    pictures: Mapping[str, Picture],
) -> list[Path]:
    """Write a report.

    Args:
        out: names its files, without suffix.
        record: returns what the JSON file holds, given the names of the pictures' files.
        report: returns the text, given what the JSON file holds.
        pictures: by what follows `out` in the name of their file; none is drawn without matplotlib,
            and the report says so.

    Returns:
        The files.

    Raises:
        ValueError: they cannot be written.
    """
    files = [out.with_name(f"{out.name}{suffix}") for suffix in (".md", ".json")]
    drawn: dict[str, str] = {}
    reason = ""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for key, picture in pictures.items():
            file = out.with_name(f"{out.name}{key}.svg")
            try:
                draw(file, picture)
            except MissingPackageError as exc:
                reason = str(exc)
                continue
            files.append(file)
            drawn[key] = file.name
        found = {**record(drawn), "not_drawn": reason}
        write_json(files[1], found)
        write_atomically(files[0], report(found))
    except OSError as exc:
        raise ValueError(
            f"the results ({out}) cannot be written: {exc.strerror}; name a --out"
        ) from exc
    return files
