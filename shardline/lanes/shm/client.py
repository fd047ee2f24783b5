"""The shm lane: worker and server on one host map the same memory, and the call says where the bytes are."""

from __future__ import annotations

import contextlib
import functools
import socket
import time
from collections.abc import Sequence

import torch

from shardline.core.plan import ShardSpec
from shardline.core.tensor_bytes import borrowed_tensor, copy_bytes
from shardline.errors import ProtocolError, UnreachableError
from shardline.host import segments
from shardline.host.addresses import address_of
from shardline.host.device_memory import settle
from shardline.host.process import kept_from_children
from shardline.host.segments import Segment, SegmentError
from shardline.lanes.base import LaneUnavailable
from shardline.lanes.call_socket import CallSocket
from shardline.lanes.calls import NotAdmittedError, ShardCalls
from shardline.rpc.channel import Peer
from shardline.rpc.messages.data import Attached, is_one_message, progress_request, referred_requests
from shardline.rpc.v1 import parameter_server_pb2
from shardline.waist import Arrival, Exchanged, Memory, Payload, Push, Sender, Sink, Want

KNOCK_S = 5.0
"""Seconds that the server's unix socket may take to answer; it is on this host."""


class Mapped:
    """The memory of one attachment on the worker's side.

    gradients, areas, replies: bytes of the host, or uint8 tensors of a device. keeps: what keeps it mapped.
    """

    def __init__(
        self,
        attached: Attached,
        sender: Sender,
        calls: CallSocket,
        gradients: Memory,
        areas: Sequence[Memory],
        replies: Memory | None,
        *,
        keeps: Sequence[Segment] = (),
    ) -> None:
        self.calls = calls
        self.attached = attached
        self.sender = sender.who
        self._gradients = gradients
        self._areas = {**dict(enumerate(areas)), **({2: replies} if replies is not None else {})}
        self._keeps = keeps
        self._start = None if isinstance(gradients, torch.Tensor) else address_of(memoryview(gradients))
        self.by_reference = bool(areas)
        """Whether parameters are read in the shard's publication."""
        self.used: set[int] = set()
        """Offsets in the gradient segment that the running exchange refers to."""
        self._lent: dict[tuple[int, int], Memory] = {}
        self._places: dict[int, int] = {}
        """Offsets of what is lent, by the id of its object."""
        self._read: dict[int, int] = {}
        """Step of the push by bucket, for buckets whose bytes the shard may still read."""

    @property
    def is_read(self) -> bool:
        return bool(self._read)

    def reads(self, bucket: int) -> bool:
        return bucket in self._read

    def refer(self, bucket: int, step: int) -> None:
        """Note that the shard is about to get a reference to a bucket's bytes for this step."""
        self._read[bucket] = step

    def seen(self, bucket: int, step: int) -> None:
        """Note that a pull has shown the bucket at this step: bytes pushed for earlier steps are not read any more."""
        if self._read.get(bucket, step) < step:
            self._read.pop(bucket, None)

    def applied(self) -> None:
        """Note that the shard has copied or applied all pushes."""
        self._read.clear()

    def room(self, length: int) -> int:
        """Number of pushes of this length that fit side by side into the gradient segment."""
        return len(self._gradients) // max(1, length)

    def slot(self, offset: int, nbytes: int) -> memoryview:
        """See SharedMemory; in host memory only."""
        assert not isinstance(self._gradients, torch.Tensor)
        return memoryview(self._gradients)[offset : offset + nbytes]

    def put(self, offset: int, item: Payload) -> None:
        """Copy a payload to where the shard reads it."""
        if isinstance(self._gradients, torch.Tensor):
            data = item.data
            source = data if isinstance(data, torch.Tensor) else borrowed_tensor(data, "uint8")
            self._gradients[offset : offset + item.nbytes].copy_(source.reshape(-1).view(torch.uint8))
            settle(self._gradients.device)
        else:
            copy_bytes(self.slot(offset, item.nbytes), item.octets)

    def lent(self, offset: int, nbytes: int) -> Memory:
        """A bucket's own part of it, at each call the same object."""
        found = self._lent.get((offset, nbytes))
        if found is None:
            found = self._lent[offset, nbytes] = self._gradients[offset : offset + nbytes]
            self._places[id(found)] = offset
        return found

    def area(self, number: int) -> memoryview:
        """See SharedMemory; by_reference and in host memory only."""
        area = self._areas[number if number in self._areas else 0]
        assert not isinstance(area, torch.Tensor)
        return memoryview(area)

    def holds(self, data: Memory) -> int | None:
        """Offset of bytes that are already in the gradient segment; None for others. data: not empty."""
        known = self._places.get(id(data))
        if known is not None or self._start is None or isinstance(data, torch.Tensor):
            return known
        offset = address_of(memoryview(data)) - self._start
        inside = offset >= 0 and offset + len(data) <= len(self._gradients)
        if inside and offset % segments.ALIGNMENT_BYTES == 0:
            return offset
        return None

    def view(self, arrival: Arrival) -> Memory:
        """The bytes of a bucket that the shard refers to. Raises ProtocolError if the reference is invalid."""
        number, offset = arrival.place
        area = self._areas.get(number)
        if area is None or offset + arrival.payload_bytes > len(area):
            raise ProtocolError(
                f"the shard refers to {arrival.payload_bytes} bytes at {offset} of area {number}, which "
                + ("it has not passed" if area is None else f"has {len(area)} bytes")
            )
        part = area[offset : offset + arrival.payload_bytes]
        return part if isinstance(part, torch.Tensor) else memoryview(part).toreadonly()


