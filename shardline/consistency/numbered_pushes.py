"""Numbered pushes (PROTOCOL 1.5): a worker numbers its pushes to a shard, and each counts once, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from shardline.consistency.server import NumberedPush, Offer, ServerHalf, StepWanted, Terms
from shardline.core.contributions import Partial, dim_of
from shardline.core.gradients import Gradient, all_finite, check_gradient, on_device
from shardline.core.image import WorkerSequence
from shardline.core.outcome import Decision, Outcome
from shardline.core.push_context import PushContext
from shardline.core.records import Applied, AppliedPush, Record
from shardline.core.reduce import Block
from shardline.errors import ProtocolError
from shardline.storage.bucket import Bucket
from shardline.storage.shard import Hyper, Storage


def admit_push(seq: int, *, last_seq: int, skip: bool = False) -> Decision:
    """Whether push number `seq` of an incarnation counts at a shard that has counted up to last_seq.

    Only last_seq + 1 is accepted: remembering just the highest number would lose the retry of a lower one.
    """
    if seq < 1:
        return Decision(Outcome.REFUSED, f"the sequence number is {seq}; numbers start at 1")
    if seq <= last_seq:
        return Decision(Outcome.DUPLICATE, f"push {seq} was already applied; the shard is at {last_seq}")
    if seq > last_seq + 1:
        return Decision(Outcome.OUT_OF_SEQUENCE, f"push {seq} arrived; expected {last_seq + 1}")
    return Decision(Outcome.SKIPPED if skip else Outcome.APPLIED)


def resume(seq: int, *, last_seq: int) -> int | None:
    """Number for resending an unanswered push on a new timeline: its own number.

    last_seq: the shard's current number. If the shard already has the push it answers DUPLICATE. None if the shard went
    back behind the previous push: that one is lost too, and this one is computed again.
    """
    return seq if seq <= last_seq + 1 else None


def staleness(version: int, base_version: int) -> int:
    """Number of updates by others between the pull and the application of this push."""
    return max(0, version - base_version)


COUNTED = (Outcome.APPLIED, Outcome.COUNTED, Outcome.SKIPPED)
"""Outcomes of pushes that have used up their number."""
Totals = Sequence[tuple[Bucket, Partial]]
"""Each bucket's part of a push."""


