"""Activations and gradients that have come for a worker's stages."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import shardline_pipeline as pipeline
from shardline.client.overlap.gate import StepAgain
from shardline.core.identity import Identity
from shardline.core.orders import Orders
from shardline.core.parcel import Parcel, ParcelKey
from shardline.core.placement import Post
from shardline.core.spec import JobSpec
from shardline.errors import ForbiddenError, ProtocolError, UnreachableError
from shardline.host.awake import awake_s
from shardline.observability.metrics import Metrics
from shardline.rpc.limits import MAX_NAME
from shardline.rpc.messages.parcels import ParcelReader
from shardline.security import holds

log = logging.getLogger("shardline.client")
LOOK_S = 1.0
"""Seconds between two looks, during a wait, whether the step is still the one to compute."""
Life = tuple[str, int]
"""Task and incarnation."""


class Mailbox:
    """Activations that have come, and whose count; see shardline.lanes.parcels.Inbox.

    A stage is never further ahead of the next one than its passes allow, which depend on what comes back from there: at
    most as many steps as there are stages. So what is kept is bounded by the passes of those; what is for a later step
    waits at its sender. A parcel counts only if the life that sent it computes the stage that it has to come from.

    Used by the session's thread, except interrupt() and what Inbox names. still_open(key): whether the step that a
    parcel is for is still the one to compute; asked every LOOK_S of a wait.
    """

    def __init__(self, task: str, metrics: Metrics, suspect_s: float, still_open: Callable[[ParcelKey], bool]) -> None:
        """suspect_s: a wait of so many seconds is told."""
        self._task = task
        self._metrics = metrics
        self._suspect_s = suspect_s
        self._still_open = still_open
        self._changed = threading.Condition()
        self._here: dict[tuple[int, ParcelKey], tuple[Life, Parcel]] = {}
        """By timeline and key: the sender, and what it sent."""
        self._job: JobSpec | None = None
        self._posts: tuple[Post, ...] = ()
        self._stages = 1
        self.neighbours: Mapping[tuple[int, int], Post] = {}
        self._timeline = self._posting = 0
        self._step = 0
        self._interrupted = self._closed = False

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return self._stages - 1

    def __len__(self) -> int:
        return len(self._here)

    def begin(self, job: JobSpec, orders: Orders, step: int) -> None:
        """Take parcels for this step from these posts: what was for earlier steps goes."""
        with self._changed:
            if job is not self._job or orders.posts != self._posts:
                # What the job's tensors and settings say is found once: every parcel asks for it several times.
                self._stages = pipeline.stages(job)
                self.neighbours = pipeline.neighbours(job, orders.posts, self._task)
            self._job = job
            self._posts, self._timeline, self._step = orders.posts, orders.timeline, step
            self._posting = orders.posting
            for place in [place for place in self._here if place[0] < self._timeline or place[1].step < step]:
                del self._here[place]
            self._changed.notify_all()

    def arm(self) -> None:
        """Forget earlier interruptions. Read the orders after this, so that none is missed."""
        with self._changed:
            self._interrupted = False

    def interrupt(self) -> None:
        """End waits: the orders have changed."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def close(self) -> None:
        """End all waits, for good."""
        with self._changed:
            self._interrupted = self._closed = True
            self._changed.notify_all()

    # See shardline.lanes.parcels.Inbox

    def check_sender(self, who: Identity) -> None:
        post = next((p for p in self._posts if (p.task, p.incarnation) == (who.task, who.incarnation)), None)
        if post is None:
            raise UnreachableError(f"{self._task} knows no stage of {who.task}, incarnation {who.incarnation:#x} (yet)")
        if not holds(who.secret, post.key):
            self._metrics.counter("shardline_fenced_messages_total", peer=who.task).inc()
            raise ForbiddenError(
                f"the message is not from {who.task}: it lacks the secret that the chief gave to incarnation "
                f"{who.incarnation:#x} of it"
            )

    def awaits(self, parcel: ParcelReader, *, wait_s: float) -> bool:
        end_s = awake_s() + wait_s
        with self._changed:
            while True:
                found = self._wanted(parcel.job, parcel.timeline, parcel.posting, parcel.key)
                if found is not None:
                    assert self._job is not None
                    for codec in parcel.codecs - {self._job.codec_parcels}:
                        raise ProtocolError(
                            f"{parcel.key} is encoded with codec {codec[:MAX_NAME]!r}, but the job's codec_parcels is "
                            f"{self._job.codec_parcels!r}"
                        )
                    return found
                left_s = end_s - awake_s()
                if left_s <= 0.0 or self._closed:
                    raise UnreachableError(
                        f"{self._task} is at step {self._step} of timeline {self._timeline}, so it can't take "
                        f"{parcel.key} of timeline {parcel.timeline} (yet)"
                    )
                self._changed.wait(left_s)

    def _wanted(self, job: str, timeline: int, posting: int, key: ParcelKey) -> bool | None:
        """Whether a parcel may be needed; None = later, maybe.

        Its sender may have begun its step again because of orders that have not come here yet. This worker will begin
        again too, and would lack what it had taken before.
        """
        if self._job is None:
            return None
        if job != self._job.name or not self._fits(self._job, key):
            raise ProtocolError(f"{key} of job {job[:100]!r} is for no pass of job {self._job.name!r}")
        if timeline != self._timeline:
            return None if timeline > self._timeline else False
        if posting > self._posting or key.step > self._step + self._stages:
            return None
        return key.step >= self._step

    def deliver(self, who: Identity, timeline: int, parcel: Parcel) -> bool:
        life = (who.task, who.incarnation)
        with self._changed:
            if timeline < self._timeline or (timeline == self._timeline and parcel.key.step < self._step):
                return False
            before = self._here.get((timeline, parcel.key))
            if before is None or self._counts(life, parcel.key) or not self._counts(before[0], parcel.key):
                # Nobody replaces what the right life has sent.
                self._here[timeline, parcel.key] = life, replace(parcel, sender=who.task)
                self._changed.notify_all()
        return True

    def _counts(self, life: Life, key: ParcelKey) -> bool:
        post = self._origin(key)
        return post is not None and life == (post.task, post.incarnation)

    def _origin(self, key: ParcelKey) -> Post | None:
        return self.neighbours.get((key.stage + (1 if key.back else -1), key.replica))

    def _fits(self, job: JobSpec, key: ParcelKey) -> bool:
        last = self._stages - 1
        ends = key.stage <= last - 1 if key.back else 1 <= key.stage <= last
        return ends and key.replica < job.replicas and key.microbatch < job.accumulate

    def here(self, key: ParcelKey) -> bool:
        with self._changed:
            return self._came(key)

    def take(self, key: ParcelKey) -> Parcel:
        with self._changed:
            return self._here.pop((self._timeline, key))[1]

    def wait(self, keys: Sequence[ParcelKey]) -> None:
        """Wait until one of these has come. Raises StepAgain if the step has to be found again."""
        start_s = time.monotonic()
        try:
            self._wait(keys, start_s)
        finally:
            self._metrics.counter("shardline_parcel_wait_seconds_total").inc(time.monotonic() - start_s)

    def comes_first(self, keys: Sequence[ParcelKey], over: Callable[[], bool]) -> bool:
        """Wait until one of these has come; False if before that something is over, or the orders have changed.

        over: asked again after look(). False also after `suspect_s`, so that whoever waits looks for what is wrong.
        """
        start_s = time.monotonic()
        with self._changed:
            self._changed.wait_for(
                lambda: self._interrupted or over() or any(map(self._came, keys)), self._suspect_s if keys else 0.0
            )
            self._metrics.counter("shardline_parcel_wait_seconds_total").inc(time.monotonic() - start_s)
            return any(map(self._came, keys))

    def look(self) -> None:
        """Have comes_first() ask again."""
        with self._changed:
            self._changed.notify_all()

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
            if not told and waited_s >= self._suspect_s:
                told = True
                log.warning("waiting for %s since %.0f s; %s computes it", keys[0], waited_s, self._from(keys[0]))

    def _came(self, key: ParcelKey) -> bool:
        found = self._here.get((self._timeline, key))
        return found is not None and self._counts(found[0], key)

    def _from(self, key: ParcelKey) -> str:
        post = self._origin(key)
        return post.task if post is not None else "nobody"
