"""A primary's records for its standby, without a network: what is recorded, and what waits for it. PROTOCOL 1.8.

A record's update is published, and answers that depend on it are sent, once the standby has acknowledged the record.
While a standby is copied, bucket by bucket, changes of copied buckets are recorded already. From the mark after the
last bucket the standby may be promoted, so from then on nothing is sent without it until the chief has the primary
continue alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from shardline.core.choices import Choices
from shardline.core.image import BucketImage
from shardline.core.records import Applied, AppliedPush, Digest, Image, Mark, Record, RecordPart
from shardline.core.tensor_bytes import digest, tensor_bytes
from shardline.errors import UnreachableError
from shardline.rpc.messages.records import PREVIOUS, Frame
from shardline.storage.bucket import Bucket

DIGEST_EVERY = 100
"""Records between two comparisons of the values on both sides."""
Release = Callable[[], None]


@dataclass(frozen=True)
class SentEntry:
    """An entry of the stream, and the number of the last record that the standby has after it."""

    number: int
    frame: Frame


class RecordLog:
    """Records of one shard for one standby. Thread-safe; takes no other lock while it holds its own.

    on_entry: called when there is something to send, from any thread, with locks held.
    run: runs releases, which take the locks of buckets.
    """

    def __init__(self, *, on_entry: Callable[[], None], run: Callable[[Release], None]) -> None:
        self._lock = threading.Lock()
        self._on_entry = on_entry
        self._run = run
        self.copy = 0
        """Number of the current copy; 0 = none."""
        self.marked = False
        """All buckets have been sent: the standby may be promoted."""
        self.sent = 0
        self.acked = 0
        self._copied: set[int] = set()
        self._unsent: deque[SentEntry] = deque()
        self._unacked: deque[SentEntry] = deque()
        self._held: deque[tuple[int, Release]] = deque()
        self._waiting: dict[asyncio.Future[None], int] = {}
        self._since_digest = 0
        self._digest_bucket = 0

    @property
    def lag(self) -> int:
        """Number of records not acknowledged yet."""
        with self._lock:
            return max(0, self.sent - self.acked)

    # Recording

    def record(
        self,
        parts: Sequence[RecordPart],
        release: Release | None = None,
        *,
        scale: float = 1.0,
        skip: bool = False,
        verdict: Applied | None = None,
        push: AppliedPush | None = None,
    ) -> int | None:
        """Send a decision about these buckets; release() runs once it is acknowledged.

        Returns None if none of them is copied: nothing is recorded, and nothing has to wait. Empty parts: a push that
        changes push numbers only.
        """
        with self._lock:
            told = tuple(part for part in parts if part.bucket in self._copied)
            if not self._copied or (parts and not told):
                return None
            number = self.sent + 1
            self._append(number, Record(number=number, parts=told, scale=scale, skip=skip, verdict=verdict, push=push))
            if release is not None:
                self._held.append((number, release))
            return number

    def image(self, copy: int, bucket: int, image: BucketImage) -> bool:
        """Send a bucket's present state and record its changes from now on. The caller keeps it unchanged meanwhile.

        False if this copy has been abandoned.
        """
        with self._lock:
            if copy != self.copy:
                return False
            number = self.sent + 1
            self._append(number, Image(number=number, image=image))
            self._copied.add(bucket)
            return True

    def mark(
        self,
        copy: int,
        *,
        pushes: Sequence[AppliedPush] = (),
        verdict: Applied | None = None,
        choices: Choices | None = None,
    ) -> None:
        """Send the mark that all buckets are copied; the caller keeps the shard from changing meanwhile."""
        with self._lock:
            if copy == self.copy:
                number = self.sent + 1
                self.marked = True
                made = choices or Choices()
                self._append(number, Mark(number=number, pushes=tuple(pushes), verdict=verdict, choices=made))

    def compare(self, number: int, bucket: int, values: torch.Tensor) -> None:
        """Every DIGEST_EVERY records, have the standby compare the next bucket as it is right after record `number`.

        The caller keeps the bucket from changing meanwhile.
        """
        with self._lock:
            self._since_digest += 1
            due = self._since_digest >= DIGEST_EVERY and bucket == self._digest_bucket % max(1, len(self._copied))
            # A bucket that isn't copied belongs to a record of the previous copy.
            if not due or bucket not in self._copied:
                return
            self._since_digest = 0
            self._digest_bucket += 1
            copy = self.copy
        found = digest(tensor_bytes(values.cpu()))
        with self._lock:
            # Not if the copy that the record belonged to has been abandoned.
            if copy == self.copy:
                self._send(number, Digest(number=number, bucket=bucket, digest=found))

    def _append(self, number: int, frame: Frame) -> None:
        self.sent = number
        self._send(number, frame)

    def _send(self, number: int, frame: Frame) -> None:
        self._unsent.append(SentEntry(number, frame))
        self._on_entry()

    # The stream

    def take(self) -> SentEntry | None:
        with self._lock:
            if not self._unsent:
                return None
            entry = self._unsent.popleft()
            self._unacked.append(entry)
            return entry

    def acknowledge(self, copy: int, number: int) -> None:
        """The standby has everything up to this record."""
        with self._lock:
            if copy != self.copy or number > self.sent:
                return
            self.acked = max(self.acked, number)
            while self._unacked and self._unacked[0].number <= self.acked:
                self._unacked.popleft()
            due, waiting = self._due(self.acked)
        self._let_go(due, waiting)

    def resume(self, copy: int, number: int) -> bool:
        """Open a new stream to a standby that has this copy up to this record. False: it must be copied again."""
        with self._lock:
            known = copy == self.copy != 0 and self.acked <= number <= self.sent
            if not known:
                return False
            self._unsent = deque(entry for entry in (*self._unacked, *self._unsent) if entry.number > number)
            self._unacked.clear()
        self.acknowledge(copy, number)
        self._on_entry()
        return True

    def restart(self, copy: int) -> None:
        """The standby now refuses to be promoted (or there is none: copy 0). Nothing waits for it any more."""
        with self._lock:
            self.copy, self.marked = copy, False
            self.sent = self.acked = 0
            self._copied = set()
            self._unsent.clear()
            self._unacked.clear()
            due, waiting = self._due(None)
        self._let_go(due, waiting)

    def abandon(self) -> None:
        """The timeline ends here: unacknowledged updates never happened, and are never reported."""
        with self._lock:
            self.copy, self.marked = 0, False
            self._copied = set()
            self._unsent.clear()
            self._unacked.clear()
            self._held.clear()
            waiting, self._waiting = self._waiting, {}
        for future in waiting:
            _settle(future, UnreachableError("the timeline of the shard ended while waiting for its standby"))

    def _due(self, number: int | None) -> tuple[list[Release], list[asyncio.Future[None]]]:
        """Releases and answers that wait for records up to a number, or for any record if None. Lock held."""
        due: list[Release] = []
        while self._held and (number is None or self._held[0][0] <= number):
            due.append(self._held.popleft()[1])
        waiting = [future for future, wanted in self._waiting.items() if number is None or wanted <= number]
        for future in waiting:
            del self._waiting[future]
        return due, waiting

    def _let_go(self, due: Sequence[Release], waiting: Sequence[asyncio.Future[None]]) -> None:
        for release in due:
            self._run(release)
        for future in waiting:
            _settle(future, None)

    # Answers

    @property
    def waits(self) -> bool:
        with self._lock:
            return bool(self._held or self._waiting) or self.sent > self.acked

    async def passed(self) -> None:
        """Return once the standby has everything recorded so far, or nothing waits for it any more.

        Raises UnreachableError if the timeline ends first. On the server's loop; the call's own deadline limits the
        wait.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            if self.sent <= self.acked or not self._copied:
                return
            self._waiting[future] = self.sent
        try:
            await future
        finally:
            with self._lock:
                self._waiting.pop(future, None)
            # An error in it refers to the frames of the waiting call, including this one; the cycle would keep the
            # shard alive.
            del future


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    """Complete the future of a waiting call, from any thread."""

    def settle() -> None:
        if not future.done():
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    # At process exit the loop closes while threads are still finishing.
    with contextlib.suppress(RuntimeError):
        future.get_loop().call_soon_threadsafe(settle)


def copied_image(bucket: Bucket) -> BucketImage:
    """A bucket for a standby, with theta_{t-1}, which a worker one step behind may need. Its lock must be held."""
    image, previous = bucket.image(), bucket.previous()
    if previous is None:
        return image
    return replace(image, tensors={**image.tensors, PREVIOUS: previous.detach().to("cpu", copy=True)})