class ShmLane(ShardCalls):
    """One shard of a ps on this host, over the ps's channel and shared segments."""

    name = "shm"
    by_reference = True

    def __init__(self, peer: Peer, shard: int, spec: ShardSpec, *, timeout_s: float, private: bool = True) -> None:
        """private: the model may be where the shard publishes; off, the areas can be page-locked."""
        super().__init__(peer, shard, [bucket.elements for bucket in spec.buckets])
        self._private = private
        self._timeout_s = timeout_s
        self._offsets = segments.layout([bucket.nbytes for bucket in spec.buckets])
        self._length = max(self._offsets[-1], segments.ALIGNMENT_BYTES)
        """Bytes of one push."""
        self.mapped: Mapped | None = None
        """The segments in use; None before the first exchange and after a broken one."""
        self._busy = False

    @property
    def published(self) -> Mapped | None:
        """See Lane.published; None before the first exchange and after a broken one."""
        mapped = self.mapped
        return mapped if mapped is not None and mapped.by_reference else None

    def exchange(
        self, sender: Sender, contributions: Sequence[Push], want: Want | None, sink: Sink, *, timeout_s: float
    ) -> Exchanged:
        """Push and pull by reference; see Lane.exchange.

        Raises LaneUnavailable if the two tasks can't share memory.
        """
        self._arm()
        self._busy = True
        whole = False
        try:
            if contributions and self.mapped is not None and self.mapped.is_read:
                # A push was counted and later given up: the shard reads it until its step is applied.
                self._drop()
            mapped = self._opened(sender, max(1, len(contributions)), min(timeout_s, self._timeout_s))
            mapped.used.clear()
            step = contributions[0].step if contributions else 0
            done = self.converse(
                referred_requests(
                    sender,
                    self._shard,
                    contributions,
                    want,
                    mapped.attached,
                    place=functools.partial(self._place, mapped, step),
                ),
                contributions,
                want,
                sink,
                timeout_s=timeout_s,
                single=is_one_message(contributions, mapped.attached),
                fill=functools.partial(_fill, mapped, sink),
                calls=mapped.calls,
            )
            # What was not accepted ends an exchange.
            whole = not done.acks or done.acks[-1].accepted
            for push in contributions if whole else ():
                if push.init or push.seq:
                    # Only gradients of synchronous steps are read after their ack.
                    mapped.applied()
        except NotAdmittedError as error:
            return error.exchanged(contributions)
        finally:
            self._busy = False
            if not whole:
                # The shard may still read it: never write it again, use new segments.
                self._drop()
        return done

    def allocate(self, bucket: int, nbytes: int) -> Memory | None:
        """Memory that the shard reads: a gradient computed there needs no copy.

        None if nothing is shared yet, or if the shard may still be reading this memory.
        """
        mapped = self.mapped
        if mapped is None or mapped.reads(bucket):
            return None
        if nbytes == 0 or nbytes > self._offsets[bucket + 1] - self._offsets[bucket]:
            return None
        return mapped.lent(self._offsets[bucket], nbytes)

    def offset(self, bucket: int) -> int:
        """Offset in bytes of a bucket within an area or the gradient segment."""
        return self._offsets[bucket]

    def close(self) -> None:
        self.cancel()
        if not self._busy:
            self._drop()

    def _drop(self) -> None:
        """Use new segments from now on; the calls end with the socket."""
        mapped, self.mapped = self.mapped, None
        if mapped is not None:
            mapped.calls.close()

    def _place(self, mapped: Mapped, step: int, item: Payload) -> int:
        nbytes = item.nbytes
        if nbytes == 0:
            return 0
        if item.ready is not None:
            item.ready.synchronize()
        mapped.refer(item.bucket, step)
        held = mapped.holds(item.data)
        if held is not None:
            mapped.used.add(held)
            return held
        offset = self._offsets[item.bucket]
        if nbytes > self._offsets[item.bucket + 1] - offset:
            raise ProtocolError(f"bucket {item.bucket}: {nbytes} bytes don't fit into its area")
        # allocate() lends the first place, perhaps to a push that is sent after this one: so use it last.
        room = mapped.room(self._length)
        for number in range(1, room + 1):
            place = offset + number % room * self._length
            if place not in mapped.used:
                break
        mapped.used.add(place)
        mapped.put(place, item)
        return place

    def _opened(self, sender: Sender, pushes: int, timeout_s: float) -> Mapped:
        mapped = self.mapped
        if (
            mapped is not None
            and mapped.calls.usable
            and mapped.sender == sender.who
            and mapped.room(self._length) >= pushes
        ):
            return mapped
        self._drop()
        opened = self.open_attachment(sender, timeout_s=timeout_s)
        try:
            self.mapped = self._share(opened, sender, pushes, time.monotonic() + min(timeout_s, KNOCK_S))
        except (SegmentError, OSError) as error:
            # If the ps is gone this raises: that is no reason for another lane.
            self._ask(self._stub.Progress, progress_request(sender, self._shard, ()), "Progress", timeout_s)
            raise LaneUnavailable(
                f"{self._peer}: memory can't be shared through {opened.socket} ({error or type(error).__name__}); do "
                "both tasks run on one host, as one user, in one network namespace (otherwise set the same --run-dir "
                "for both)?"
            ) from error
        return self.mapped

    def _share(
        self, opened: parameter_server_pb2.OpenLaneReply, sender: Sender, pushes: int, deadline_s: float
    ) -> Mapped:
        gradients = self._allocate(pushes * self._length)
        with contextlib.ExitStack() as unless_kept:
            plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock = unless_kept.enter_context(kept_from_children(plain))
            segments.connect(sock, opened.socket, timeout_s=max(0.1, deadline_s - time.monotonic()))
            segments.check_user(sock)
            sock.settimeout(max(0.1, deadline_s - time.monotonic()))
            segments.knock(sock, opened.token, gradients[1])
            areas, replies = segments.hear_welcome(sock, private=self._private)
            if self._cancelled:
                raise UnreachableError(f"{self._peer}: the exchange was abandoned while memory was being shared")
            memory, segment = gradients
            mapped = Mapped(
                Attached(self.name, opened.attachment, in_place=True),
                sender,
                CallSocket(sock),
                memory,
                [self._memory(area) for area in areas],
                self._memory(replies) if replies is not None else None,
                keeps=[segment, *areas, *([replies] if replies is not None else [])],
            )
            unless_kept.pop_all()
        return mapped

    def _allocate(self, nbytes: int) -> tuple[Memory, Segment]:
        """New memory for gradients, and the segment by which the server gets it. Raises SegmentError."""
        segment = Segment.create(nbytes, name="shardline-gradients")
        return segment.memory, segment

    def _memory(self, segment: Segment) -> Memory:
        """The memory that a segment from the server stands for. Raises SegmentError."""
        return segment.memory


def _fill(mapped: Mapped, sink: Sink, arrival: Arrival) -> None:
    if arrival.unchanged or arrival.payload_bytes == 0:
        sink.done(arrival)
    else:
        sink.take(arrival, mapped.view(arrival))
    mapped.seen(arrival.bucket, arrival.step)
