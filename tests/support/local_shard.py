"""A shard of this process as a ShardService: no message, socket or event loop between the sender and the shard."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from shardline.codecs.base import Turn
from shardline.codecs.coding import Coding
from shardline.consistency.server import NumberedPush, StepWanted
from shardline.core.contributions import none_present
from shardline.core.gradients import Gradient
from shardline.core.outcome import SERVED, Decision, Outcome
from shardline.core.spec import DTYPES
from shardline.errors import ProtocolError, TensorError
from shardline.rpc.messages.convert import unpack_bits
from shardline.server.backend import Backend, HostedShard
from shardline.server.incoming_push import worst_of
from shardline.server.pull_sender import encode_bucket, published_step
from shardline.waist import Ack, Arrival, End, Exchanged, Payload, Push, Sender, Sink, Standing, Want, refuse_rows

WAIT_S = 10.0
"""Seconds that a pull waits if it names none."""


@dataclass
class LocalShard:
    """One shard of a backend, see waist.ShardService. Any thread may call it: the work is done on the caller's.

    It takes no room in staging: a payload is its sender's until it is copied into a sum.
    """

    backend: Backend
    number: int

    def exchange(
        self, sender: Sender, pushes: Sequence[Push], want: Want | None, sink: Sink, *, timeout_s: float
    ) -> Exchanged:
        began_s = time.monotonic()
        acks: list[Ack] = []
        answers: list[tuple[Arrival, torch.Tensor]] = []
        for push in pushes:
            acks.append(self._push(sender, push, want, answers))
            if not acks[-1].accepted:
                return Exchanged(acks=tuple(acks), end=None, push_s=time.monotonic() - began_s)
        push_s = time.monotonic() - began_s
        end = self._pull(sender, want, sink, answers, began_s + timeout_s) if want is not None else None
        return Exchanged(acks=tuple(acks), end=end, push_s=push_s)

    def standing(self, sender: Sender, replicas: Sequence[int], *, timeout_s: float) -> Standing:
        decision = self._admit(sender)
        timeline = self.backend.timeline
        if decision.outcome is not Outcome.SERVED:
            return Standing(
                outcome=decision.outcome,
                reason=decision.reason,
                timeline=timeline,
                replicas={},
                step_max=0,
                version=0,
                last_seq=0,
            )
        shard, who = self.backend.shard(self.number), sender.who
        if any(replica >= shard.replicas for replica in replicas):
            raise ProtocolError(f"replicas {list(replicas)[:8]} are asked for; the job has {shard.replicas}")
        steps = shard.mode.standing(who.task, who.incarnation, replicas)
        return Standing(
            outcome=Outcome.SERVED,
            reason="",
            timeline=timeline,
            replicas=steps,
            step_max=shard.step_max,
            version=shard.version,
            last_seq=shard.mode.last_push(who.task, who.incarnation),
            wants_state=shard.summing is not None and shard.summing.wants_state(),
        )

    def _admit(self, sender: Sender, *, init: bool = False) -> Decision:
        return self.backend.admit(
            job=sender.job, timeline=sender.timeline, plan_id=sender.plan_id, who=sender.who, init=init
        )

    # Pushes

    def _push(self, sender: Sender, push: Push, want: Want | None, answers: list[tuple[Arrival, torch.Tensor]]) -> Ack:
        decision = self._admit(sender, init=push.init)
        if decision.outcome is not Outcome.SERVED:
            return Ack(outcome=decision.outcome, reason=decision.reason, timeline=self.backend.timeline)
        shard, who, generation = self.backend.shard(self.number), push.by or sender.who, self.backend.generation
        gradients, nonfinite = self._gradients(shard, push)

        def guard() -> Decision | None:
            if generation != self.backend.generation:
                return Decision(Outcome.WRONG_TIMELINE, "the server was reconfigured while this push was arriving")
            return self.backend.fenced(sender.who.task, sender.who.incarnation)

        lag = 0
        if push.init:
            decision = worst_of([self._initialize(shard, number, item) for number, item in gradients.items()])
        elif shard.consistency.intake.number(push.seq) is not None:
            numbered = NumberedPush(
                task=who.task,
                incarnation=who.incarnation,
                seq=push.seq,
                base_version=push.base_min,
                clock=push.clock,
                scale=push.scale,
                skip=push.skip,
            )

            def answer() -> None:
                if want is not None and want.step is None:
                    answers[:] = [self._copied(shard, number, who.task) for number in range(len(shard.buckets))]

            decision, lag = shard.push(numbered, gradients, hyper=push.hyper, guard=guard, then=answer)
        else:
            decision = worst_of(
                [
                    shard.contribute(
                        number,
                        push.step,
                        push.block,
                        gradient,
                        hyper=push.hyper,
                        nonfinite=[*push.nonfinite, *nonfinite.get(number, ())],
                        guard=guard,
                    )
                    for number, gradient in gradients.items()
                ]
            )
        step, version = shard.position
        return Ack(
            outcome=decision.outcome,
            reason=decision.reason,
            step=step,
            version=version,
            staleness=lag,
            next_seq=shard.consistency.intake.number(shard.mode.last_push(who.task) + 1) or 0,
            timeline=self.backend.timeline,
            mismatch=decision.mismatch,
        )

    def _gradients(self, shard: HostedShard, push: Push) -> tuple[dict[int, Gradient], dict[int, Sequence[str]]]:
        """By bucket: the gradient, in memory of its own, and the tensors that the sender found not finite."""
        coding = self.backend.coding.plain if push.init else self.backend.coding.of_push(push.codec)
        found: dict[int, Gradient] = {}
        nonfinite: dict[int, Sequence[str]] = {}
        for item in [item for batch in push.payloads.batches() for item in batch]:
            if item.bucket >= len(shard.buckets) or item.bucket in found:
                raise ProtocolError(f"shard {shard.number}: bucket {item.bucket} is pushed twice, or does not exist")
            found[item.bucket], nonfinite[item.bucket] = _gradient(shard, item, coding), item.nonfinite
        for number in push.payloads.empty:
            found[number] = Gradient(None, none_present(shard.buckets[number].spec))
        missing = sorted(set(range(len(shard.buckets))) - found.keys())
        if missing and not push.partial:
            raise ProtocolError(f"shard {shard.number}: the push lacks buckets {missing[:8]}; name those without bytes")
        return found, nonfinite

    @staticmethod
    def _initialize(shard: HostedShard, number: int, gradient: Gradient) -> Decision:
        if gradient.values is None:
            raise ProtocolError(f"bucket {number}: initial values can't be empty")
        return shard.initialize(number, gradient.values)

    # Pulls

    def _copied(self, shard: HostedShard, number: int, task: str) -> tuple[Arrival, torch.Tensor]:
        """The latest values of a bucket, right after a push: no other one can come between."""
        bucket = shard.buckets[number]
        with bucket.lock:
            return _arrival(shard, number, bucket.step), bucket.answer(bucket.step, task).clone()

    def _pull(
        self,
        sender: Sender,
        want: Want,
        sink: Sink,
        answers: Sequence[tuple[Arrival, torch.Tensor]],
        deadline_s: float,
    ) -> End:
        decision, shard = self._admit(sender), self.backend.shards.get(self.number)
        if decision.outcome is not Outcome.SERVED or shard is None:
            return End(outcome=decision.outcome, reason=decision.reason, timeline=self.backend.timeline)
        for bucket in want.rows:
            raise refuse_rows(bucket)
        asked = StepWanted(
            step=want.step if want.ahead is None else want.ahead,
            at_least=want.ahead is not None,
            have=want.have_step,
            task=sender.who.task,
        )
        deadline_s = min(deadline_s, time.monotonic() + (want.wait_s or WAIT_S))
        coding = self.backend.coding.pull
        if answers and coding.is_view:
            numbers = want.buckets or range(len(answers))
            for arrival, values in [answers[number] for number in numbers]:
                sink.whole(arrival, values)
            return self._end(shard, SERVED)
        for number in want.buckets or range(len(shard.buckets)):
            outcome = self._bucket(shard, number, asked, coding, sink, deadline_s)
            if outcome is not Outcome.SERVED:
                return self._end(shard, Decision(outcome, f"step {asked.step} of bucket {number}"))
        return self._end(shard, SERVED)

    def _bucket(
        self, shard: HostedShard, number: int, want: StepWanted, coding: Coding, sink: Sink, deadline_s: float
    ) -> Outcome:
        """Hand one bucket to the sink once the mode allows it: SERVED, or why it can't be."""
        generation, changed = self.backend.generation, threading.Event()
        signal = self.backend.signal(shard.number, number)
        assert signal is not None, "the generation is that of the shard"
        with signal.watched(changed):
            while True:
                changed.clear()
                outcome = _give(shard, number, want, coding, sink)
                if outcome is not Outcome.WAITING:
                    return outcome
                if not changed.wait(max(0.0, deadline_s - time.monotonic())):
                    return Outcome.WAITING
                if generation != self.backend.generation:
                    return Outcome.WRONG_TIMELINE

    def _end(self, shard: HostedShard, decision: Decision) -> End:
        step, version = shard.position
        waits = decision.outcome is Outcome.WAITING
        return End(
            outcome=decision.outcome,
            reason=decision.reason,
            step=step,
            version=version,
            timeline=self.backend.timeline,
            waiting_for=tuple(shard.mode.waiting_for()) if waits else (),
            wants_state=shard.summing is not None and shard.summing.wants_state(),
            hyper=shard.summing.hyper if shard.summing is not None else {},
        )


