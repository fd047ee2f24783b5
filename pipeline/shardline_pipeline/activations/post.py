"""A worker's activations: those that have come for its stages, and the way to other workers."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import shardline_pipeline as pipeline
from shardline.client.overlap.gate import StepAgain
from shardline.client.partners import Hooks, Partners
from shardline.config import RoleConfig
from shardline.core.identity import Identity
from shardline.core.orders import Orders, PassReport
from shardline.core.parcel import Parcel, ParcelKey
from shardline.core.placement import Post
from shardline.core.spec import JobSpec
from shardline.lanes import offered
from shardline.lanes.parcel_port import ParcelPorts
from shardline.lanes.parcels import WORKER, register_worker
from shardline.observability.metrics import Metrics
from shardline.rpc.channel import Peers
from shardline.rpc.messages.parcels import Packed, packed
from shardline.rpc.report_queue import PassQueue
from shardline_pipeline.activations.mailbox import Mailbox
from shardline_pipeline.activations.sender import ActivationSender

log = logging.getLogger("shardline.client")


class PostOffice(Partners):
    """Activations of one worker, to and from others; see shardline_pipeline.stream.StageExchange.

    Used by the session's thread, except interrupt() and look().
    """

    def __init__(self, config: RoleConfig, metrics: Metrics, hooks: Hooks) -> None:
        self.settle = hooks.settle
        self._settled = hooks.settled
        self.still_ordered = hooks.still_ordered
        self.on_interrupt: Callable[[], None] = lambda: None
        """Called by interrupt(), to end other waits for workers."""
        self._config = config
        self._peers = Peers(config.timeouts, config.security)
        self._metrics = metrics
        self.mailbox = Mailbox(config.task, metrics, config.timeouts.suspect_s, lambda key: hooks.still_open(key.step))
        """What has come."""
        self.here, self.take, self.wait = self.mailbox.here, self.mailbox.take, self.mailbox.wait
        self.ports = ParcelPorts(config, offered(config.lane), self.mailbox, self._refused)
        """On which other workers send."""
        self._job: JobSpec | None = None
        self._who = Identity(config.task)
        self._posts: tuple[Post, ...] = ()
        self.timeline = self._posting = 0
        self._all_stages: Mapping[int, tuple[int, ...]] = {}
        self.rank = 0
        """Which of the workers that share layers this one is, in the open step; 0 where none are shared."""
        self.job_secret = b""
        """See Orders; of the open step."""
        self._senders: dict[str, ActivationSender] = {}
        self.passes: PassQueue = PassQueue()
        """Those that were computed, for the chief."""

    def begin(self, job: JobSpec, orders: Orders, step: int, who: Identity) -> None:
        """Compute this step with these posts: what was for earlier ones, and what others are no longer asked for, goes.

        who: this life. Call before every step. Without a pipeline there is nothing to do.
        """
        if not orders.posts:
            return
        moved = (orders.posting, orders.posts, orders.timeline) != (self._posting, self._posts, self.timeline)
        if moved or job is not self._job:
            own = orders.units(self._config.task)
            self.rank = pipeline.rank_of(job, own)
            self._all_stages = pipeline.by_replica(job, own)
        self._job, self._posts, self.timeline = job, orders.posts, orders.timeline
        self._posting = orders.posting
        self.job_secret = orders.job_secret
        self.mailbox.begin(job, orders, step)
        if moved:
            self.ports.keep_only({(post.task, post.incarnation) for post in orders.posts})
            for sender in self._senders.values():
                sender.clear()
        if who != self._who:
            self._who = who
            for sender in self._senders.values():
                sender.close()
            self._senders.clear()

    def stages(self, replica: int) -> tuple[int, ...]:
        """The stages of a replica that this worker computes in the open step."""
        return self._all_stages.get(replica, ())

    def arm(self) -> None:
        self.mailbox.arm()

    def interrupt(self) -> None:
        self.mailbox.interrupt()
        self.on_interrupt()

    def comes_first(self, keys: Sequence[ParcelKey]) -> bool:
        return self.mailbox.comes_first(keys, self._settled)

    def _refused(self, what: str, error: Exception) -> None:
        self._metrics.counter("shardline_refused_messages_total", method=what).inc()
        log.warning("refused %s: %s", what, error)

    def team(self) -> tuple[Post, ...]:
        """The workers that share this one's layers in the open step, by rank. Raises StepAgain if there are none."""
        own = [unit for unit, post in enumerate(self._posts) if post.task == self._config.task]
        if self._job is None or not own:
            raise StepAgain
        return self._posts[own[0] % pipeline.cells(self._job) :: pipeline.cells(self._job)]

    def all_stages(self) -> dict[int, tuple[int, ...]]:
        """The stages that this worker computes in the open step, by replica."""
        return dict(self._all_stages)

    def staleness(self, stage: int, steps: int) -> None:
        self._metrics.gauge("shardline_stage_staleness_steps", stage=str(stage)).set(steps)

    # See shardline_pipeline.stage_work.ActivationChannel

    def send(self, parcel: Parcel) -> None:
        assert self._job is not None
        post = self.mailbox.neighbours.get((parcel.key.stage, parcel.key.replica))
        if post is None:
            raise StepAgain
        if post.task == self._config.task:
            self.mailbox.deliver(Identity(post.task, post.incarnation), self.timeline, parcel)
            return
        sender = self._senders.get(post.address)
        if sender is None:
            sender = self._senders[post.address] = ActivationSender(
                self._config,
                self._peers.get(post.task, post.address),
                self._who,
                sent=functools.partial(self._sent, post.task),
                on_fallback=lambda lane, reason: self._metrics.counter(
                    "shardline_lane_fallbacks_total", lane=lane
                ).inc(),
            )
        sender.put(packed(self._job.name, self.timeline, parcel, self._posting))

    def _sent(self, peer: str, lane: str, packed: Packed) -> None:
        self._metrics.later(self._count, (peer, lane, packed.raw_bytes, packed.nbytes))

    def _count(self, parcels: Sequence[tuple[str, str, int, int]]) -> None:
        codec = self._job.codec_parcels if self._job is not None else ""
        for peer, lane, raw_bytes, nbytes in parcels:
            labels = {"peer": peer, "codec": codec or "raw", "lane": lane}
            self._metrics.counter("shardline_parcel_raw_bytes_total", **labels).inc(raw_bytes)
            self._metrics.counter("shardline_parcel_wire_bytes_total", **labels).inc(nbytes)

    def passed(self, report: PassReport) -> None:
        """Note a pass that was computed. All ranks compute the same ones."""
        if self.rank == 0:
            self.passes.add(report)

    def services(self) -> tuple[Sequence[Any], Sequence[str]]:
        return [register_worker(self.mailbox, self.ports.open)], [WORKER]

    def reports(self, replica: int) -> bool:
        """The last stage does, which knows the loss, by its rank 0."""
        last = self.mailbox.last
        return self.rank == 0 and (not last or last in self.stages(replica))

    def look(self) -> None:
        self.mailbox.look()

    def close(self) -> None:
        self.mailbox.close()
        for sender in self._senders.values():
            sender.close()
        self.ports.close()
        self._peers.close()
