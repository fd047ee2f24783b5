"""A result as a picture: panels over virtual time, in one SVG file that needs nothing else."""

from __future__ import annotations

import math
from html import escape

import numpy as np
import numpy.typing as npt

from shardline_lab.simulator.result import Result

Numbers = npt.NDArray[np.float64]
POINTS = 120
"""Most points of a line; each is the mean of what lies between it and the one before."""
STEPS = 4
"""Fewest steps between two points, in the mean."""
WIDTH, HEIGHT, LEFT, TOP, GAP = 760, 110, 90, 48, 44
TICKS = 3


def panels(result: Result) -> list[tuple[str, Numbers, Numbers]]:
    """(title, virtual seconds, values) of every line: time per step, throughput, bytes, staleness, loss."""
    ends_s = np.array(result.step_ends_s)
    edges_s = np.linspace(0.0, result.seconds, min(POINTS, max(1, result.steps // STEPS)) + 1)
    done = np.searchsorted(ends_s, edges_s, side="right")
    totals = np.vstack([np.zeros(3), np.array(result.traffic)])[done]
    counts, width_s = np.diff(done), edges_s[1]
    nbytes, pushes, staleness = np.diff(totals, axis=0).T
    with np.errstate(divide="ignore", invalid="ignore"):
        found = [
            ("seconds per step", edges_s[1:], width_s / counts),
            ("steps per second", edges_s[1:], counts / width_s),
            ("megabytes per second, pushed and pulled", edges_s[1:], nbytes / width_s / 1e6),
            ("staleness in updates, mean", edges_s[1:], staleness / pushes),
        ]
    if result.losses:
        times, losses = np.array(sorted(result.losses)).T
        groups = np.array_split(np.arange(len(losses)), min(POINTS, len(losses)))
        where, mean = (np.array([values[group].mean() for group in groups]) for values in (times, losses))
        found.append(("loss", where, mean))
    return found


def svg(result: Result, title: str) -> str:
    """The picture. It has the reader's text colour, so it can stand on light and dark pages."""
    lines = panels(result)
    height = TOP + len(lines) * (HEIGHT + GAP)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 40} {height}" '
        'font-family="sans-serif" font-size="12" fill="currentColor">',
        "<style>:root{color:#1c2733;background:#fff}"
        "@media(prefers-color-scheme:dark){:root{color:#dbe4ee;background:#14191f}}</style>",
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]
    for number, (name, times_s, values) in enumerate(lines):
        drawn += _panel(TOP + number * (HEIGHT + GAP), name, times_s, values, result.seconds)
    return "\n".join([*drawn, "</svg>", ""])


def _panel(top: float, name: str, times_s: Numbers, values: Numbers, seconds: float) -> list[str]:
    finite = values[np.isfinite(values)]
    low = min(0.0, float(finite.min(initial=0.0)))
    high = max(float(finite.max(initial=0.0)), low + 1e-12)

    def x(second: float) -> float:
        return LEFT + WIDTH * second / seconds

    def y(value: float) -> float:
        return top + HEIGHT * (1 - (value - low) / (high - low))

    points = " ".join(
        f"{x(second):.1f},{y(value):.1f}" for second, value in zip(times_s, values, strict=True) if math.isfinite(value)
    )
    marks = [f'<text x="{LEFT}" y="{top - 6}">{escape(name)}</text>']
    for part in np.linspace(low, high, TICKS):
        marks.append(f'<text x="{LEFT - 8}" y="{y(part) + 4:.1f}" text-anchor="end">{part:.3g}</text>')
        marks.append(_line(LEFT, y(part), LEFT + WIDTH, y(part)))
    for second in np.linspace(0.0, seconds, TICKS):
        marks.append(f'<text x="{x(second):.1f}" y="{top + HEIGHT + 16}" text-anchor="middle">{second:.4g} s</text>')
    return [*marks, f'<polyline points="{points}" fill="none" stroke="#1f6f8b" stroke-width="1.6"/>']


def _line(*ends: float) -> str:
    x1, y1, x2, y2 = (f"{end:.1f}" for end in ends)
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="currentColor" stroke-opacity="0.2"/>'
