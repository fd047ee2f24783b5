"""One bucket: two published parameter buffers, by step; optimizer state; contributions. PROTOCOL 1.4, 1.9."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch

from shardline.core.contributions import Contributions, Partial, scaled
from shardline.core.image import VALUE, BucketImage
from shardline.core.plan import BucketSpec
from shardline.core.push_context import TOGETHER, PushContext
from shardline.core.spec import DTYPES, TensorKind, TensorSpec
from shardline.core.tensor_bytes import tensor_bytes
from shardline.errors import CheckpointError, ProtocolError
from shardline.host.device_memory import settle
from shardline.update import BucketRule, Need


class Intact:
    """Whether values have not been written to since this was made."""

    def __init__(self, counts: np.ndarray[tuple[int], np.dtype[np.int64]], which: int) -> None:
        self._counts = counts
        self._which = which
        self.count = int(counts[which])

    def __call__(self) -> bool:
        """Whether they are what they were; may be called from any thread, without a lock."""
        return int(self._counts[self._which]) == self.count

    @property
    def address(self) -> int:
        """Of the 8 bytes that hold `count` as long as nothing was written; valid as long as this object is kept."""
        start: int = self._counts.__array_interface__["data"][0]
        return start + self._which * self._counts.itemsize


class WriteCounts:
    """How many times the values of even and of odd steps have begun to be replaced."""

    def __init__(self) -> None:
        self._counts = np.zeros(2, np.int64)

    def begin(self, step: int) -> None:
        """Call before the first byte of a step's values is written."""
        self._counts[step & 1] += 1

    def intact(self, step: int) -> Intact:
        """For who reads the values of a step without a lock: make it before reading what says that they are there."""
        return Intact(self._counts, step & 1)


