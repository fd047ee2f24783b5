"""The chief's commands to a parameter server, and tasks' requests to the chief."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import torch

from shardline.core.identity import Identity
from shardline.core.image import BucketImage, WorkerSequence
from shardline.core.orders import JobView
from shardline.core.placement import Placement
from shardline.core.spec import DTYPES
from shardline.core.status import PsStatus
from shardline.core.tensor_bytes import tensor_bytes, tensor_from_bytes
from shardline.core.timeouts import Timeouts
from shardline.errors import CheckpointError, FencedError, ProtocolError, UnreachableError
from shardline.host.awake import awake_s, away_s
from shardline.rpc.channel import Peer, end_call
from shardline.rpc.errors import from_status
from shardline.rpc.limits import MAX_IDS
from shardline.rpc.messages.configuration import Configuration, configuration_to_proto, placement_to_proto
from shardline.rpc.messages.convert import (
    ImageAssembler,
    dtype_from_proto,
    image_parts,
    sequences_from_proto,
    sequences_to_proto,
)
from shardline.rpc.messages.fields import from_message, to_message
from shardline.rpc.messages.status import ps_status_from_proto
from shardline.rpc.v1 import access_pb2_grpc, chief_pb2, common_pb2, parameter_server_pb2, parameter_server_pb2_grpc
from shardline.rpc.watch import ChiefWatch
from shardline.security import PLAIN, Security

T = TypeVar("T")


class PsControl:
    """Commands of the chief to one ps; every call has a deadline and is safe to repeat."""

    def __init__(
        self, task: str, address: str, timeouts: Timeouts, *, term: int, chief_uuid: str, security: Security = PLAIN
    ) -> None:
        self.peer = Peer(task, address, timeouts, security)
        self._stub = parameter_server_pb2_grpc.ParameterServerStub(self.peer.channel)
        self._term = parameter_server_pb2.Term(number=term, chief_uuid=chief_uuid)
        self._timeouts = timeouts

    def lead(self) -> int:
        """Take command; returns the ps's current timeline. Raises FencedError if a newer chief commands it."""
        reply = self.peer.call(self._stub.Lead, parameter_server_pb2.LeadRequest(term=self._term), what="Lead")
        if not reply.held:
            raise FencedError(
                f"{self.peer} obeys the chief of term {reply.current.number}; this one has term {self._term.number}"
            )
        return int(reply.timeline)

    def configure(self, configuration: Configuration) -> int:
        """Give the ps its shards; returns the bytes that it will hold."""
        request = configuration_to_proto(configuration, self._term)
        # The server allocates and touches its memory here: for gigabytes that takes longer than a plain call's
        # deadline.
        reply = self.peer.call(self._stub.Configure, request, what="Configure", timeout_s=self._timeouts.total_s)
        return int(reply.memory_bytes)

    def set_membership(
        self,
        timeline: int,
        members: Mapping[str, int],
        placement: Iterable[Placement] = (),
        keys: Mapping[str, bytes] | None = None,
    ) -> int:
        """Replace the table of living incarnations by task; returns how many were fenced.

        keys: digest of each task's secret (see security.key_of); a task without one needs no secret.
        """
        known = keys or {}
        request = parameter_server_pb2.SetMembershipRequest(
            term=self._term,
            timeline=timeline,
            members=[
                parameter_server_pb2.Member(task=task, incarnation=number, key=known.get(task, b""))
                for task, number in sorted(members.items())
            ],
            placement=placement_to_proto(placement),
        )
        return int(self.peer.call(self._stub.SetMembership, request, what="SetMembership").fenced)

    def activate(self, timeline: int) -> None:
        """Admit pushes and pulls of this timeline."""
        request = parameter_server_pb2.ActivateRequest(term=self._term, timeline=timeline)
        # It waits for a reconfiguration that is still running, possibly by an earlier chief.
        reply = self.peer.call(self._stub.Activate, request, what="Activate", timeout_s=self._timeouts.total_s)
        if reply.empty_shards:
            raise ProtocolError(
                f"{self.peer} has no values for shards {list(reply.empty_shards)}; restore or set them first"
            )

    def promote(self, timeline: int, shard: int, appointment: int = 0) -> str:
        """Make the standby the primary of a shard, which admits nothing yet; returns why not, or "" on success.

        appointment: the one that the standby must have been copied for.
        """
        request = parameter_server_pb2.PromoteRequest(
            term=self._term, timeline=timeline, shard=shard, appointment=appointment
        )
        what = f"Promote of shard {shard}"
        # Same deadline as in activate().
        return str(self.peer.call(self._stub.Promote, request, what=what, timeout_s=self._timeouts.total_s).reason)

    def cut(self, timeline: int, step: int, *, stop: bool = False) -> tuple[bool, int]:
        """Request a cut at `step`; returns (passed, highest step). passed: too late, request a higher step."""
        request = parameter_server_pb2.CutRequest(term=self._term, timeline=timeline, step=step, stop=stop)
        reply = self.peer.call(self._stub.Cut, request, what="Cut")
        return bool(reply.passed), int(reply.step_max)

    def get_cut(
        self,
        timeline: int,
        shard: int,
        step: int,
        *,
        max_bytes: int,
        sequences: dict[str, WorkerSequence] | None = None,
        pace: Callable[[int], None] = lambda nbytes: None,
        patience_s: float = 0.0,
    ) -> Iterator[BucketImage]:
        """The cut of one shard, bucket by bucket. max_bytes: limit for one bucket's image.

        pace: called with the payload size of each frame; the next one is read when it returns, and the server sends no
        further than the call's flow-control window. patience_s: most seconds that these waits may add to the call.
        sequences: filled, after the last bucket, with each worker's last push that the cut includes (asynchronous
        mode).
        """
        request = parameter_server_pb2.GetCutRequest(term=self._term, timeline=timeline, shard=shard, step=step)

        def read(left_s: float) -> Iterator[BucketImage]:
            assembler, ended, start_s = ImageAssembler(max_bytes=max_bytes), False, time.monotonic()
            call = self._stub.GetCut(request, timeout=left_s)
            try:
                for frame in call:
                    pace(len(frame.chunk.payload))
                    if (image := assembler.read(frame)) is not None:
                        yield image
                    if frame.HasField("end"):
                        ended = True
                        if sequences is not None:
                            sequences.update(sequences_from_proto(frame.end.sequences))
            except grpc.RpcError as error:
                waited_s = time.monotonic() - start_s
                what = f"GetCut of step {step}"
                raise from_status(error, peer=str(self.peer), what=what, waited_s=waited_s) from error
            finally:
                # The consumer may have stopped early.
                end_call(call)
            if not ended or not assembler.idle:
                raise ProtocolError(f"{self.peer}: the cut of shard {shard} at step {step} ended early")

        return self._streamed(read, patience_s)

    def _streamed(self, call: Callable[[float], Iterable[T]], patience_s: float = 0.0) -> Iterator[T]:
        """What a call that is not retried yields; made again if it failed while this process was stopped.

        call: is given the seconds that are left for it. All of them together last ten times --timeout, and patience_s.
        """
        deadline_s = awake_s() + self._timeouts.total_s * 10 + patience_s
        came = 0
        while True:
            # A stream is not retried, but connecting is, and may take several attempts on a busy machine: the last
            # checkpoint of a job has no second chance.
            self.status()
            away = away_s()
            try:
                for item in itertools.islice(call(max(0.1, deadline_s - awake_s())), came, None):
                    came += 1
                    yield item
                return
            except UnreachableError:
                # Whoever was stopped heard nobody; the server has the cut until it is released.
                if away_s() == away or awake_s() >= deadline_s:
                    raise

    def restore(
        self,
        timeline: int,
        shard: int,
        images: Callable[[], Iterable[BucketImage]],
        sequences: Mapping[str, WorkerSequence] | None = None,
    ) -> None:
        """Replace one shard by these images. sequences: each worker's last push that they include."""
        failure: list[Exception] = []

        def frames() -> Iterator[parameter_server_pb2.RestoreFrame]:
            # gRPC reports an exception in the request iterator as CANCELLED; keep the cause.
            try:
                yield parameter_server_pb2.RestoreFrame(
                    head=parameter_server_pb2.RestoreHead(term=self._term, timeline=timeline, shard=shard)
                )
                count = 0
                for image in images():
                    count += 1
                    for header, chunk in image_parts(image):
                        yield parameter_server_pb2.RestoreFrame(header=header, chunk=chunk)
                end = parameter_server_pb2.ImageEnd(buckets=count, sequences=sequences_to_proto(sequences or {}))
                yield parameter_server_pb2.RestoreFrame(end=end)
            except Exception as error:
                failure.append(error)
                raise

        def send(left_s: float) -> list[parameter_server_pb2.RestoreReply]:
            failure.clear()
            start_s = time.monotonic()
            try:
                return [self._stub.Restore(frames(), timeout=left_s)]
            except grpc.RpcError as error:
                if failure:
                    raise failure[0] from error
                waited_s, what = time.monotonic() - start_s, f"Restore of shard {shard}"
                raise from_status(error, peer=str(self.peer), what=what, waited_s=waited_s) from error

        list(self._streamed(send))

    def release(self, timeline: int, step: int, *, noted: int = 0) -> None:
        """Drop a cut. noted: the chief's journal has the choices of all steps before this one."""
        request = parameter_server_pb2.ReleaseRequest(term=self._term, timeline=timeline, step=step, noted=noted)
        self.peer.call(self._stub.Release, request, what="Release")

    def stop(self, reason: str) -> None:
        request = parameter_server_pb2.StopRequest(term=self._term, reason=reason)
        self.peer.call(self._stub.Stop, request, what="Stop", timeout_s=min(5.0, self._timeouts.rpc_s))

    def status(self) -> PsStatus:
        request = parameter_server_pb2.PsStatusRequest(term=self._term)
        reply = self.peer.call(self._stub.Status, request, what="Status")
        return ps_status_from_proto(reply)

    def close(self) -> None:
        self.peer.close()


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Global batches [first, first + count) to train on; count 0 = none now, ask again after retry_after_s seconds."""

    number: int
    first: int
    count: int
    retry_after_s: float = 0.0
    ended: bool = False
    """There will be no more batches."""


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Named tensors of a committed checkpoint."""

    step: int
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


