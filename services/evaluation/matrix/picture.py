"""The trade-off of a matrix as one picture: score against tokens and against seconds, as SVG.

report.py --points--> here. One row of panels for each kind of data set; its points are means over
the sets. For task files of the user's, one panel each: score against sampled tokens, with lines
through ways to decode that differ in their cost alone. The parts of the drawing are those of the
tables' charts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agent_r1.evaluation.table.chart import COLOURS, line, svg, text

PANEL_W, PANEL_H = 300, 220
LEFT, TOP, GAP, LEGEND = 62, 56, 56, 250
SIZE = 5.0
SHAPES = ("circle", "square", "triangle", "diamond", "cross", "plus")
COSTS = (("tokens a question", "tokens"), ("seconds a question", "seconds"))
Scale = Callable[[float], float]


@dataclass(frozen=True)
class Point:
    """One way to answer questions of one family."""

    family: str
    colour: str
    """What decides the colour: the method."""
    shape: str
    """What decides the shape: model and decoding."""
    score: float
    tokens: float
    seconds: float


def trade_off(points: Sequence[Point]) -> str:
    """Draw the points.

    Returns:
        The text of an SVG file.
    """
    families = list(dict.fromkeys(point.family for point in points))
    colours = list(dict.fromkeys(point.colour for point in points))
    shapes = list(dict.fromkeys(point.shape for point in points))
    parts: list[str] = []
    for row, family in enumerate(families):
        members = [point for point in points if point.family == family]
        for column, (label, cost) in enumerate(COSTS):
            x, y = LEFT + column * (PANEL_W + GAP), TOP + row * (PANEL_H + GAP)
            scale, ticks = log_scale([getattr(point, cost) for point in members], x, x + PANEL_W)
            parts += frame(x, y, family if column == 0 else "", label, scale, ticks)
            for point in members:
                parts.append(
                    mark(
                        SHAPES[shapes.index(point.shape) % len(SHAPES)],
                        scale(getattr(point, cost)),
                        y + PANEL_H * (1 - point.score),
                        COLOURS[colours.index(point.colour) % len(COLOURS)],
                    )
                )
    parts += _legend(LEFT + 2 * (PANEL_W + GAP) - 20, colours, shapes)
    width = LEFT + 2 * (PANEL_W + GAP) + LEGEND
    rows = max(len(families) * (PANEL_H + GAP), 18 * (len(colours) + len(shapes) + 2))
    return svg(width, TOP + rows, "Score against what it costs", parts)


@dataclass(frozen=True)
class Series:
    """Ways to decode that differ in what they may cost."""

    name: str
    points: Sequence[tuple[float, float]]
    """Sampled tokens a question and score, by tokens."""


def curves(panels: Mapping[str, Sequence[Series]]) -> str:
    """Draw score over sampled tokens, a panel for each set.

    Returns:
        The text of an SVG file.
    """
    names = list(dict.fromkeys(one.name for series in panels.values() for one in series))
    parts: list[str] = []
    for column, (title, series) in enumerate(panels.items()):
        x = LEFT + column * (PANEL_W + GAP)
        tokens = [point[0] for one in series for point in one.points]
        scale, ticks = log_scale(tokens, x, x + PANEL_W)
        parts += frame(x, TOP, title, COSTS[0][0], scale, ticks)
        for one in series:
            colour = COLOURS[names.index(one.name) % len(COLOURS)]
            places = [(scale(cost), TOP + PANEL_H * (1 - score)) for cost, score in one.points]
            joined = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
            parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}"/>')
            parts += [mark("circle", px, py, colour) for px, py in places]
    parts += _legend(LEFT + len(panels) * (PANEL_W + GAP) - 20, names, [])
    width = LEFT + len(panels) * (PANEL_W + GAP) + LEGEND
    height = TOP + max(PANEL_H + GAP, 18 * (len(names) + 2))
    return svg(width, height, "Score over sampled tokens", parts)


def log_scale(values: Sequence[float], start: float, end: float) -> tuple[Scale, list[float]]:
    """Return a logarithmic axis over whole powers of ten, and its ticks.

    Args:
        values: what it has to show; those of 0 and below stand at its beginning.
        start: place of its beginning, in pixels.
        end: place of its end, in pixels.
    """
    positive = [value for value in values if value > 0] or [1.0]
    low = math.floor(math.log10(min(positive)))
    high = max(low + 1, math.ceil(math.log10(max(positive))))

    def place(value: float) -> float:
        power = low if value <= 0 else max(low, math.log10(value))
        return start + (power - low) / (high - low) * (end - start)

    return place, [10.0**power for power in range(low, high + 1)]


def frame(
    x: float, y: float, title: str, label: str, scale: Scale, ticks: Sequence[float]
) -> list[str]:
    """Draw the axes of one panel, whose upper left corner is at x and y; scores go from 0 to 1."""
    right, bottom = x + PANEL_W, y + PANEL_H
    parts: list[str] = []
    for tenth in range(0, 11, 2):
        height = bottom - PANEL_H * tenth / 10
        parts.append(line(x, height, right, height, "#dddddd"))
        parts.append(text(x - 6, height + 4, f"{tenth / 10:.1f}", 'text-anchor="end"'))
    for tick in ticks:
        parts.append(line(scale(tick), bottom, scale(tick), bottom + 5, "#000000"))
        parts.append(text(scale(tick), bottom + 18, f"{tick:g}", 'text-anchor="middle"'))
    parts.append(line(x, bottom, right, bottom, "#000000"))
    parts.append(line(x, y, x, bottom, "#000000"))
    parts.append(text((x + right) / 2, bottom + 34, label, 'text-anchor="middle"'))
    if title:
        parts.append(text(x, y - 8, title, 'font-weight="bold"'))
    return parts


def mark(shape: str, x: float, y: float, colour: str) -> str:
    """Draw one point."""
    s = SIZE
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{s:g}" fill="{colour}"/>'
    strokes = {"cross": ((-s, -s, s, s), (-s, s, s, -s)), "plus": ((-s, 0, s, 0), (0, -s, 0, s))}
    if shape in strokes:
        return "".join(line(x + a, y + b, x + c, y + d, colour, 3) for a, b, c, d in strokes[shape])
    corners = {
        "square": ((-s, -s), (s, -s), (s, s), (-s, s)),
        "triangle": ((0, -s), (s, s), (-s, s)),
        "diamond": ((0, -s), (s, 0), (0, s), (-s, 0)),
    }[shape]
    places = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{places}" fill="{colour}"/>'


def _legend(x: float, colours: Sequence[str], shapes: Sequence[str]) -> list[str]:
    parts: list[str] = []
    y = TOP + 10.0
    for index, name in enumerate(colours):
        parts.append(mark("circle", x, y, COLOURS[index % len(COLOURS)]))
        parts.append(text(x + 14, y + 4, name))
        y += 18
    y += 12
    for index, name in enumerate(shapes):
        parts.append(mark(SHAPES[index % len(SHAPES)], x, y, "#555555"))
        parts.append(text(x + 14, y + 4, name))
        y += 18
    return parts
