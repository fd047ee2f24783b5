"""Who exchanges with whom, at how many bytes per second, and which link is the fullest. Pure."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.filesize import decimal

from shardline.cluster import parse_task
from shardline.core.status import TaskStatus
from shardline.roles import ROLES

MOST_EDGES = 16
"""Edges drawn at most: of more, the tasks of one role on a machine are drawn as one, then those of like machines."""

Pair = tuple[str, str]
"""Two tasks: the one further from the servers first."""
Pairs = Mapping[Pair, list[float]]
"""Bytes per second from the first of a pair to the second, and back."""


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """Tasks of one role that are drawn as one."""

    name: str
    """Such as "worker/0" or "worker/0-63"."""
    column: int
    """0 for workers, 1 for tasks between them and the servers, 2 for servers."""


@dataclass(frozen=True, kw_only=True)
class MachineView:
    """A machine, or several with the same roles."""

    name: str
    """Its host, or "64 machines"."""
    nodes: tuple[NodeView, ...]
    others: str
    """Its tasks that exchange nothing, such as "chief/0, evaluator/0"."""
    marked: bool
    """Whether it has the marked link."""


@dataclass(frozen=True, kw_only=True)
class EdgeView:
    """What moves between two nodes, which are named; within one machine, what moves through its memory too."""

    start: str
    end: str
    out_bytes_per_s: float
    in_bytes_per_s: float
    marked: bool
    """Whether it uses the marked link."""


@dataclass(frozen=True, kw_only=True)
class TopologyView:
    machines: tuple[MachineView, ...]
    edges: tuple[EdgeView, ...]
    marked: str
    """The marked link in words, such as "fullest link: 10.0.0.1 out, 94.0 MB/s, 75% of 125.0 MB/s"; empty while nothing
    moves."""


def topology_view(tasks: Sequence[TaskStatus]) -> TopologyView | None:
    """The topology of these tasks, which live; None if none of them has exchanged anything."""
    # In an IPv6 address the host has brackets.
    host = {task.task: task.address.rpartition(":")[0].strip("[]") or "?" for task in tasks}
    pairs = _pairs(tasks)
    if not pairs:
        return None
    talking = sorted({task for pair in pairs for task in pair}, key=_place)
    words, marked_host, marked_pairs = _mark(pairs, host, _lines(tasks, host))
    roles: dict[str, set[str]] = defaultdict(set)
    for task in talking:
        roles[host[task]].add(_role(task))
    kind = {task: ", ".join(sorted(roles[host[task]])) for task in talking}
    for box, node_of in ((host, str), (host, _role), (kind, _role)):
        found: dict[tuple[str, str], list[str]] = defaultdict(list)
        for task in talking:
            found[box[task], node_of(task)].append(task)
        name = {task: names for together in found.values() for names in (_names(together),) for task in together}
        edges = _edges(pairs, name, host, marked_pairs)
        if len(edges) <= MOST_EDGES:
            break
    machines = []
    for key in dict.fromkeys(box[task] for task in talking):
        hosts = {host[task] for task in talking if box[task] == key}
        machines.append(
            MachineView(
                name=hosts.copy().pop() if len(hosts) == 1 else f"{len(hosts)} machines",
                nodes=tuple(
                    NodeView(name=_names(together), column=_place(together[0])[0])
                    for (held, _), together in found.items()
                    if held == key
                ),
                others=_names(sorted((t for t, h in host.items() if h in hosts and t not in kind), key=_place)),
                marked=marked_host in hosts,
            )
        )
    return TopologyView(machines=tuple(machines), edges=edges, marked=words)


def _role(task: str) -> str:
    return _place(task)[1]


@functools.cache
def _place(task: str) -> tuple[int, str, int]:
    """Column, role and index: the order in which tasks are drawn."""
    role, index = parse_task(task)
    return 2 if ROLES[role].holds else 0 if ROLES[role].trains else 1, role, index


def _names(tasks: Iterable[str]) -> str:
    """Tasks in their order, with runs in short: "worker/0-3, worker/7, ps/0"."""
    runs: list[tuple[str, int, int]] = []
    for _, role, index in map(_place, tasks):
        if runs and runs[-1][0] == role and runs[-1][2] == index - 1:
            runs[-1] = role, runs[-1][1], index
        else:
            runs.append((role, index, index))
    return ", ".join(f"{role}/{first}" + (f"-{last}" if last > first else "") for role, first, last in runs)


def _pairs(tasks: Sequence[TaskStatus]) -> Pairs:
    there = {task.task for task in tasks}
    found: dict[Pair, list[float]] = {}
    for task in tasks:
        for peer in task.links.peers:
            if peer.task in there:
                turned = _place(task.task) > _place(peer.task)
                pair, moved = (task.task, peer.task), (peer.out_bytes, peer.in_bytes)
                both = found.setdefault(pair[::-1] if turned else pair, [0.0, 0.0])
                for way, rate in enumerate(moved[::-1] if turned else moved):
                    both[way] += rate
    return found


def _lines(tasks: Sequence[TaskStatus], host: Mapping[str, str]) -> dict[str, float]:
    """Bytes per second that the link of each host carries; 0 = not known."""
    found: dict[str, float] = {}
    for task in tasks:
        found[host[task.task]] = max(found.get(host[task.task], 0.0), task.links.line_bytes_per_s)
    return found


def _mark(pairs: Pairs, host: Mapping[str, str], lines: Mapping[str, float]) -> tuple[str, str, set[Pair]]:
    """What to mark: in words, the host whose link it is, and the pairs that use it."""
    used: dict[tuple[str, str], float] = defaultdict(float)
    users: dict[tuple[str, str], set[Pair]] = defaultdict(set)
    for (start, end), (out, back) in pairs.items():
        for sender, receiver, rate in ((host[start], host[end], out), (host[end], host[start], back)):
            if sender != receiver and rate > 0:
                for link in ((sender, "out"), (receiver, "in")):
                    used[link] += rate
                    users[link].add((start, end))
    share = {link: rate / lines[link[0]] for link, rate in used.items() if lines[link[0]]}
    if share or used:
        link = max(share or used, key=(share or used).__getitem__)
        told = f"{' '.join(link)}, {_rate(used[link])}"
        how = f"{share[link]:.0%} of {_rate(lines[link[0]])}" if share else "what it carries is not known"
        return f"{'fullest' if share else 'busiest'} link: {told}, {how}", link[0], users[link]
    busiest = max(pairs, key=lambda pair: sum(pairs[pair]))
    if rate := sum(pairs[busiest]):
        return f"busiest: {' and '.join(busiest)}, {_rate(rate)}, within one machine", "", {busiest}
    return "", "", set()


def _rate(value: float) -> str:
    return f"{decimal(round(value))}/s"


def _edges(pairs: Pairs, name: Mapping[str, str], host: Mapping[str, str], marked: set[Pair]) -> tuple[EdgeView, ...]:
    found: dict[Pair, list[float]] = {}
    bright = {(name[start], name[end]) for start, end in marked}
    for (start, end), both in pairs.items():
        if name[start] != name[end] or host[start] != host[end]:
            held = found.setdefault((name[start], name[end]), [0.0, 0.0])
            held[:] = held[0] + both[0], held[1] + both[1]
    return tuple(
        EdgeView(start=start, end=end, out_bytes_per_s=out, in_bytes_per_s=back, marked=(start, end) in bright)
        for (start, end), (out, back) in sorted(found.items())
    )
