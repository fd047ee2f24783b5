"""PushPull on a socket of an open lane: the messages of the gRPC call, each behind a header of five bytes.

One call follows another. A call is any number of REQUESTs and then a LAST, which is one more request unless it is
empty; the shard answers with REPLYs and then DONE or FAILED. A call that is given up ends with its socket.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator

import grpc

from shardline.errors import ProtocolError

HEADER = struct.Struct("!BI")
"""Kind, and bytes of the body."""
MAX_REQUEST_BYTES = 16 << 20
MAX_REPLY_BYTES = 64 << 20
"""Limits of one body, far above what a call needs: about a hundred bytes for each bucket of a shard."""


class Kind(enum.IntEnum):
    REQUEST = 1
    LAST = 2
    REPLY = 3
    DONE = 4
    FAILED = 5


Frame = tuple[Kind, bytes]
_KINDS = {int(kind): kind for kind in Kind}
_CODES = {int(code.value[0]): code for code in grpc.StatusCode}


class CallError(Exception):
    """A call that did not end well: its gRPC status and the sentence behind it."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code


def frame(kind: Kind, body: bytes = b"") -> bytes:
    return HEADER.pack(kind, len(body)) + body


def failure(code: grpc.StatusCode, sentence: str) -> bytes:
    """A FAILED frame: the number of a status in one byte, then the sentence in UTF-8."""
    return frame(Kind.FAILED, bytes([code.value[0]]) + sentence.encode(errors="replace"))


def read_failure(body: bytes) -> CallError:
    number = body[0] if body else -1
    return CallError(_CODES.get(number, grpc.StatusCode.UNKNOWN), body[1:].decode(errors="replace"))


class CallFrameReader:
    """Frames from the bytes of a socket, in whatever pieces they arrive. limit: most bytes of a body."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[Frame]:
        """The frames that these bytes complete. Raises ProtocolError for an unknown kind or a body that is too long.

        Memory is taken for bytes that have arrived, never for a length that was announced.
        """
        held = self._bytes
        held += data
        start = 0
        try:
            while len(held) - start >= HEADER.size:
                kind, length = HEADER.unpack_from(held, start)
                if kind not in _KINDS or length > self._limit:
                    raise ProtocolError(
                        f"the bytes on a lane's socket are not a call: a frame of kind {kind} and {length} bytes"
                    )
                end = start + HEADER.size + length
                if len(held) < end:
                    break
                body = bytes(held[start + HEADER.size : end])
                start = end
                yield _KINDS[kind], body
        finally:
            del held[:start]
