"""Channels to peers; calls with a deadline, retries with jitter, and errors that name the peer."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partialmethod
from typing import Any, NamedTuple, TypeVar, cast

import grpc
import grpc.experimental
import tenacity

from shardline.cluster import parse_address
from shardline.core.timeouts import Timeouts
from shardline.errors import ShardlineError, UnreachableError
from shardline.host.awake import awake_s
from shardline.rpc.auth.access import CHIEF_AUDIENCE, STALE_KEY, Prover
from shardline.rpc.auth.rights import takes_proof
from shardline.rpc.errors import from_status
from shardline.rpc.limits import MAX_MESSAGE_BYTES
from shardline.rpc.names import HostName, is_literal, no_address, unknown_name
from shardline.rpc.v1 import access_pb2, access_pb2_grpc
from shardline.security import PLAIN, Metadata, Security

log = logging.getLogger("shardline.rpc")
T = TypeVar("T")

RETRIED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

ONE_THREAD = grpc.experimental.ChannelOptions.SingleThreadedUnaryStream
"""Option to read a reply on the calling thread, without handing it over from one of gRPC's threads."""


def end_call(call: Any) -> None:
    """End a call that may still be running. With ONE_THREAD, call it on the thread that reads the replies.

    gRPC frees such a call, 20 to 50 kB plus unread replies, only when all its pending operations have been read. After
    a cancellation it leaves that to the reading thread, and offers no other way.
    """
    call.cancel()
    take = getattr(call, "_consume_next_event", None)
    while take is not None and call._state.due:
        take()


def channel_options(timeouts: Timeouts) -> Sequence[tuple[str, int]]:
    """Options of every channel: own connections, keepalive derived from the timeout, message limits, no retries."""
    keepalive_ms = int(max(1.0, timeouts.suspect_s) * 1000)
    # Whoever could not be reached for a while is back long before it could be taken for dead. An attempt may take as
    # long, and TLS on a busy machine needs that.
    backoff_ms = int(min(2.0, max(1.0, timeouts.suspect_s / 2)) * 1000)
    return (
        # Otherwise all channels of a process to one address share a TCP connection.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", backoff_ms),
        # A restarted container has a new address under the same name; by default gRPC looks only every 30 s.
        ("grpc.dns_min_time_between_resolutions_ms", 1000),
        ("grpc.enable_http_proxy", 0),
        # gRPC transparently retries a call that its server has not seen. If the server is gone by then, such a call
        # gets its status but never its other events: a thread that reads its replies blocks for ever, past the deadline
        # and despite cancellation. Shardline's calls are retried by their callers.
        ("grpc.enable_retries", 0),
    )


class _Details(NamedTuple):
    """A call's details with added metadata; gRPC accepts any object with these fields."""

    method: str
    timeout: float | None
    metadata: Sequence[tuple[str, str | bytes]] | None
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: Any


