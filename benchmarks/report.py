"""docs/results.md: the figures of benchmarks/results as tables, with each bar that is met or missed.

    python -m benchmarks.report > docs/results.md

`make docs` writes it, and so does `make bench` when it is done; `make docs-check` says whether it is fresh.
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import AT_LEAST
from benchmarks.process import ROOT
from benchmarks.sets import ALL

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
WORDS = {True: "", False: "**missed**", None: ""}

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

    counts = Counter(name for name, _ in missed)
    where = ", ".join(f"{count} of [{name}](#{name})" for name, count in counts.items())
    common = usual(sets.values())
    top = (
        "Figures are medians. A ratio compares medians of one run with the fastest rival, which is named. Sets give "
        f"commit and load of the machine before it; if they say no more, they ran on {', '.join(common)}. "
        "Fewer than 5 repeats are less certain. Bars not said to be missed are met. In pictures Shardline is blue, or "
        "red where it misses a bar."
    )
    total = f"{len(judged) - len(missed)} bars are met, {len(missed)} are missed{': ' * bool(missed)}{where}."
    lines = [
        "# Measured",
        "",
        "Made by `make docs` from `benchmarks/results/*.json`; [benchmarks](benchmarks.md) says how to measure.",
        "",
        *textwrap.wrap(top, 118),
        "",
        *textwrap.wrap(total, 118, break_on_hyphens=False),
    ]
    for name, chosen in ALL.items():
        lines += ["", f"## {name}", "", f"{chosen.ABOUT[0].upper()}{chosen.ABOUT[1:]}.", ""]
        lines += section(found[name], common) if name in found else ["Not measured yet."]
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
        f"errors. The server held {ps['mb_first_third']:.0f} MB in the first third, {ps['mb_last_third']:.0f} in the "
        f"last; at most {ps['mb_max']:.0f} MB, {ps['threads_max']} threads, {ps['files_max']} open files."
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
        "seconds, the worst in brackets. *Noticed*: the chief says so. *Standstill*: no batch is computed. *Back*: "
        "training goes on, or the chief, evaluator or asynchronous worker is there again. *Made again*: steps; "
        "asynchronous: acknowledged updates that were lost. *Held*: jobs that ended in the bits of an undisturbed "
        "process; asynchronous: with each update applied once and each batch trained on."
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
    yield "| killed | kills | noticed | standstill | back | made again | held |"
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


def section(one: Found, common: Sequence[str]) -> Iterable[str]:
    """Tables and picture of one set. common: what its origin leaves out."""
    rows = shown(one["rows"])
    units = {row["unit"] for row in rows}
    yield f"| work | {', '.join(('reached', *(units if len(units) == 1 else ())))} | beside | ratio | bar |"
    yield "|---|---|---|---|---|"
    for row in rows:
        work = row["work"] if row["note"] in ("", "reported") else f"{row['work']} ({row['note']})"
        judged = ": ".join(part for part in (bar(row), WORDS[row["met"]]) if part)
        cells = (work, amount(row["value"], row["unit"] if len(units) > 1 else ""), beside(row), ratio(row), judged)
        yield f"| {' | '.join(cells)} |".replace("  ", " ")
    yield from ("", origin(one, common))
    if one["not_run"]:
        yield ""
        yield from (f"- Not run: {what}: {why}" for what, why in one["not_run"].items())
    yield from ("", f"![{one['set']}](../benchmarks/results/{one['set']}.png)")


def shown(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows with a bar or a rival; of those measured alone, or beside what was predicted, the worst of each kind."""
    found: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if row["bar"] is None and (not row["against"] or row["work"].endswith("rivals with one call a step")):
            continue
        _, of, what = row["work"].partition(": ")
        key = what if of and not row["against"].keys() - {"predicted"} else row["work"]
        if key not in found or (row["ratio"] or 0) > (found[key]["ratio"] or 0):
            found[key] = row
    return list(found.values())


def amount(value: float | None, unit: str) -> str:
    """A figure with its unit."""
    return "not measured" if value is None else f"{value:.4g} {unit}".rstrip()


def beside(row: Mapping[str, Any]) -> str:
    """The rival that the ratio is beside, without the end that both names share, and what it reached."""
    found, ratio, value = row["against"], row["ratio"], row["value"]
    if not found or ratio is None or value is None:
        return ", ".join(f"{rival} {reached:.4g}" for rival, reached in found.items())
    rival = min(found, key=lambda name: abs(value - ratio * found[name]))
    words = row["work"].split(", ")
    shared = (f", {', '.join(words[first:])}" for first in range(1, len(words)))
    name = next((rival.removesuffix(end) for end in shared if rival.endswith(end)), rival)
    return f"{name} {found[rival]:.4g}"


def ratio(row: Mapping[str, Any]) -> str:
    """What is compared with the bar. Of memory it is the figure itself, and empty."""
    return f"{row['ratio']:.2f}" if row["ratio"] is not None and row["against"] else ""


def bar(row: Mapping[str, Any]) -> str:
    """The bar, such as "≥ 1.8"; empty where there is none."""
    return "" if row["bar"] is None else f"{'≥' if row['sense'] == AT_LEAST else '≤'} {row['bar']:g}"


def usual(sets: Iterable[Found]) -> list[str]:
    """What most sets have in common of `conditions`."""
    return [Counter(column).most_common(1)[0][0] for column in zip(*map(conditions, sets), strict=True)]


def conditions(one: Found) -> tuple[str, str, str, str]:
    """Where and how it was measured."""
    machine = one["machine"]
    return (
        f"{machine['cores']} cores of an {machine['cpu']}",
        f"torch {machine['versions']['torch']}",
        f"{one['scale']['repeats']} repeats",
        f"{one['network']['links']}{'' if one['network']['namespace'] else ' without a namespace'}",
    )


def origin(one: Found, common: Sequence[str]) -> str:
    """Its commit, the load before, and conditions that are not the common ones."""
    machine = one["machine"]
    parts = [f"Commit {commit(machine)}", f"load {machine['load_before'][0]:.1f}"]
    parts += [part for part, same in zip(conditions(one), common, strict=True) if part != same]
    return f"({'; '.join(parts)}.)"


if __name__ == "__main__":
    print(page(read(RESULTS)), end="")
