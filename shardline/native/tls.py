"""Bytes of TLS connections moved by native/tls.c: many records in one call that lets go of the interpreter's lock.

A connection is Python's own ssl.SSLObject over ssl.MemoryBIO, so contexts, certificates, names and handshakes are those
of ssl. The C code calls SSL_read and SSL_write of the OpenSSL that ssl is linked to, and learns a connection's address
from OpenSSL itself, which announces each new one to those that ask for it (CRYPTO_get_ex_new_index).
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import ssl
from collections.abc import Callable
from typing import Any

import numpy as np

from shardline.native.library import describe, functions

_EX_INDEX_SSL = 0
_NAMES = (
    *("SSL_read", "SSL_write", "SSL_get_error", "SSL_get_rbio", "SSL_get_wbio"),
    *("BIO_read", "BIO_write", "BIO_ctrl", "ERR_clear_error"),
)
_ADDRESS, _COUNT, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class _OpenSsl(ctypes.Structure):
    """`struct openssl` of native/tls.c."""

    _fields_ = tuple((name, _ADDRESS) for name in _NAMES)


class NativeTls:
    """One connection. Raises OSError where the native library is not in use or does not find ssl's OpenSSL.

    make: makes the connection.
    """

    def __init__(self, make: Callable[[], ssl.SSLObject]) -> None:
        library = functions()
        if library is None or not available():
            raise OSError(f"lane tcp moves TLS by the native library and ssl's OpenSSL; {describe()}")
        self._receive, self._send = library.shardline_tls_receive, library.shardline_tls_send
        library.shardline_tls_made()
        self.ssl = make()
        self.address = library.shardline_tls_made()
        """The `SSL *` of OpenSSL."""
        if not self.address:
            raise OSError("OpenSSL has not announced a new connection to the native library")
        self._pending = _COUNT()

    def receive(self, descriptor: int, memory: memoryview, timeout: float | None) -> int:
        """Fill writable bytes with what has arrived; timeout: as of a socket, for each wait.

        Returns their number; 0: the connection was closed. Raises TimeoutError, OSError, ssl.SSLError.
        """
        wait_ms = _milliseconds(timeout)
        moved = self._receive(self.address, descriptor, _address(memory), len(memory), wait_ms)
        if moved == -errno.EPROTO:
            # OpenSSL has kept the reason for this thread; ssl raises it.
            self.ssl.read(1)
        return _checked(moved)

    def send(self, descriptor: int, data: memoryview, timeout: float | None) -> int:
        """Send bytes as far as there is room. Returns how many have left; the next call must go on behind them.

        0: there is no room, or a signal came. Raises TimeoutError, OSError, ssl.SSLError.
        """
        wait_ms, pending = _milliseconds(timeout), ctypes.byref(self._pending)
        moved = self._send(self.address, descriptor, _address(data), len(data), pending, wait_ms)
        if moved == -errno.EPROTO:
            self.ssl.write(data[:1])
        return _checked(moved)


def available() -> bool:
    """Whether the native library is in use and finds the OpenSSL that ssl is linked to."""
    library = functions()
    return library is not None and _linked(library)


@functools.cache
def _linked(library: ctypes.CDLL) -> bool:
    """Give the library the functions of ssl's OpenSSL; False if they are not to be had."""
    try:
        import _ssl

        openssl = ctypes.CDLL(_ssl.__file__)
        table = _OpenSsl(*(ctypes.cast(getattr(openssl, name), _ADDRESS).value for name in _NAMES))
        register: Any = openssl.CRYPTO_get_ex_new_index
    except (ImportError, AttributeError, OSError):
        # An ssl that is part of the interpreter, or that hides its OpenSSL.
        return False
    library.shardline_tls_made.restype = _ADDRESS
    for function in (library.shardline_tls_receive, library.shardline_tls_send):
        function.restype = ctypes.c_ssize_t
    library.shardline_tls_receive.argtypes = (_ADDRESS, _INT, _ADDRESS, _COUNT, _INT)
    library.shardline_tls_send.argtypes = (_ADDRESS, _INT, _ADDRESS, _COUNT, ctypes.POINTER(_COUNT), _INT)
    library.shardline_tls_use(ctypes.byref(table))
    register.argtypes = (_INT, ctypes.c_long, *(_ADDRESS,) * 4)
    announce = ctypes.cast(library.shardline_tls_on_new, _ADDRESS)
    return bool(register(_EX_INDEX_SSL, 0, None, announce, None, None) >= 0)


def _address(memory: memoryview) -> int:
    """Where bytes lie, also those that may only be read."""
    found: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return found


def _milliseconds(timeout: float | None) -> int:
    return -1 if timeout is None else round(1e3 * timeout + 0.5) if timeout else 0


def _checked(result: int) -> int:
    if result == -errno.ETIMEDOUT:
        raise TimeoutError("timed out")
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result
