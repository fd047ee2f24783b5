"""The page's HTTP server, with a thread and event loop of its own: the chief's work never waits for a browser."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import Mapping

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from shardline.cluster import format_address, parse_address
from shardline.core.status import ChiefStatus
from shardline.errors import InternalError, UsageError
from shardline.security import Security
from shardline_chief.page.access import PageAccess, check_exposure
from shardline_chief.page.app import Page
from shardline_chief.page.board import Board
from shardline_chief.page.history import History

log = logging.getLogger("shardline_chief.page")

CONNECTIONS = 128
"""Most connections; further ones get a 503."""
HEAD_BYTES = 16_384
"""Most bytes of a request's head."""
IDLE_S = 10.0
"""Seconds; a connection without a whole request is closed after one to two times this long."""
REMEDY = "use another --page HOST:PORT (port 0 = a free one), or --no-page"
START_S = 10.0
CLOSE_S = 2.0


class PageServer:
    """Serves the page of one chief. show() is thread-safe."""

    def __init__(
        self,
        address: str,
        security: Security,
        history: History,
        *,
        runs: Mapping[str, History] | None = None,
        remedy: str = REMEDY,
    ) -> None:
        """address: "host:port", port 0 = a free one. runs: see Board. remedy: what to do if it can't be bound.

        Raises UsageError if it would be reachable from other machines without a token, or can't be bound.
        """
        exposed = check_exposure(address, security)
        self.history = history
        self._board = Board(history, runs)
        self.passes = self._board.passes
        self._page = Page(self._board, PageAccess(security, exposed))
        self._socket = _bind(address, remedy)
        host, _ = parse_address(address)
        tls = exposed and security.tls_cert is not None
        self.address = format_address(host, int(self._socket.getsockname()[1]))
        self.url = f"{'https' if tls else 'http'}://{self.address}/"
        config = uvicorn.Config(
            self._page.application,
            http=_Patient,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            # uvicorn's warnings are caused by strangers' requests, one line each.
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=CONNECTIONS,
            h11_max_incomplete_event_size=HEAD_BYTES,
            timeout_graceful_shutdown=1,
        )
        if tls:
            config.load()
            config.ssl = _for_browsers(security)
        self._server = uvicorn.Server(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="page", daemon=True)

    def start(self) -> str:
        """Serve; returns the page's URL. Raises InternalError if the server doesn't start in time."""
        self._thread.start()
        if not self._ready.wait(START_S) or self._loop is None:
            raise InternalError(f"the page at {self.url} did not start within {START_S:g} s")
        return self.url

    @property
    def streams(self) -> int:
        """Number of browsers that receive live updates."""
        return self._page.streams

    def show(self, status: ChiefStatus, *, written: float | None = None) -> None:
        """Show a newer status; never blocks. written: see ClusterView."""
        self._board.show(status, written)

    def close(self) -> None:
        """Send every browser the last state, then end. May be called twice."""
        if not self._thread.is_alive():
            self._socket.close()
            return
        loop = self._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._page.close)
            except RuntimeError:
                log.debug("the page's server stopped unexpectedly")
        self._server.should_exit = True
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("the page's server did not end within %.0f s", CLOSE_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:
            # Losing the page is no reason to lose a run.
            log.exception("the page at %s failed; training continues without it", self.url)
        finally:
            self._board.bind(None)
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._board.bind(self._loop)
        # The socket listens already: connections made now are answered as soon as the server accepts.
        self._loop.call_soon(self._ready.set)
        await self._server.serve(sockets=[self._socket])


def _for_browsers(security: Security) -> ssl.SSLContext:
    """TLS 1.2 or newer, without a certificate of the other side."""
    context = security.server_context()
    assert context is not None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_NONE
    return context


def _bind(address: str, remedy: str) -> socket.socket:
    host, port = parse_address(address, "--page")
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(where[:2], family=family, backlog=CONNECTIONS)
    except OSError as error:
        raise UsageError(f"the page can't be served at {address}: {error.strerror or error}; {remedy}") from None


class _Patient(H11Protocol):
    """Ends idle connections, requests that don't end, and readers that take no data; uvicorn would wait for ever."""

    _idle = False
    _last: object = None
    """The newest request at the last check."""
    _taken = True
    """Since the last check there was room in the send buffer, if only briefly."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(IDLE_S, self._look)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._taken = True

    def _look(self) -> None:
        if not self._taken and self.flow.write_paused:
            # Also if it is closing already: closing waits until the rest of the answer is taken.
            self.transport.abort()
            return
        self._taken = not self.flow.write_paused
        if not self.transport.is_closing():
            # A request whose body is still coming is not one that is worked on.
            idle = self.cycle is None or self.cycle.response_complete or self.cycle.more_body
            if idle and self._idle and self._last is self.cycle:
                self.transport.close()
            self._idle, self._last = idle, self.cycle
        elif not self.flow.write_paused:
            return
        self.loop.call_later(IDLE_S, self._look)
