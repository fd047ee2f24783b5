"""A gRPC server with health and reflection, on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from shardline.cluster import format_address, parse_address
from shardline.errors import InternalError, UsageError
from shardline.host.ports import check_free
from shardline.rpc.auth.access import STALE_KEY, Access, role_of
from shardline.rpc.auth.handlers import HandlerCache, checked
from shardline.rpc.auth.rights import PACKAGE, Token, right_of, role_refusal, takes_proof
from shardline.rpc.limits import MAX_MESSAGE_BYTES, bounded, message_limit
from shardline.rpc.v1 import access_pb2, access_pb2_grpc
from shardline.security import PLAIN, Security

log = logging.getLogger("shardline.rpc")
T = TypeVar("T")

ACCESS = f"{PACKAGE}.Access"
STREAMS = 1024
"""Concurrent calls over one connection; further ones wait at the sender."""

SERVER_OPTIONS: Sequence[tuple[str, int]] = (
    # Otherwise a second process could bind the same port unnoticed, and the two would share the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_metadata_size", 64 << 10),
    ("grpc.max_concurrent_streams", STREAMS),
    # A compressed message is not opened, and so can't be parsed: a few kB of zeros would become MAX_MESSAGE_BYTES, for
    # strangers too. gRPC's own refusal would write a line of log for each.
    ("grpc.per_message_decompression", 0),
)


class AccessGate(grpc.aio.ServerInterceptor):
    """Refuses calls before any byte of them is read, if the caller lacks what rights.py requires."""

    def __init__(self, access: Access, *, certificates: bool) -> None:
        """certificates: callers present one, and the role in it counts."""
        self._access = access
        self._certificates = certificates
        # Streaming handlers only: a unary handler would first read the stranger's whole message.
        self._stranger: Any = grpc.stream_stream_rpc_method_handler(self._refuse_stranger)
        self._no_admin: Any = grpc.stream_stream_rpc_method_handler(self._refuse_command)
        self._stale: Any = grpc.stream_stream_rpc_method_handler(self._refuse_stale)
        self._told: set[str] = set()
        self._for_roles = HandlerCache(self._with_roles)

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The call's own handler, or one that refuses."""
        method, metadata = handler_call_details.method, handler_call_details.invocation_metadata
        right = right_of(method)
        if right.token is not Token.NONE and not self._access.has_job_token(metadata):
            return self._stranger
        if takes_proof(method) and self._access.stale(metadata):
            return self._stale
        if right.token is Token.ADMIN and not self._access.is_admin(method, metadata):
            return self._no_admin
        handler = await continuation(handler_call_details)
        return self._for_roles.get(method, handler) if self._certificates else handler

    def _with_roles(self, method: str, handler: Any) -> Any:
        right, call = right_of(method), method.rpartition("/")[2]

        async def check(context: Any) -> None:
            refusal = role_refusal(role_of(context), right.roles, call)
            if refusal:
                self._log("refused a call: the role of its certificate: %s", context)
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, refusal)

        return checked(handler, check)

    async def _refuse_stranger(self, _requests: Any, context: Any) -> None:
        self._log("refused a call without the token: %s", context)
        await context.abort(
            grpc.StatusCode.UNAUTHENTICATED,
            "the call does not carry the token of this job; set --token-file (or SHARDLINE_TOKEN_FILE) to a file with "
            "the token that the cluster was started with",
        )

    async def _refuse_command(self, _requests: Any, context: Any) -> None:
        self._log("refused a command without proof of the admin token: %s", context)
        await context.abort(
            grpc.StatusCode.PERMISSION_DENIED,
            "the call does not prove that its caller has the admin token of this cluster, which commands require; set "
            "--admin-token-file (or SHARDLINE_ADMIN_TOKEN_FILE) to the same token as on the chief and the parameter "
            "servers",
        )

    async def _refuse_stale(self, _requests: Any, context: Any) -> None:
        await context.abort(
            grpc.StatusCode.UNAVAILABLE,
            "this task was restarted, so the proof of the admin token must answer its new challenge",
            trailing_metadata=((STALE_KEY, "stale"),),
        )

    def _log(self, text: str, context: Any) -> None:
        # Warn once per text, or strangers could fill the disk with log lines.
        log.log(logging.DEBUG if text in self._told else logging.WARNING, text, context.peer())
        self._told.add(text)


class SizeGate(grpc.aio.ServerInterceptor):
    """Ends calls whose messages exceed the limits of limits.py or can't be parsed, before their handlers see them."""

    def __init__(self) -> None:
        self._bounded = HandlerCache(lambda method, handler: bounded(handler, method, message_limit(method)))

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The call's own handler, with limits."""
        return self._bounded.get(handler_call_details.method, await continuation(handler_call_details))


