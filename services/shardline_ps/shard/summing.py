"""Shards of which workers run the optimizer: they publish what is needed for that, mean gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from shardline.core.contributions import Partial, scaled
from shardline.core.image import BucketImage
from shardline.core.outcome import Decision, Outcome
from shardline.core.push_context import PushContext
from shardline.core.spec import TensorKind
from shardline.errors import ProtocolError
from shardline.storage.bucket import Bucket
from shardline.storage.cuts import CutBook
from shardline.update import BucketRule


class SummingBucket(Bucket):
    """Parameters until the first step after Init or Restore is closed, from then on each step's mean gradient.

    The rule keeps the optimizer state of a cut from Restore to that step, for the workers to take it.
    """

    _closed_hyper: Mapping[str, float] = {}
    _bare = False
    """The values say that no tensor had a gradient."""

    @property
    def has_state(self) -> bool:
        return self.step == self.oldest

    @property
    def closed_hyper(self) -> Mapping[str, float]:
        return self._closed_hyper

    def update(
        self, target: torch.Tensor, total: Partial, scale: float, source: torch.Tensor | None, context: PushContext
    ) -> bool:
        """Write the mean gradient; NaN, which no counted gradient contains, to tensors without one.

        A bucket that still has none has not changed, and costs a pull no bytes: so it is where gradients stay with the
        one worker that computes them.
        """
        if self.has_state:
            # Every worker has taken the state that this step began from.
            self.rule = self.make_rule()
        self._closed_hyper = self.hyper or {}
        mean = scaled(total, scale).values
        bare, self._bare = self._bare, mean is None
        if bare and mean is None:
            return False
        if mean is not None:
            target.copy_(self.combined(mean))
        for piece, present in zip(self.spec.slices, total.present, strict=True):
            if mean is None or not present:
                target[piece.offset : piece.end].fill_(torch.nan)
        return True

    def restore(self, image: BucketImage, rule: BucketRule | None, *, previous: torch.Tensor | None = None) -> None:
        super().restore(image, rule, previous=previous)
        self._closed_hyper = {}
        self._bare = False


class Stored(Protocol):
    """The storage of a shard: the part of ShardStorage that is used here."""

    buckets: list[Bucket]
    cuts: CutBook


class Summing:
    """What a shard knows of the state of the workers' optimizer."""

    def __init__(self, number: int, storage: Stored) -> None:
        self._number = number
        self._cuts = storage.cuts
        self._all = storage.buckets
        self._buckets = [bucket for bucket in storage.buckets if bucket.spec.kind is TensorKind.PARAM]
        self._parts: dict[int, list[Bucket]] = {}
        """By fragment: in a pipeline without a flush these are at different steps, and brought by different workers."""
        for bucket in self._all:
            self._parts.setdefault(bucket.fragment, []).append(bucket)

    def wants_state(self, buckets: Collection[int] = ()) -> bool:
        """Whether a cut of the open step lacks the workers' state. buckets: of those that ask; () = all."""
        parts = self._parts.values()
        return any(
            self._lacking(part) for part in parts if not buckets or any(bucket.number in buckets for bucket in part)
        )

    def _lacking(self, part: Sequence[Bucket]) -> bool:
        # Until the first step is closed, cuts take the state that is here.
        lacking = [bucket.number for bucket in part if bucket.spec.kind is TensorKind.PARAM and not bucket.has_state]
        return bool(lacking) and self._cuts.open(min(bucket.step for bucket in part), lacking)

    @property
    def hyper(self) -> Mapping[int, Mapping[str, float]]:
        """Hyper-parameters of the last closed step that differ from the job's, by parameter group."""
        return {bucket.group: bucket.closed_hyper for bucket in self._buckets if bucket.closed_hyper}

    def state(self, step: int, buckets: Collection[int] = ()) -> list[BucketImage] | None:
        """Images of these buckets of parameters, () = all, at a step; None if the workers have gone on from it.

        Raises ProtocolError for a bucket that has none.
        """
        wrong = set(buckets) - {bucket.number for bucket in self._buckets}
        if wrong:
            raise ProtocolError(f"shard {self._number}: bucket {min(wrong)} has no parameters, so it has no state")
        images = []
        for bucket in [bucket for bucket in self._buckets if not buckets or bucket.number in buckets]:
            with bucket.lock:
                if bucket.step != step or not bucket.has_state or not bucket.initialized:
                    return None
                images.append(bucket.image())
        return images

    def bring(self, images: Sequence[BucketImage]) -> Decision:
        """Take the state that a worker has at the open step, for a cut: of all parameters, or of some fragments.

        Raises ProtocolError or CheckpointError for images that don't fit; nothing is changed then.
        """
        given = sorted(images, key=lambda image: image.bucket)
        numbers = {image.bucket for image in given}
        parts = {bucket.fragment for bucket in self._buckets if bucket.number in numbers}
        whole = [bucket for bucket in self._buckets if bucket.fragment in parts]
        if not given or [image.bucket for image in given] != [bucket.number for bucket in whole]:
            raise ProtocolError(
                f"shard {self._number} has {len(self._buckets)} buckets of parameters; the state is of buckets "
                f"{[image.bucket for image in given][:10]}, which is not all of them, nor all of some stages"
            )
        taken = []
        for bucket, image in zip(whole, given, strict=True):
            bucket.rule_of(image)
            with bucket.lock:
                if bucket.step != image.step:
                    reason = f"shard {self._number} is at step {bucket.step}; the state is of step {image.step}"
                    return Decision(Outcome.DUPLICATE, reason)
                taken.append(replace(image, shard=self._number, version=bucket.version))
        self._cuts.offer(taken, wanted=self.wants_state(numbers))
        return Decision(Outcome.COUNTED)
