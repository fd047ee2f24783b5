"""The server half of lane shm: the server publishes in sealed segments, and workers on the host pass theirs.

| memory | written by | read by |
|---|---|---|
| areas 0 and 1, theta_t in t & 1 | the shard, as it applies a step | workers, until they have pushed the next one |
| a worker's gradients | the worker, once a pull has shown the next step | the shard, until it has applied the step |
| a worker's replies (asynchronous, lossy codecs) | the shard, for one pull | that worker, before its next pull |
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

import torch

from shardline.core.plan import ShardSpec
from shardline.core.spec import DTYPES
from shardline.core.tensor_bytes import Buffer, borrowed_tensor
from shardline.errors import ProtocolError, UnreachableError, UsageError
from shardline.host import segments
from shardline.host.process import kept_from_children
from shardline.host.segments import Segment, SegmentError
from shardline.lanes.attachments import Holder, Hosted, Opening
from shardline.lanes.base import LaneUnavailable
from shardline.lanes.call_server import Answers, CallServer
from shardline.lanes.token_acceptor import MAX_GUESTS, LeftQuietly, TokenAcceptor
from shardline.storage.bucket import Intact
from shardline.storage.publication import PlainPublication, Publication, bucket_offsets, num_areas, view_of
from shardline.waist import Memory

log = logging.getLogger("shardline.lanes")
MAX_TICKETS = 1 << 14
"""Places that are remembered of a worker's segment; a worker may name another one in each push."""
Take = Callable[[socket.socket, int, int], None]
"""(socket, descriptor, bytes of the segment): the receiver of a worker's segment."""


class SegmentPublication:
    """Published parameters in one or two segments that others can map read-only; see Publication."""

    def __init__(self, spec: ShardSpec, *, keeps_previous: bool) -> None:
        self._spec = spec
        self._offsets = bucket_offsets(spec)
        self.areas_of = [num_areas(bucket, keeps_previous=keeps_previous) for bucket in spec.buckets]
        """Number of areas that each bucket uses."""
        self._flats, self.areas = self._allocate(max(self.areas_of, default=1))
        """All bytes of each area; the segments that tell workers of them."""

    def _allocate(self, count: int) -> tuple[list[torch.Tensor], list[Segment]]:
        made = [
            Segment.create(self.nbytes, name=f"shardline-published-{area}", read_only=True) for area in range(count)
        ]
        return [torch.frombuffer(area.memory, dtype=torch.uint8) for area in made], made

    def tensor(self, which: int, bucket: int) -> torch.Tensor:
        return view_of(self._flats[which], self._spec.buckets[bucket], self._offsets[bucket])

    def offset(self, bucket: int) -> int:
        return self._offsets[bucket]

    @property
    def nbytes(self) -> int:
        return self._offsets[-1]


def publish(spec: ShardSpec, keeps_previous: bool) -> Publication:
    """Segments if this machine has them, else ordinary memory with a warning."""
    try:
        return SegmentPublication(spec, keeps_previous=keeps_previous)
    except SegmentError as error:
        log.warning("parameters can't be published in shared memory: %s; lane shm is not available for them", error)
        return PlainPublication(spec, torch.device("cpu"))


