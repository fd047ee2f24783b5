"""The tcp lane: payloads go over a pair of bulk sockets, one per direction; a third carries the calls.

The first exchange opens the sockets. The upward one is used by the thread that sends the call's requests, the downward
one by the exchanging thread. If an exchange ends early all are closed, since a raw byte stream can't be resumed in the
middle; the next exchange opens new ones.
"""

from __future__ import annotations

import functools
import socket
import ssl
import threading
from collections.abc import Callable, Sequence

from shardline.cluster import parse_address
from shardline.core.timeouts import Timeouts
from shardline.errors import UnreachableError
from shardline.lanes.base import LaneUnavailable
from shardline.lanes.call_socket import CallSocket
from shardline.lanes.calls import NotAdmittedError, ShardCalls
from shardline.lanes.tcp import frames as bulk
from shardline.lanes.tls_socket import shut
from shardline.rpc.channel import Peer
from shardline.rpc.messages.data import (
    Attached,
    is_one_message,
    progress_request,
    referred_requests,
)
from shardline.waist import Arrival, Exchanged, Payload, Push, Sender, Sink, Want

DIAL_S = 10.0
"""Seconds that the bulk port may take to answer. More than a server grants to a connection without a token."""


class TcpLane(ShardCalls):
    """One shard over its ps's channel and a pair of bulk sockets.

    tls: the context for new sockets, if the cluster has TLS.
    """

    name = "tcp"

    def __init__(
        self,
        peer: Peer,
        shard: int,
        elements: Sequence[int],
        *,
        timeouts: Timeouts,
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
    ) -> None:
        super().__init__(peer, shard, elements)
        self._timeouts = timeouts
        self._tls = tls
        self.sockets: BulkSockets | None = None
        """The open sockets; None before the first exchange and after one that broke off."""
        self._dialling: list[socket.socket] = []
        self._busy = False

    def exchange(
        self, sender: Sender, contributions: Sequence[Push], want: Want | None, sink: Sink, *, timeout_s: float
    ) -> Exchanged:
        """Push and pull in full duplex; see Lane.exchange.

        Raises LaneUnavailable if the two tasks can't open bulk sockets.
        """
        self._arm()
        self._busy = True
        whole = False
        try:
            sockets = self._opened(sender, min(timeout_s, self._timeouts.rpc_s))
            # No places on a bulk socket: bytes come in the order of the references.
            requests = referred_requests(
                sender, self._shard, contributions, want, sockets.attached, place=lambda item: 0, after=sockets.send
            )
            done = self.converse(
                requests,
                contributions,
                want,
                sink,
                timeout_s=timeout_s,
                single=is_one_message(contributions, sockets.attached),
                fill=functools.partial(sockets.receive, sink),
                calls=sockets.calls,
            )
            # What was not accepted ends an exchange.
            whole = not done.acks or done.acks[-1].accepted
        except NotAdmittedError as error:
            return error.exchanged(contributions)
        finally:
            self._busy = False
            if not whole:
                self._abandon()
        return done

    def cancel(self) -> None:
        super().cancel()
        with self._lock:
            for sock in self._dialling:
                shut(sock)
            if self.sockets is not None and self._busy:
                self.sockets.shut()

    def close(self) -> None:
        self.cancel()
        if not self._busy:
            self._abandon()

    def _opened(self, sender: Sender, timeout_s: float) -> BulkSockets:
        """The sockets of this sender, opened now if there is none."""
        sockets = self.sockets
        if sockets is not None and sockets.alive and sockets.calls.usable and sockets.sender == sender.who:
            return sockets
        self._abandon()
        opened = self.open_attachment(sender, timeout_s=timeout_s)
        # The host that the call was made to: the server may know itself by another name.
        host, _ = parse_address(self._peer.address)
        made: list[socket.socket] = []
        try:
            for token in (opened.up_token, opened.down_token, opened.call_token):
                made.append(
                    bulk.dial(
                        host,
                        opened.port,
                        token,
                        timeout_s=min(timeout_s, DIAL_S),
                        stall_s=self._timeouts.rpc_s,
                        tls=self._tls,
                        hold=self._hold,
                    )
                )
            bulk.keep_alive(made[2], self._timeouts.suspect_s)
            return self._keep(BulkSockets(self._peer, sender, Attached(self.name, opened.attachment), *made))
        except OSError as error:
            for sock in made:
                sock.close()
            if self._cancelled:
                gone = f"{self._peer}: the exchange was abandoned while its bulk sockets were being opened"
                raise UnreachableError(gone) from error
            # If the ps is gone this raises: then the bulk port is not the reason.
            self._ask(self._stub.Progress, progress_request(sender, self._shard, ()), "Progress", timeout_s)
            raise LaneUnavailable(
                f"{self._peer}: bulk port {opened.port} at {host} can't be used ({error or type(error).__name__}); "
                "is it blocked between the two hosts?"
            ) from error
        finally:
            with self._lock:
                self._dialling.clear()

    def _hold(self, sock: socket.socket) -> None:
        """Let cancel() end this socket from now on."""
        with self._lock:
            if self._cancelled:
                raise ConnectionAbortedError("abandoned")
            self._dialling.append(sock)

    def _keep(self, sockets: BulkSockets) -> BulkSockets:
        with self._lock:
            self.sockets = sockets
            if self._cancelled:
                sockets.shut()
        return sockets

    def _abandon(self) -> None:
        """Close the sockets: bytes in flight have no meaning any more."""
        with self._lock:
            sockets, self.sockets = self.sockets, None
        if sockets is not None:
            sockets.close()


class BulkSockets:
    """The worker's side of an open attachment."""

    def __init__(
        self,
        peer: Peer,
        sender: Sender,
        attached: Attached,
        up: socket.socket,
        down: socket.socket,
        call: socket.socket,
    ) -> None:
        self.calls = CallSocket(call)
        self.sender = sender.who
        self.attached = attached
        self.alive = True
        self._peer = peer
        self._up = up
        self._down = down
        self._sending = threading.Lock()

    def send(self, batch: Sequence[Payload]) -> None:
        """Send the payloads of a batch. Raises UnreachableError; then both sockets are unusable."""
        with self._sending:
            try:
                if not self.alive:
                    raise ConnectionAbortedError("it was closed")
                for item in batch:
                    bulk.send_all(self._up, memoryview(item.octets).cast("B"))
            except OSError as error:
                # The exchanging thread may be waiting for bytes that won't come now.
                self.shut()
                raise self._broken("sent", error) from error

    def receive(self, sink: Sink, arrival: Arrival) -> None:
        """Receive the bytes of one bucket. Raises UnreachableError; then both sockets are unusable."""
        if not arrival.unchanged and arrival.payload_bytes:
            memory = sink.buffer(arrival).cast("B")
            try:
                bulk.receive(self._down, memory)
            except OSError as error:
                self.shut()
                raise self._broken(f"received (bucket {arrival.bucket}, {len(memory)} bytes)", error) from error
        sink.done(arrival)

    def _broken(self, what: str, error: OSError) -> UnreachableError:
        return UnreachableError(
            f"{self._peer}: the bulk socket broke while bytes were {what}: {error or type(error).__name__}"
        )

    def shut(self) -> None:
        """End both directions of the bytes, from any thread: a call may still get the shard's answer."""
        self.alive = False
        shut(self._up)
        shut(self._down)

    def close(self) -> None:
        """Free them. Called by the exchanging thread, or when no exchange runs."""
        self.shut()
        # Wait until the sending thread has left its call, which it does at once: a descriptor in use must not be
        # reused.
        with self._sending:
            self._up.close()
        self._down.close()
        self.calls.close()
