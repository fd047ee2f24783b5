"""Parameter servers with standbys in one process, and a chief's actions when one of them is lost.

with Protected(job, ps=2) as cluster:
    cluster.await_synced()
    cluster.fail_over(0)                 # its process is gone; zombie=True: it lives on, cut off
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from shardline.client.exchange.shard_exchange import Interrupted, Restart
from shardline.core.placement import Placement
from shardline.core.status import ShardStatus
from shardline.errors import UnreachableError
from shardline.job import Job
from shardline.rpc.messages.configuration import Configuration
from tests.support.cluster import PATIENCE_S, Cluster, Worker

MEMBERS = {f"worker/{index}": 1 for index in range(8)}


class Protected(Cluster):
    """A cluster in which each shard's standby is on the next server."""

    def __init__(self, job: Job, *, ps: int = 2, **options: Any) -> None:
        self._primary: dict[int, int] = {}
        self._standby: dict[int, int | None] = {}
        self.appointments: dict[int, int] = {}
        self.gone: set[int] = set()
        self.moved = threading.Condition()
        """Notified when there is a new timeline."""
        super().__init__(job, ps=ps, **options)

    def host_of(self, shard: int) -> int:
        return self._primary.get(shard, shard)

    def make_placement(self) -> tuple[Placement, ...]:
        placed = []
        for place in super().make_placement():
            number = self._standby.setdefault(place.shard, (self.host_of(place.shard) + 1) % len(self.hosts))
            if number is not None:
                host = self.hosts[number]
                number = self.appointments.get(place.shard, 0)
                place = replace(place, standby_task=host.task, standby_address=host.address, appointment=number)
            placed.append(place)
        return tuple(placed)

    def configuration(self, host: int) -> Configuration:
        standbys = tuple(shard for shard, holder in sorted(self._standby.items()) if holder == host)
        return replace(super().configuration(host), standbys=standbys)

    # State

    def status(self, shard: int) -> ShardStatus:
        """Status of a shard, as its primary reports it."""
        statuses = self.controls[self.host_of(shard)].status().shards
        return next(item for item in statuses if item.shard == shard)

    def await_standby(self, shard: int, state: str) -> ShardStatus:
        """Wait until a shard's standby is in this state."""
        pause = threading.Event()
        for _ in range(int(PATIENCE_S / 0.02)):
            found = self.status(shard)
            if found.standby == state:
                return found
            pause.wait(0.02)
        raise AssertionError(f"the standby of shard {shard} is {found.standby}, not {state}: {found.standby_problem}")

    def await_synced(self) -> None:
        """Wait until every shard is protected."""
        for shard in range(len(self.plan.shards)):
            self.await_standby(shard, "synced")

    # The chief's actions

    def living(self) -> list[int]:
        return [host for host in range(len(self.hosts)) if host not in self.gone]

    def fail_over(self, lost: int, *, zombie: bool = False) -> None:
        """Lose a server: its shards' standbys are promoted, and shards whose standby was there continue without one."""
        self.gone.add(lost)
        if not zombie:
            self.hosts[lost].close(grace_s=0.0)
        timeline = self.timeline + 1
        for shard in range(len(self.plan.shards)):
            standby = self._standby[shard]
            if self.host_of(shard) == lost:
                assert standby is not None
                reason = self.controls[standby].promote(timeline, shard, self.appointments.get(shard, 0))
                assert not reason, reason
                self._primary[shard], self._standby[shard] = standby, None
            elif standby == lost:
                self._standby[shard] = None
        with self.moved:
            self.timeline, self.placement = timeline, self.make_placement()
            for host in self.living():
                configuration = self.configuration(host)
                self.controls[host].configure(
                    replace(configuration, keep=configuration.shards, keep_standbys=configuration.standbys)
                )
            for host in self.living():
                self.controls[host].activate(timeline)
            self.moved.notify_all()
        for worker in self.workers:
            worker.trainer.exchange.interrupt()

    def place_standby(self, shard: int, host: int | None, *, appointment: int = 0, unheard: Sequence[int] = ()) -> None:
        """Move a shard's standby, or remove it. unheard: servers that are not notified."""
        self._standby[shard], self.appointments[shard] = host, appointment
        self.placement = self.make_placement()
        for number in set(self.living()) - set(unheard):
            self.controls[number].set_membership(self.timeline, MEMBERS, self.placement)

    # Workers

    def __enter__(self) -> Protected:
        return self

    def persist(self, index: int, run: Callable[[Worker], Any]) -> Any:
        """Run a worker until it ends; restart it when the timeline changes, as a session does."""
        while True:
            with self.moved:
                timeline = self.timeline
                worker = self.worker(index)
            try:
                return run(worker)
            except (Restart, Interrupted, UnreachableError):
                with self.moved:
                    # It may time out: a worker that was restarted may still be notified of the same change.
                    self.moved.wait_for(functools.partial(self._later, timeline), 0.2)

    def _later(self, timeline: int) -> bool:
        return self.timeline > timeline

    def train_through(self, ownership: Sequence[Sequence[int]], *others: Callable[[], Any]) -> None:
        """Train to the end with one worker per entry, while others interfere."""

        def trainer(index: int, owned: Sequence[int]) -> Callable[[], Any]:
            return lambda: self.persist(index, lambda worker: worker.run(owned, self.job.steps))

        self.together([*(trainer(index, owned) for index, owned in enumerate(ownership)), *others])

    def at_step(self, step: int, shard: int, function: Callable[[], Any]) -> Callable[[], Any]:
        """A function that waits until some bucket of a shard has published a step, then calls `function`."""

        def run() -> None:
            pause = threading.Event()
            held = self.shards[shard]
            for _ in range(int(PATIENCE_S / 0.002)):
                if held.step_max >= step:
                    function()
                    return
                pause.wait(0.002)
            raise AssertionError(f"shard {shard} did not reach step {step}")

        return run
