"""Synchronous steps (PROTOCOL 1.4), eager and voted: which contributions count, which pulls are served.

A bucket at `step` t has theta_t, collects contributions of step t, and still publishes theta_{t-1}.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import ClassVar

from shardline.consistency.server import Offer, ServerHalf, StepWanted, Terms, numbers
from shardline.core.gradients import Gradient, check_gradient, on_device
from shardline.core.outcome import COUNTED, Decision, Outcome
from shardline.core.reduce import Block, is_node
from shardline.core.spec import TensorKind
from shardline.errors import ProtocolError, TensorError
from shardline.storage.bucket import Bucket
from shardline.storage.shard import Hyper, Storage


def admit_push(step: int, counted: Collection[int], block: Block, *, bucket_step: int, replicas: int) -> Decision:
    """Whether a contribution of `block` for `step` counts in a bucket at bucket_step.

    counted: replicas already counted in bucket_step. Call with the bucket's lock held.
    """
    first, count = block
    if count < 1 or first + count > replicas:
        return Decision(Outcome.REFUSED, f"block {block} is outside the job's {replicas} replicas")
    if not is_node(block, replicas):
        return Decision(Outcome.REFUSED, f"block {block} is not a node of the sum over {replicas} replicas")
    if step < bucket_step:
        return Decision(Outcome.DUPLICATE, f"step {step} is closed; the bucket is at step {bucket_step}")
    if step > bucket_step:
        return Decision(Outcome.REFUSED, f"step {step} is ahead of the bucket, which is at step {bucket_step}")
    held = sum([replica in counted for replica in range(first, first + count)]) if counted else 0
    if held == count:
        return Decision(Outcome.DUPLICATE, f"replicas {block} were already counted in step {step}")
    if held:
        return Decision(Outcome.SPLIT, f"{held} of {count} replicas of {block} were already counted in step {step}")
    return COUNTED


def serve_pull(want: int, *, bucket_step: int, oldest: int = 0) -> Outcome:
    """Whether theta_want can be sent: SERVED, WAITING (not there yet) or OVERTAKEN (gone).

    oldest: step at which the bucket got its values by Init or Restore; earlier ones were never published here, and the
    second buffer is still empty.
    """
    if want > bucket_step:
        return Outcome.WAITING
    if want < max(bucket_step - 1, oldest):
        return Outcome.OVERTAKEN
    return Outcome.SERVED


def progress(bucket_step: int, replica_counted: bool) -> int:
    """The step that a replica has to work on according to one bucket. A (re)started worker takes the lowest."""
    return bucket_step + 1 if replica_counted else bucket_step


class ReplicaSteps(ServerHalf):
    """Each bucket collects all replicas' contributions to its open step. A subclass decides what closes the step."""

    outcome: ClassVar[Outcome] = Outcome.COUNTED
    """The outcome of a contribution that counts."""
    one_brings_buffers: ClassVar[bool] = True
    """Only replica 0 may contribute to buffers."""

    def __init__(self, storage: Storage, terms: Terms) -> None:
        super().__init__(storage, terms)
        self._opened_s: float | None = None
        """When the first contribution to bucket 0's open step arrived."""

    # Decided by subclasses

    def decide(self, bucket: Bucket, step: int, block: Block) -> Decision:
        """Whether a contribution counts. Call with the bucket's lock held."""
        stop = self.storage.stop_step
        if stop is not None and step >= stop:
            return Decision(Outcome.STOPPED, f"the job stops at step {stop}")
        return admit_push(
            step,
            bucket.contributions.counted,
            block,
            bucket_step=bucket.step,
            replicas=self.terms.contributors,
        )

    def ready(self, bucket: Bucket) -> bool:
        """Whether the open step of a bucket is complete. Call with its lock held."""
        return bucket.contributions.complete

    @property
    def divisor(self) -> int:
        return self.terms.contributors

    def counted(self, bucket: Bucket, block: Block, nonfinite: Collection[str], hyper: Hyper | None) -> None:
        """A contribution to a bucket's open step was counted and may make it complete. Call with its lock held."""
        if block.first == 0:
            bucket.hyper = (hyper or {}).get(bucket.group)

    def complete(self, bucket: Bucket) -> None:
        """A bucket has all contributions of its step. Called with its lock held."""
        raise NotImplementedError

    def noted(self, bucket: Bucket, step: int, *, ready: bool) -> None:
        """Called after a contribution was counted, without the lock. ready: it was the last, see complete()."""
        raise NotImplementedError

    # Contributions

    def admit(self, offer: Offer) -> tuple[Decision, int]:
        if offer.push is not None:
            raise ProtocolError("the consistency mode of this job takes the buckets of a step, not numbered pushes")
        ((bucket, gradient),) = offer.gradients.items()
        step, block = offer.step, offer.block
        storage, to = self.storage, self.storage.buckets[bucket]
        bound = check_gradient(
            gradient,
            shard=storage.number,
            bucket=to.spec,
            names=to.names,
            block=block,
            refuse_nonfinite=self.terms.nan_policy == "stop",
        )
        brought = to.spec.kind is TensorKind.BUFFER and gradient.values is not None
        if brought and block.first and self.one_brings_buffers:
            raise TensorError(f"buffer {to.names[0]!r} comes from replica 0, not from replicas {block}")
        storage.check_hyper(to, offer.hyper)
        with to.lock:
            decision = offer.guard() or self.decide(to, step, block)
            if decision.outcome is Outcome.DUPLICATE:
                if step == to.step and to.contributions.bits_differ(block, gradient.fingerprint):
                    decision = self._mismatch(to, step, block)
                return decision, 0
            if decision.outcome is not Outcome.COUNTED:
                return decision, 0
            self._add(to, block, gradient, bound)
            self.counted(to, block, offer.nonfinite, offer.hyper)
            ready = self.ready(to)
            if ready:
                self.complete(to)
        if bucket == 0:
            # One bucket represents the push, so that the others don't contend for the shard's lock.
            with storage.lock:
                storage.tally.pushes += 1
        storage.observers.on_counted()
        self.noted(to, step, ready=ready)
        return (COUNTED if self.outcome is Outcome.COUNTED else Decision(self.outcome)), 0

    def _add(self, to: Bucket, block: Block, gradient: Gradient, bound: float) -> None:
        values, borrowed = on_device(gradient, to.device)
        if to.number == 0:
            # Report how long the step's first contribution waited for its last, measured at bucket 0.
            now_s = time.monotonic()
            if self._opened_s is None or not to.contributions.counted:
                self._opened_s = now_s
            if len(to.contributions.counted) + block.count == self.divisor:
                self.storage.observers.on_barrier(now_s - self._opened_s)
        to.contributions.add(block, values, gradient.present, gradient.fingerprint, borrowed=borrowed, bound=bound)

    def _mismatch(self, bucket: Bucket, step: int, block: Block) -> Decision:
        with self.storage.lock:
            self.storage.tally.duplicate_mismatches += 1
        return Decision(
            Outcome.DUPLICATE,
            f"replicas {block} repeated step {step}, bucket {bucket.number} ({bucket.names[0]}), with different bits; "
            "the first contribution counts. Do all workers have the same kind of machine and number of threads?",
            mismatch=True,
        )

    # Queries

    def serve(self, bucket: Bucket, want: StepWanted) -> Outcome:
        if want.step is None:
            return Outcome.SERVED
        if want.at_least:
            return Outcome.SERVED if want.step <= bucket.step else Outcome.WAITING
        return serve_pull(want.step, bucket_step=bucket.step, oldest=bucket.oldest)

    def standing(self, task: str, incarnation: int, replicas: Sequence[int]) -> dict[int, int]:
        return {replica: self.progress(replica) for replica in replicas}

    def late(self) -> str:
        missing = self.waiting_for()
        return f"replicas {numbers(missing)}" if missing else super().late()

    def progress(self, replica: int) -> int:
        found = []
        for bucket in self.storage.buckets:
            with bucket.lock:
                found.append(progress(bucket.step, replica in bucket.contributions.counted))
        return min(found)

    def waiting_for(self) -> list[int]:
        lowest = min(bucket.step for bucket in self.storage.buckets)
        missing: set[int] = set()
        for bucket in self.storage.buckets:
            with bucket.lock:
                if bucket.step == lowest:
                    missing.update(bucket.contributions.missing())
        return sorted(missing)