class _Bearer(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Adds the job token to every call of a channel, and proof of the admin token to calls that need it."""

    def __init__(self, security: Security, prover: Prover, channel: grpc.Channel, wait_s: float) -> None:
        """channel: without this interceptor. wait_s: how long to wait for the challenge."""
        self._tokens = security.metadata()
        self._prover = prover
        self._channel = channel
        self._wait_s = wait_s

    def _call(self, continuation: Any, details: Any, request: Any) -> Any:
        if not takes_proof(details.method):
            return continuation(with_metadata(details, self._tokens), request)
        if not self._prover.ready:
            wait_s = self._wait_s if details.timeout is None else min(self._wait_s, details.timeout)
            stub = access_pb2_grpc.AccessStub(self._channel)
            reply = stub.Challenge(access_pb2.ChallengeRequest(), timeout=wait_s, metadata=self._tokens)
            self._prover.answer(reply.challenge)
        more = (*self._tokens, *self._prover.metadata(details.method))
        return continuation(with_metadata(details, more), request)

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        call = self._call(continuation, client_call_details, request)
        if takes_proof(client_call_details.method):
            # Streaming commands follow unary ones, which detect a restart first.
            call.add_done_callback(lambda ended: forget_if_stale(self._prover, ended.trailing_metadata()))
        return call

    intercept_unary_stream = intercept_stream_unary = intercept_stream_stream = _call  # type: ignore[assignment]


def forget_if_stale(prover: Prover, trailing: Metadata) -> None:
    """Ask for the challenge again before the next call, if the server reported a new one."""
    if any(key == STALE_KEY for key, _ in trailing or ()):
        prover.forget()


class _Method:
    """A method of one channel. gRPC closes a channel that nobody refers to, so a running call does."""

    def __init__(self, channel: grpc.Channel, method: Any) -> None:
        self._channel = channel
        self._method = method

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        return self._held(self._method(*arguments, **settings))

    def with_call(self, *arguments: Any, **settings: Any) -> Any:
        return self._method.with_call(*arguments, **settings)

    def future(self, *arguments: Any, **settings: Any) -> Any:
        return self._held(self._method.future(*arguments, **settings))

    def _held(self, made: Any) -> Any:
        if isinstance(made, grpc.Call):
            made.channel = self._channel  # type: ignore[attr-defined]
        return made


class _RenewedChannel:
    """A channel with TLS that is opened anew for the next call once the TLS files have changed.

    gRPC reconnects with the certificate that a channel was opened with. Calls that are running go on over the earlier
    channel, which is closed with the last of them.
    """

    def __init__(self, security: Security, open_with: Callable[[grpc.ChannelCredentials], grpc.Channel]) -> None:
        self._security = security
        self._open_with = open_with
        self._lock = threading.Lock()
        self._credentials: grpc.ChannelCredentials | None = None
        self._channel: grpc.Channel | None = None
        self._opened: weakref.WeakSet[grpc.Channel] = weakref.WeakSet()
        self._closed = False

    def _newest(self) -> grpc.Channel:
        with self._lock:
            credentials = self._security.channel_credentials()
            assert credentials is not None
            if self._channel is None or (credentials is not self._credentials and not self._closed):
                self._credentials, self._channel = credentials, self._open_with(credentials)
                self._opened.add(self._channel)
            return self._channel

    def _method(self, kind: str, *arguments: Any, **settings: Any) -> _Method:
        channel = self._newest()
        return _Method(channel, getattr(channel, kind)(*arguments, **settings))

    unary_unary = partialmethod(_method, "unary_unary")
    unary_stream = partialmethod(_method, "unary_stream")
    stream_unary = partialmethod(_method, "stream_unary")
    stream_stream = partialmethod(_method, "stream_stream")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for channel in list(self._opened):
                channel.close()


class AioPeer:
    """A parameter server, called from the running event loop by another server, which has the admin token too."""

    def __init__(self, address: str, timeouts: Timeouts, security: Security = PLAIN) -> None:
        self._address = address
        self._security = security
        self._options = channel_options(timeouts)
        self._credentials = security.channel_credentials()
        self._channel = self._open()
        self._wait_s = timeouts.rpc_s
        self._tokens = security.metadata()
        self._prover = Prover(security, address)

    def _open(self) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(self._address, options=self._options)
        return grpc.aio.secure_channel(self._address, self._credentials, options=self._options)

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel for the next call, another one once the TLS files have changed.

        Refer to it until the call has ended: gRPC closes a channel that nobody refers to.
        """
        credentials = self._security.channel_credentials()
        if credentials is not self._credentials:
            self._credentials = credentials
            self._channel = self._open()
        return self._channel

    async def metadata(self, method: str) -> Sequence[tuple[str, str]]:
        """Metadata for a call of a method. Raises grpc.aio.AioRpcError if the server doesn't give its challenge."""
        if not takes_proof(method):
            return self._tokens
        if not self._prover.ready:
            channel = self.channel
            stub: Any = access_pb2_grpc.AccessStub(channel)
            reply = await stub.Challenge(access_pb2.ChallengeRequest(), timeout=self._wait_s, metadata=self._tokens)
            self._prover.answer(reply.challenge)
        return (*self._tokens, *self._prover.metadata(method))

    def failed(self) -> None:
        """Note a failed call: the next one asks for the challenge again, since the server may have been restarted."""
        self._prover.forget()

    async def close(self) -> None:
        await self._channel.close()


def with_metadata(details: Any, more: Sequence[tuple[str, str]]) -> _Details:
    return _Details(
        method=details.method,
        timeout=details.timeout,
        metadata=(*(details.metadata or ()), *more),
        credentials=details.credentials,
        wait_for_ready=details.wait_for_ready,
        compression=details.compression,
    )


def open_channel(
    address: str, timeouts: Timeouts, security: Security = PLAIN, prover: Prover | None = None
) -> grpc.Channel:
    """A channel with its own connection; TLS, renewed with its files, and tokens according to `security`.

    prover: for the admin token; by default, one that expects a parameter server at this address.
    """
    options = (*channel_options(timeouts), (ONE_THREAD, 1))
    if security.tls:
        renewed = _RenewedChannel(security, lambda given: grpc.secure_channel(address, given, options=options))
        # With an interceptor, gRPC asks the channel for the method at each call.
        channel = cast(grpc.Channel, renewed)
    else:
        channel = grpc.insecure_channel(address, options=options)
        if not (security.token or security.admin_token):
            return channel
    bearer = _Bearer(security, prover or Prover(security, address), channel, timeouts.rpc_s)
    return grpc.intercept_channel(channel, bearer)


class Peer:
    """One task at one address: a channel, and calls on it."""

    def __init__(self, task: str, address: str, timeouts: Timeouts, security: Security = PLAIN) -> None:
        self.task = task
        self.address = address
        self.timeouts = timeouts
        self.security = security
        audience = CHIEF_AUDIENCE if task.partition("/")[0] == "chief" else address
        self.prover = Prover(security, audience)
        self.channel = open_channel(address, timeouts, security, self.prover)
        self.on_retry: Callable[[], None] = lambda: None
        self._name = HostName(parse_address(address)[0], str(self))

    def __str__(self) -> str:
        return f"{self.task} at {self.address}"

    def call(self, method: Any, request: Any, *, what: str, timeout_s: float | None = None) -> Any:
        """One unary call, retried with jitter while the peer is unavailable, until the deadline.

        Before the first call, waits until the host name resolves, as long as the cluster waits for a lost task. Only
        for idempotent calls (all of Shardline's are). Raises the error that rpc.errors.from_status returns.
        """
        if not self.await_name(timeout_s):
            raise UnreachableError(f"{self} was not called ({what}): this process is shutting down")
        total_s = self.timeouts.rpc_s if timeout_s is None else timeout_s
        start_s = awake_s()

        def attempt() -> Any:
            left_s = max(0.1, start_s + total_s - awake_s())
            return method(request, timeout=left_s, wait_for_ready=False)

        def before_sleep(state: tenacity.RetryCallState) -> None:
            self.on_retry()
            log.debug("%s: retry %d of %s", self, state.attempt_number, what)

        retrying = tenacity.Retrying(
            # A deadline that passed while this process was stopped is no answer.
            stop=lambda state: awake_s() >= start_s + total_s,
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=1.0),
            retry=tenacity.retry_if_exception(is_retried),
            before_sleep=before_sleep,
            reraise=True,
        )
        try:
            return retrying(attempt)
        except grpc.RpcError as error:
            waited_s = awake_s() - start_s
            raise self.failure(error, what=what, waited_s=waited_s) from error

    def await_name(self, wait_s: float | None = None) -> bool:
        """Wait until the host name has an address; returns at once if it had one before.

        wait_s: seconds; by default as long as the cluster waits for a lost task. Returns False after cancel() or
        close(); raises UnreachableError on timeout.
        """
        return self._name.wait(self.timeouts.lost_s if wait_s is None else wait_s)

    def cancel(self) -> None:
        self._name.cancel()

    def failure(self, error: grpc.RpcError, *, what: str, waited_s: float, connecting: bool = False) -> ShardlineError:
        """The error of a failed call. Without a connection, checks whether the host name or TLS is why (some seconds).

        connecting: the call was waiting for a connection, so that its deadline may have passed meanwhile.
        """
        found = from_status(error, peer=str(self), what=what, waited_s=waited_s)
        code = error.code() if isinstance(error, grpc.Call) else None
        if code is grpc.StatusCode.UNAVAILABLE or (connecting and code is grpc.StatusCode.DEADLINE_EXCEEDED):
            reason = self.obstacle()
            if reason:
                return UnreachableError(f"{self} can't be called ({what}): {reason}")
        return found

    def obstacle(self) -> str:
        """Why there is no connection, if the host name or TLS is why; else empty. Takes some seconds."""
        host, port = parse_address(self.address)
        cause = "" if is_literal(host) else unknown_name(host)
        return no_address(host, cause) if cause else self.security.diagnose(host, port)

    def close(self) -> None:
        """Close the channel; running calls end with CANCELLED."""
        self.cancel()
        self.channel.close()


def is_retried(error: BaseException) -> bool:
    """Whether a failed call may succeed on a retry."""
    return isinstance(error, grpc.RpcError) and isinstance(error, grpc.Call) and error.code() in RETRIED


class Peers:
    """Channels by address, opened on first use. Thread-safe."""

    def __init__(self, timeouts: Timeouts, security: Security = PLAIN) -> None:
        self._timeouts = timeouts
        self._security = security
        self._lock = threading.Lock()
        self._peers: dict[str, Peer] = {}

    def get(self, task: str, address: str) -> Peer:
        with self._lock:
            if address not in self._peers:
                self._peers[address] = Peer(task, address, self._timeouts, self._security)
            return self._peers[address]

    def close(self) -> None:
        with self._lock:
            for peer in self._peers.values():
                peer.close()
            self._peers.clear()