class NumberedPushes(ServerHalf):
    """Keeps the numbers of every worker's pushes. A subclass decides what a counted push does."""

    def __init__(self, storage: Storage, terms: Terms) -> None:
        super().__init__(storage, terms)
        self.pushes: dict[str, AppliedPush] = {}
        """The last counted push of each worker. Guarded by `order`."""

    # Decided by subclasses

    def take(self, totals: Totals, context: PushContext, *, outcome: Outcome, scale: float, record: int | None) -> None:
        """Take a push that counts; also at a standby, where totals may lack buckets that are not copied yet.

        Call with `order` held.

        outcome: as decided by decide(), here or at the primary. scale: factor still to be applied to its gradients.
        record: for Storage.apply_now().
        """
        raise NotImplementedError

    def counted(self, push: NumberedPush) -> None:
        """Note a push that has used up its number: it is taken, or skipped. Call with `order` held."""

    def answer(self, then: Callable[[], None]) -> None:
        """A push was decided on; then: copies the answer to the pull in its call. Call with `order` held."""
        then()

    # Contributions

    def admit(self, offer: Offer) -> tuple[Decision, int]:
        push, gradients, hyper = offer.push, offer.gradients, offer.hyper
        if push is None:
            raise ProtocolError("the consistency mode of this job takes whole pushes, not single buckets of a step")
        storage = self.storage
        self._check(gradients, hyper)
        # A codec may have turned finite values into infinities.
        skip = push.skip or (self.terms.nan_policy == "skip" and not all_finite(gradients.values()))
        with storage.order:
            refused = offer.guard()
            if refused is not None:
                return refused, 0
            last = self._last(push.task, push.incarnation)
            decision = self.decide(push, last, skip=skip)
            lag = last.staleness
            if decision.outcome in COUNTED:
                applied = decision.outcome is not Outcome.SKIPPED
                if applied:
                    lag = staleness(storage.version, push.base_version)
                self._tally(lag, applied=applied)
                last = replace(last, last_seq=push.seq, outcome=decision.outcome, staleness=lag)
                self.pushes[push.task] = last
                totals = self._totals(gradients, hyper or {}) if applied else ()
                record = storage.record(totals, scale=push.scale, push=last)
                if applied:
                    context = _context(last, push.base_version)
                    self.take(totals, context, outcome=last.outcome, scale=push.scale, record=record)
                self.counted(push)
            self.answer(offer.then)
        for bucket in storage.buckets:
            storage.observers.on_publish(bucket.number)
        return decision, lag

    def decide(self, push: NumberedPush, last: AppliedPush, *, skip: bool) -> Decision:
        """Whether a push counts: APPLIED, COUNTED (applied with a later one) or SKIPPED. last: the previous one.

        Call with `order` held.
        """
        stop = self.storage.stop_step
        if stop is not None and self.storage.buckets[0].step >= stop:
            return Decision(Outcome.STOPPED, f"the job stops at version {stop}")
        return admit_push(push.seq, last_seq=last.last_seq, skip=skip)

    def _check(self, gradients: Mapping[int, Gradient], hyper: Hyper | None) -> None:
        for number, gradient in gradients.items():
            bucket = self.storage.buckets[number]
            check_gradient(
                gradient,
                shard=self.storage.number,
                bucket=bucket.spec,
                names=bucket.names,
                block=Block(0, 1),
                refuse_nonfinite=self.terms.nan_policy == "stop",
            )
        for bucket in self.storage.buckets:
            self.storage.check_hyper(bucket, hyper)

    def _totals(self, gradients: Mapping[int, Gradient], hyper: Hyper) -> Totals:
        """Each bucket's part on its device; sets the bucket's hyper-parameters. Call with `order` held."""
        totals = []
        for bucket in self.storage.buckets:
            gradient, total = gradients.get(bucket.number), Partial(None, ())
            if gradient is not None:
                values, borrowed = on_device(gradient, bucket.device)
                total = Partial(values, gradient.present, borrowed, dim=dim_of(bucket.spec))
            with bucket.lock:
                bucket.hyper = hyper.get(bucket.group)
            totals.append((bucket, total))
        return totals

    # Queries

    def serve(self, bucket: Bucket, want: StepWanted) -> Outcome:
        """See ServerHalf. Values of earlier steps are not kept."""
        if want.step is None:
            return Outcome.SERVED
        if want.step > bucket.step:
            return Outcome.WAITING
        return Outcome.SERVED if want.at_least or want.step == bucket.step else Outcome.OVERTAKEN

    def standing(self, task: str, incarnation: int, replicas: Sequence[int]) -> dict[int, int]:
        return {replica: self.progress(replica) for replica in replicas}

    def progress(self, replica: int) -> int:
        return min(bucket.step for bucket in self.storage.buckets)

    def last_push(self, task: str, incarnation: int = 0) -> int:
        with self.storage.order:
            known = self.pushes.get(task)
        return known.last_seq if known is not None and incarnation in (0, known.incarnation) else 0

    def _last(self, task: str, incarnation: int) -> AppliedPush:
        """The last counted push of an incarnation; a new incarnation starts at 0."""
        known = self.pushes.get(task)
        if known is None or known.incarnation != incarnation:
            return AppliedPush(task=task, incarnation=incarnation, last_seq=0, outcome=Outcome.APPLIED)
        return known

    # Timelines

    def settle(self) -> dict[str, WorkerSequence]:
        return {task: WorkerSequence(push.incarnation, push.last_seq) for task, push in self.pushes.items()}

    def restored(self, sequences: Mapping[str, WorkerSequence]) -> None:
        """See ServerHalf. Each worker's next push is expected."""
        with self.storage.order:
            self.pushes = {
                task: AppliedPush(
                    task=task, incarnation=held.incarnation, last_seq=held.last_seq, outcome=Outcome.APPLIED
                )
                for task, held in sequences.items()
            }

    # Standby

    def remembered(self) -> tuple[Sequence[AppliedPush], Applied | None]:
        return tuple(self.pushes.values()), None

    def recall(self, pushes: Sequence[AppliedPush], verdict: Applied | None) -> None:
        with self.storage.order:
            self.pushes = {push.task: push for push in pushes}

    def replay(self, record: Record, *, whole: bool) -> None:
        """See ServerHalf. The numbers come with recall(), which includes those of earlier records."""
        push = record.push
        if push is None:
            return
        applied = push.outcome is not Outcome.SKIPPED
        with self.storage.order:
            if applied:
                context = _context(push, self.storage.version - push.staleness)
                self.take(self.recorded(record), context, outcome=push.outcome, scale=record.scale, record=None)
            if not whole:
                return
            self.pushes[push.task] = push
        self._tally(push.staleness, applied=applied)

    def _tally(self, lag: int, *, applied: bool) -> None:
        with self.storage.lock:
            if applied:
                self.storage.tally.applied(lag)
            else:
                self.storage.tally.skipped_steps += 1

    def recorded(self, record: Record) -> Totals:
        """Each copied bucket's part of a recorded push; sets the bucket's hyper-parameters. Call with `order` held."""
        totals = []
        for part in record.parts:
            bucket = self.storage.buckets[part.bucket]
            with bucket.lock:
                bucket.hyper = part.hyper
            totals.append((bucket, self.total_of(part.tensor(), part.present, bucket)))
        return totals


def _context(push: AppliedPush, base_version: int) -> PushContext:
    return PushContext(
        task=push.task,
        incarnation=push.incarnation,
        base_version=base_version,
        staleness=push.staleness,
        clock=push.last_seq,
    )
