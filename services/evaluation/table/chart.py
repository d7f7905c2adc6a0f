"""A line chart as SVG text: report.py --curves--> picture of a table.

matplotlib is not among the dependencies, and two simple pictures are not worth adding it; the other
is that of matrix/picture.py, which shares the parts of the drawing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999999"),
    *("#6a3d9a", "#b15928"),
)
"""One a line, then from the start; Okabe and Ito's first, which the colour-blind can tell."""
WIDTH, HEIGHT = 760, 400
LEFT, TOP, BOTTOM = 56, 36, 48
LEGEND = 220
"""Width of the legend at the right, in pixels."""
MAX_TICKS = 10
STEPS_OF_TEN = (1, 2, 5)


def tick_step(span: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that gives at most `MAX_TICKS` ticks."""
    power = 10.0 ** math.floor(math.log10(span / MAX_TICKS))
    for factor in (*STEPS_OF_TEN, 10, 20):
        if span / (factor * power) <= MAX_TICKS:
            return factor * power
    raise AssertionError("20 times the power below span / MAX_TICKS is more than enough")


def line_chart(
    lines: Mapping[str, Sequence[float]], *, title: str, x_label: str, y_label: str
) -> str:
    """Draw lines over the steps 1, 2, 3, …, with y from 0 to 1.

    Returns:
        The text of an SVG file.
    """
    steps = max([2, *(len(values) for values in lines.values())])
    right, bottom = WIDTH - LEGEND, HEIGHT - BOTTOM

    def x_of(step: float) -> float:
        return LEFT + (step - 1) / (steps - 1) * (right - LEFT)

    def y_of(value: float) -> float:
        return bottom - min(1.0, max(0.0, value)) * (bottom - TOP)

    parts: list[str] = []
    for tenth in range(0, 11, 2):
        y = y_of(tenth / 10)
        parts.append(line(LEFT, y, right, y, "#dddddd"))
        parts.append(text(LEFT - 6, y + 4, f"{tenth / 10:.1f}", 'text-anchor="end"'))
    every = max(1, round(tick_step(steps)))
    for step in sorted({1, *range(every, steps + 1, every)}):
        if step == 1 or step - 1 >= every / 2:
            parts.append(line(x_of(step), bottom, x_of(step), bottom + 5, "#000000"))
            parts.append(text(x_of(step), bottom + 18, str(step), 'text-anchor="middle"'))
    parts.append(line(LEFT, bottom, right, bottom, "#000000"))
    parts.append(line(LEFT, TOP, LEFT, bottom, "#000000"))
    middle = (TOP + bottom) / 2
    parts.append(text((LEFT + right) / 2, HEIGHT - 10, x_label, 'text-anchor="middle"'))
    turned = f'text-anchor="middle" transform="rotate(-90 14 {middle:g})"'
    parts.append(text(14, middle, y_label, turned))
    for index, (name, values) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        points = " ".join(
            f"{x_of(step):.1f},{y_of(value):.1f}" for step, value in enumerate(values, start=1)
        )
        if points:
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
            )
        y = TOP + 10 + 20 * index
        parts.append(line(right + 16, y, right + 40, y, colour, 3))
        parts.append(text(right + 46, y + 4, name))
    return svg(WIDTH, HEIGHT, title, parts)


def svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """Return the text of an SVG file with a title above its parts."""
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        text(LEFT, 22, title, 'font-size="14"'),
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, attributes: str = "") -> str:
    """Return words at a place, in pixels."""
    space = " " if attributes else ""
    return f'<text x="{x:g}" y="{y:g}"{space}{attributes}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str, width: int = 1) -> str:
    """Return a line between two places, in pixels."""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="{width}"/>'
    )
