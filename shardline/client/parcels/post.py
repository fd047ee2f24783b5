"""A worker's parcels: those that have come for its stages, and the way to other workers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from shardline import pipeline
from shardline.client.overlap.watching import StepAgain
from shardline.client.parcels.sender import ParcelSender
from shardline.config import RoleConfig
from shardline.core.orders import Orders, PassReport
from shardline.core.placement import Post
from shardline.core.spec import JobSpec
from shardline.core.timeouts import Timeouts
from shardline.lanes.parcels import WORKER, register_worker
from shardline.observability.metrics import Metrics
from shardline.pipeline.parcel import Parcel, ParcelKey
from shardline.rpc.channel import Peers
from shardline.rpc.report_queue import PassQueue
from shardline.rpc.server import RpcServer
from shardline.security import Security

log = logging.getLogger("shardline.client")
LOOK_S = 1.0
"""Seconds between two looks, during a wait, whether the step is still the one to compute."""


class PostOffice:
    """Parcels of one worker; see shardline.pipeline.stream.StageExchange.

    A stage is never further ahead of the next one than its passes allow, which depend on what comes back from there. So
    what is kept is bounded: by the passes of two steps, or without a flush by one activation per stage and replica.

    Used by the session's thread, except deliver() and interrupt(). still_open(key): whether the step that a parcel is
    for is still the one to compute; asked every LOOK_S of a wait. settle(): see StageExchange.settle().
    """

    def __init__(
        self,
        task: str,
        timeouts: Timeouts,
        security: Security,
        metrics: Metrics,
        still_open: Callable[[ParcelKey], bool],
        settle: Callable[[], None],
    ) -> None:
        self.settle = settle
        self._task = task
        self._timeouts = timeouts
        self._peers = Peers(timeouts, security)
        self._metrics = metrics
        self._still_open = still_open
        self._changed = threading.Condition()
        self._here: dict[tuple[int, ParcelKey], Parcel] = {}
        """By timeline and key."""
        self._job: JobSpec | None = None
        self._posts: tuple[Post, ...] = ()
        self._timeline = 0
        self._step = 0
        self._interrupted = False
        self._senders: dict[str, ParcelSender] = {}
        self.passes = PassQueue()
        """Those that were computed, for the chief."""

    def begin(self, job: JobSpec, orders: Orders, step: int) -> None:
        """Compute this step with these posts: what was for earlier ones, and what others are no longer asked for, goes.

        Call before every step. Without a pipeline there is nothing to do.
        """
        if not orders.posts:
            return
        with self._changed:
            self._job = job
            changed = orders.posts != self._posts or orders.timeline != self._timeline
            self._posts, self._timeline, self._step = orders.posts, orders.timeline, step
            for place in [place for place in self._here if place[0] < self._timeline or place[1].step < step]:
                del self._here[place]
        if changed:
            for sender in self._senders.values():
                sender.clear()

    def stages(self, replica: int) -> tuple[int, ...]:
        """The stages of a replica that this worker computes in the open step."""
        return self.all_stages().get(replica, ())

    def arm(self) -> None:
        """Forget earlier interruptions. Read the orders after this, so that none is missed."""
        with self._changed:
            self._interrupted = False

    def interrupt(self) -> None:
        """End waits: the orders have changed."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def deliver(self, job: str, timeline: int, parcel: Parcel) -> bool:
        """Take in a parcel; False if it is for another job, or for a step that is over here."""
        with self._changed:
            known = self._job is None or (job == self._job.name and self._fits(self._job, parcel.key))
            if not known or timeline < self._timeline or (timeline == self._timeline and parcel.key.step < self._step):
                return False
            self._here[timeline, parcel.key] = parcel
            self._changed.notify_all()
        return True

    @staticmethod
    def _fits(job: JobSpec, key: ParcelKey) -> bool:
        return key.replica < job.replicas and key.stage < pipeline.stages(job) and key.microbatch < job.accumulate

    @property
    def timeline(self) -> int:
        """Timeline of the open step."""
        return self._timeline

    def all_stages(self) -> dict[int, tuple[int, ...]]:
        """The stages that this worker computes in the open step, by replica."""
        if self._job is None:
            return {}
        own = [unit for unit, post in enumerate(self._posts) if post.task == self._task]
        return dict(pipeline.by_replica(self._job, own))

    def staleness(self, stage: int, steps: int) -> None:
        """See shardline.pipeline.stream.StageExchange."""
        self._metrics.gauge("shardline_stage_staleness_steps", stage=str(stage)).set(steps)

    # See shardline.pipeline.stage_work.Parcels

    def send(self, parcel: Parcel) -> None:
        """Hand a parcel over; it is delivered in the background."""
        assert self._job is not None
        unit = pipeline.unit_of(self._job, parcel.key.stage, parcel.key.replica)
        if unit >= len(self._posts):
            raise StepAgain
        post = self._posts[unit]
        if post.task == self._task:
            self.deliver(self._job.name, self._timeline, parcel)
            return
        sender = self._senders.get(post.address)
        if sender is None:
            peer = self._peers.get(post.task, post.address)
            sender = self._senders[post.address] = ParcelSender(
                peer,
                self._job.name,
                self._timeouts,
                sent=self._metrics.counter("shardline_parcel_bytes_total", peer=post.task).inc,
            )
        sender.put(self._timeline, parcel)

    def here(self, key: ParcelKey) -> bool:
        """Whether a parcel has come."""
        with self._changed:
            return (self._timeline, key) in self._here

    def take(self, key: ParcelKey) -> Parcel:
        """A parcel that has come."""
        with self._changed:
            return self._here.pop((self._timeline, key))

    def passed(self, report: PassReport) -> None:
        """Note a pass that was computed."""
        self.passes.add(report)

    def wait(self, keys: Sequence[ParcelKey]) -> None:
        """Wait until one of these has come. Raises StepAgain if the step has to be found again."""
        start_s = time.monotonic()
        try:
            self._wait(keys, start_s)
        finally:
            self._metrics.counter("shardline_parcel_wait_seconds_total").inc(time.monotonic() - start_s)

    def _wait(self, keys: Sequence[ParcelKey], start_s: float) -> None:
        told = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._interrupted or any(map(self._came, keys)), LOOK_S)
                if any(map(self._came, keys)):
                    return
                interrupted = self._interrupted
            waited_s = time.monotonic() - start_s
            if interrupted or not self._still_open(keys[0]):
                raise StepAgain
            if not told and waited_s >= self._timeouts.suspect_s:
                told = True
                log.warning("waiting for %s since %.0f s; %s computes it", keys[0], waited_s, self._from(keys[0]))

    def _came(self, key: ParcelKey) -> bool:
        return (self._timeline, key) in self._here

    def _from(self, key: ParcelKey) -> str:
        """The task that sends a parcel."""
        assert self._job is not None
        unit = pipeline.unit_of(self._job, key.stage + (1 if key.back else -1), key.replica)
        return self._posts[unit].task if unit < len(self._posts) else "nobody"

    def server(self, config: RoleConfig) -> RpcServer:
        """A server for this worker, which takes parcels in."""
        return RpcServer(
            config.cluster.address(config.task),
            name=config.task,
            security=config.security,
            bind=config.bind,
            register=[register_worker(self.deliver)],
            service_names=[WORKER],
        )

    def close(self) -> None:
        """End the threads and close the channels."""
        self.interrupt()
        for sender in self._senders.values():
            sender.close()
        self._peers.close()