def _gradient(shard: HostedShard, item: Payload, codings: Coding) -> Gradient:
    """A payload as a gradient on its own device, in memory that the shard may keep. Raises TensorError."""
    spec, coding = shard.buckets[item.bucket].spec, codings.bucket(shard.number, item.bucket)
    misfit = coding.misfit(item.nbytes)
    if item.elements != spec.elements or item.dtype != spec.dtype or misfit:
        raise TensorError(
            f"shard {shard.number}, bucket {item.bucket}: pushed as {item.elements} {item.dtype} elements in "
            f"{item.nbytes} bytes; the plan says {spec.elements} {spec.dtype}" + (f", {misfit}" if misfit else "")
        )
    present = unpack_bits(item.present, len(spec.slices), f"bucket {item.bucket}")
    if coding.codec.is_view and isinstance(item.data, torch.Tensor):
        if item.ready is not None:
            item.ready.synchronize()
        values = item.data.reshape(-1).view(DTYPES[spec.dtype]).clone()
    else:
        values = coding.coder.decode(bytes(item.octets), Turn(present=present))
    return Gradient(values, present, item.fingerprint, item.bound if item.bound > 0.0 else math.inf)


def _arrival(shard: HostedShard, number: int, step: int, *, unchanged: bool = False) -> Arrival:
    bucket = shard.buckets[number]
    nbytes = 0 if unchanged else bucket.spec.nbytes
    return Arrival(
        bucket=number, step=step, version=bucket.version, unchanged=unchanged, codec="", payload_bytes=nbytes
    )


def _give(shard: HostedShard, number: int, want: StepWanted, coding: Coding, sink: Sink) -> Outcome:
    """Hand one bucket to the sink, as it is now: SERVED, or why it can't be given."""
    if not coding.is_view:
        found = encode_bucket(shard, number, want, coding)
        if isinstance(found, Outcome):
            return found
        state = found.state
        arrival = _arrival(shard, number, state.step, unchanged=state.unchanged)
        arrival = replace(arrival, version=state.version, codec=state.codec, payload_bytes=state.payload_bytes)
        if state.payload_bytes:
            sink.whole(arrival, found.payload)
        else:
            sink.done(arrival)
        return Outcome.SERVED
    bucket = shard.buckets[number]
    with bucket.lock:
        step = published_step(shard, bucket, want)
        if isinstance(step, Outcome):
            return step
        if want.have is not None and bucket.changed_step <= want.have <= step:
            sink.done(_arrival(shard, number, step, unchanged=True))
        else:
            # Under the lock, so that nothing is written to what the sink reads: on whichever device it is.
            sink.take(_arrival(shard, number, step), bucket.answer(step, want.task))
    return Outcome.SERVED
