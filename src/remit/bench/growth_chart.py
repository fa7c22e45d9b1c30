"""SVG log-log chart.

Draws lines over two logarithmic axes, with colours for light and dark pages. Measures nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise
from math import ceil, floor, log10
from typing import Final, NamedTuple

WIDTH: Final = 960
HEIGHT: Final = 520
LEFT, RIGHT, TOP, BOTTOM = 84, 700, 64, 456
LABEL_GAP: Final = 20
COLOURS: Final = (
    ("#57606a", "#9aa4af"), ("#8c6d1f", "#d9b44a"), ("#8250df", "#bc8cff"), ("#0969da", "#58a6ff"), ("#0a7a76", "#39c5bb"),
    ("#bc4c00", "#f0883e"), ("#cf222e", "#ff7b72"), ("#1a7f37", "#3fb950"), ("#bf3989", "#f778ba"), ("#1f2328", "#e6edf3"),
)  # fmt: skip
"""Colours for light and dark pages. Lines also differ by their dashes."""
DASHES: Final = ("", "7 4", "2 4")


class ChartLine(NamedTuple):
    name: str
    points: Sequence[tuple[float, float]]
    """All values are positive."""


class LogAxis(NamedTuple):
    """Maps a value to a coordinate: `low` and `high` are powers of ten, at the coordinates `start` and `end`."""

    low: int
    high: int
    start: float
    end: float

    def position(self, value: float) -> float:
        return self.start + (log10(value) - self.low) / (self.high - self.low) * (self.end - self.start)

    @property
    def ticks(self) -> list[int]:
        return list(range(self.low, self.high + 1))


def axis(values: Sequence[float], start: float, end: float) -> LogAxis:
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    return LogAxis(low, max(high, low + 1), start, end)


def draw(title: str, across: str, upwards: str, lines: Sequence[ChartLine]) -> str:
    """Return the chart as SVG. Each line is labelled at its end, so that no legend is needed."""
    if not any(line.points for line in lines):
        raise ValueError("nothing to draw: no line has a point")
    x = axis([point[0] for line in lines for point in line.points], LEFT, RIGHT)
    y = axis([point[1] for line in lines for point in line.points], BOTTOM, TOP)
    description = f"{upwards} over {across}, both logarithmic: " + "; ".join(_describe(line) for line in lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="title desc"'
        " font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif\">",
        f'  <title id="title">{escape(title)}</title>',
        f'  <desc id="desc">{escape(description)}</desc>',
        *_style(len(lines)),
        f'  <rect class="ground" width="{WIDTH}" height="{HEIGHT}"/>',
        f'  <text class="name" x="{LEFT}" y="36">{escape(title)}</text>',
        *_grid(x, y),
        f'  <text class="say" x="{(LEFT + RIGHT) / 2:g}" y="{HEIGHT - 16}" text-anchor="middle">{escape(across)}</text>',
        f'  <text class="say" transform="translate(22 {(TOP + BOTTOM) / 2:g}) rotate(-90)" text-anchor="middle">'
        f"{escape(upwards)}</text>",
        *_curves(lines, x, y),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _describe(line: ChartLine) -> str:
    return f"{line.name}: " + ", ".join(f"{value:.3g} at {x:,.0f}" for x, value in line.points)


def _style(lines: int) -> list[str]:
    light, dark = ([_colour_rules(index, shade) for index in range(lines)] for shade in (0, 1))
    return [
        "  <style>",
        "    /* Own background: viewers that ignore colour schemes show the light picture, which is readable on any page. */",
        "    .ground { fill: #fbfbf9 } .grid { stroke: #d0d7de; stroke-width: 1 }",
        "    .name { fill: #1f2328; font-size: 19px; font-weight: 600 } .say { fill: #57606a; font-size: 14px }",
        "    .line { fill: none; stroke-width: 2.5; stroke-linejoin: round } .text { font-size: 14px }",
        *light,
        "    @media (prefers-color-scheme: dark) {",
        "    .ground { fill: #0d1117 } .grid { stroke: #30363d } .name { fill: #e6edf3 } .say { fill: #9aa4af }",
        *dark,
        "    }",
        "  </style>",
    ]


def _colour_rules(index: int, shade: int) -> str:
    colour = COLOURS[index % len(COLOURS)][shade]
    return f"    .line-{index} {{ stroke: {colour} }} .text-{index} {{ fill: {colour} }}"


def _grid(x: LogAxis, y: LogAxis) -> list[str]:
    across = [
        f'  <path class="grid" d="M{x.position(10**tick):.1f} {TOP}V{BOTTOM}"/>'
        f'<text class="say" x="{x.position(10**tick):.1f}" y="{BOTTOM + 22}" text-anchor="middle">{_tick_label(tick)}</text>'
        for tick in x.ticks
    ]
    up = [
        f'  <path class="grid" d="M{LEFT} {y.position(10**tick):.1f}H{RIGHT}"/>'
        f'<text class="say" x="{LEFT - 8}" y="{y.position(10**tick) + 5:.1f}" text-anchor="end">{_tick_label(tick)}</text>'
        for tick in y.ticks
    ]
    return across + up


def _tick_label(tick: int) -> str:
    return f"{10**tick:,}" if tick >= 0 else f"{10.0**tick:.{-tick}f}"


def _curves(lines: Sequence[ChartLine], x: LogAxis, y: LogAxis) -> list[str]:
    parts = []
    for index, (line, label) in enumerate(
        zip(lines, _spread_labels([y.position(line.points[-1][1]) for line in lines]), strict=True)
    ):
        points = [(x.position(across), y.position(value)) for across, value in line.points]
        path = "M" + "L".join(f"{across:.1f} {value:.1f}" for across, value in points)
        end_x, end_y = points[-1]
        parts += [
            f'  <path class="line line-{index}" stroke-dasharray="{DASHES[index % len(DASHES)]}" d="{path}"/>',
            *(f'  <circle class="text-{index}" cx="{across:.1f}" cy="{value:.1f}" r="3.5"/>' for across, value in points),
            f'  <path class="line line-{index}" style="stroke-width: 1"'
            f' d="M{end_x:.1f} {end_y:.1f}L{RIGHT + 22} {label:.1f}"/>',
            f'  <text class="text text-{index}" x="{RIGHT + 28}" y="{label + 5:.1f}">{escape(line.name)}</text>',
        ]
    return parts


def _spread_labels(preferred: Sequence[float]) -> list[float]:
    """Move label positions apart by LABEL_GAP, keeping their order and staying as close as possible to the given positions."""
    positions = list(preferred)
    order = sorted(range(len(preferred)), key=lambda at: preferred[at])
    for before, index in pairwise(order):
        positions[index] = max(positions[index], positions[before] + LABEL_GAP)
    below: float = BOTTOM
    for index in reversed(order):
        positions[index] = min(positions[index], below)
        below = positions[index] - LABEL_GAP
    return positions
