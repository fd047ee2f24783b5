"""The standby of a shard: applies its primary's records in order, and can replace it. PROTOCOL 1.8."""

from __future__ import annotations

import threading
from dataclasses import replace

from shardline.consistency import choices as choices_of
from shardline.core.records import Begin, Digest, Image, Mark, Record
from shardline.core.tensor_bytes import digest, tensor_bytes
from shardline.errors import FencedError, ProtocolError
from shardline.rpc.messages.records import PREVIOUS
from shardline_ps.shard.shard import Shard


class Standby:
    """A copy of one shard. Thread-safe: records are applied one at a time, and none after a promotion.

    `shard` is of the same kind as the primary's, so the same records give the same bits, and it can serve as it is.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.copy = 0
        """Number of the copy whose records it has; 0 = none that can be resumed."""
        self.record = 0
        self.synced = False
        self.appointment = 0
        """The appointment it was copied for; see Placement."""
        self._copied: set[int] = set()
        self._closed = ""
        """Why it takes no more records; empty if it does."""
        self._lock = threading.Lock()

    def take(self, frame: Begin | Record | Image | Mark | Digest, *, appointment: int = 0) -> None:
        """Apply one frame. appointment: for a frame that begins a copy, the appointment it is for.

        Raises ProtocolError if the frame doesn't follow the previous one, or shows that the two sides differ: the
        standby must then be copied again, and refuses to be promoted. Raises FencedError if this is no longer a
        standby.
        """
        with self._lock:
            if self._closed:
                raise FencedError(self._closed)
            if isinstance(frame, Begin):
                # Set with the copy: what was copied for another appointment must never pass as this one's.
                self.appointment = appointment
            try:
                self._take(frame)
            except Exception:
                self.synced, self.copy = False, 0
                raise

    def _take(self, frame: Begin | Record | Image | Mark | Digest) -> None:
        if isinstance(frame, Begin):
            self.copy, self.record, self.synced = frame.copy, 0, False
            self._copied.clear()
            # What an earlier copy has left open.
            self.shard.mode.abandon()
            return
        if isinstance(frame, Digest):
            self._compare(frame)
            return
        if not self.copy or frame.number != self.record + 1:
            raise ProtocolError(
                f"the standby of shard {self.shard.number} received record {frame.number} after {self.record}; it "
                "must be copied again"
            )
        match frame:
            case Image():
                self._copy(frame)
            case Record():
                self._apply(frame)
            case Mark():
                self._complete(frame)
        self.record = frame.number

    def _copy(self, frame: Image) -> None:
        image, number = frame.image, frame.image.bucket
        if image.shard != self.shard.number or number >= len(self.shard.buckets):
            raise ProtocolError(f"shard {self.shard.number} has no bucket {number} of shard {image.shard}")
        bucket = self.shard.buckets[number]
        previous = image.tensors.get(PREVIOUS)
        known = replace(image, tensors={name: item for name, item in image.tensors.items() if name != PREVIOUS})
        rule = bucket.rule_of(known)
        with bucket.lock:
            bucket.restore(known, rule, previous=previous)
        self._copied.add(number)

    def _apply(self, record: Record) -> None:
        lacking = [part.bucket for part in record.parts if part.bucket not in self._copied]
        late = [part for part in record.parts if self.shard.buckets[part.bucket].step != part.step]
        if lacking or late:
            what = (
                f"buckets {lacking[:8]}, which are not copied yet"
                if lacking
                else f"another step of bucket {late[0].bucket}"
            )
            raise ProtocolError(f"record {record.number} of shard {self.shard.number} is for {what}")
        self.shard.mode.replay(record, whole=self.synced)

    def _complete(self, mark: Mark) -> None:
        shard = self.shard
        lacking = [bucket.number for bucket in shard.buckets if bucket.number not in self._copied]
        if lacking:
            raise ProtocolError(f"the copy of shard {shard.number} ended without buckets {lacking[:8]}")
        shard.mode.recall(mark.pushes, mark.verdict)
        if (choices := choices_of(shard.mode)) is not None:
            choices.inherit(mark.choices)
        self.synced = True

    def _compare(self, frame: Digest) -> None:
        if frame.number > self.record or frame.bucket not in self._copied:
            raise ProtocolError(f"a digest of record {frame.number} arrived after record {self.record}")
        mine = digest(tensor_bytes(self.shard.buckets[frame.bucket].values.cpu()))
        if mine != frame.digest:
            raise ProtocolError(
                f"bucket {frame.bucket} of shard {self.shard.number} differs between primary and standby after record "
                f"{frame.number}; it must be copied again. Do both have the same kind of machine and torch build?"
            )

    def standing(self) -> tuple[int, int, bool]:
        """(copy, record, synced), once any frame being applied is done."""
        with self._lock:
            return self.copy, self.record, self.synced

    def promote(self, appointment: int) -> str:
        """Take no more records and become the primary's shard; returns why not, or "" on success.

        appointment: the one that the chief's placement names. A copy for an earlier one was abandoned since, and its
        primary has continued without it.
        """
        with self._lock:
            if self._closed:
                return self._closed
            if appointment != self.appointment:
                return (
                    f"the standby of shard {self.shard.number} was copied for appointment {self.appointment:#x}, not "
                    f"for {appointment:#x}; its primary has continued without it"
                )
            if not self.synced:
                return f"the standby of shard {self.shard.number} is incomplete: it has record {self.record} of a copy"
            self._closed = f"the standby of shard {self.shard.number} is its primary now"
            # The previous primary's cuts are lost with it: one that lags behind some bucket could never be completed.
            self.shard.cuts.release(self.shard.step_max)
            return ""

    def close(self, reason: str) -> None:
        """Take no more records, and refuse to be promoted. reason: for the errors."""
        with self._lock:
            self._closed = self._closed or reason

    @property
    def nbytes(self) -> int:
        return self.shard.held_bytes
