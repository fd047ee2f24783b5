"""Cuts of one shard: copies of all buckets at one step, kept until the chief has fetched them. PROTOCOL 1.7."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from shardline.core.image import BucketImage, WorkerSequence, origin

HELD_CUTS = 2
"""Copies kept at a time: one being fetched by the chief, one for the next cut."""


@dataclass
class CutImages:
    """Images collected so far for one step."""

    step: int
    images: dict[int, BucketImage] = field(default_factory=dict)
    skipped: bool = False
    """There was no room left when the first bucket reached the step; nothing is kept."""
    sequences: Mapping[str, WorkerSequence] = field(default_factory=dict)
    """If pushes are numbered: the last push of each worker that the images include. If each contribution to a bucket is
    an update: how many steps of each replica some image includes."""

    def add(self, image: BucketImage) -> None:
        self.images[image.bucket] = image
        found = dict(self.sequences)
        for replica, steps in enumerate(image.counted):
            known = found.get(origin(replica), WorkerSequence(0, 0))
            found[origin(replica)] = WorkerSequence(0, max(known.last_seq, steps))
        self.sequences = found

    def in_order(self) -> list[BucketImage]:
        return [self.images[number] for number in sorted(self.images)]


class CutBook:
    """Which steps are to be cut, and the copies held. Thread-safe; buckets call it under their own lock."""

    def __init__(self, num_buckets: int, every: int, *, budget: int = HELD_CUTS) -> None:
        self._lock = threading.Lock()
        self._num_buckets = num_buckets
        self._every = every
        self._budget = budget
        self._requested: set[int] = set()
        self._held: dict[int, CutImages] = {}
        self._released = -1
        """Highest released step. A bucket that reaches it later makes no copy: the cut could never be complete."""
        self.skipped_total = 0
        self._offered: dict[int, BucketImage] = {}
        """The state last brought by the workers that run the optimizer, by bucket."""

    def request(self, step: int) -> None:
        """Cut at this step too, regardless of the budget."""
        with self._lock:
            self._requested.add(step)

    def wanted(self, step: int) -> bool:
        """Whether a bucket that reaches `step` must be copied."""
        with self._lock:
            if step in self._requested:
                held = self._held.get(step)
                return held is None or not held.skipped
            if not self._on_cadence(step) or step <= self._released:
                return False
            held = self._held.get(step)
            if held is None:
                held = self._held[step] = CutImages(step)
                # One decision per shard and step, made by the first bucket to reach it.
                if sum(not cut.skipped for cut in self._held.values()) > self._budget:
                    held.skipped = True
                    self.skipped_total += 1
            return not held.skipped

    def _on_cadence(self, step: int) -> bool:
        return self._every > 0 and step > 0 and step % self._every == 0

    def withdraw(self, step: int) -> None:
        """Drop a request that came too late, and the copies made for it alone."""
        with self._lock:
            self._requested.discard(step)
            if not self._on_cadence(step):
                self._held.pop(step, None)

    def offer(self, images: Sequence[BucketImage], *, wanted: bool) -> None:
        """Keep what a worker brought: for an open cut of that step if `wanted`, or one that may be requested later."""
        with self._lock:
            self._offered.update({image.bucket: image for image in images})
            for image in images:
                # Released meanwhile, it would never be complete.
                if wanted and self._lacks(image.step):
                    self._held.setdefault(image.step, CutImages(image.step)).images[image.bucket] = image

    def offered(self, bucket: int, step: int) -> BucketImage | None:
        """What a worker brought for a bucket at this step."""
        with self._lock:
            image = self._offered.get(bucket)
            return image if image is not None and image.step == step else None

    def open(self, step: int, buckets: Collection[int]) -> bool:
        """Whether a cut at `step` is wanted and still lacks images of some of these buckets."""
        with self._lock:
            held = self._held.get(step)
            return self._lacks(step) and (held is None or any(number not in held.images for number in buckets))

    def _lacks(self, step: int) -> bool:
        held = self._held.get(step)
        if held is None:
            # None of its buckets may have got so far as to say that the step is to be cut.
            return step in self._requested or (self._on_cadence(step) and step > self._released)
        return not held.skipped and len(held.images) < self._num_buckets

    def store(self, image: BucketImage) -> None:
        with self._lock:
            self._held.setdefault(image.step, CutImages(image.step)).add(image)

    def store_all(self, step: int, images: list[BucketImage], sequences: Mapping[str, WorkerSequence]) -> None:
        """Keep a cut whose buckets were all copied at one instant, under the chief's number.

        sequences: each worker's last push at that instant, by task.
        """
        with self._lock:
            self._held[step] = CutImages(
                step, {image.bucket: image for image in images}, sequences=MappingProxyType(dict(sequences))
            )

    def whole(self, step: int) -> CutImages | None:
        """The cut if all its images are there (it is then final), else None."""
        with self._lock:
            held = self._held.get(step)
            return held if held is not None and len(held.images) == self._num_buckets else None

    def get(self, step: int) -> list[BucketImage] | None:
        held = self.whole(step)
        return held.in_order() if held is not None else None

    def release(self, step: int) -> int:
        """Drop the cuts up to this step for good; returns how many were held."""
        with self._lock:
            self._released = max(self._released, step)
            gone = [number for number in self._held if number <= step]
            for number in gone:
                del self._held[number]
            self._requested = {number for number in self._requested if number > step}
            self._offered = {number: image for number, image in self._offered.items() if image.step > step}
            return len(gone)

    def clear(self) -> None:
        with self._lock:
            self._held.clear()
            self._requested.clear()
            self._offered.clear()
            self._released = -1

    def status(self) -> list[tuple[int, bool, bool]]:
        """(step, complete, skipped) of each cut."""
        with self._lock:
            return [
                (cut.step, len(cut.images) == self._num_buckets, cut.skipped)
                for cut in sorted(self._held.values(), key=lambda cut: cut.step)
            ]

    @property
    def held_bytes(self) -> int:
        with self._lock:
            held = [image for cut in self._held.values() for image in cut.images.values()]
            return sum({id(image): image.nbytes for image in (*held, *self._offered.values())}.values())
