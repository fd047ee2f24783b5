"""Servers of which kind hold a tensor: those in workers' processes, or those of their own. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import replace

from shardline.core.spec import JobSpec, TensorKind, TensorSpec
from shardline.errors import JobError

AUTO, PS, ALLREDUCE = "auto", "ps", "allreduce"
PLACES = (ALLREDUCE, PS)
"""Servers in workers' processes, which are the first by index, and those with processes of their own.

What the former hold is reduced and gathered among the workers, as by an all-reduce.
"""
REMEDIES = {
    ALLREDUCE: "no worker holds parameters: start workers with --mirrored N, or --with-ps",
    PS: "all servers are in workers' processes: add some with --ps N, or behind those of the workers in cluster.json",
}
TOLD = {ALLREDUCE: "among the workers", PS: "on servers"}


def placed(tensors: Iterable[TensorSpec], communication: Mapping[str, str]) -> tuple[TensorSpec, ...]:
    """Tensors with the place (PS or ALLREDUCE) of the first pattern that their name matches.

    Raises JobError for a tensor without one, one whose names (tied weights) have different ones, or a pattern that
    matches nothing.
    """
    found, used = [], set()
    for tensor in tensors:
        names = (tensor.part_of or tensor.name, *tensor.aliases)
        matches = {name: next((p for p in communication if fnmatch.fnmatchcase(name, p)), None) for name in names}
        places = {communication[pattern] for pattern in matches.values() if pattern is not None}
        if len(places) != 1 or None in matches.values():
            told = ", ".join(f"{name!r} {f'matches {p!r}' if p else 'matches none'}" for name, p in matches.items())
            what = "places one tensor in two ways" if len(places) > 1 else "leaves a tensor without a place"
            raise JobError(f"communication {what}: {told}; end it with '*', and give tied weights one place")
        used |= {*matches.values()}
        found.append(replace(tensor, place=places.pop()))
    for pattern in communication.keys() - used:
        raise JobError(f"communication has the pattern {pattern!r}, which no tensor matches first; leave it out")
    return tuple(found)


def shards_by_place(job: JobSpec, own: int, others: int) -> dict[str, int]:
    """Number of shards for tensors of each place (place_of); empty if any server may hold any tensor.

    own: servers in workers' processes. others: those of their own. The job's `communication` decides; if it is AUTO and
    there are both, tables are on servers, and everything else is exchanged among the workers.

    Raises JobError for tensors that no server may hold.
    """
    there = {ALLREDUCE: own, PS: others}
    for tensor in job.tensors:
        if tensor.place and not there.get(tensor.place):
            how = REMEDIES.get(tensor.place, f"there are only {' and '.join(PLACES)}")
            raise JobError(f"communication places {tensor.name!r} with {tensor.place!r}, but {how}")
    if not own or not others or not (job.has_tables or any(tensor.place for tensor in job.tensors)):
        return {}
    needed = {place_of(tensor) for tensor in job.tensors}
    return {place: count for place, count in there.items() if place in needed}


def place_of(tensor: TensorSpec) -> str:
    """PS or ALLREDUCE."""
    return tensor.place or (PS if tensor.kind is TensorKind.TABLE else ALLREDUCE)
