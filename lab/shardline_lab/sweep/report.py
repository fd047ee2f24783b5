"""The results of a sweep: a table, a file, a picture, and a link to the best checkpoint."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from shardline import methods
from shardline.cli.terminal import aligned
from shardline.host import files
from shardline_lab.sweep.ensemble import EnsembleMember
from shardline_lab.sweep.member import SweepMember

RESULTS, PICTURE, BEST = "results.json", "results.png", "best"


def ranked(members: Iterable[SweepMember]) -> list[SweepMember]:
    """The best first; those that have failed last."""
    return sorted(members, key=lambda member: member.found.rank)


def sentence(member: SweepMember) -> str:
    """How a model has ended."""
    at, value = member.found.best
    return member.found.failure or f"{member.found.metric} {value:.4f} at step {at} of {member.found.step}"


def table(ranked: Sequence[SweepMember]) -> list[str]:
    """A line for each model, also the ensemble, which has no step, and the sentences of those that have failed."""
    fields = [name for name, _ in ranked[0].point]
    rows = [[*fields, ranked[0].found.metric, "at step", "steps", "seconds"]]
    for member in ranked:
        found, (at, value) = member.found, member.found.best
        shown = "failed" if found.failure else f"{value:.4f}"
        steps = [str(at or ""), str(found.step or "")]
        rows.append([*dict(member.point).values(), shown, *steps, f"{found.seconds:.1f}"])
    failed = [f"{member.name}: {member.found.failure}" for member in ranked if member.found.failure]
    return [*aligned(rows, texts=len(fields)), *failed]


def write(ranked: Sequence[SweepMember], out: Path, ensemble: EnsembleMember | None = None) -> None:
    """Write the file and, where matplotlib is installed, the picture, and link the best checkpoint."""
    models = [
        {
            "fields": dict(member.point),
            "folder": str(member.folder.relative_to(out)),
            "best_step": member.found.best[0],
            **dataclasses.asdict(member.found),
        }
        for member in ranked
    ]
    found: dict[str, Any] = {"models": models}
    if ensemble is not None:
        found["ensemble"] = {
            "members": [str(member.folder.relative_to(out)) for member in ensemble.members],
            **ensemble.settings,
            "scores": dict(ensemble.found.scores).get(0),
            "failure": ensemble.found.failure,
        }
    files.replace(out / RESULTS, json.dumps(found, indent=1).encode())
    if not ranked[0].found.failure:
        temporary = out / f".{BEST}.{secrets.token_hex(4)}"
        temporary.symlink_to(ranked[0].best_checkpoint.relative_to(out))
        os.replace(temporary, out / BEST)
    if importlib.util.find_spec("matplotlib") is not None:
        draw(ranked, out / PICTURE, ensemble)


def draw(ranked: Sequence[SweepMember], path: Path, ensemble: EnsembleMember | None = None) -> None:
    """Draw the scores by step, with the ensemble's as a line, and for each field the best score by its value."""
    from matplotlib.figure import Figure

    fields = [name for name, _ in ranked[0].point]
    drawing = Figure(figsize=(4 * (1 + len(fields)), 3.2), layout="constrained")
    curves, *panels = drawing.subplots(1, 1 + len(fields), squeeze=False)[0]
    for place, member in reversed([*enumerate(ranked)]):
        scores = [(at, metrics[member.found.metric]) for at, metrics in member.found.scores]
        color, label = ("0.75", None) if place else ("C0", member.name)
        values = [math.nan if value is None else value for _, value in scores]
        curves.plot([at for at, _ in scores], values, marker=".", color=color, label=label)
    if ensemble is not None:
        curves.axhline(ensemble.found.best[1], color="C1", linestyle="--", label=ensemble.name)
    curves.set(xlabel="step", ylabel=ranked[0].found.metric)
    curves.legend(fontsize="small")
    for field, axes in zip(fields, panels, strict=True):
        kind = methods.OVERRIDES[field]
        where: list[Any] = [(kind if kind in (int, float) else str)(dict(member.point)[field]) for member in ranked]
        axes.plot(where, [member.found.best[1] for member in ranked], "o", alpha=0.6)
        if kind is float and 0 < 20 * min(where) <= max(where):
            axes.set_xscale("log")
        axes.set_xlabel(field)
    drawing.savefig(path, dpi=120)
