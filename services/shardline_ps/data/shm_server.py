"""The shm lane of a ps: what it publishes lies in sealed segments, and workers of the host pass theirs. PROTOCOL 1.9.

| memory | written by | read by |
|---|---|---|
| areas 0 and 1, theta_t in t & 1 | the shard, as it applies a step | workers, until they have pushed the next one |
| a worker's gradients | the worker, once a pull has shown the next step | the shard, until it has applied the step |
| a worker's replies (asynchronous, lossy codecs) | the shard, for one pull | that worker, before its next pull |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch

from shardline.core.plan import ShardSpec
from shardline.core.tensor_bytes import Buffer
from shardline.errors import ProtocolError, UnreachableError, UsageError
from shardline.host import segments
from shardline.host.segments import Segment, SegmentError
from shardline.lanes.base import LaneUnavailable
from shardline_ps.data.attachments import Holder, Opening
from shardline_ps.data.socket_thread import READ, SocketThread
from shardline_ps.data.tcp_server import MAX_VISITORS, VISIT_S, Tokens
from shardline_ps.shard.publication import PlainPublication, Publication, bucket_offsets, num_areas, view_of
from shardline_ps.shard.shard import Shard

log = logging.getLogger("shardline.ps")
Take = Callable[[socket.socket, int, int], None]
"""(socket, descriptor, bytes of the segment): whom a worker's segment is for."""


class SegmentPublication:
    """Published parameters in one or two segments that others can map only for reading; see Publication."""

    def __init__(self, spec: ShardSpec, *, sync: bool) -> None:
        self._spec = spec
        self._offsets = bucket_offsets(spec)
        self.areas_of = [num_areas(bucket, sync=sync) for bucket in spec.buckets]
        """Areas that each bucket uses."""
        count = max(self.areas_of, default=1)
        self.areas = [
            Segment.create(self.nbytes, name=f"shardline-published-{area}", read_only=True) for area in range(count)
        ]
        self._flats = [torch.frombuffer(area.memory, dtype=torch.uint8) for area in self.areas]

    def tensor(self, which: int, bucket: int) -> torch.Tensor:
        """See Publication."""
        return view_of(self._flats[which], self._spec.buckets[bucket], self._offsets[bucket])

    def offset(self, bucket: int) -> int:
        """See Publication."""
        return self._offsets[bucket]

    @property
    def nbytes(self) -> int:
        """See Publication."""
        return self._offsets[-1]


def publish(spec: ShardSpec, sync: bool) -> Publication:
    """Segments where this machine has them, else ordinary memory, said once."""
    try:
        return SegmentPublication(spec, sync=sync)
    except SegmentError as error:
        log.warning("parameters are not published in shared memory: %s; lane shm is not offered for them", error)
        return PlainPublication(spec, torch.device("cpu"))


class ShmTicket:
    """One referred bucket; its bytes are there already. See attachments.Ticket."""

    done = True

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory

    async def wait(self) -> None:
        """Nothing to wait for."""


