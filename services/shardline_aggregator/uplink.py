"""One shard's way to the servers: sums leave over one lane as they are ready, values come over another."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from shardline.client.exchange.shard_exchange import Interrupted, Observer, Retrying
from shardline.codecs.coding import JobCoding
from shardline.codecs.rows import PLAIN
from shardline.core.outcome import Outcome
from shardline.core.tensor_bytes import tensor_bytes
from shardline.core.timeouts import Timeouts
from shardline.errors import ShardlineError
from shardline.lanes.base import Lane
from shardline.rpc.messages.convert import pack_bits
from shardline.waist import Ack, End, Payload, Push, Sender, Standing, Want, Whole
from shardline_aggregator.sums import BEFORE, Arriving, BlockSum, RelayedShard, grouped

log = logging.getLogger("shardline.aggregator")
AWAY = (Outcome.WRONG_TIMELINE, Outcome.NOT_CONFIGURED, Outcome.FENCED)
"""Outcomes after which new orders come."""
CLOSE_S = 5.0
"""Seconds that the end of a cancelled call may take."""


class Uplink:
    """Exchanges with one shard of the servers for all members, from start() to close().

    connect: a new lane to the shard. on_trouble: called, on any thread, with a sentence if the members have to find
    another way to this shard. count: called with "push" or "pull", the codec, and the bytes.
    """

    def __init__(
        self,
        shard: RelayedShard,
        sender: Sender,
        coding: JobCoding,
        connect: Callable[[], Lane],
        timeouts: Timeouts,
        *,
        on_trouble: Callable[[str], None],
        count: Callable[[str, str, int], None],
    ) -> None:
        self._shard, self._steps, self._sender, self._timeouts = shard, shard.steps, sender, timeouts
        self._outbox = shard.steps.outbox
        self._on_trouble, self._count, self._coding = on_trouble, count, coding
        self._closed = threading.Event()
        self._asking = threading.Lock()
        self._puller = replace(sender, beside=True)
        self._lanes = [connect() for _ in range(3)]
        self._push, self._pull, self._ask = (
            Retrying(
                shard.number,
                lane,
                timeouts,
                interrupted=self._closed,
                observer=Observer(),
                note=self._note,
                promise=lambda number, seconds: None,
            )
            for lane in self._lanes
        )
        self._leaving, self._left, self._before = BEFORE, list[int](), list[int]()
        """A step, the buckets whose sums have left in it so far, and those of the step before, in order."""
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=f"{name}-{shard.number}", daemon=True)
            for name, work in (("sums", self._push_all), ("values", self._pull_all))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def standing(self, replicas: Sequence[int]) -> Standing:
        """The shard's standing on some replicas. Raises UnreachableError, Interrupted."""
        with self._asking:
            found = self._ask.standing(self._sender, replicas, timeout_s=self._timeouts.rpc_s / 2)
        self._steps.reach = max(self._steps.reach, found.step_max)
        return found

    def close(self) -> None:
        self._closed.set()
        self._outbox.close()
        for lane in self._lanes:
            lane.cancel()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(CLOSE_S)
        for lane in self._lanes:
            lane.close()

    def _note(self, shard: int, silent: bool) -> None:
        if silent:
            self._on_trouble(f"shard {shard} does not answer this aggregator")

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Interrupted:
            log.debug("shard %d: the exchange with the servers has ended", self._shard.number)
        except Exception as error:
            # The members would wait for this thread.
            if not isinstance(error, ShardlineError):
                log.exception("shard %d: an exchange with the servers failed", self._shard.number)
            self._on_trouble(f"shard {self._shard.number}: {error}")

    def _turned_away(self, outcome: Outcome, reason: str) -> None:
        """The servers take nothing from here until the orders change, which closes this uplink. Raises Interrupted."""
        log.info("shard %d: %s: %s", self._shard.number, outcome.name.lower(), reason)
        if self._closed.wait(self._timeouts.heartbeat_s):
            raise Interrupted

    # Sums

    def _push_all(self) -> None:
        patience_s = self._timeouts.suspect_s / 2
        sink = Arriving(self._shard, self._coding)
        while (parts := self._outbox.take(self._steps.overdue(patience_s))) is not None:
            if not parts:
                continue
            self._note_order(parts)
            groups = grouped(parts)
            pushes = [self._made(parts) for parts in groups.values()]
            done = self._push.exchange(self._sender, pushes, None, sink, timeout_s=self._timeouts.rpc_s)
            for (push, sums), ack in zip(zip(pushes, groups.values(), strict=True), done.acks, strict=False):
                self._judge(push, sums, ack)
            for sums in list(groups.values())[len(done.acks) :]:
                # An exchange ends with the first push that does not count.
                self._outbox.put(sums)

    def _note_order(self, parts: Sequence[BlockSum]) -> None:
        if parts[-1].step != self._leaving:
            self._leaving, self._before, self._left = parts[-1].step, self._left, []
        self._left.extend(part.bucket for part in parts)

    def _made(self, sums: Sequence[BlockSum]) -> Push:
        """The push of one block's sums."""
        step, block = sums[0].step, sums[0].block
        hyper, nonfinite = self._steps.extras(step, block)
        items, empty = [], []
        for part in sums:
            spec, values = self._shard.buckets[part.bucket].spec, part.total.values
            if values is None:
                empty.append(part.bucket)
                continue
            present, bound = part.total.present, part.total.bound
            items.append(
                Payload(
                    bucket=part.bucket,
                    dtype=spec.dtype,
                    elements=spec.elements,
                    present=b"" if all(present) else pack_bits(present),
                    data=tensor_bytes(values),
                    raw_bytes=spec.nbytes,
                    digest=0,
                    bound=bound if bound < float("inf") else 0.0,
                )
            )
        payloads = Whole(items, empty)
        return Push(payloads=payloads, step=step, block=block, hyper=hyper, nonfinite=nonfinite, partial=True)

    def _judge(self, push: Push, sums: Sequence[BlockSum], ack: Ack) -> None:
        if ack.accepted:
            self._count("push", PLAIN.name, push.payloads.nbytes)
            if ack.mismatch:
                log.error("shard %d: %s", self._shard.number, ack.reason)
        elif ack.outcome is Outcome.SPLIT:
            log.info("shard %d: %s; its parts follow", self._shard.number, ack.reason)
            if not self._steps.cut_again(push.step, push.block, [part.bucket for part in sums]):
                self._on_trouble(f"shard {self._shard.number} has a part of what a member sent: {ack.reason}")
        elif ack.outcome is Outcome.STOPPED:
            self._steps.stopped(push.step)
        elif ack.outcome in AWAY:
            self._outbox.put(sums)
            self._turned_away(ack.outcome, ack.reason)
        else:
            self._on_trouble(f"shard {self._shard.number} refused the sum of replicas {push.block}: {ack.reason}")

    # Values

    def _pull_all(self) -> None:
        sink, step = Arriving(self._shard, self._coding), -1
        while (wanted := self._outbox.wanted(step, self._timeouts.rpc_s)) is not None:
            if wanted <= step:
                continue
            if wanted > 0 and self._steps.lacking(wanted - 1):
                # Steps were missed; another member may still need the one before.
                self._fetch(wanted - 1, sink)
            if self._fetch(wanted, sink):
                self._steps.reach = max(self._steps.reach, wanted)
                step = wanted

    def _fetch(self, wanted: int, sink: Arriving) -> bool:
        """Pull what the buckets lack of a step; False if it has to be asked for again."""
        lacking = self._steps.lacking(wanted)
        if not lacking:
            return True
        # Servers answer in the order of the pull: one that waits for what leaves last would hold up all others.
        rank = {bucket: place for place, bucket in enumerate(dict.fromkeys([*self._left, *self._before]))}
        lacking.sort(key=lambda bucket: rank.get(bucket.number, len(rank)))
        follows = all(bucket.step == wanted - 1 for bucket in lacking) and wanted > 0
        want = Want(
            step=wanted,
            have_step=wanted - 1 if follows else None,
            buckets=[bucket.number for bucket in lacking],
            wait_s=self._timeouts.server_wait_s,
        )
        before = sink.wire_bytes
        done = self._pull.exchange(self._puller, (), want, sink, timeout_s=self._timeouts.rpc_s)
        self._count("pull", self._coding.pull.name, sink.wire_bytes - before)
        assert done.end is not None
        return self._taken(wanted, done.end)

    def _taken(self, wanted: int, end: End) -> bool:
        """Whether nothing more has to be done for this step."""
        if end.outcome is Outcome.OVERTAKEN:
            self._steps.passed(wanted)
        elif end.outcome is Outcome.STOPPED:
            self._steps.stopped(wanted - 1)
        elif end.outcome in AWAY:
            self._turned_away(end.outcome, end.reason)
            return False
        elif end.outcome is not Outcome.SERVED:
            self._on_trouble(f"shard {self._shard.number} refused a pull of step {wanted}: {end.reason}")
        return True
