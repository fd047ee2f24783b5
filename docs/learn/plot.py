"""Plots of the lessons, from the files of your own runs.

python docs/learn/plot.py curves OUT.png RUN...      loss over steps; a run is its folder or a file of JSON lines
python docs/learn/plot.py bytes OUT.png RUN...       loss over the megabytes that workers pushed and pulled
python docs/learn/plot.py bars OUT.png FIGURES...    gradients per second and staleness, from `simulate --json`
python docs/learn/plot.py passes OUT.png RUN         who computes what when in a pipeline
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's log, one for each step."""
    path = run / "logs" / "steps.jsonl" if run.is_dir() else run
    return [json.loads(line) for line in path.read_text().splitlines()]


def smooth(values: list[float], width: int = 10) -> list[float]:
    """The mean of each value and those before it, `width` at most."""
    parts = [values[max(0, at - width + 1) : at + 1] for at in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def curves(runs: list[Path]) -> None:
    for run in runs:
        steps = steps_of(run)
        plt.plot([step["step"] for step in steps], smooth([step["loss"] for step in steps]), label=run.stem)
    plt.xlabel("step")


def transferred(runs: list[Path]) -> None:
    for run in runs:
        steps = steps_of(run)
        moved = json.loads((run / "summary.json").read_text())["bytes"]
        each = (moved["push"]["wire"] + moved["pull"]["wire"]) / len(steps) / 1e6
        at = [each * (number + 1) for number in range(len(steps))]
        plt.plot(at, smooth([step["loss"] for step in steps]), marker=".", label=run.stem)
    plt.xscale("log")
    plt.xlabel("MB on the wire")


def bars(files: list[Path]) -> None:
    figures = [json.loads(path.read_text()) for path in files]
    names = [path.stem for path in files]
    plt.bar(names, [one["passes_per_s"] * (1 - one["passes_unused"]) for one in figures])
    plt.ylabel("gradients per second that count")
    other = plt.twinx()
    other.plot(names, [one["staleness"]["mean"] for one in figures], "ko")
    other.set_ylabel("mean staleness (dots)")
    other.set_ylim(-0.1, max(1.0, 1.1 * max(one["staleness"]["mean"] for one in figures)))


def passes(run: Path) -> None:
    events = json.loads((run / "pipeline-trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X" and event.get("cat") in ("forward", "backward")]
    last = max(span["args"]["step"] for span in spans)
    spans = [span for span in spans if span["args"]["step"] == last]
    begin = min(span["ts"] for span in spans)
    for span in spans:
        color = "tab:blue" if span["cat"] == "forward" else "tab:orange"
        plt.barh(
            span["args"]["stage"], span["dur"] / 1000, left=(span["ts"] - begin) / 1000, color=color, edgecolor="white"
        )
    plt.gca().invert_yaxis()
    plt.xlabel("ms of the last step; forward blue, backward orange")
    plt.ylabel("stage")


def main() -> None:
    kind, out, *given = sys.argv[1:]
    paths = [Path(name) for name in given]
    if kind == "passes":
        passes(paths[0])
    elif kind == "bars":
        bars(paths)
    else:
        {"curves": curves, "bytes": transferred}[kind](paths)
        plt.ylabel("loss")
        plt.legend()
    plt.tight_layout()
    plt.savefig(out, dpi=120)
    print(f"plot: {out}")


if __name__ == "__main__":
    main()