class ChiefClient(ChiefWatch):
    """A task's requests to the chief; every call has a deadline and is safe to repeat."""

    def __init__(self, address: str, timeouts: Timeouts | None = None, security: Security = PLAIN) -> None:
        super().__init__(address, timeouts, security)
        self.access = access_pb2_grpc.AccessStub(self.peer.channel)

    def get_job(self, who: Identity) -> JobView:
        request = chief_pb2.GetJobRequest(task=who.task, incarnation=who.incarnation)
        reply = self.peer.call(self.stub.GetJob, request, what="GetJob")
        placement = tuple(Placement(shard=p.shard, task=p.task, address=p.address) for p in reply.placement)
        return from_message(JobView, reply, placement=placement)

    def lease(self, who: Identity, done: Sequence[int]) -> Lease:
        """Asynchronous mode: report finished leases, get the next batches."""
        reply = self.peer.call(self.stub.Lease, to_message(chief_pb2.LeaseRequest, who, done=done), what="Lease")
        outcome = common_pb2.Outcome.Name(reply.outcome)
        if outcome == "OUTCOME_FENCED":
            raise FencedError(f"{who.task}: {reply.reason}")
        return from_message(Lease, reply, number=reply.lease, ended=outcome == "OUTCOME_STOPPED")

    def loader(self, who: Identity, number: int, step: int, state: str = "") -> str:
        """Hand over the state of a script's loader before a step; without one, return it, "" if it is not there."""
        request = to_message(chief_pb2.LoaderRequest, who, number=number, step=step, state=state)
        return str(self.peer.call(self.stub.Loader, request, what="Loader").state)

    def report(self, who: Identity, step: int, metrics: Mapping[str, float], seconds: float, failure: str = "") -> bool:
        """Report the metrics of a checkpoint; returns whether it is the best so far. Raises FencedError."""
        told: dict[str, Any] = {
            "metrics": dict(metrics),
            "metric_order": list(metrics),
            "seconds": seconds,
            "failure": failure,
        }
        request = to_message(chief_pb2.ReportRequest, who, step=step, **told)
        return bool(self.peer.call(self.stub.Report, request, what="Report").best)

    def fetch_parameters(self, step: int | None = None) -> Parameters:
        """Parameters and buffers of a committed checkpoint (None = newest), by name."""
        return self._fetch(chief_pb2.FetchCutRequest(step=step, params_only=True))

    def fetch_rows(self, step: int, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Rows of a table in a committed checkpoint, see Checkpoint.rows(): float32 [U, dim]. ids: int64 [U]."""
        found = []
        for first in range(0, max(1, len(ids)), MAX_IDS):
            some = bytes(tensor_bytes(ids[first : first + MAX_IDS]))
            request = chief_pb2.FetchCutRequest(step=step, params_only=True, table=table, ids=some)
            found.append(self._fetch(request).tensors[table])
        return torch.cat(found)

    def _fetch(self, request: chief_pb2.FetchCutRequest) -> Parameters:
        start_s = time.monotonic()
        found: dict[str, torch.Tensor] = {}
        head: chief_pb2.NamedTensor | None = None
        buffer = bytearray()
        filled = 0
        at_step = -1

        def finish() -> None:
            if head is None:
                return
            if filled != len(buffer):
                raise CheckpointError(f"{self.peer} sent {filled} of {len(buffer)} bytes of {head.name!r}")
            dtype = dtype_from_proto(head.dtype, head.name)
            found[head.name] = tensor_from_bytes(buffer, dtype).reshape(tuple(head.shape))

        try:
            for frame in self.stub.FetchCut(request, timeout=self.timeouts.total_s * 10):
                if at_step < 0:
                    at_step = frame.step
                if frame.HasField("tensor"):
                    finish()
                    head = frame.tensor
                    size = DTYPES[dtype_from_proto(head.dtype, head.name)].itemsize
                    for length in head.shape:
                        size *= length
                    if size != head.payload_bytes:
                        raise CheckpointError(
                            f"tensor {head.name!r} of {size} bytes was announced with {head.payload_bytes}"
                        )
                    buffer, filled = bytearray(size), 0
                if frame.payload:
                    end = frame.offset + len(frame.payload)
                    if head is None or frame.offset != filled or end > len(buffer):
                        raise CheckpointError(f"{self.peer} sent a checkpoint with a gap or overlap")
                    buffer[frame.offset : end] = frame.payload
                    filled = end
        except grpc.RpcError as error:
            waited_s = time.monotonic() - start_s
            raise from_status(error, peer=str(self.peer), what="FetchCut", waited_s=waited_s) from error
        finish()
        return Parameters(step=at_step, tensors=found)
