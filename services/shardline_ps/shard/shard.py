"""One shard: its buckets, and what a contribution does to them. No network here; callers may be any threads."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from shardline.consistency import asynchronous, sync
from shardline.core.contributions import Partial, mean
from shardline.core.image import BucketImage, WorkerSequence
from shardline.core.outcome import Decision, Outcome
from shardline.core.records import Applied, AppliedPush
from shardline.core.reduce import Block, is_finite, stays_finite
from shardline.core.spec import TensorKind
from shardline.errors import NonFiniteError, TensorError
from shardline.storage.publication import PlainPublication, Publication, areas
from shardline_ps.shard.bucket import Bucket
from shardline_ps.shard.cuts import CutBook, check_images
from shardline_ps.shard.gradients import (
    Gradient,
    ShardVote,
    Staged,
    all_finite,
    nonfinite_names,
    norm_parts,
    on_device,
    peak,
)
from shardline_ps.shard.held import factor_of, hold_bucket, hold_verdict, record_push, totals_of
from shardline_ps.shard.tallies import PushRecord, ShardSettings, Tally
from shardline_ps.standby.record_log import ReplicaLog

__all__ = ["Gradient", "Guard", "PushRecord", "Shard", "ShardSettings", "ShardVote", "Tally"]

Guard = Callable[[], Decision | None]
"""Why a message counts no more, or None where it does."""


class Shard:
    """Buckets of one shard and the rules between them.

    publication: memory of the published values; None = ordinary memory of the settings' device.

    on_publish(bucket number), on_counted() and on_complete(step) are called without a bucket's lock and must not block.
    on_counted says that contributions were counted or dropped, on_complete that all of a voted step are there.
    """

    def __init__(
        self,
        number: int,
        settings: ShardSettings,
        *,
        publication: Publication | None = None,
        on_publish: Callable[[int], None] = lambda bucket: None,
        on_counted: Callable[[], None] = lambda: None,
        on_complete: Callable[[int], None] = lambda step: None,
        on_barrier: Callable[[float], None] = lambda wait_s: None,
        on_apply: Callable[[float], None] = lambda seconds: None,
        on_failure: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.number = number
        self.settings = settings
        spec = settings.plan.shards[number]
        self.is_sync = settings.consistency.mode == "sync"
        self.voted = settings.consistency.voted
        self._partial_lock = threading.Lock()
        self.partial_bytes = 0
        """Bytes of sums that wait for more replicas, or for a verdict. No lock to read."""
        self.publication = PlainPublication(spec, settings.device) if publication is None else publication
        """Where the buckets' values live."""
        held = self._weak_held()
        self.buckets = [
            Bucket(
                number,
                index,
                bucket,
                settings.plan.tensors,
                settings.rule,
                settings.schedule,
                replicas=settings.replicas,
                pub=areas(self.publication, index, bucket, sync=self.is_sync),
                on_held=held,
            )
            for index, bucket in enumerate(spec.buckets)
        ]
        # In asynchronous mode the chief says when; the shard copies itself at once.
        self.cuts = CutBook(len(self.buckets), settings.cut_every if self.is_sync else 0)
        self.lock = threading.Lock()
        self.tally = Tally()
        self.stop_step: int | None = None
        self.sequences: dict[str, PushRecord] = {}
        self._nonfinite: dict[int, set[str]] = {}
        """Tensors that workers named as not finite, by step (policy "skip")."""
        self._on_publish = on_publish
        self._on_counted = on_counted
        self._on_complete = on_complete
        self._on_barrier = on_barrier
        self._on_apply = on_apply
        self._on_failure = on_failure
        self._opened_s: float | None = None
        """When the first contribution to bucket 0's open step came."""
        self._completed: set[int] = set()
        self._staged: Staged | None = None
        """What the open vote is about."""
        self.log: ReplicaLog | None = None
        """Where there is a standby: what is recorded for it."""
        self.order = threading.Lock()
        """Held while a voted step is made in all buckets, and while one of them is copied for a standby."""
        self.last_verdict: Applied | None = None
        """Voted steps: the last one that is known; the step may not be published yet."""
        self._epoch = 0
        """Counts rollbacks and restores, so that a verdict of before changes nothing."""

    def _weak_held(self) -> Callable[[int], None]:
        """_held, without keeping the shard: its memory goes with its last user, and waits for no cycle to be found."""
        weak = weakref.WeakMethod(self._held)

        def held(difference: int) -> None:
            method = weak()
            if method is not None:
                method(difference)

        return held

    def _held(self, difference: int) -> None:
        with self._partial_lock:
            self.partial_bytes += difference

    # Reading

    @property
    def step_min(self) -> int:
        """Lowest step over the buckets; the shard's open step."""
        return min(bucket.step for bucket in self.buckets)

    @property
    def step_max(self) -> int:
        """Highest step over the buckets."""
        return max(bucket.step for bucket in self.buckets)

    @property
    def version(self) -> int:
        """Optimizer applications that every bucket has seen."""
        return min(bucket.version for bucket in self.buckets)

    @property
    def initialized(self) -> bool:
        """Every bucket has values."""
        return all(b.initialized for b in self.buckets)

    @property
    def held_bytes(self) -> int:
        """Bytes of values, optimizer state, partial sums and cuts."""
        return sum(bucket.nbytes for bucket in self.buckets) + self.partial_bytes + self.cuts.held_bytes

    def progress(self, replica: int) -> int:
        """Step the replica has to work on, as far as this shard knows."""
        found = []
        for bucket in self.buckets:
            with bucket.lock:
                found.append(sync.progress(bucket.step, replica in bucket.contributions.counted))
        return min(found)

    def waiting_for(self) -> list[int]:
        """Replicas that the lowest open step lacks in some bucket."""
        lowest = self.step_min
        missing: set[int] = set()
        for bucket in self.buckets:
            with bucket.lock:
                if bucket.step == lowest:
                    missing.update(bucket.contributions.missing())
        return sorted(missing)

    # First values

    def initialize(self, bucket: int, values: torch.Tensor) -> Decision:
        """Set one bucket's first values; a second time changes nothing."""
        held = self.buckets[bucket]
        with held.lock:
            fresh = held.initialize(values)
        self._on_publish(bucket)
        return Decision(Outcome.COUNTED if fresh else Outcome.DUPLICATE)

    # Synchronous

    def _admit(self, held: Bucket, step: int, block: Block) -> Decision:
        if self.stop_step is not None and step >= self.stop_step:
            return Decision(Outcome.STOPPED, f"the job stops at step {self.stop_step}")
        return sync.admit_push(
            step,
            held.contributions.counted,
            block,
            bucket_step=held.step,
            replicas=self.settings.replicas,
        )

    def contribute(
        self,
        bucket: int,
        step: int,
        block: Block,
        gradient: Gradient,
        *,
        hyper: Mapping[int, Mapping[str, float]] | None = None,
        nonfinite: Collection[str] = (),
        guard: Guard = lambda: None,
    ) -> Decision:
        """Count a whole contribution of one bucket; applies the step where it was the last one (EAGER).

        The gradient's tensor is the shard's from now on, unless it is borrowed. nonfinite: what the worker found not
        finite, for the vote.
        guard is asked under the bucket's lock, so that nothing of another history counts after it was dropped.
        Raises TensorError or NonFiniteError, the bucket unchanged.
        """
        held = self.buckets[bucket]
        bound = self._check(held, block, gradient)
        self._check_hyper(held, hyper)
        with held.lock:
            decision = guard() or self._admit(held, step, block)
            if decision.outcome is Outcome.DUPLICATE:
                if step == held.step and held.contributions.bits_differ(block, gradient.fingerprint):
                    decision = self._mismatch(held, step, block)
                return decision
            if decision.outcome is not Outcome.COUNTED:
                return decision
            values, borrowed = on_device(gradient, held.device)
            if bucket == 0:
                self._time_barrier(held, block)
            held.contributions.add(
                block, values, gradient.present, gradient.fingerprint, borrowed=borrowed, bound=bound
            )
            del values
            if block.first == 0:
                held.hyper = (hyper or {}).get(held.group)
            if nonfinite and self.voted:
                # Before the step can be seen complete, so that the vote never misses it.
                with self.lock:
                    self._nonfinite.setdefault(step, set()).update(nonfinite)
            complete = held.contributions.complete
            if complete and not self.voted:
                self._close(held)
        if bucket == 0:
            # One bucket stands for the push: the others needn't meet at the shard's lock.
            with self.lock:
                self.tally.pushes += 1
        self._on_counted()
        if self.voted:
            if complete:
                self._complete(step)
            return Decision(Outcome.STAGED)
        if complete:
            self._on_publish(bucket)
        return decision

    def _close(self, held: Bucket) -> None:
        """Apply a complete step to a bucket whose lock is held (EAGER)."""
        try:
            total = held.contributions.take()
            if held.spec.kind is TensorKind.PARAM:
                total = mean(total, self.settings.replicas)
                self._check_sum(held, total)
            if self.log is not None and hold_bucket(self, self.log, held, total):
                return
            self._apply(held, total)
        except Exception:
            # Nothing was published: what was counted is forgotten, so that it can be sent again.
            held.contributions.clear()
            held.hyper = None
            raise
        self.cut_if_wanted(held)

    def _check_sum(self, held: Bucket, total: Partial) -> None:
        """Finite contributions can have a sum that is not; under "stop" it is never applied."""
        values = total.values
        if self.settings.replicas == 1 or values is None or stays_finite(total.bound, values.dtype):
            return
        if not is_finite(values):
            names = ", ".join(nonfinite_names(held.names, held.spec, values))
            error = NonFiniteError(
                f"shard {self.number}, step {held.step}: the sum of {self.settings.replicas} replicas' gradients of "
                f"{names} has NaN or infinity though each of them is finite; it was not applied. Lower the learning "
                f"rate, or train in a wider dtype"
            )
            self._on_failure(error)
            raise error

    def _check_hyper(self, held: Bucket, hyper: Mapping[int, Mapping[str, float]] | None) -> None:
        if hyper and held.rule is not None and (numbers := hyper.get(held.group)):
            held.rule.check_hyper(numbers)

    def _apply(self, held: Bucket, total: Partial, *, scale: float = 1.0, skip: bool = False) -> None:
        """Apply to a bucket whose lock is held, and tell how long it took."""
        held.publish(self.compute(held, total, scale=scale, skip=skip), skip=skip)

    def compute(self, held: Bucket, total: Partial, *, scale: float = 1.0, skip: bool = False) -> bool:
        """The first half of it: see Bucket.compute()."""
        start_s = time.monotonic()
        try:
            changed = held.compute(total, scale=scale, skip=skip)
        except Exception as error:
            self._on_failure(error)
            raise
        self._on_apply(time.monotonic() - start_s)
        return changed

    def published(self, held: Bucket) -> None:
        """A bucket's step was published after its standby had it; no bucket's lock held."""
        self._on_publish(held.number)
        self._on_counted()

    def _time_barrier(self, held: Bucket, block: Block) -> None:
        """Tell how long the step's first contribution waited for its last; bucket 0 stands for the shard."""
        now_s = time.monotonic()
        if self._opened_s is None or not held.contributions.counted:
            self._opened_s = now_s
        if len(held.contributions.counted) + block.count == self.settings.replicas:
            self._on_barrier(now_s - self._opened_s)

    def _mismatch(self, held: Bucket, step: int, block: Block) -> Decision:
        with self.lock:
            self.tally.duplicate_mismatches += 1
        return Decision(
            Outcome.DUPLICATE,
            f"replicas {block} sent other bits for step {step}, bucket {held.number} ({held.names[0]}) than before; "
            f"the first ones count. Do all workers have one kind of machine and the same number of threads?",
            mismatch=True,
        )

    def _check(self, held: Bucket, block: Block, gradient: Gradient) -> float:
        """Refuse what a contribution may not hold, by the kind of bucket; returns the largest magnitude, if looked."""
        values = gradient.values
        if values is None:
            return 0.0
        if held.spec.kind is TensorKind.FROZEN:
            raise TensorError(f"{held.names[0]!r} is frozen (requires_grad is False): it takes no gradient")
        if held.spec.kind is TensorKind.BUFFER:
            if block.first != 0:
                raise TensorError(f"buffer {held.names[0]!r} comes from replica 0, not from replicas {block}")
            return math.inf
        if self.settings.consistency.nan_policy != "stop":
            return math.inf
        bound = peak(gradient, values)
        if not math.isfinite(bound):
            names = nonfinite_names(held.names, held.spec, values)
            raise NonFiniteError(
                f"shard {self.number}: gradient of {', '.join(names)} from replicas {block} has NaN or infinity; "
                f"nothing was changed. Lower the learning rate, clip gradients, or set nan_policy='skip'"
            )
        return bound

    def cut_if_wanted(self, held: Bucket) -> None:
        """Copy the bucket if its new step is to be cut: after the step is reached, before the next is applied."""
        if self.cuts.wanted(held.step):
            self.cuts.store(held.image())

    # Voted

    def _complete(self, step: int) -> None:
        """Tell once when every bucket has all contributions of the step."""
        for bucket in self.buckets:
            with bucket.lock:
                if bucket.step != step or not bucket.contributions.complete:
                    return
        with self.lock:
            if step in self._completed:
                return
            self._completed.add(step)
        self._on_complete(step)

    def vote(self, step: int) -> tuple[ShardVote, Staged] | None:
        """The mean gradient of a complete step with its square sums. Its replicas stay counted until the verdict.

        None where the contributions were dropped since the step was complete (a new timeline).
        """
        with self.lock:
            nonfinite = set(self._nonfinite.pop(step, set()))
            epoch = self._epoch
        sums: list[tuple[int, float]] = []
        totals: list[Partial] = []
        for bucket in self.buckets:
            with bucket.lock:
                if bucket.step != step or not bucket.contributions.complete:
                    self._held(-sum(total.held_bytes for total in totals))
                    return None
                total = bucket.contributions.take()
            if bucket.spec.kind is TensorKind.PARAM:
                total = mean(total, self.settings.replicas)
                found, names = norm_parts(self.settings.plan, bucket.spec, total)
                sums += found
                nonfinite |= names
            self._held(total.held_bytes)
            totals.append(total)
        vote = ShardVote(step=step, sums=tuple(sums), nonfinite=tuple(sorted(nonfinite)))
        staged = Staged(step, epoch, totals)
        with self.lock:
            self._staged = staged
        if epoch != self._epoch:
            # Dropped while the vote was made.
            self._forget_staged()
            return None
        return vote, staged

    def waits_for(self, staged: Staged) -> bool:
        """Whether this vote is still open."""
        return self._staged is staged

    def _forget_staged(self) -> None:
        """Let go of what a vote is about; whoever still holds it finds nothing in it."""
        with self.lock:
            staged, self._staged = self._staged, None
        if staged is None:
            return
        for bucket in self.buckets:
            with bucket.lock:
                self.let_go(staged, bucket.number)

    def let_go(self, staged: Staged, bucket: int) -> None:
        """A total was applied, or never will be. The bucket's lock is held."""
        self._held(-staged.totals[bucket].held_bytes)
        staged.totals[bucket] = Partial(None, ())

    def open_for(self, bucket: Bucket, staged: Staged) -> bool:
        """Whether the bucket waits for this verdict: it was not restored since the vote. Its lock held."""
        return bucket.step == staged.step and staged.epoch == self._epoch

    def apply_verdict(self, staged: Staged, *, scale: float, skip: bool) -> None:
        """Apply or skip a voted step in every bucket; nothing where the shard was restored since the vote."""
        with self.order:
            if self.log is not None and hold_verdict(self, self.log, staged, scale=scale, skip=skip):
                return
            for bucket in self.buckets:
                with bucket.lock:
                    if not self.open_for(bucket, staged):
                        continue
                    total = staged.totals[bucket.number]
                    self._apply(bucket, total, scale=factor_of(bucket, scale), skip=skip)
                    self.let_go(staged, bucket.number)
                    self.cut_if_wanted(bucket)
                self._on_publish(bucket.number)
            self.voted_step_closed(staged, Applied(step=staged.step, scale=scale, skip=skip))

    def voted_step_closed(self, staged: Staged, verdict: Applied) -> None:
        """A voted step is published in every bucket. self.order held. Nothing where the shard was restored since."""
        self._on_counted()
        with self.lock:
            if staged.epoch != self._epoch:
                return
            if self._staged is staged:
                # Else the next step is voted on already, and its verdict may be known.
                self._staged, self.last_verdict = None, verdict
            self._completed.discard(staged.step)
            self.tally.skipped_steps += verdict.skip

    # Asynchronous

    def sequence(self, task: str, incarnation: int) -> PushRecord:
        """Record of an incarnation; a new incarnation starts at 0. Lock held."""
        known = self.sequences.get(task)
        if known is None or known.incarnation != incarnation:
            known = self.sequences[task] = PushRecord(incarnation)
        return known

    def push_async(
        self,
        task: str,
        incarnation: int,
        seq: int,
        gradients: Mapping[int, Gradient],
        *,
        base_version: int,
        scale: float = 1.0,
        skip: bool = False,
        hyper: Mapping[int, Mapping[str, float]] | None = None,
        guard: Guard = lambda: None,
        then: Callable[[], None] = lambda: None,
    ) -> tuple[Decision, int]:
        """Apply one worker's whole push to all buckets, once; returns the decision and the staleness.

        then() runs under the shard's lock after the decision, for a reply that no other push comes between. guard is
        asked under it before, so that nothing counts after its sender was fenced.
        """
        for number, gradient in gradients.items():
            self._check(self.buckets[number], Block(0, 1), gradient)
        for bucket in self.buckets:
            self._check_hyper(bucket, hyper)
        # A codec may have made infinities of what was finite at the worker.
        skip = skip or (self.settings.consistency.nan_policy == "skip" and not all_finite(gradients.values()))
        with self.lock:
            refused = guard()
            if refused is not None:
                return refused, 0
            record = self.sequence(task, incarnation)
            decision = asynchronous.admit_push(seq, last_seq=record.last_seq, skip=skip)
            if self.stop_step is not None and self.buckets[0].step >= self.stop_step:
                decision = Decision(Outcome.STOPPED, f"the job stops at version {self.stop_step}")
            lag = record.staleness
            if decision.outcome in (Outcome.APPLIED, Outcome.SKIPPED):
                record.last_seq = seq
                record.outcome = decision.outcome
                if decision.outcome is Outcome.APPLIED:
                    lag = record.staleness = asynchronous.staleness(self.version, base_version)
                    self.tally.pushes += 1
                    self.tally.staleness_sum += lag
                    self.tally.staleness_max = max(self.tally.staleness_max, lag)
                totals = totals_of(self.buckets, gradients, hyper or {}) if decision.outcome is Outcome.APPLIED else []
                self._apply_async(totals, scale, AppliedPush(task=task, **vars(record)))
            then()
        for bucket in self.buckets:
            self._on_publish(bucket.number)
        return decision, lag

    def _apply_async(self, totals: Sequence[tuple[Bucket, Partial]], scale: float, push: AppliedPush) -> None:
        number = record_push(self.log, totals, scale, push) if self.log is not None else None
        for bucket, total in totals:
            with bucket.lock:
                self._apply(bucket, total, scale=scale)
                if number is not None and self.log is not None:
                    self.log.compare(number, bucket.number, bucket.values)

    # Cuts, restore, stop

    def request_cut(self, step: int, *, stop: bool) -> tuple[bool, int]:
        """Cut at `step`; returns (passed, highest step). With stop, nothing goes past it."""
        if not self.is_sync:
            self._cut_now(step)
            if stop:
                self.stop_step = 0
            return False, self.step_max
        # Registered first: a bucket that reaches the step in between then copies itself.
        self.cuts.request(step)
        before = self.stop_step
        if stop:
            self.stop_step = step
        for bucket in self.buckets:
            with bucket.lock:
                # A step that waits for the standby is made already: the optimizer's state is that of the next one.
                if bucket.step + (bucket.pending is not None) > step:
                    self._withdraw_cut(step, before)
                    return True, self.step_max
                if bucket.step == step and bucket.initialized:
                    self.cuts.store(bucket.image())
        return False, self.step_max

    def _withdraw_cut(self, step: int, stop_step: int | None) -> None:
        """A request came too late: stop nothing, and keep no copy that can't be completed."""
        self.stop_step = stop_step
        self.cuts.withdraw(step)

    def _cut_now(self, step: int) -> None:
        with self.lock:
            images = []
            for bucket in self.buckets:
                with bucket.lock:
                    images.append(bucket.image())
            # Of the same instant: a restored shard has to know which pushes it holds.
            sequences = {
                task: WorkerSequence(record.incarnation, record.last_seq) for task, record in self.sequences.items()
            }
        self.cuts.store_all(step, images, sequences)

    def restore(self, images: Sequence[BucketImage], sequences: Mapping[str, WorkerSequence] | None = None) -> None:
        """Replace all buckets, or none where an image is missing, named twice, at another step or doesn't fit.

        sequences: the last push of each worker that the images hold (asynchronous mode); the next one is expected.
        Raises ProtocolError or CheckpointError.
        """
        check_images(self.number, len(self.buckets), images, sync=self.is_sync)
        rules = [self.buckets[image.bucket].rule_of(image) for image in images]
        self.cuts.clear()
        self._epoch += 1
        self._forget_staged()
        self.last_verdict = None
        if self.log is not None:
            self.log.abandon()
        for image, rule in zip(images, rules, strict=True):
            bucket = self.buckets[image.bucket]
            with bucket.lock:
                bucket.restore(image, rule)
        with self.lock:
            self._nonfinite.clear()
            self._completed.clear()
            self.sequences = {
                task: PushRecord(held.incarnation, held.last_seq) for task, held in (sequences or {}).items()
            }
        self._on_counted()
        for bucket in self.buckets:
            self._on_publish(bucket.number)

    def drop_contributions(self) -> int:
        """Forget what open steps have gathered (a new timeline); returns the number of replicas dropped."""
        dropped = 0
        self._epoch += 1
        self._forget_staged()
        for bucket in self.buckets:
            with bucket.lock:
                dropped = max(dropped, len(bucket.contributions.counted))
                bucket.contributions.clear()
                bucket.pending = None
        with self.lock:
            self._nonfinite.clear()
            self._completed.clear()
        if self.log is not None:
            self.log.abandon()
        self._on_counted()
        return dropped
