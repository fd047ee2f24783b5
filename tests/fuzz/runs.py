"""Runs of the fuzz suite: so many calls, visits and loads from a seed, with what is held before and after.

Each raises Finding, whose text ends with what repeats it; else it returns figures.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st

from tests.fuzz import loading, payloads, resources
from tests.fuzz.calls import HOSTS, Caller, draw_case
from tests.fuzz.reports import lies
from tests.fuzz.sockets import Visitor, draw_visit

BATCH = 200
"""Calls between two looks at what is held."""
GROWTH_MB = 48.0
"""What a process may hold more after a run than after the first fifth of it: caches of gRPC and of hypothesis fill."""


HOST_MB = 0.5
"""What an ended host may leave behind in this process; a task has one in its life."""


class Grown(AssertionError):
    """Memory grew with the number of inputs."""


class Memory:
    """Resident memory after the first fifth of a run and at its end."""

    def __init__(self, count: int) -> None:
        self._early_at = max(1, count // 5)
        self.early_mb = 0.0
        self.done = 0

    def one(self) -> None:
        """One input was made."""
        self.done += 1
        if self.done == self._early_at:
            self.early_mb = resources.rss_mb()

    def figures(self, hosts: int = 0) -> dict[str, float]:
        """Both; raises Grown. hosts: those that have ended on the way."""
        end_mb = resources.rss_mb()
        if end_mb > self.early_mb + GROWTH_MB + HOST_MB * hosts:
            raise Grown(f"{self.done} inputs: {self.early_mb:.0f} MB after a fifth of them, {end_mb:.0f} MB at the end")
        return {"rss_fifth_mb": round(self.early_mb, 1), "rss_end_mb": round(end_mb, 1)}


def _drawn(count: int, number: int, one: Callable[[Any], None]) -> None:
    """Call one(draw) so often, with draws of a seed. Shrinking is left out: a finding repeats from its own text."""

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        one(data.draw)

    run()


def calls(kind: str, count: int, number: int) -> dict[str, Any]:
    """Calls of every method that this kind of host serves."""
    caller, memory, began_s = Caller(kind), Memory(count), time.monotonic()
    try:
        served = caller.methods()

        def one(draw: Any) -> None:
            method = draw(st.sampled_from(served))
            caller.make(draw_case(draw, kind, method, caller.templates))
            memory.one()
            if memory.done % BATCH == 0:
                caller.settle()

        # Right calls first: what they make grow once is no leak.
        _drawn(min(count, 20), number, one)
        caller.settle()
        _drawn(max(1, count - 20), number + 1, one)
        caller.settle()
        return {
            "calls": memory.done,
            "methods": len(caller.counts),
            "codes": dict(caller.codes.most_common()),
            "hosts": 1 + caller.renewed,
            "seconds": round(time.monotonic() - began_s, 1),
            **memory.figures(caller.renewed),
        }
    finally:
        caller.close()


def visits(count: int, number: int) -> dict[str, Any]:
    """Connections to the bulk port, the unix socket of shared memory, and gRPC's port."""
    visitor, memory, began_s = Visitor(), Memory(count), time.monotonic()
    try:

        def one(draw: Any) -> None:
            visitor.make(draw_visit(draw))
            memory.one()

        _drawn(count, number, one)
        answers = dict(visitor.answers.most_common())
        return {
            "visits": count,
            "answers": answers,
            "seconds": round(time.monotonic() - began_s, 1),
            **memory.figures(),
        }
    finally:
        visitor.close()


def loads(kind: str, count: int, number: int) -> dict[str, Any]:
    """Things to load of one kind."""
    memory, began_s, taken = Memory(count), time.monotonic(), [0]

    def one(draw: Any) -> None:
        taken[0] += loading.make(loading.draw_load(draw, kind))
        memory.one()

    _drawn(count, number, one)
    return {"loads": count, "taken": taken[0], "seconds": round(time.monotonic() - began_s, 1), **memory.figures()}


def payloads_of(name: str, count: int, number: int) -> dict[str, Any]:
    """Payloads of a codec with bytes changed."""
    rng, known, memory = random.Random(f"{name} {number}"), payloads.seeds(name), Memory(count)
    began_s, taken = time.monotonic(), 0
    for _ in range(count):
        seed = known[rng.randrange(len(known))]
        taken += payloads.check(name, seed, payloads.mutated(rng, seed.payload))
        memory.one()
    return {"payloads": count, "taken": taken, "seconds": round(time.monotonic() - began_s, 1), **memory.figures()}


def plan(
    number: int, *, call_count: int, load_count: int, payload_count: int, lie_count: int
) -> dict[str, Callable[[], dict[str, Any]]]:
    """All runs by name. call_count: over all hosts together."""
    each = max(1, call_count // (len(HOSTS) + 1))
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for kind in HOSTS:
        found[f"calls at {kind}"] = lambda kind=kind: calls(kind, each, number)
    found["lies"] = lambda: lies(lie_count, number)
    found["handshakes"] = lambda: visits(each, number)
    for kind in loading.LOADERS:
        found[f"loading {kind}"] = lambda kind=kind: loads(kind, load_count, number)
    for name in payloads.NAMES:
        found[f"payloads of {name}"] = lambda name=name: payloads_of(name, payload_count, number)
    return found