class ShmAttachment:
    """One worker's segments; see attachments.Attachment."""

    lane = "shm"
    borrowed = True
    window = 1 << 30

    def __init__(
        self,
        holder: Holder,
        publication: SegmentPublication,
        *,
        by_reference: bool,
        pushes: int,
        forget: Callable[[], None],
    ) -> None:
        """pushes: as many contributions one step takes of one worker at most."""
        self.holder = holder
        self._publication = publication
        self._pushes = pushes
        self._by_reference = by_reference
        self._forget = forget
        self._gradients: Segment | None = None
        self._replies = (
            None if by_reference else Segment.create(publication.nbytes, name="shardline-replies", read_only=True)
        )

    def take(self, sock: socket.socket, fd: int, nbytes: int) -> None:
        """The worker's segment has come: map it, pass ours. Takes the descriptor. Raises OSError, SegmentError.

        Called on the socket thread.
        """
        least = max(self._publication.nbytes, segments.ALIGNMENT_BYTES)
        if not least <= nbytes <= least * self._pushes:
            os.close(fd)
            raise SegmentError(
                f"the worker's segment has {nbytes:,} bytes; the shard's gradients need {least:,} for each of at most "
                f"{self._pushes} pushes"
            )
        segment = Segment.adopt(fd, nbytes)
        # First: a worker that was welcomed pushes at once.
        self._gradients = segment
        segments.welcome(sock, self._publication.areas if self._by_reference else [], self._replies)

    def expect(self, offset: int, nbytes: int) -> ShmTicket:
        """A view of the worker's gradients. Raises ProtocolError where it isn't within them, or at a crooked place."""
        held = self._gradients
        if held is None:
            raise UnreachableError(f"{self.holder.task} has passed no segment to shard {self.holder.shard} (any more)")
        if offset % segments.ALIGNMENT_BYTES or offset + nbytes > held.nbytes:
            raise ProtocolError(
                f"{nbytes} bytes at {offset} of the segment of {self.holder.task} are referred to; it has "
                f"{held.nbytes} bytes, and places are multiples of {segments.ALIGNMENT_BYTES}"
            )
        return ShmTicket(held.memory[offset : offset + nbytes])

    def published(self, bucket: int, step: int) -> tuple[int, int] | None:
        """Where the worker sees theta_step itself."""
        if not self._by_reference:
            return None
        area = step & 1 if self._publication.areas_of[bucket] == 2 else 0
        return area, self._publication.offset(bucket)

    def reply_slot(self, bucket: int, nbytes: int) -> tuple[int, memoryview] | None:
        """The bucket's place among this worker's replies."""
        # Once: close() may come from the loop meanwhile, and what is under a shard's lock must not fail for that.
        replies = self._replies
        if replies is None:
            return None
        offset = self._publication.offset(bucket)
        return offset, replies.memory[offset : offset + nbytes]

    async def send(self, payload: Buffer, intact: Callable[[], bool]) -> None:
        """Nothing is sent on this lane."""
        raise ProtocolError(
            f"{self.holder.task} asks shard {self.holder.shard} on lane shm for something else than an exact step; "
            f"ask on lane grpc"
        )

    def abort(self, reason: str) -> None:
        """The worker makes a new segment for whatever comes after; this one is never read again."""
        self._forget()
        self._gradients = None

    def close(self) -> None:
        """Free everything that no running call holds."""
        self.abort("closed")
        self._replies = None


class _Guest:
    """A connection that has not shown its token yet. Used by the socket thread."""

    limit_s = VISIT_S

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.moved_s = time.monotonic()
        self.stalled: Callable[[], None] = sock.close