class ShmTicket:
    """One place in a worker's segment; its bytes are already there. See attachments.Ticket."""

    whole = True
    matches = None

    def __init__(self, memory: Memory, values: torch.Tensor) -> None:
        """values: the same memory as uint8, a part of the whole segment's: its size tells what a pass over it costs."""
        self.memory = memory
        self._values = values
        self._tensors: dict[str, torch.Tensor] = {}

    def tensor(self, dtype: str) -> torch.Tensor:
        """See attachments.Ticket: the same one in every step."""
        found = self._tensors.get(dtype)
        if found is None:
            found = self._tensors[dtype] = self._values.view(DTYPES[dtype])
        return found

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
        serve: Callable[[Callable[[str], None]], CallServer],
        *,
        by_reference: bool,
        pushes: int,
        forget: Callable[[], None],
    ) -> None:
        """serve(broke): what serves the calls. pushes: maximum number of contributions of one worker to one step."""
        self.holder = holder
        self._calls = serve(self.abort)
        self._publication = publication
        self._pushes = pushes
        self._by_reference = by_reference
        self._forget = forget
        self._gradients: tuple[Memory, torch.Tensor] | None = None
        self._tickets: dict[tuple[int, int], ShmTicket] = {}
        """The places that its pushes have named: workers name the same ones in every step."""
        self._replies: tuple[Memory, Segment] | None = None if by_reference else self._allocate(publication.nbytes)

    def take(self, sock: socket.socket, fd: int, nbytes: int) -> None:
        """Map the worker's segment, pass ours, keep the socket for calls. Takes the descriptor.

        Raises OSError or SegmentError; the socket is the caller's then.
        Called on the socket thread.
        """
        # First, because a welcomed worker pushes at once.
        self._gradients = self._adopt(fd, nbytes)
        replies = self._replies[1] if self._replies is not None else None
        segments.welcome(sock, self._publication.areas if self._by_reference else [], replies)
        self._calls.attach(sock)

    def _adopt(self, fd: int, nbytes: int) -> tuple[Memory, torch.Tensor]:
        """The worker's memory, as bytes and as a uint8 tensor. Takes the descriptor. Raises SegmentError."""
        try:
            self._check(nbytes)
        except SegmentError:
            os.close(fd)
            raise
        memory = Segment.adopt(fd, nbytes).memory
        return memory, borrowed_tensor(memory, "uint8")

    def _check(self, nbytes: int) -> None:
        least = max(self._publication.nbytes, segments.ALIGNMENT_BYTES)
        if not least <= nbytes <= least * self._pushes:
            raise SegmentError(
                f"the worker's segment has {nbytes:,} bytes; the gradients of the shard need {least:,} for each of up "
                f"to {self._pushes} pushes"
            )

    def _allocate(self, nbytes: int) -> tuple[Memory, Segment]:
        """Memory for replies, and the segment that tells the worker of it. Raises SegmentError."""
        segment = Segment.create(nbytes, name="shardline-replies", read_only=True)
        return segment.memory, segment

    def expect(self, offset: int, nbytes: int, digest: int) -> ShmTicket:
        """A view of the worker's gradients. Raises ProtocolError if the place is outside of them or not aligned.

        Raises UnreachableError if there is no segment (any more).
        """
        held = self._gradients
        if held is None:
            raise UnreachableError(f"shard {self.holder.shard} has no segment of {self.holder.task} (any more)")
        known = self._tickets.get((offset, nbytes))
        if known is not None:
            return known
        memory, values = held
        if offset % segments.ALIGNMENT_BYTES or offset + nbytes > values.nbytes:
            raise ProtocolError(
                f"a reference to {nbytes} bytes at {offset} of the segment of {self.holder.task} is invalid; it has "
                f"{values.nbytes} bytes, and offsets are multiples of {segments.ALIGNMENT_BYTES}"
            )
        made = ShmTicket(memory[offset : offset + nbytes], values[offset : offset + nbytes])
        if len(self._tickets) < MAX_TICKETS:
            self._tickets[offset, nbytes] = made
        return made

    def published(self, bucket: int, step: int) -> tuple[int, int] | None:
        if not self._by_reference:
            return None
        area = step & 1 if self._publication.areas_of[bucket] == 2 else 0
        return area, self._publication.offset(bucket)

    def reply_slot(self, bucket: int, nbytes: int) -> tuple[int, Memory] | None:
        # Read once: close() may come from the loop meanwhile, and code under a shard's lock must not fail for that.
        replies = self._replies
        if replies is None:
            return None
        offset = self._publication.offset(bucket)
        return offset, replies[0][offset : offset + nbytes]

    async def send(self, payload: Buffer, intact: Intact | None) -> None:
        raise ProtocolError(
            f"{self.holder.task} asked shard {self.holder.shard} on lane {self.lane} for something other than an exact "
            "step; use lane grpc"
        )

    def abort(self, reason: str) -> None:
        """Drop the worker's segment, which is never read again, and its calls; the worker makes a new one."""
        self._forget()
        self._calls.close()
        self._gradients = None
        self._tickets.clear()

    def close(self) -> None:
        self.abort("closed")
        self._replies = None


