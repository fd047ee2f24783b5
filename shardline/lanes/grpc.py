"""The grpc lane: chunk frames inside the RPC's own stream. Always works."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc

from shardline.errors import ProtocolError, UnreachableError
from shardline.lanes.base import Ack, Contribution, Exchanged, Sender, Sink, Standing, Want
from shardline.rpc.channel import Peer
from shardline.rpc.data import (
    PullReader,
    ack_from_proto,
    exchange_requests,
    progress_request,
    ps_stub,
    push_pull_method,
    standing_from_proto,
)
from shardline.rpc.errors import from_status


class GrpcLane:
    """One shard over its ps's channel."""

    name = "grpc"

    def __init__(self, peer: Peer, shard: int, elements: Sequence[int]) -> None:
        self._peer = peer
        self._shard = shard
        self._elements = tuple(elements)
        self._stub = ps_stub(peer)
        self._push_pull = push_pull_method(peer)
        self._lock = threading.Lock()
        self._call: grpc.Call | None = None

    def exchange(
        self, sender: Sender, contributions: Sequence[Contribution], want: Want | None, sink: Sink, *, timeout_s: float
    ) -> Exchanged:
        """Push and pull in full duplex on one stream; see Lane.exchange."""
        acks: list[Ack] = []
        reader = PullReader(sink, self._elements)
        failure: list[Exception] = []

        def requests() -> Iterator[Any]:
            try:
                yield from exchange_requests(sender, self._shard, contributions, want)
            except Exception as error:
                # gRPC turns an error of the request iterator into CANCELLED; keep the cause.
                failure.append(error)
                raise

        start_s = time.monotonic()
        push_s = 0.0
        try:
            call = self._push_pull(requests(), timeout=timeout_s)
            with self._lock:
                self._call = call
            for reply in call:
                if reply.error is not None:
                    raise reply.error
                if reply.ack is not None:
                    acks.append(ack_from_proto(reply.ack))
                    push_s = time.monotonic() - start_s
                    if not acks[-1].accepted:
                        # The pull would wait for a step that can't close without this push.
                        return Exchanged(acks=tuple(acks), end=None, push_s=push_s)
                if reply.pull is not None:
                    reader.feed(reply.pull)
        except grpc.RpcError as error:
            if failure:
                raise failure[0] from error
            raise from_status(
                error, peer=str(self._peer), what="PushPull", waited_s=time.monotonic() - start_s
            ) from error
        finally:
            with self._lock:
                if self._call is not None:
                    self._call.cancel()
                self._call = None
        if len(acks) != len(contributions) or (want is not None and reader.end is None):
            raise ProtocolError(
                f"{self._peer}: the exchange with shard {self._shard} ended with {len(acks)} of "
                f"{len(contributions)} acks" + ("" if reader.end else " and without the end of the pull")
            )
        return Exchanged(acks=tuple(acks), end=reader.end, push_s=push_s)

    def progress(self, sender: Sender, replicas: Sequence[int], *, timeout_s: float) -> Standing:
        """Ask the shard what it has counted."""
        start_s = time.monotonic()
        call = self._stub.Progress.future(progress_request(sender, self._shard, replicas), timeout=timeout_s)
        with self._lock:
            self._call = call
        try:
            return standing_from_proto(call.result())
        except grpc.FutureCancelledError as error:
            raise UnreachableError(f"{self._peer}: Progress was given up") from error
        except grpc.RpcError as error:
            waited_s = time.monotonic() - start_s
            raise from_status(error, peer=str(self._peer), what="Progress", waited_s=waited_s) from error
        finally:
            with self._lock:
                self._call = None

    def cancel(self) -> None:
        """End a running exchange early."""
        with self._lock:
            if self._call is not None:
                self._call.cancel()

    def close(self) -> None:
        """The channel belongs to Peers; a running call is ended."""
        self.cancel()
