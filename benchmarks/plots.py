"""Bar charts of a set's rows: one group per row, ours beside what it is compared with.

python -m benchmarks.plots        # draws benchmarks/results/*.png once more, from the figures beside them
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from benchmarks.figures import AT_LEAST, Row

OURS, THEIRS, MISSED = "#1f6f8b", "#b8b8b8", "#c0392b"
WIDTH_IN = 11.0
ROW_IN = 0.34


def bars(rows: Sequence[Row]) -> list[tuple[str, float, str, str]]:
    """Label, value, unit and colour of every bar, from top to bottom."""
    found = []
    for row in rows:
        if row.value is None:
            continue
        found.append((label(row), row.value, row.unit, MISSED if row.met is False else OURS))
        found += [(f"    {rival}", value, row.unit, THEIRS) for rival, value in row.against.items()]
    return found


def label(row: Row) -> str:
    """The row's work, with its ratio and bar where there are such."""
    if row.ratio is None or row.bar is None:
        return row.work
    sign = "≥" if row.sense == AT_LEAST else "≤"
    return f"{row.work}: {row.ratio:.2f} ({sign} {row.bar:g})"


def draw(path: Path, title: str, rows: Sequence[Row]) -> bool:
    """Write a PNG; one panel per unit. Returns whether there was anything to draw."""
    found = bars(rows)
    if not found:
        return False
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    units = list(dict.fromkeys(unit for _, _, unit, _ in found))
    counts = [sum(1 for bar in found if bar[2] == unit) for unit in units]
    figure, panels = pyplot.subplots(
        len(units),
        1,
        figsize=(WIDTH_IN, 1.2 + ROW_IN * sum(counts) + 0.6 * len(units)),
        squeeze=False,
        gridspec_kw={"height_ratios": counts},
        layout="constrained",
    )
    for unit, panel in zip(units, panels[:, 0], strict=True):
        mine = [bar for bar in found if bar[2] == unit]
        places = range(len(mine))
        panel.barh(places, [bar[1] for bar in mine], color=[bar[3] for bar in mine])
        panel.set_yticks(places, [bar[0] for bar in mine], fontsize=8)
        panel.invert_yaxis()
        panel.set_xlabel(unit)
        for place, bar in zip(places, mine, strict=True):
            panel.text(bar[1], place, f" {bar[1]:.4g}", va="center", fontsize=8)
        panel.margins(x=0.12)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def redraw(folder: Path) -> list[Path]:
    """Draw SET.png of every SET.json in a folder; returns the pictures. Files that have no rows are no sets."""
    drawn = []
    known = {field.name for field in fields(Row)}
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        if "rows" not in found:
            continue
        rows = [Row(**{name: value for name, value in row.items() if name in known}) for row in found["rows"]]
        if draw(path.with_suffix(".png"), found["about"], rows):
            drawn.append(path.with_suffix(".png"))
    return drawn


if __name__ == "__main__":
    for picture in redraw(Path(__file__).parent / "results"):
        print(picture)
