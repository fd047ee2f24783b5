"""Admits workers' own connections by one-time tokens, and limits connections that have not shown one yet.

A call gives a worker its token; the worker shows it on a new connection, in its lane's format (a Handshake). Every lane
uses this, so that the same limits apply to each: MAX_GUESTS connections without a token at a time, GUEST_S seconds for
each of them, one use per token, and a limited validity.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import math
import secrets
import selectors
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from shardline.errors import ProtocolError
from shardline.host.awake import awake_s
from shardline.host.process import kept_from_children

log = logging.getLogger("shardline.lanes")
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
MAX_GUESTS = 64
"""Limit of connections that have not shown a token yet; the kernel queues more of them."""
GUEST_S = 5.0
"""Seconds that each of them may take."""
PAUSE_S = 1.0
"""Seconds until the next attempt after the system failed to accept a connection."""
TOKEN_BYTES = 32
_KEY_BYTES = 8

T = TypeVar("T")
B = TypeVar("B", contravariant=True)


def new_token() -> bytes:
    return secrets.token_bytes(TOKEN_BYTES)


@dataclass(frozen=True)
class _Granted(Generic[T]):
    token: bytes = field(repr=False)
    bearer: T
    until_s: float


class Tokens(Generic[T]):
    """One-time tokens, each for one connection of one attachment. Thread-safe."""

    def __init__(self, valid_s: float) -> None:
        self._valid_s = valid_s
        self._lock = threading.Lock()
        # Looked up by the first bytes in variable time, then compared as a whole in constant time.
        self._granted: dict[bytes, _Granted[T]] = {}

    def grant(self, bearer: T, *, now_s: float) -> bytes:
        """Create a token that redeem() turns into `bearer`, once."""
        token = new_token()
        with self._lock:
            self._prune(now_s)
            self._granted[token[:_KEY_BYTES]] = _Granted(token, bearer, now_s + self._valid_s)
        return token

    def redeem(self, token: bytes, *, now_s: float) -> T | None:
        """The bearer of a token; None if the token is wrong, used or expired."""
        with self._lock:
            self._prune(now_s)
            granted = self._granted.get(token[:_KEY_BYTES])
            if granted is None or not hmac.compare_digest(granted.token, token):
                return None
            del self._granted[token[:_KEY_BYTES]]
            return granted.bearer

    def revoke(self, token: bytes) -> None:
        """Invalidate a token. May be called twice."""
        with self._lock:
            self._granted.pop(token[:_KEY_BYTES], None)

    def _prune(self, now_s: float) -> None:
        # All are valid for the same time, so the oldest come first.
        for key, granted in list(self._granted.items()):
            if granted.until_s > now_s:
                return
            del self._granted[key]

    def __len__(self) -> int:
        return len(self._granted)


class LeftQuietly(Exception):
    """The guest closed the connection without sending anything: nothing to count or to report."""


class Handshake(Protocol[B]):
    """One connection's handshake, in its lane's format. Used only by the socket thread; nothing here may block."""

    sock: socket.socket
    """Non-blocking. hear() may replace it (TLS) before it raises for the first time."""

    @property
    def who(self) -> str:
        """The guest, for the message that explains a refusal."""

    def hear(self) -> bytes:
        """The token, once the whole handshake has arrived.

        Raises BlockingIOError, SSLWantReadError or SSLWantWriteError while bytes are missing; ProtocolError or OSError
        with the reason for a refusal; LeftQuietly.
        """

    def admit(self, bearer: B) -> None:
        """Pass on the guest's socket and data. Raises ProtocolError or OSError if they can't be used."""

    def refuse(self) -> None:
        """Send a refusal. May raise OSError."""

    def close(self) -> None:
        """Close the socket and everything that was not passed on."""


class Guest(Generic[T]):
    """A connection that has not shown its token yet."""

    limit_s = GUEST_S

    def __init__(self, handshake: Handshake[T]) -> None:
        self.handshake = handshake
        self.until_s = awake_s() + self.limit_s
        """Its time does not start again with each byte."""
        self.awaits = 0
        """The events that its socket is watched for."""


class TokenAcceptor(Generic[T]):
    """A listening socket, its tokens, and the guests that have not shown theirs yet.

    listener: non-blocking; closed with the acceptor, whose thread runs everything except grant(), revoke() and close(),
    which any thread may call. Nothing wakes the thread while nobody waits. handshake(socket, address): for each new
    connection. label: kind of connection, for on_refused(label, error), which is called on the thread for every guest
    that was turned away. valid_s: seconds for which a token is valid.
    """

    def __init__(
        self,
        listener: socket.socket,
        handshake: Callable[[socket.socket, str], Handshake[T]],
        *,
        label: str,
        valid_s: float,
        on_refused: Callable[[str, Exception], None],
    ) -> None:
        self.refused = 0
        """Number of guests that were turned away."""
        self.tokens: Tokens[T] = Tokens(valid_s)
        self._listener = listener
        self._handshake = handshake
        self._label = label
        self._on_refused = on_refused
        self._guests: set[Guest[T]] = set()
        self._listening = self._closed = False
        self._again_s = math.inf
        """When to listen again after the system failed to accept a connection."""
        self._selector = selectors.DefaultSelector()
        self._bell, self._heard = socket.socketpair()
        """Rung to end the thread."""
        self._selector.register(self._heard, READ)
        self._thread = threading.Thread(target=self._run, name=f"{label}-accept", daemon=True)
        self._thread.start()

    @property
    def guests(self) -> int:
        """Number of connections that have not shown a token yet."""
        return len(self._guests)

    def grant(self, bearer: T) -> bytes:
        """Create a token; the connection that shows it is passed to Handshake.admit() with `bearer`."""
        return self.tokens.grant(bearer, now_s=awake_s())

    def revoke(self, *tokens: bytes) -> None:
        """Invalidate tokens. May be called twice."""
        for token in tokens:
            self.tokens.revoke(token)

    def close(self) -> None:
        """Accept no more, turn away all guests, and end the thread. May be called twice."""
        # A closed one: the thread has ended.
        with contextlib.suppress(OSError):
            self._bell.send(b"!")
        self._thread.join(5.0)
        if self._thread.is_alive():
            log.error("the thread %s did not end; its sockets remain open", self._thread.name)

    # On the thread

    def _run(self) -> None:
        try:
            self._look()
            while not self._closed:
                next_s = min([self._again_s, *(guest.until_s for guest in self._guests)])
                for key, _ in self._selector.select(max(0.0, next_s - awake_s()) if next_s < math.inf else None):
                    if key.fileobj is self._heard:
                        self._closed = True
                    elif key.fileobj is self._listener:
                        self._safely(self._accept)
                    else:
                        self._safely(self._hear, key.data)
                now_s = awake_s()
                for guest in [guest for guest in self._guests if guest.until_s <= now_s]:
                    self._safely(self._turn_away, guest, f"no token within {guest.limit_s:.0f} s")
                if self._again_s <= now_s:
                    self._look()
        finally:
            self._closed = True
            self._listener.close()
            for guest in list(self._guests):
                self._safely(self._turn_away, guest, "this server is ending")
            for one in (self._selector, self._bell, self._heard):
                one.close()

    def _safely(self, act: Callable[..., None], *arguments: Any) -> None:
        try:
            act(*arguments)
        except Exception:
            # An error of one connection must not end the thread that all others depend on.
            log.exception("unexpected error in the thread that accepts %s connections", self._label)

    def _look(self) -> None:
        """Watch the listener: there is room for a guest."""
        self._again_s = math.inf
        if not (self._listening or self._closed):
            self._listening = True
            self._selector.register(self._listener, READ)

    def _accept(self) -> None:
        while len(self._guests) < MAX_GUESTS:
            try:
                sock, address = self._listener.accept()
                kept_from_children(sock)
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            except OSError as error:
                # Most likely there are no descriptors left, and the next try would fail at once too.
                log.warning("can't accept a %s connection: %s; retrying in %.0f s", self._label, error, PAUSE_S)
                self._again_s = awake_s() + PAUSE_S
                break
            sock.setblocking(False)
            place = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else ""
            guest = Guest(self._handshake(sock, place))
            self._guests.add(guest)
            self._hear(guest)
        self._selector.unregister(self._listener)
        self._listening = False

    def _hear(self, guest: Guest[T]) -> None:
        """Admit a guest, turn it away, or wait for the rest of its handshake."""
        handshake = guest.handshake
        try:
            token = handshake.hear()
        except ssl.SSLWantWriteError:
            self._watch(guest, WRITE)
        except (BlockingIOError, ssl.SSLWantReadError):
            self._watch(guest, READ)
        except LeftQuietly:
            self._goes(guest)
            handshake.close()
        except (OSError, ProtocolError) as error:
            self._turn_away(guest, str(error))
        else:
            self._shows(guest, token)

    def _watch(self, guest: Guest[T], events: int) -> None:
        if guest.awaits != events:
            (self._selector.modify if guest.awaits else self._selector.register)(guest.handshake.sock, events, guest)
            guest.awaits = events

    def _shows(self, guest: Guest[T], token: bytes) -> None:
        bearer = self.tokens.redeem(token, now_s=awake_s())
        if bearer is None:
            self._turn_away(guest, "its token is wrong, was already used, or came too late")
            return
        # From here on the socket may belong to somebody else.
        self._goes(guest)
        try:
            guest.handshake.admit(bearer)
        except (OSError, ProtocolError) as error:
            self._refuse(guest, str(error))

    def _goes(self, guest: Guest[T]) -> None:
        """Remove a guest; there is room for another."""
        self._guests.discard(guest)
        if guest.awaits:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(guest.handshake.sock)
        self._look()

    def _turn_away(self, guest: Guest[T], reason: str) -> None:
        self._goes(guest)
        self._refuse(guest, reason)

    def _refuse(self, guest: Guest[T], reason: str) -> None:
        self.refused += 1
        with contextlib.suppress(OSError):
            guest.handshake.refuse()
        guest.handshake.close()
        sentence = f"{guest.handshake.who} was refused: {reason}"
        log.debug("%s", sentence)
        self._on_refused(self._label, ProtocolError(sentence))
