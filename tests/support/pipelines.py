"""Workers of a pipeline in one process: a thread each, which take turns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shardline.pipeline.hosts import Hosts, planned_hosts
from shardline.pipeline.parcel import Parcel, ParcelKey
from shardline.pipeline.runner import AtHome

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