class SegmentHandshake:
    """A worker's single message: its token and the descriptor of its segment; see token_acceptor.Handshake."""

    who = "a process on the socket for segments"

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._nbytes = 0
        self._fds: list[int] = []

    def hear(self) -> bytes:
        try:
            segments.check_user(self.sock)
            token, self._nbytes, self._fds = segments.hear_knock(self.sock)
        except SegmentError as error:
            raise ProtocolError(str(error)) from error
        except ConnectionError as error:
            raise LeftQuietly from error
        return token

    def admit(self, bearer: Take) -> None:
        """Map the worker's segment and pass the shard's; the socket then carries the worker's calls."""
        fds, self._fds = self._fds, []
        try:
            bearer(self.sock, fds[0], self._nbytes)
        except SegmentError as error:
            raise ProtocolError(str(error)) from error

    def refuse(self) -> None:
        segments.refuse(self.sock)

    def close(self) -> None:
        fds, self._fds = self._fds, []
        segments.close_all(fds)
        self.sock.close()


class ShmOffer:
    """Offers lane shm at one unix socket; see attachments.LaneOffer.

    run_dir: folder of the socket if network namespaces differ; None = the abstract namespace. timeout_s: seconds for
    which a token is valid (a third of --timeout). on_refused: called for every connection that was turned away. Raises
    UsageError if the socket can't be made.
    """

    lane = "shm"
    keeps_replies = True
    _attachment: type[ShmAttachment] = ShmAttachment

    def __init__(
        self,
        *,
        run_dir: Path | None,
        timeout_s: float,
        on_refused: Callable[[str, Exception], None] = lambda method, error: None,
    ) -> None:
        self.address = segments.new_address(run_dir)
        self._path = None if run_dir is None else Path(self.address)
        listener = listen(self.address, self._path)
        self.acceptor: TokenAcceptor[Take] = TokenAcceptor(
            listener,
            lambda sock, address: SegmentHandshake(sock),
            label="segments",
            valid_s=timeout_s,
            on_refused=on_refused,
        )

    def open(self, holder: Holder, hosted: Hosted, loop: asyncio.AbstractEventLoop, answers: Answers) -> Opening:
        """An attachment, still without the worker's segment, and the token with which the worker brings it."""
        publication = self._shared(hosted)
        try:
            attachment = self._attachment(
                holder,
                publication,
                lambda broke: CallServer(loop, answers, who=holder.task, broke=broke),
                by_reference=hosted.by_reference,
                pushes=hosted.pushes,
                forget=lambda: self.acceptor.revoke(token),
            )
        except SegmentError as error:
            raise LaneUnavailable(str(error)) from error
        token = self.acceptor.grant(attachment.take)
        return Opening(attachment=attachment, socket=self.address, token=token)

    def _shared(self, hosted: Hosted) -> SegmentPublication:
        """The shard's values, if workers can map them. Raises LaneUnavailable."""
        if not isinstance(hosted.publication, SegmentPublication):
            raise LaneUnavailable(f"shard {hosted.shard} is not in shared memory on this ps")
        return hosted.publication

    def publish(self, spec: ShardSpec, *, keeps_previous: bool) -> Publication:
        return publish(spec, keeps_previous)

    def close(self) -> None:
        """Accept no more segments. May be called twice."""
        self.acceptor.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def listen(address: str, path: Path | None) -> socket.socket:
    """A listening, non-blocking unix socket at an address. path: the address as a file path, if it is one."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        place = segments.to_kernel(address)
        if path is None:
            listener.bind(place)
            listener.listen(MAX_GUESTS)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            sweep(path.parent)
            # Create the path only once the socket is listening: before that, a starting neighbour would remove it.
            early = path.with_suffix(".new")
            try:
                listener.bind(str(early))
                # Nobody can connect yet. Changing the process's umask would affect all threads.
                early.chmod(0o600)
                listener.listen(MAX_GUESTS)
                early.rename(path)
            except OSError:
                early.unlink(missing_ok=True)
                raise
    except (OSError, SegmentError) as error:
        listener.close()
        raise UsageError(f"can't listen at {address} for lane shm: {error}; see --run-dir") from error
    listener.setblocking(False)
    return kept_from_children(listener)


def sweep(folder: Path) -> None:
    """Remove sockets of servers that are gone: unlike everything else of this lane, a path outlives a crash."""
    for path in folder.glob("shardline-*.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(path))
            except OSError as error:
                if segments.is_gone(error):
                    path.unlink(missing_ok=True)
