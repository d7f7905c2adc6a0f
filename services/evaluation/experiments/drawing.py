"""Pictures of reports: series of points --> an SVG file, by matplotlib, which an extra brings."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from agent_r1.runtime.files.writing import write_atomically
from agent_r1.runtime.imports import import_extra

COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999999"),
    *("#6a3d9a", "#b15928"),
)
"""Okabe and Ito's first, which the colour-blind can tell; then from the start."""
MARKERS = "os^Dx+"
PANEL_INCHES = (3.6, 2.8)
LEGEND_INCHES = 2.6
# Text stays text, and the same numbers give the same file.
SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "agent-r1", "font.size": 9}


@dataclass(frozen=True)
class Series:
    """Points of one name."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    """Place in `COLOURS`."""
    marker: int | None = None
    """Place in `MARKERS`; None draws none."""
    line: bool = True
    """Whether the points are joined."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes; values on the vertical one go from 0 to 1."""

    x_label: str
    series: Sequence[Series]
    y_label: str = ""
    title: str = ""
    costs: bool = False
    """The horizontal axis is a cost, and logarithmic over whole powers of ten."""


Picture = tuple[str, Sequence[Sequence[Panel]]]
"""A title, and rows of panels."""


def curves(lines: Mapping[str, Sequence[float]], x_label: str, y_label: str) -> Panel:
    """Return a panel of lines over the steps 1, 2, 3, …"""
    series = [
        Series(name, list(enumerate(values, start=1)), colour)
        for colour, (name, values) in enumerate(lines.items())
    ]
    return Panel(x_label, series, y_label)


def draw(file: Path, picture: Picture) -> None:
    """Draw a picture into an SVG file.

    Raises:
        MissingPackageError: matplotlib is not installed; the text has the command that installs it.
        OSError: the file cannot be written.
    """
    matplotlib = import_extra("matplotlib", "plots", "a picture")
    figures = import_extra("matplotlib.figure", "plots", "a picture")
    title, rows = picture
    width, height = PANEL_INCHES
    size = (width * len(rows[0]) + LEGEND_INCHES, height * len(rows) + 0.4)
    with matplotlib.rc_context(SETTINGS):
        figure = figures.Figure(figsize=size, layout="constrained")
        figure.suptitle(title, x=0.01, horizontalalignment="left")
        axes = figure.subplots(len(rows), len(rows[0]), squeeze=False)
        named: dict[str, Any] = {}
        for one, panel in zip(axes.flat, chain(*rows), strict=True):
            named |= _fill(one, panel)
        figure.legend(named.values(), named.keys(), loc="outside right upper", frameon=False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    write_atomically(file, text.getvalue())


def _fill(axes: Any, panel: Panel) -> dict[str, Any]:
    """Draw one panel; return what the legend shows of each name."""
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label, ylim=(-0.02, 1.02))
    axes.grid(axis="y", color="#dddddd")
    axes.spines[["top", "right"]].set_visible(False)
    least = -math.inf
    if panel.costs:  # a cost may be 0, which has no logarithm
        known = [x for one in panel.series for x, _ in one.points if x > 0] or [1.0]
        low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
        least = 10.0**low
        axes.set(xscale="log", xlim=(least, 10.0 ** max(low + 1, high)))
    named: dict[str, Any] = {}
    for one in panel.series:
        (named[one.name],) = axes.plot(
            [max(least, x) for x, _ in one.points],
            [y for _, y in one.points],
            color=COLOURS[one.colour % len(COLOURS)],
            marker=None if one.marker is None else MARKERS[one.marker % len(MARKERS)],
            linestyle="-" if one.line else "none",
            clip_on=False,
        )
    return named