class ShmOffer:
    """Offers lane shm at one unix socket; see attachments.LaneOffer.

    in_place: whether parameters are pulled as they are in the job in force, so that they can be read where they lie;
    asked at each opening. run_dir: folder of the socket where network namespaces differ; None = the abstract namespace.
    timeout_s: how long a token is good for (a third of --timeout).
    Raises UsageError where the socket can't be made.
    """

    lane = "shm"
    limit_s = 1.0
    """Pause where the machine lets nobody in."""

    def __init__(
        self,
        in_place: Callable[[], bool],
        *,
        run_dir: Path | None,
        timeout_s: float,
        on_refused: Callable[[str, Exception], None] = lambda method, error: None,
    ) -> None:
        self._in_place = in_place
        self.moved_s = 0.0
        self._on_refused = on_refused
        self.address = segments.new_address(run_dir)
        self._path = None if run_dir is None else Path(self.address)
        self._listener = self._listen()
        self._tokens: Tokens[Take] = Tokens(timeout_s)
        self._thread = SocketThread("segments")
        self._guests: set[_Guest] = set()
        self.refused = 0
        """Connections that were sent away."""
        self._closed = False
        self._thread.post(self._look)

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            place = segments.to_kernel(self.address)
            if self._path is None:
                listener.bind(place)
                listener.listen(MAX_VISITORS)
            else:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                sweep(self._path.parent)
                self._listen_in_folder(listener, self._path)
        except (OSError, SegmentError) as error:
            listener.close()
            raise UsageError(f"can't listen at {self.address} for lane shm: {error}; see --run-dir") from error
        listener.setblocking(False)
        return listener

    @staticmethod
    def _listen_in_folder(listener: socket.socket, path: Path) -> None:
        """The path is there from the moment somebody answers: before, a neighbour that starts would sweep it away."""
        early = path.with_suffix(".new")
        try:
            listener.bind(str(early))
            # Nobody can connect yet. The process's mask would be all threads' mask.
            early.chmod(0o600)
            listener.listen(MAX_VISITORS)
            early.rename(path)
        except OSError:
            early.unlink(missing_ok=True)
            raise

    def open(self, holder: Holder, shard: Shard, loop: asyncio.AbstractEventLoop) -> Opening:
        """An attachment without the worker's segment, and the token that brings it."""
        publication = shard.publication
        if not isinstance(publication, SegmentPublication):
            raise LaneUnavailable(f"shard {shard.number} does not lie in shared memory here")
        by_reference = shard.is_sync and self._in_place()
        try:
            attachment = ShmAttachment(
                holder,
                publication,
                by_reference=by_reference,
                pushes=shard.settings.replicas,
                forget=lambda: self._tokens.revoke(token),
            )
        except SegmentError as error:
            raise LaneUnavailable(str(error)) from error
        token = self._tokens.grant(attachment.take, now_s=time.monotonic())
        return Opening(attachment=attachment, socket=self.address, token=token)

    # On the socket thread

    def stalled(self) -> None:
        """The pause after a failed accept is over."""
        self._thread.unguard(self)
        self._look()

    def _look(self) -> None:
        if not self._closed and len(self._guests) < MAX_VISITORS:
            self._thread.watch(self._listener, READ, self._accept)
        else:
            self._thread.unwatch(self._listener)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            # Most likely no descriptors are left, and the next try would fail at once too.
            log.warning("can't take a connection for lane shm: %s; trying again in %.0f s", error, self.limit_s)
            self.moved_s = time.monotonic()
            self._thread.guard(self)
            self._thread.unwatch(self._listener)
            return
        sock.setblocking(False)
        guest = _Guest(sock)
        guest.stalled = lambda: self._leaves(guest, f"no token within {guest.limit_s:.0f} s")
        self._guests.add(guest)
        try:
            segments.check_user(sock)
        except (OSError, SegmentError) as error:
            self._leaves(guest, str(error))
            return
        self._thread.guard(guest)
        self._thread.watch(sock, READ, lambda: self._hear(guest))
        self._look()

    def _hear(self, guest: _Guest) -> None:
        try:
            token, nbytes, fds = segments.hear_knock(guest.sock)
        except BlockingIOError:
            return
        except ConnectionError:
            # A neighbour that starts looks whether somebody lives here; a worker may have died.
            self._goes(guest)
            return
        except (OSError, ProtocolError) as error:
            self._leaves(guest, str(error))
            return
        take = self._tokens.redeem(token, now_s=time.monotonic())
        if take is None:
            segments.close_all(fds)
            self._leaves(guest, "its token is wrong, was used before or came late")
            return
        try:
            take(guest.sock, fds[0], nbytes)
        except (OSError, SegmentError) as error:
            self._leaves(guest, str(error))
            return
        self._goes(guest)

    def _goes(self, guest: _Guest) -> None:
        self._guests.discard(guest)
        self._thread.unguard(guest)
        self._thread.unwatch(guest.sock)
        guest.sock.close()
        self._look()

    def _leaves(self, guest: _Guest, reason: str) -> None:
        self.refused += 1
        with contextlib.suppress(OSError):
            segments.refuse(guest.sock)
        self._goes(guest)
        log.debug("a process at the segments' socket was refused: %s", reason)
        self._on_refused("segments", ProtocolError(f"a process at the segments' socket was refused: {reason}"))

    def _end(self) -> None:
        self._thread.unguard(self)
        self._thread.unwatch(self._listener)
        self._listener.close()
        for guest in list(self._guests):
            self._leaves(guest, "this ps ends")

    def close(self) -> None:
        """Take no more segments. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._thread.post(self._end)
        self._thread.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove sockets of servers that are gone: a path outlives a crash, unlike everything else of this lane."""
    for path in folder.glob("shardline-*.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(path))
            except OSError as error:
                if segments.is_gone(error):
                    path.unlink(missing_ok=True)
