"""The metrics page over HTTP: who may read it, and a server that no reader can block.

prometheus_client's own server does the TLS handshake on the thread that accepts connections, so a silent client blocks
all others. Here each connection has its own thread and a deadline, and their number is limited.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from shardline.cluster import format_address
from shardline.security import PLAIN, Security, is_loopback, names_loopback

CONNECTIONS = 32
"""Concurrent connections; further ones are closed at once."""
READER_S = 10.0
"""Seconds that a reader may keep the page waiting, each time."""
REQUEST_S = 20.0
"""Seconds until a connection is closed, whatever it does."""

SHOWN = 120
"""Characters of a foreign header that an answer repeats."""

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class PageAnswer(enum.Enum):
    PAGE = "200 OK"
    NEEDS_TOKEN = "401 Unauthorized"
    WRONG_HOST = "421 Misdirected Request"


def decide(security: Security, *, exposed: bool, peer: str, host: str, authorization: str) -> PageAnswer:
    """The answer to a request from the IP address `peer`, with these Host and Authorization headers.

    A reader with the job's token is admitted. Without it, anyone on this machine is, by one of loopback's names (see
    names_loopback()); others only if the job has no token and the page is exposed, that is, open to other machines.
    """
    scheme, _, token = authorization.partition(" ")
    if security.token and security.check(token.strip() if scheme.lower() == "bearer" else None):
        return PageAnswer.PAGE
    if security.token and not is_loopback(peer):
        return PageAnswer.NEEDS_TOKEN
    if names_loopback(host) or (exposed and not security.token):
        return PageAnswer.PAGE
    return PageAnswer.WRONG_HOST


def tls_of(host: str, security: Security) -> ssl.SSLContext | None:
    """TLS for a page at this host; None = plain HTTP, as on loopback.

    If there is a token, it is required instead of a certificate, so that a browser or a Prometheus without one can read
    the page; without a token, client certificates keep strangers out, as everywhere else.
    """
    if is_loopback(host) or security.tls_cert is None:
        return None
    context = security.server_context()
    assert context is not None
    if security.token:
        context.verify_mode = ssl.CERT_NONE
    return context


def guarded(application: Application, security: Security, *, exposed: bool) -> Application:
    """The page for admitted readers, and an error message for all others."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        host = environ.get("HTTP_HOST", "")
        decided = decide(
            security,
            exposed=exposed,
            peer=environ["REMOTE_ADDR"],
            host=host,
            authorization=environ.get("HTTP_AUTHORIZATION", ""),
        )
        if decided is PageAnswer.PAGE:
            return application(environ, start_response)
        headers = [("Content-Type", "text/plain; charset=utf-8")]
        if decided is PageAnswer.NEEDS_TOKEN:
            headers.append(("WWW-Authenticate", "Bearer"))
            sentence = "these metrics need the job's token: Authorization: Bearer TOKEN\n"
        else:
            token = ", or send the job's token" if security.token else ""
            sentence = f"these metrics were requested from host {host[:SHOWN]!r}; use 127.0.0.1 or localhost{token}\n"
        body = sentence.encode()
        start_response(decided.value, [*headers, ("Content-Length", str(len(body)))])
        return [body]

    return answer


class _Handler(WSGIRequestHandler):
    timeout = READER_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a scrape every few seconds is not an event."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = CONNECTIONS
    security = PLAIN

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self._since: dict[Any, float] = {}
        """When each open connection began."""
        super().__init__(*arguments, **settings)

    def server_bind(self) -> None:
        # WSGIServer would look up this machine's name, which may take seconds.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._since) >= CONNECTIONS:
            self.shutdown_request(request)
            return
        self._since[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:
            del self._since[request]
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            del self._since[request]

    def service_actions(self) -> None:
        """Look after certificates, and close connections that have taken too long. Called at least every half second.

        Every task has this thread, and nobody waits for it: a heartbeat would be late if the disk is.
        """
        self.security.watch()
        for request, since_s in list(self._since.items()):
            if time.monotonic() - since_s > REQUEST_S:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: a reader that disconnects or fails its handshake is not our error."""


class MetricsPage:
    """Serves an application at host:port, 0 = a free one, until close(). Raises OSError if it can't be bound."""

    def __init__(self, host: str, port: int, application: Application, security: Security) -> None:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        context = tls_of(host, security)
        server_class: type[_Server] = type("_FamilyServer", (_Server,), {"address_family": family})
        self._server = make_server(
            host,
            port,
            guarded(application, security, exposed=not is_loopback(host)),
            server_class=server_class,
            handler_class=_Handler,
        )
        self._server.security = security
        if context is not None:
            # Each connection's own thread does the handshake.
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.address = format_address(host, int(self._server.server_port))
        self.url = f"{'http' if context is None else 'https'}://{self.address}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        # A listener that takes no more wakes the server's thread, which otherwise looks every half second.
        with contextlib.suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)
