"""Workers of a pipeline in one process: a thread each, which take turns. And models that are traced once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
from torch import nn

from shardline.core.parcel import Parcel, ParcelKey
from shardline_pipeline.hosts import Hosts, planned_hosts
from shardline_pipeline.runner import AtHome
from shardline_pipeline.split import model as split
from shardline_pipeline.split.trace import Inputs, Traced, trace

T = TypeVar("T")
PATIENCE_S = 20.0


class Mail(AtHome):
    """Parcels between workers. One worker runs at a time, until it waits: torch's random generator is the process's."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = threading.Condition()

    def send(self, parcel: Parcel) -> None:
        super().send(parcel)
        self.turn.notify_all()

    def wait(self, keys: Sequence[ParcelKey]) -> None:
        if not self.turn.wait_for(lambda: any(map(self.here, keys)), PATIENCE_S):
            raise TimeoutError(f"no worker sent {', '.join(map(str, keys))}")


def stages_of(hosts: Hosts, replicas: int, number: int) -> dict[int, tuple[int, ...]]:
    """The stages of a worker, by replica."""
    found: dict[int, tuple[int, ...]] = {}
    for unit, task in planned_hosts(hosts, replicas).items():
        if task == f"worker/{number}":
            stage, replica = divmod(unit, replicas)
            found[replica] = (*found.get(replica, ()), stage)
    return found


def run_workers(hosts: Hosts, turn: threading.Condition, work: Callable[[int], T]) -> list[T]:
    """What each worker, given by number, returns."""
    numbers = sorted({number for one in hosts for number in one})

    def in_turn(number: int) -> T:
        with turn:
            return work(number)

    with ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(in_turn, numbers))


_traced: dict[object, Traced] = {}


def _trace_once(model: nn.Module, inputs: Inputs, cuts: Sequence[str]) -> Traced:
    key = type(model), tuple(cuts), tuple(module.training for module in model.modules())
    if key not in _traced:
        _traced[key] = trace(model, inputs, cuts)
    return _traced[key]


@pytest.fixture
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace each class of models once for all tests, which takes seconds; for tests that run stages in one thread."""
    monkeypatch.setattr(split, "trace", _trace_once)
