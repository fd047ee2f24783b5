"""Draw docs/images/pipeline-NAME.svg of every pipeline in the table, each from the trace of a real run.

    python docs/make_pipeline_pictures.py            # all; a quarter of a minute each
    python docs/make_pipeline_pictures.py stash

A run has three stages on a worker each and four microbatches per step. Its passes sleep (benchmarks/simulated_job.py),
so that three workers fit on two cores; what is drawn is when they ran.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.simulated import Pass, passes, real, staged
from shardline_pipeline import PIPELINES, schedule_named

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
STAGES, MICROBATCHES, STEPS, DRAWN = 3, 4, 14, (8, 9)
"""DRAWN: steps whose passes are drawn, with what lies between them."""
WIDTH, LABEL, LANE, STASH, GAP = 900, 70, 24, 16, 14
COLOURS = {"forward": ("#2f6fde", "#8fb2ef"), "backward": ("#b4690e", "#dcab6c")}
"""Of even and of odd steps."""


def picture(pipeline: str, found: Sequence[Pass]) -> str:
    """An SVG of the drawn steps: passes by stage, microbatches held, and the version of the parameters."""
    steps = [one for one in found if one["args"]["step"] in DRAWN]
    begin, end = min(one["ts"] for one in steps), max(one["ts"] + one["dur"] for one in steps)
    shown = [one for one in found if begin <= one["ts"] and one["ts"] + one["dur"] <= end]
    most = max(one["args"]["held"] for one in shown)
    each = LANE + STASH + GAP
    height = 24 + STAGES * each + 6

    def x(time_us: float) -> float:
        return round(LABEL + (WIDTH - LABEL - 4) * (time_us - begin) / (end - begin), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="0" y="14" font-weight="bold">{escape(pipeline)}</text>',
        f'<text x="{WIDTH - 4}" y="14" text-anchor="end" fill="#5c6778">{(end - begin) / 1e6:.2f} s of a run</text>',
    ]
    for stage in range(STAGES):
        own, top = [one for one in shown if one["args"]["stage"] == stage], 24 + stage * each
        parts.append(f'<text x="0" y="{top + 16}">stage {stage}</text>')
        parts.append(f'<rect x="{LABEL}" y="{top}" width="{WIDTH - LABEL - 4}" height="{LANE}" fill="#eef1f5"/>')
        parts += [_slice(one, x(one["ts"]), x(one["ts"] + one["dur"]), top) for one in own]
        parts += _stash(own, top + LANE + 2, most, x)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _slice(one: Pass, left: float, right: float, top: float) -> str:
    facts, middle = one["args"], (left + right) / 2
    colour = COLOURS[one["cat"]][facts["step"] % 2]
    title = f"step {facts['step']}, microbatch {facts['microbatch']}, {one['cat']}, version {facts['version']}"
    return (
        f'<rect x="{left}" y="{top}" width="{max(1.0, right - left - 0.7):.1f}" height="{LANE}" rx="2" fill="{colour}">'
        f"<title>{title}</title></rect>"
        f'<text x="{middle:.1f}" y="{top + 16}" text-anchor="middle" fill="#ffffff">{facts["microbatch"]}</text>'
    )


def _stash(own: Sequence[Pass], top: float, most: int, x: Any) -> list[str]:
    """The microbatches held as a line, and versions where they change."""
    path, labels, named, free = "", [], -1, -1.0
    held = 0

    def level(count: int) -> float:
        return round(top + STASH - STASH * count / most, 1)

    for one in own:
        facts, left = one["args"], x(one["ts"])
        after = facts["held"] - (one["cat"] == "backward")
        path += f"{'L' if path else 'M'}{left},{level(held if path else facts['held'])}V{level(facts['held'])}"
        path += f"H{x(one['ts'] + one['dur'])}V{level(after)}"
        held = after
        if facts["version"] != named and left > free:
            labels.append(
                f'<text x="{left}" y="{top + STASH + 9}" font-size="10" fill="#5c6778">v{facts["version"]}</text>'
            )
            free = left + 20
        named = facts["version"]
    return [f'<path d="{path}" fill="none" stroke="#1d7a46" stroke-width="1.4"/>', *labels]


def main(names: Sequence[str]) -> None:
    """Draw the named pipelines, or all that have stages."""
    chosen = names or [one.name for one in PIPELINES if schedule_named(one.name).staged]
    for name in chosen:
        with tempfile.TemporaryDirectory(prefix="shardline-picture-") as folder:
            out = Path(folder) / "run"
            real(staged(name, STAGES, MICROBATCHES, steps=STEPS, mean_s=0.09, cv=0.0, width=32), out)
            found = passes(out)
        path = IMAGES / f"pipeline-{name.partition(':')[0]}.svg"
        path.write_text(picture(name, found), encoding="utf-8")
        print(path.relative_to(ROOT), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