class Health(health.aio.HealthServicer):  # type: ignore[misc]  # of a package without types
    """The health service; a task has so few services that nobody needs a list of them."""

    async def List(self, request: Any, context: Any) -> None:
        """Refused with a status: the library's own version raises, so anyone could fill the log."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this task does not list its services; use reflection")


class AccessServicer(access_pb2_grpc.AccessServicer):
    """Provides the challenge for proofs of the admin token."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def Challenge(self, request: access_pb2.ChallengeRequest, context: Any) -> access_pb2.ChallengeReply:
        """The challenge; empty if no call needs a proof."""
        return access_pb2.ChallengeReply(challenge=self._access.challenge)


WATCHER = "rpc_task"
"""Name that grpc.aio gives the task beside each call."""
CANCELLED_S = 2.0
"""Seconds that calls have to end once they are cancelled."""


class RpcServer:
    """Serves async servicers at one address.

    register: functions that add their servicer to the grpc.aio server, called on the loop.
    service_names: full names for health and reflection, such as "shardline.rpc.v1.Chief".
    security: TLS and tokens; rights.py has what each call needs.
    access: identifies callers; pass it if servicers need that too.
    bind: interface to listen on if it is not the host of the address, such as 0.0.0.0 in a container.
    The health service answers NOT_SERVING until set_serving(True).
    """

    def __init__(
        self,
        address: str,
        *,
        register: Sequence[Callable[[grpc.aio.Server], None]] = (),
        service_names: Sequence[str] = (),
        name: str = "rpc",
        security: Security = PLAIN,
        access: Access | None = None,
        bind: str | None = None,
    ) -> None:
        self._requested = address
        self._bind = bind
        self._register = tuple(register)
        self._names = tuple(service_names)
        self._security = security
        self._access = access if access is not None else Access(security)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name=f"{name}-loop", daemon=True)
        self._health = Health()
        self._server: grpc.aio.Server | None = None
        self.address = ""

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def run(self, coroutine: Coroutine[Any, Any, T], *, timeout_s: float) -> T:
        """Run a coroutine on the loop from another thread and wait for its result, for at most timeout_s seconds."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise InternalError(f"the server at {self._requested} did not finish within {timeout_s} s") from None

    def start(self) -> str:
        """Bind and serve; returns the bound host:port. Raises UsageError if the port is in use."""
        self._thread.start()
        try:
            self.address = self.run(self._start(), timeout_s=30.0)
        except BaseException:
            self._stop_loop()
            raise
        return self.address

    async def _start(self) -> str:
        credentials = self._security.server_credentials()
        # First in the list: calls that are not allowed are not read at all.
        gate = AccessGate(self._access, certificates=self._security.tls_ca is not None)
        server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[gate, SizeGate()])
        for register in self._register:
            register(server)
        access_pb2_grpc.add_AccessServicer_to_server(AccessServicer(self._access), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (*self._names, ACCESS, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        host, _, port = self._requested.rpartition(":")
        listen = self._requested if self._bind is None else format_address(self._bind, int(port))
        try:
            check_free(parse_address(listen)[0], int(port))
            if credentials is None:
                bound = server.add_insecure_port(listen)
            else:
                bound = server.add_secure_port(listen, credentials)
        except OSError as error:
            bound, cause = 0, str(error.strerror)
        except RuntimeError as error:
            bound = 0
            # The rest is advice on debugging gRPC.
            cause = str(error).partition("; set GRPC_VERBOSITY")[0]
        else:
            cause = "bind failed"
        if bound == 0:
            raise UsageError(
                f"can't listen on {listen} ({cause}): is another process using port {port}, "
                f"and does {self._bind or host} belong to this machine?"
            )
        address = f"{host}:{bound}"
        self._access.audience = self._access.audience or address
        await server.start()
        self._server = server
        await self._set(True)
        return address

    async def _set(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, status)

    def close(self, grace_s: float = 1.0) -> None:
        """Stop taking calls, give running ones grace_s seconds, end the loop. May be called twice."""
        if not self._thread.is_alive():
            return
        if self._server is not None:
            server = self._server
            self._server = None

            async def stop() -> None:
                await self._health.enter_graceful_shutdown()
                await server.stop(grace_s)

            try:
                self.run(stop(), timeout_s=grace_s + 5.0)
            except InternalError:
                log.warning("calls at %s did not end within %.1f s and are cancelled", self.address, grace_s + 5.0)
        self._stop_loop()

    def _stop_loop(self) -> None:
        async def drain() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            # gRPC's watcher of a call ends with the call; one that is cancelled prints a traceback.
            watchers = [task for task in tasks if task.get_name() == WATCHER]
            for task in tasks:
                if task not in watchers:
                    task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=CANCELLED_S)
            for task in watchers:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        try:
            self.run(drain(), timeout_s=5.0)
        except InternalError:
            log.warning("tasks of the server at %s did not end", self.address)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=5.0)
        if self._thread.is_alive():
            log.warning("the loop of the server at %s did not end", self.address)
        else:
            self.loop.close()
