"""docs/concepts.md has the way of a gradient: a real step passes these functions, in this order, and few others."""

from __future__ import annotations

import ast
import functools
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from shardline.job import Job
from shardline.rpc.messages import data
from tests.support.cluster import Cluster
from tests.support.jobs import make_job

ROOT = Path(__file__).parents[2]
PRODUCT = tuple(f"{ROOT / folder}/" for folder in ("shardline", "services", "worker"))
"""Whose functions are looked at; an environment with libraries may lie beside them."""
MOST = {"there": 12, "back": 10}
LANES = ("grpc", "tcp", "shm")
SEAMS = ("shardline/cadence/", "shardline/topology/", "shardline/codecs/", "shardline/update/")
ARITHMETIC = ("shardline/core/", "shardline/native/")
BLOCK = "shardline/storage/bucket.py"
PLACE = re.compile(r"`([\w/]+\.py):([\w.<>]+)`")

Place = tuple[str, str]
"""(file, function)."""


def section(name: str) -> str:
    text = (ROOT / "docs" / "concepts.md").read_text()
    found = re.search(rf"<!-- way: {name} -->\n(.*?)<!-- end of way -->", text, re.DOTALL)
    assert found is not None, name
    return found.group(1)


def places(text: str) -> list[Place]:
    return [(file, function) for file, function in PLACE.findall(text)]


def rooms(way: str, lane: str = "grpc") -> list[Place]:
    """The rows of a way, with the lane's own room in the row that is the lane's.

    On shm without those of copies and streams.
    """
    found = []
    for number, line in enumerate(re.findall(r"^\| \d+.*$", section(way), re.MULTILINE), start=1):
        row = re.match(r"\| (\d+)(?: \((lane|copied|stream)\))? \| ", line)
        assert row is not None and int(row.group(1)) == number, line
        (place,) = places(line)
        if row.group(2) not in ("copied", "stream") or lane != "shm":
            found.append(rooms_of_lanes()[lane][way] if row.group(2) == "lane" and lane != "grpc" else place)
    return found


def rooms_of_lanes() -> Mapping[str, Mapping[str, Place]]:
    found = {}
    for name, there, back in re.findall(r"^\| `(\w+)` \| (\S+) \| (\S+) \|$", section("lanes"), re.MULTILINE):
        found[name] = {"there": places(there)[0], "back": places(back)[0]}
    return found


def functions(tree: ast.AST, prefix: str = "") -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}"
            yield from functions(node, f"{prefix}{node.name}.<locals>.")


@pytest.mark.parametrize("way", MOST)
def test_the_way_has_few_rooms_and_none_twice(way: str) -> None:
    found = rooms(way)
    assert 0 < len(found) <= MOST[way]
    assert len(set(found)) == len(found)


def test_the_two_ways_share_no_room() -> None:
    assert not set(rooms("there")) & set(rooms("back"))


def test_every_place_exists() -> None:
    for file, function in [p for name in ("there", "back", "lanes", "doors") for p in places(section(name))]:
        assert function in set(functions(ast.parse((ROOT / file).read_text()))), f"{file}:{function}"


# A real step


class Cut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.full((24_688, 4), 0.001))
        self.out = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(x) + self.matrix.sum()
        return result


HOLDERS = {
    *("Outgoing", "Partial", "Gradient", "Offer", "Payload", "Slot", "Encoded"),
}
"""Small values of the project that the bytes are passed in."""
HEAD = 4096
"""A message is larger than its payload by less than this."""


