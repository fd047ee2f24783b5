"""TLS for a lane's sockets, moved in batches: one system call for many records instead of one or two for each.

A record of TLS holds at most 16 KB. An ssl.SSLSocket asks the kernel for the header and for the body of each, sends
each by itself, and takes the interpreter's lock after each. Here ssl works in memory (ssl.MemoryBIO), and native/tls.c
moves a whole bucket without the lock.
"""

from __future__ import annotations

import contextlib
import socket
import ssl

from shardline.core.tensor_bytes import Buffer
from shardline.host.process import kept_from_children
from shardline.native.tls import NativeTls

HANDSHAKE_BYTES = 16 << 10
"""Received at a time until keys are agreed on: a full record."""
NOT_READY = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""What a non-blocking socket, with TLS or without, raises that can't go on yet."""


class TlsSocket(socket.socket):
    """A stream socket whose send(), recv() and recv_into() use TLS. Takes the descriptor of `plain`.

    Waits as `plain` does: not at all, without end, or until its timeout. A non-blocking one raises SSLWantReadError or
    SSLWantWriteError. One thread at a time may use it, but any thread may shut() it. name: that the certificate of the
    other side must contain; None for a server. Raises OSError where there is no native library.
    """

    def __init__(self, plain: socket.socket, context: ssl.SSLContext, *, name: str | None) -> None:
        timeout = plain.gettimeout()
        super().__init__(plain.family, plain.type, plain.proto, plain.detach())
        kept_from_children(self)
        self.settimeout(timeout)
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.native = NativeTls(
            lambda: context.wrap_bio(self._arrived, self._leaving, server_side=name is None, server_hostname=name)
        )
        self._tls = self.native.ssl
        self._unsent = memoryview(b"")
        """Encrypted bytes for which the kernel has had no room."""

    def do_handshake(self) -> None:
        """Agree on keys and verify the other side. Raises ssl.SSLError, OSError. May be called again."""
        while True:
            self._flush()
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                self._fill()
            except ssl.SSLError:
                self._alert()
                raise
        self._flush()

    def recv_into(self, buffer: Buffer, nbytes: int = 0, flags: int = 0) -> int:  # type: ignore[override]
        """Receive into the whole buffer as far as bytes have arrived. 0: the other side has closed the connection.

        nbytes and flags are not used.
        """
        memory = memoryview(buffer)
        while True:
            try:
                return self.native.receive(self.fileno(), memory, self.gettimeout())
            except InterruptedError:
                continue
            except BlockingIOError:
                raise ssl.SSLWantReadError from None
            except ssl.SSLError:
                self._alert()
                raise

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        data = bytearray(bufsize)
        return bytes(memoryview(data)[: self.recv_into(data)])

    def send(self, data: Buffer, flags: int = 0) -> int:  # type: ignore[override]
        """Send as far as there is room. Returns the number of bytes that have left.

        The next call must begin with the bytes behind these, after SSLWantWriteError and TimeoutError too: some of them
        may be encrypted already.
        """
        left = memoryview(data)
        while True:
            sent = self.native.send(self.fileno(), left, self.gettimeout())
            if sent or not len(left):
                return sent
            if self.gettimeout() == 0:
                raise ssl.SSLWantWriteError

    def sendall(self, data: Buffer, flags: int = 0) -> None:  # type: ignore[override]
        left = memoryview(data)
        while len(left):
            left = left[self.send(left) :]

    def pending(self) -> int:
        """Bytes that have arrived although the socket need not be readable."""
        return self._tls.pending() + self._arrived.pending

    def _fill(self) -> None:
        try:
            data = super().recv(HANDSHAKE_BYTES)
        except BlockingIOError:
            raise ssl.SSLWantReadError from None
        if data:
            self._arrived.write(data)
        else:
            self._arrived.write_eof()

    def _flush(self) -> None:
        """Send what is encrypted."""
        if not len(self._unsent) and self._leaving.pending:
            self._unsent = memoryview(self._leaving.read())
        while len(self._unsent):
            try:
                self._unsent = self._unsent[super().send(self._unsent) :]
            except BlockingIOError:
                raise ssl.SSLWantWriteError from None

    def _alert(self) -> None:
        """Tell the other side what was wrong, if it can be told."""
        with contextlib.suppress(OSError):
            self._flush()


def shut(sock: socket.socket) -> None:
    """End a socket that another thread may be using: its calls return at once. May be called twice."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
