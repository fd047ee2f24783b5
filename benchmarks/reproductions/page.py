"""docs/reproductions.md and its plots, from the kept figures: `python -m benchmarks.reproductions.page`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.reproductions.base import RESULTS, Curve, Found, Reproduction

TOP = """# Reproductions

What papers claim about Shardline's methods, tried small. `make reproduce` runs them again and writes this page and
`benchmarks/results/reproductions`. Only time is virtual ([simulator](simulator.md)), so every run gives the same
figures. Models and data are smaller than the papers', so the shape of a claim counts, not its numbers. *Digits* are
those of scikit-learn, learned by a perceptron unless another network is named; passes take Gamma distributed times.
Figures are means over seeds; the files have their ranges.
"""

RANGE = re.compile(r" \([\d.]+ to [\d.]+\)")
"""A range of seeds."""


def page(all_of: Sequence[Reproduction]) -> Iterator[str]:
    """Lines of the page."""
    yield TOP
    for one in all_of:
        path = RESULTS / f"{one.number}.json"
        yield f"## {one.number}: {one.title}\n"
        yield f"**Claim.** {one.claim} ({one.source}.)\n"
        yield f"**Setting.** {one.setting}\n"
        if not path.exists():
            yield "Not run yet.\n"
            continue
        found = json.loads(path.read_text(encoding="utf-8"))
        yield from table(found["rows"])
        yield ""
        for part, holds in found["verdicts"].items():
            yield f"- {'Yes' if holds else '**No**'}: {part}."
        yield ""
        if found["curves"]:
            yield f"![{one.title}](../benchmarks/results/reproductions/{one.number}.png)\n"


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Rows as Markdown, with every column that any has."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        yield f"| {' | '.join(RANGE.sub('', str(row.get(name, ''))) for name in columns)} |"


def draw(one: Reproduction, found: Found) -> Path | None:
    """Write the plot of a reproduction's curves, if it has any."""
    if not found.curves:
        return None
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.2), layout="constrained")
    for curve in found.curves:
        _line(axes, curve)
    axes.set_xlabel(found.axes[0])
    axes.set_ylabel(found.axes[1])
    axes.set_title(f"{one.number}: {one.title}")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=8)
    path = RESULTS / f"{one.number}.png"
    figure.savefig(path, dpi=110, metadata={"Software": ""})
    pyplot.close(figure)
    return path


def _line(axes: Any, curve: Curve) -> None:
    axes.plot(curve.x, curve.y, marker="o" if len(curve.x) < 20 else "", label=curve.label)


if __name__ == "__main__":
    from benchmarks.reproductions.__main__ import ALL

    sys.stdout.write("\n".join(page(ALL)) + "\n")