@dataclass
class Trace:
    """Which functions are handed the bytes of one bucket, or make them, in the order in which each first does so."""

    sizes: frozenset[int]
    on: bool = False
    held: dict[Place, int] = field(default_factory=dict)
    entered: dict[Place, list[int]] = field(default_factory=dict)
    clock: int = 0

    def profile(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if not self.on or event not in ("call", "return") or not code.co_filename.startswith(PRODUCT):
            return
        file = str(Path(code.co_filename).relative_to(ROOT))
        if file.startswith("tests/") or "/v1/" in file:
            return
        self.clock += 1
        place = (file, code.co_qualname)
        if event == "return":
            seen = self.has(arg)
        else:
            self.entered.setdefault(place, []).append(self.clock)
            count = code.co_argcount + code.co_kwonlyargcount
            seen = any(self.has(frame.f_locals.get(name)) for name in code.co_varnames[:count] if name != "self")
        if seen:
            self.held.setdefault(place, self.clock)

    def has(self, value: object, depth: int = 2) -> bool:
        size = size_of(value)
        if size is not None:
            return any(wanted <= size <= wanted + HEAD for wanted in self.sizes)
        if depth == 0:
            return False
        if isinstance(value, dict):
            return any(self.has(item, depth - 1) for item in list(value.values())[:8])
        if isinstance(value, list | tuple):
            return any(self.has(item, depth - 1) for item in value[:8])
        if type(value).__name__ not in HOLDERS:
            return False
        names = getattr(type(value), "__slots__", None) or vars(value)
        return any(self.has(getattr(value, name, None), depth) for name in names)

    def passed(self, place: Place, after: int) -> int | None:
        """When a function first held the bytes, if after this; one that fetches them counts when it is entered."""
        times = [self.held[place]] if place in self.held else self.entered.get(place, [])
        return next((when for when in times if when > after), None)


def size_of(value: object) -> int | None:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, memoryview):
        return value.nbytes
    return len(value) if isinstance(value, bytes | bytearray) else None


@functools.cache
def job() -> Job:
    return make_job("momentum", model=Cut, steps=3)


@functools.cache
def traced(lane: str) -> Trace:
    """The second step of a worker that runs all replicas; in the first it doesn't add them up."""
    trace = Trace(frozenset())
    # The model stands for larger ones, whose buckets are sent one by one.
    quick_bytes, data.QUICK_BYTES = data.QUICK_BYTES, 0
    threading.setprofile(trace.profile)
    sys.setprofile(trace.profile)
    try:
        with Cluster(job(), bucket_bytes=1 << 18, lane=lane) as cluster:
            worker, replicas = cluster.worker(0, lane=lane), range(job().replicas)
            buckets = cluster.plan.shards[0].buckets
            small = next(bucket for bucket in buckets if len(bucket.slices) > 1)
            trace.sizes = frozenset({small.nbytes, 24_688 * 4 * 4})
            worker.trainer.exchange.arm()
            worker.step(sorted(worker.trainer.locate(replicas, cluster.timeline)))
            assert {held.name for held in worker.trainer.exchange.lanes.values()} == {lane}
            trace.on = True
            worker.step(replicas)
            trace.on = False
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # as documented for sys.setprofile
        data.QUICK_BYTES = quick_bytes
    return trace


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("way", MOST)
def test_a_step_passes_these_rooms_in_this_order(way: str, lane: str) -> None:
    trace, after = traced(lane), 0
    for place in rooms(way, lane):
        # What a lane does not carry itself is set up beside it, at any time.
        passed = trace.passed(place, after if lane == "grpc" else 0)
        assert passed is not None, place
        after = passed


@pytest.mark.parametrize("lane", LANES)
def test_nobody_else_is_handed_the_bytes(lane: str) -> None:
    known = {file for way in MOST for name in {"grpc", lane} for file, _ in rooms(way, name)}
    doors = set(places(section("doors")))
    others = {
        (file, function)
        for file, function in traced(lane).held
        if file not in known | {BLOCK}
        and not file.startswith((*SEAMS, *ARITHMETIC, f"shardline/lanes/{lane}/"))
        and (file, function.split(".<locals>.<")[0]) not in doors
    }
    assert not others, f"on the way with {lane}, and not in docs/concepts.md"


def test_lanes_differ_within_their_rooms_alone() -> None:
    """What else a lane's bytes pass is in its folder, or is a door."""
    own = {place for way in MOST for place in rooms(way)}
    doors = set(places(section("doors")))
    for lane in ("tcp", "shm"):
        files = {file for file, _ in own | doors} | {BLOCK}
        extra = {file for file, _ in traced(lane).held} - files
        extra = {file for file in extra if not file.startswith((*SEAMS, *ARITHMETIC))}
        assert extra and all(file.startswith(f"shardline/lanes/{lane}/") for file in extra)
