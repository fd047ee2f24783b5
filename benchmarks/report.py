"""docs/results.md: the figures of benchmarks/results as tables, with each bar that is met or missed.

    python -m benchmarks.report > docs/results.md

`make docs` writes it, and so does `make bench` when it is done; `make docs-check` says whether it is fresh.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.figures import AT_LEAST
from benchmarks.process import ROOT
from benchmarks.sets import ALL

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
ENOUGH = 5
"""Repeats that docs/benchmarks.md promises."""
WORDS = {True: "met", False: "**missed**", None: ""}

Found = Mapping[str, Any]
"""One file of results."""


def read(folder: Path) -> dict[str, Found]:
    """Results by set, in the order of the sets, then "load" and "recovery"; those that have no file are left out."""
    paths = {name: folder / f"{name}.json" for name in (*ALL, "load", "recovery")}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.is_file()}


def page(found: Mapping[str, Found]) -> str:
    """The whole page."""
    sets = {name: one for name, one in found.items() if name in ALL}
    judged = [(name, row) for name, one in sets.items() for row in one["rows"] if row["met"] is not None]
    missed = [(name, row) for name, row in judged if not row["met"]]

    def of_set(chosen: str) -> str:
        return "; ".join(f"{row['work']} {row['ratio']:.2f}" for name, row in missed if name == chosen)

    lines = [
        "# Measured",
        "",
        "This page is made of `benchmarks/results/*.json`: `make docs`. What is compared, and how, is in",
        "[benchmarks](benchmarks.md). Figures are medians; a ratio is that of medians of one run, against the fastest",
        "rival, which is the one named; the files have more. In pictures ours is blue, or red where its bar is missed.",
        "",
        f"{len(judged) - len(missed)} bars are met, {len(missed)} are missed{':' if missed else '.'}",
        "",
        *(f"- `{name}`: {of_set(name)}" for name in dict.fromkeys(name for name, _ in missed)),
    ]
    for name, chosen in ALL.items():
        lines += ["", f"## {name}", "", f"{chosen.ABOUT[0].upper()}{chosen.ABOUT[1:]}.", ""]
        lines += section(found[name]) if name in found else ["No figures are recorded: nothing is known of its bars."]
    if "load" in found:
        lines += ["", "## load", "", *load(found["load"])]
    if "recovery" in found:
        lines += ["", "## recovery", "", *recovery(found["recovery"])]
    return "\n".join(lines) + "\n"


def load(one: Found) -> Iterable[str]:
    """What `benchmarks.load` found."""
    ps, machine = one["ps"], one["machine"]
    text = (
        f"Many workers on one server: `python -m benchmarks.load`. {one['workers']} workers, {one['megabytes']:g} MB, "
        f"lane `{one['lane']}`, {one['seconds']:.0f} s: {one['pushes']:,} pushes ({one['pushes_per_s']:.1f} a second), "
        f"the slowest {one['slowest_push_s']:.1f} s, staleness at most {one['staleness_max']}, {len(one['errors'])} "
        f"errors. The server held {ps['mb_first_third']:.0f} MB in the first third of the time and "
        f"{ps['mb_last_third']:.0f} MB in the last, at most {ps['mb_max']:.0f} MB, {ps['threads_max']} threads and "
        f"{ps['files_max']} open files."
    )
    yield from textwrap.wrap(text, 118)
    yield ""
    load_before = f"load {machine['load_before'][0]:.1f} before"
    yield f"({machine['cores']} cores of an {machine['cpu']}; commit {commit(machine)}; {load_before}.)"


def recovery(one: Found) -> Iterable[str]:
    """What `make chaos-figures` found."""
    cases = one["cases"]
    every, timeout = (_values(cases, name) for name in ("checkpoint_every", "timeout_s"))
    ways = {True: "from nothing", False: "as a fork of a process that has imported everything"}
    start = " or ".join(ways[cold] for cold in sorted({case["cold"] for case in cases}))
    text = (
        f"What a death costs: `make chaos-figures`. Two servers, two workers, a checkpoint every {every} steps, "
        f"`--timeout {timeout}`. Each task is killed with SIGKILL and started again 0.3 s later, {start}. Medians in "
        "seconds, the worst in brackets. Noticed: the chief, or the next one, says so. Standstill: the longest time "
        "around the kill in which no batch was computed. Back: training goes on, the next chief has taken over, or the "
        "evaluator (asynchronous: the worker) is there again. Made again: steps; asynchronous: acknowledged updates "
        "that were lost. A job that held ended in the bits of one undisturbed process; asynchronous: with each update "
        "in the parameters once, and each batch trained on."
    )
    yield from textwrap.wrap(text, 118)
    yield from ("", *deaths(cases), "")
    machines = [case["machine"] for case in cases]
    where = " and ".join(sorted({f"{machine['cores']} cores of an {machine['cpu']}" for machine in machines}))
    commits = ", ".join(dict.fromkeys(commit(machine) for machine in machines))
    load_before = max(machine["load_before"][0] for machine in machines)
    yield f"({where}; commits {commits}; load at most {load_before:.1f} before.)"
    for case in cases:
        yield from (f"- Broken: {case['case']}: {sentence}" for sentence in case["broken"])


def _values(cases: Iterable[Mapping[str, Any]], name: str) -> str:
    return " or ".join(f"{value:g}" for value in sorted({case[name] for case in cases}))


def deaths(cases: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    """A line per kind of death."""
    yield "| killed | kills | noticed | standstill | back | made again | jobs that held |"
    yield "|---|---|---|---|---|---|---|"
    for case in cases:
        names = ("noticed_s", "stall_s", "resumed_s", "again")
        figures = " | ".join(spread(case[name], case["kills"]) for name in names)
        held = f"{case['held']} of {case['jobs']}"
        yield f"| {case['case']} | {case['kills']} | {figures} | {held}{'' if not case['broken'] else ': **broken**'} |"


def spread(found: Mapping[str, float] | None, kills: int) -> str:
    """Median, and the worst in brackets; of how many, where the next kill came first for some."""
    if found is None:
        return ""
    few = f", of {found['of']}" if found["of"] < kills else ""
    return f"{found['median']:g} ({found['worst']:g}{few})"


def commit(machine: Mapping[str, Any]) -> str:
    """Of which state of the tree."""
    return f"{machine['commit'][:7]}{'' if machine['clean'] else ' with changes'}"


def section(one: Found) -> Iterable[str]:
    """Tables and picture of one set."""
    yield "| work | reached | beside | ratio | bar |"
    yield "|---|---|---|---|---|"
    for row in one["rows"]:
        if row["bar"] is None and (not row["against"] or row["work"].endswith("rivals with one call a step")):
            continue
        work = row["work"] if row["note"] in ("", "reported") else f"{row['work']} ({row['note']})"
        judged = ": ".join(part for part in (bar(row), WORDS[row["met"]]) if part)
        cells = (work, amount(row["value"], row["unit"]), beside(row), ratio(row), judged)
        yield f"| {' | '.join(cells)} |".replace("  ", " ")
    yield from ("", origin(one))
    if one["not_run"]:
        yield ""
        yield from (f"- Not run: {what}: {why}" for what, why in one["not_run"].items())
    yield from ("", f"![{one['set']}](../benchmarks/results/{one['set']}.png)")


def amount(value: float | None, unit: str) -> str:
    """A figure with its unit."""
    return "not measured" if value is None else f"{value:.4g} {unit}"


def beside(row: Mapping[str, Any]) -> str:
    """The rival that the ratio is beside, and what it reached."""
    found, ratio, value = row["against"], row["ratio"], row["value"]
    if not found or ratio is None or value is None:
        return ", ".join(f"{rival} {reached:.4g}" for rival, reached in found.items())
    rival = min(found, key=lambda name: abs(value - ratio * found[name]))
    return f"{rival} {found[rival]:.4g}"


def ratio(row: Mapping[str, Any]) -> str:
    """What is compared with the bar. Of memory it is the figure itself, and empty."""
    return f"{row['ratio']:.2f}" if row["ratio"] is not None and row["against"] else ""


def bar(row: Mapping[str, Any]) -> str:
    """The bar, such as "at least 1.8"; empty where there is none."""
    return "" if row["bar"] is None else f"{row['sense'] if row['sense'] == AT_LEAST else 'at most'} {row['bar']:g}"


def origin(one: Found) -> str:
    """Where and how it was measured, with what makes the figures weaker than they should be."""
    machine, repeats = one["machine"], one["scale"]["repeats"]
    parts = [
        f"{machine['cores']} cores of an {machine['cpu']}",
        f"torch {machine['versions']['torch']}",
        f"commit {commit(machine)}",
        f"load {machine['load_before'][0]:.1f} before",
        f"{repeats} repeats{'' if repeats >= ENOUGH else f', fewer than the {ENOUGH} there should be'}",
        f"{one['network']['links']}{'' if one['network']['namespace'] else ' without a namespace'}",
    ]
    return f"({'; '.join(parts)}.)"


if __name__ == "__main__":
    print(page(read(RESULTS)), end="")