class Bucket:
    """Values of one bucket at `step` and `step` - 1, and the contributions to the open step so far.

    All methods but the constructor need the lock held, unless stated otherwise. theta_t stays in pub[t & 1] until step
    t + 1 is applied, which needs every replica to have pushed t + 1 and so to have theta_{t+1}: that is why a worker
    lost in mid-step can be replaced.
    """

    def __init__(
        self,
        shard: int,
        number: int,
        spec: BucketSpec,
        tensors: Sequence[TensorSpec],
        make_rule: Callable[[torch.device], BucketRule | None],
        *,
        contributions: Contributions,
        pub: tuple[torch.Tensor, torch.Tensor],
        combined: Callable[[torch.Tensor], torch.Tensor] = lambda mean: mean,
    ) -> None:
        """make_rule: called for parameters, and again for each restored state. pub: memory for the values (zeros of the
        bucket's length and dtype), by step & 1; the same tensor twice if one step at a time is enough. combined: see
        AtServer.combine.
        """
        self.combined = combined
        self.lock = threading.Lock()
        self.shard = shard
        self.number = number
        self.spec = spec
        self.device = device = pub[0].device
        self.step = 0
        self.version = 0
        self.oldest = 0
        """Step at which Init or Restore set the values; earlier steps were never published here."""
        self.overwritten = -1
        """Highest step whose values may have been overwritten; may be read without the lock."""
        self.writes = WriteCounts()
        """Counts the values of even and of odd steps as they begin to be replaced."""
        self.changed_step = 0
        """Lowest s with theta_s == ... == theta_step: a reader that has theta_s or later needs no bytes."""
        self.initialized = False
        self.contributions = contributions
        self.hyper: Mapping[str, float] | None = None
        """Hyper-parameters of the bucket's group for the open step, from its lowest replica; None = the job's own."""
        self.group = tensors[spec.slices[0].tensor].group
        self.fragment = tensors[spec.slices[0].tensor].fragment
        self.names = tuple(tensors[piece.tensor].name for piece in spec.slices)
        self._pub = pub
        self._bytes = tuple(map(tensor_bytes, pub)) if device.type == "cpu" else ()
        self.counted: list[int] = []
        """By replica: steps that it has contributed, if each of them is an update."""
        self.pending: object | None = None
        """Record that the standby must have before theta_{step+1} is published; None if nothing waits."""
        self.rule: BucketRule | None = None
        self.make_rule: Callable[[], BucketRule | None] = lambda: (
            make_rule(device) if spec.kind is TensorKind.PARAM else None
        )
        self.rule = self.make_rule()

    @property
    def values(self) -> torch.Tensor:
        """theta_step, flat: shape [elements]."""
        return self._pub[self.step & 1]

    def values_at(self, step: int) -> torch.Tensor:
        return self._pub[step & 1]

    def bytes_at(self, step: int) -> memoryview:
        return self._bytes[step & 1]

    def previous(self) -> torch.Tensor | None:
        """theta_{step-1}, empty if it equals theta_step; None if it was never published here.

        Nothing may be pending.
        """
        if self.step <= self.oldest:
            return None
        return self._pub[(self.step - 1) & 1] if self.changed_step == self.step else self._pub[0][:0]

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers and the optimizer state."""
        size = self.spec.nbytes * (1 if self._pub[0] is self._pub[1] else 2)
        return size + (self.rule.nbytes if self.rule is not None else 0)

    def initialize(self, values: torch.Tensor) -> bool:
        """Set the first values; False if there were some already."""
        if self.initialized:
            return False
        for buffer in self._pub:
            buffer.copy_(values)
        self._zero_padding()
        settle(self.device)
        self.initialized = True
        return True

    def _zero_padding(self) -> None:
        """Set the padding to zeros: it takes part in every flat update, so it must stay finite."""
        ends = [*(piece.offset for piece in self.spec.slices[1:]), self.spec.elements]
        for piece, end in zip(self.spec.slices, ends, strict=True):
            for buffer in self._pub:
                buffer[piece.end : end].zero_()

    def apply(self, total: Partial, *, scale: float = 1.0, skip: bool = False, context: PushContext = TOGETHER) -> None:
        """Compute theta_{step+1} from theta_step and the mean gradient and publish it. The commit point of the step."""
        self.publish(self.compute(total, scale=scale, skip=skip, context=context), skip=skip)

    def compute(
        self, total: Partial, *, scale: float = 1.0, skip: bool = False, context: PushContext = TOGETHER
    ) -> bool:
        """Compute theta_{step+1} beside theta_step; returns whether they differ. publish() must follow.

        context: which worker pushed.
        """
        source, target = self._pub[self.step & 1], self._pub[(self.step + 1) & 1]
        # Set before the first byte of theta_{step-1} is overwritten.
        self.overwritten = self.step - 1
        if self.spec.kind is not TensorKind.FROZEN:
            # A frozen bucket has one buffer, to which nothing is written.
            # Count what one buffer has held: of one step, or of all where there is one buffer.
            for which in (0, 1):
                if self._pub[which] is target:
                    self.writes.begin(which)
        # Equal buffers need no copy, nor does a rule that writes beside the old values.
        differ = self.changed_step == self.step and target is not source
        changed = not skip and self.update(target, total, scale, source if differ else None, context)
        if differ and not changed:
            target.copy_(source)
        # What is published is complete, for other processes too.
        settle(self.device)
        return changed

    def publish(self, changed: bool, *, skip: bool = False) -> None:
        """Publish what compute() has made as the new theta_step."""
        self.version += not skip
        if changed:
            self.changed_step = self.step + 1
        # Set last of all that a pull reads: readers without the lock trust the step, and would otherwise take a bucket
        # that has just changed for unchanged.
        self.step += 1
        self.hyper = None
        self.contributions.clear()

    def update(
        self, target: torch.Tensor, total: Partial, scale: float, source: torch.Tensor | None, context: PushContext
    ) -> bool:
        """Compute the new values. source: the old ones, None if target has them. False: target is untouched."""
        if total.values is None or not any(total.present):
            return False
        if self.spec.kind is TensorKind.BUFFER:
            if source is not None:
                target.copy_(source)
            for piece, assigned in zip(self.spec.slices, total.present, strict=True):
                if assigned:
                    target[piece.offset : piece.end].copy_(total.values[piece.offset : piece.end])
            return True
        if self.rule is None:
            return False
        values = scaled(total, scale).values
        assert values is not None
        return self.rule.apply(
            target,
            self.combined(values),
            clock=self.step,
            source=source,
            present=total.present,
            hyper=self.hyper,
            context=context,
        )

    @property
    def has_state(self) -> bool:
        """Whether the values are parameters, and the rule has their optimizer state."""
        return True

    @property
    def closed_hyper(self) -> Mapping[str, float]:
        """Hyper-parameters of the last closed step, if workers need them to run the optimizer."""
        return {}

    # Workers

    def answer(self, step: int, task: str) -> torch.Tensor:
        """The values that a pull of theta_step or theta_{step-1} gets, to be copied before the lock is released.

        If the rule looks ahead, a training task that pulls theta_step gets the look-ahead point; its values are
        remembered if the rule needs them. task "": one that doesn't train, which gets the parameters.
        """
        values = self.values_at(step)
        if self.rule is None or step != self.step or not task:
            return values
        answer = self.rule.answer(values, task)
        if Need.PULLS in self.rule.rule.needs:
            self.rule.sent(task, answer)
        return answer

    def members_changed(self, workers: Collection[str]) -> None:
        """Only these push from now on, by PushContext.task: drop what the rule keeps for others.

        Takes the lock itself, and only if the rule keeps anything per worker.
        """
        if self.rule is not None and self.rule.workers:
            with self.lock:
                self.rule.members_changed(workers)

    def image(self) -> BucketImage:
        """A copy of everything, for a cut."""
        tensors = {VALUE: self.values.detach().to("cpu", copy=True)}
        scalars: dict[str, tuple[float, ...]] = {}
        initialized: tuple[bool, ...] = (False,) * len(self.spec.slices)
        if self.rule is not None:
            states, scalars, initialized = self.rule.export()
            tensors.update(states)
        return BucketImage(
            shard=self.shard,
            bucket=self.number,
            step=self.step,
            version=self.version,
            tensors=tensors,
            scalars=scalars,
            initialized=initialized,
            counted=tuple(self.counted),
        )

    def rule_of(self, image: BucketImage) -> BucketRule | None:
        """The rule with an image's state. Raises ProtocolError or CheckpointError if the image doesn't fit."""
        values = image.tensors[VALUE]
        if values.numel() != self.spec.elements or values.dtype != DTYPES[self.spec.dtype]:
            raise ProtocolError(
                f"shard {self.shard}, bucket {self.number}: image of {values.numel()} {values.dtype} elements; the "
                f"plan says {self.spec.elements} {self.spec.dtype}"
            )
        states = {name: tensor for name, tensor in image.tensors.items() if name != VALUE}
        rule = self.make_rule()
        if rule is not None:
            flags = (tuple(image.initialized) + (False,) * len(self.spec.slices))[: len(self.spec.slices)]
            rule.load(states, dict(image.scalars), flags)
        elif states:
            raise CheckpointError(
                f"shard {self.shard}, bucket {self.number}: image has optimizer state for a bucket without a rule"
            )
        return rule

    def restore(self, image: BucketImage, rule: BucketRule | None, *, previous: torch.Tensor | None = None) -> None:
        """Take the state of an image. rule: from rule_of(). previous: as from previous(). Raises ProtocolError."""
        if previous is not None and previous.numel() not in (0, self.spec.elements):
            raise ProtocolError(f"bucket {self.number}: {previous.numel()} values of the step before its own")
        self.rule = rule
        for which in (0, 1):
            # Both before the first byte: they may be one.
            self.writes.begin(which)
        for buffer in self._pub:
            buffer.copy_(image.tensors[VALUE])
        self._zero_padding()
        if previous is not None and previous.numel() and self._pub[0] is not self._pub[1]:
            self._pub[(image.step - 1) & 1].copy_(previous)
        settle(self.device)
        self.restored(image, with_previous=previous is not None)

    def restored(self, image: BucketImage, *, with_previous: bool) -> None:
        """The values are those of an image now: the step is open, and nothing is contributed to it."""
        self.step, self.version = image.step, image.version
        self.changed_step = image.step
        self.oldest = image.step - int(with_previous)
        self.overwritten = self.oldest - 1
        self.pending = self.hyper = None
        self.contributions.clear()
        self.initialized = True
