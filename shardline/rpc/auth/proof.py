"""Proof that both ends of a connection have the same secret, before anything else is sent on it.

    caller:    nonce a  ->
    listener:  <-  nonce b, HMAC(key, "listener" | a | b)
    caller:    HMAC(key, "caller" | a | b)  ->

Nobody learns the key from it, and no proof is of use on another connection: each side has drawn a nonce for it. The
listener proves first, so that a caller at a wrong place tells nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from collections.abc import Callable

from shardline.errors import ForbiddenError
from shardline.host.awake import awake_s

NONCE_BYTES = 32
PROOF_BYTES = 32


def mac(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 of several parts, each preceded by its length, so that ("ab", "c") differs from ("a", "bc")."""
    return hmac.digest(key, b"".join(len(part).to_bytes(4, "big") + part for part in parts), hashlib.sha256)


def prove(sock: socket.socket, key: bytes, timeout_s: float, wait: Callable[[], object] = lambda: None) -> None:
    """Prove the key to a process that listens, once it has. wait: until it answers, before timeout_s begins.

    Raises ForbiddenError if it lacks the key, OSError if the connection breaks or it takes too long.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    sock.sendall(nonce)
    wait()
    answer = receive(sock, NONCE_BYTES + PROOF_BYTES, awake_s() + timeout_s)
    theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, mac(key, b"listener", nonce, theirs)):
        raise ForbiddenError("the process that listens there lacks the secret")
    sock.sendall(mac(key, b"caller", nonce, theirs))


def check_caller(sock: socket.socket, key: bytes, timeout_s: float) -> None:
    """Prove the key to a process that has connected, and have it do so too; within timeout_s in all.

    Raises ForbiddenError if it lacks the key, OSError if the connection breaks or it takes too long.
    """
    deadline_s = awake_s() + timeout_s
    nonce, theirs = secrets.token_bytes(NONCE_BYTES), receive(sock, NONCE_BYTES, deadline_s)
    sock.sendall(nonce + mac(key, b"listener", theirs, nonce))
    if not hmac.compare_digest(receive(sock, PROOF_BYTES, deadline_s), mac(key, b"caller", theirs, nonce)):
        raise ForbiddenError("the process that has connected lacks the secret")


def receive(sock: socket.socket, nbytes: int, deadline_s: float) -> bytes:
    """Receive this many bytes. Raises TimeoutError after the deadline, OSError where the connection ends before."""
    data = b""
    while len(data) < nbytes:
        sock.settimeout(max(0.001, deadline_s - awake_s()))
        part = sock.recv(nbytes - len(data))
        if not part:
            raise ConnectionAbortedError("the other side closed the connection")
        data += part
    return data
