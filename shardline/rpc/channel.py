"""Channels to peers, and calls with a deadline, retries with jitter, and errors that name the peer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import grpc
import tenacity

from shardline.config import Timeouts
from shardline.rpc.errors import from_status
from shardline.rpc.server import MAX_MESSAGE_BYTES

log = logging.getLogger("shardline.rpc")
T = TypeVar("T")

RETRIED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def channel_options(timeouts: Timeouts) -> Sequence[tuple[str, int]]:
    """Options of every channel: own connections, keepalive derived from the timeout, message limits."""
    keepalive_ms = int(max(1.0, timeouts.suspect_s) * 1000)
    return (
        # Channels of one process would otherwise share one TCP connection per address.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.enable_http_proxy", 0),
    )


class Peer:
    """One task at one address: a channel, and calls to it."""

    def __init__(self, task: str, address: str, timeouts: Timeouts) -> None:
        self.task = task
        self.address = address
        self.timeouts = timeouts
        self.channel = grpc.insecure_channel(address, options=channel_options(timeouts))
        self.on_retry: Callable[[], None] = lambda: None

    def __str__(self) -> str:
        return f"{self.task} at {self.address}"

    def call(self, method: Any, request: Any, *, what: str, timeout_s: float | None = None) -> Any:
        """One unary call that may be repeated: retried with jitter while the peer is unavailable, until the deadline.

        Only for idempotent calls (all of Shardline's are). Raises the error of rpc.errors.from_status.
        """
        total_s = self.timeouts.rpc_s if timeout_s is None else timeout_s
        start_s = time.monotonic()

        def attempt() -> Any:
            left_s = max(0.1, start_s + total_s - time.monotonic())
            return method(request, timeout=left_s, wait_for_ready=False)

        def before_sleep(state: tenacity.RetryCallState) -> None:
            self.on_retry()
            log.debug("%s: retry %d of %s", self, state.attempt_number, what)

        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_delay(total_s),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=1.0),
            retry=tenacity.retry_if_exception(is_retried),
            before_sleep=before_sleep,
            reraise=True,
        )
        try:
            return retrying(attempt)
        except grpc.RpcError as error:
            waited_s = time.monotonic() - start_s
            raise from_status(error, peer=str(self), what=what, waited_s=waited_s) from error

    def close(self) -> None:
        """Close the channel; running calls end with CANCELLED."""
        self.channel.close()


def is_retried(error: BaseException) -> bool:
    """Whether a failed call may succeed if made again."""
    return isinstance(error, grpc.RpcError) and isinstance(error, grpc.Call) and error.code() in RETRIED


class Peers:
    """Channels by address, made when first needed. Thread-safe."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._lock = threading.Lock()
        self._peers: dict[str, Peer] = {}

    def get(self, task: str, address: str) -> Peer:
        """The peer at an address."""
        with self._lock:
            if address not in self._peers:
                self._peers[address] = Peer(task, address, self._timeouts)
            return self._peers[address]

    def close(self) -> None:
        """Close all channels."""
        with self._lock:
            for peer in self._peers.values():
                peer.close()
            self._peers.clear()
